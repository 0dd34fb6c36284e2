"""One worker's place: a copy of the network that models are loaded into, trained and measured.

This is where a client's work happens, in the plainest form; the engines only decide what runs beside what.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from cwfed.algorithms import FedAvg
from cwfed.core import augment
from cwfed.core.augment import Augment
from cwfed.core.errors import RunError
from cwfed.core.optimizers import SGD, Optimizer, Schedule, clipped, first_state
from cwfed.core.rng import stream, torch_seed
from cwfed.core.types import Batch, Loss, Output, Params, Pass, Start, When
from cwfed.data import Federation, Samples
from cwfed.data.partition import Indices
from cwfed.engine import draws
from cwfed.engine.precision import Precision, to_bf16
from cwfed.models import attached, output_layer, parameters_of, statistics
from cwfed.privacy.dp import SamplePrivacy
from cwfed.privacy.noise import Noise

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains; by default SGD without momentum, the last incomplete batch dropped."""

    seed: int
    lr: float
    batch_size: int
    epochs: int
    precision: Precision = "fp32"
    privacy: SamplePrivacy | None = None
    """Differential privacy, which changes batches and gradients (`private.py`)."""
    noise: Noise | None = None
    """Where its noise comes from; None is the seed."""
    optimizer: Optimizer = field(default_factory=SGD)
    keep_optimizer: bool = False
    """Whether a client keeps its optimiser's state until its next round."""
    schedule: Schedule = field(default_factory=Schedule)
    clip: float = 0.0
    """The longest gradient of a batch; 0 is no limit."""
    label_smoothing: float = 0.0
    augment: Augment = "none"

    def rate(self, one: Pass, round_: int) -> float:
        """The learning rate of a pass."""
        return (self.schedule.rate(self.lr, round_) if one.rate is None else one.rate) * one.lr

    def size(self, one: Pass) -> int:
        """The batch size of a pass."""
        return self.batch_size if one.batch_size is None else one.batch_size

    @property
    def is_plain(self) -> bool:
        """Whether a step is the learning rate times the gradient, and nothing else."""
        return self.optimizer.is_plain and not self.clip


def purpose(of: str, when: When, index: int) -> str:
    """What random numbers of a client's pass are for; the first pass in training has the plain name."""
    return of if (when, index) == ("training", 0) else f"{of}, {when} {index}"


OPTIMIZER = "optimizer."
"""Before the names of what a client keeps of its optimiser."""


class Stopped(Exception):
    """The run was interrupted; whoever is training gives up at the next batch."""


class Answers(NamedTuple):
    """What a network says of some samples, one number each."""

    predicted: NDArray[np.int64]
    right: NDArray[np.bool_]
    loss: NDArray[np.float64]
    """Cross-entropy."""


class _Features:
    """A hook that keeps what the output layer saw. It knows nothing of its worker: a cycle would keep the worker,
    and with it all data, in memory until Python looks for cycles.
    """

    features: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.features = inputs[0]


class ClientView:
    """The client as an algorithm sees it, on a worker's worker."""

    def __init__(self, worker: ClientWorker, client: int, statistics: Params) -> None:
        self._bench, self._client, self._statistics = worker, client, statistics
        self._shard = worker.federation.shards[client]

    @property
    def output(self) -> str:
        """The name of the network's output layer."""
        return str(self._bench.model.output_layer)

    @cached_property
    def class_counts(self) -> Tensor:
        """n_ij: the client's training samples by class."""
        return torch.from_numpy(self._bench.federation.class_counts(self._client)).float()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the network's parameters."""
        return tuple(self._bench.params)

    @property
    def statistics(self) -> Params:
        """The client's running statistics where they stay with it."""
        return self._statistics

    def squared_gradients(self, params: Params, batch_size: int) -> Tensor:
        """The squared length of the gradient of each batch of the client's training data."""
        self._bench.load(params | self._statistics)
        return self._bench.squared_gradients(self._shard.train, batch_size)

    def losses(self, models: Sequence[Params], part: Literal["train", "holdout"]) -> Tensor:
        """The mean cross-entropy of each model on a part of the client's training data."""
        indices = self._shard.train if part == "train" else self._shard.holdout
        means = []
        for model in models:
            self._bench.load(model | self._statistics)
            means.append(self._bench.measure(indices)[1].mean())
        return torch.tensor(np.array(means))

    def class_means(self, params: Params) -> Tensor:
        """The mean normalised feature of each class; zero where the client has no sample."""
        self._bench.load(params | self._statistics)
        return self._bench.class_means(self._shard.train, lambda features: F.normalize(features, dim=1))

    def class_moments(self, params: Params) -> tuple[Tensor, Tensor, Tensor]:
        """Of the features of each class: their mean, their mean squared norm, and how many samples the client has."""
        self._bench.load(params | self._statistics)
        found = self._bench.class_means(
            self._shard.train, lambda features: torch.cat([features, features.square().sum(1, keepdim=True)], 1)
        )
        return found[:, :-1].contiguous(), found[:, -1].contiguous(), self.class_counts


class ClientWorker:
    """A network and the samples, for one worker at a time."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        samples: Samples,
        stop: threading.Event,
        precision: Precision = "fp32",
    ) -> None:
        self.model = copy.deepcopy(model).to(samples.device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
        self.federation, self.samples, self.stop = federation, samples, stop
        self._generator = torch.Generator(samples.device)
        draws.seed(self.model, self._generator)
        self._output = output_layer(self.model, federation.data.classes)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._casts = to_bf16(self.model, self._output) if precision == "bf16" else []
        self.params = parameters_of(self.model) | {names[id(cast)]: master for cast, master in self._casts}
        """The float32 parameters: the network's own, or the masters of its bf16 ones."""
        self._seen = _Features()
        self._output.register_forward_pre_hook(self._seen)
        self._state = self.params | statistics(self.model)
        self.buffers = dict(self.model.named_buffers())
        self.initial_buffers = {n: b.clone() for n, b in self.buffers.items()}
        self._others = [(b, self.initial_buffers[n]) for n, b in self.buffers.items() if n not in self._state]
        self._trainable = {p: p.requires_grad for p in (*self.params.values(), *(cast for cast, _ in self._casts))}
        self._cast_names = {names[id(cast)] for cast, _ in self._casts}
        self._own_names = [name for name in self.params if not attached(self.model, name)]

    def make_dense(self) -> None:
        """Gradients of embeddings with all rows: those of a loss that asks the network at other tensors are no others."""
        for module in self.model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False

    def view(self, client: int, statistics: Params) -> ClientView:
        """What an algorithm may see of a client, whose running statistics these are."""
        return ClientView(self, client, statistics)

    def load(self, params: Params) -> None:
        """Make the network this model; it must be complete."""
        require_whole(params, self._state)
        with torch.no_grad():
            for name, tensor in self._state.items():
                tensor.copy_(params[name])
            for buffer, initial in self._others:  # such as a count of batches: nobody inherits another's
                buffer.copy_(initial)
            self._follow()

    def _follow(self) -> None:
        """The network's bf16 parameters become what their masters are."""
        if self._casts:
            torch._foreach_copy_([cast for cast, _ in self._casts], [master for _, master in self._casts])

    def save(self, out: Params, row: int) -> None:
        """Write the network into a row of a stack of models."""
        with torch.no_grad():
            for name, stack in out.items():
                stack[row].copy_(self._state[name])

    def copy_of(self, names: Iterable[str]) -> Params:
        """Copies of some tensors of the network, for the server's side: in main memory."""
        return {name: self._state[name].detach().to("cpu", copy=True) for name in names}

    def complete(self) -> Params:
        """A copy of the whole model that is loaded."""
        return self.copy_of(self._state)

    def here(self, start: Start) -> Start:
        """What the penalty needs of a start, on this worker's device."""
        device = self.samples.device
        anchor, notes = ({n: t.to(device) for n, t in what.items()} for what in (start.anchor, start.notes))
        return Start({}, anchor, notes)

    @property
    def output_weight(self) -> str:
        """The name of the output layer's weight matrix."""
        return f"{self.model.output_layer}.weight"

    def take_features(self) -> Tensor:
        """What the output layer saw last."""
        features, self._seen.features = self._seen.features, None
        assert features is not None, "the network did not use its output layer"
        return features

    def forward(self, inputs: Tensor) -> Output:
        """What the network says, with the features that the output layer saw."""
        logits = self.model(inputs)
        return Output(logits, self.take_features(), self._output.weight, self.buffers)

    def network(self, params: Params, inputs: Tensor, statistics: str | None = "") -> Output:
        """The network as a function of its parameters; see `types.Network`."""
        if params is self.params and statistics == "":
            return self.forward(inputs)
        casts = self._cast_names
        given = {n: params[n].bfloat16() if n in casts else params[n] for n in self._own_names}
        buffers = self.buffers
        if statistics is None:
            buffers = {name: b.clone() for name, b in buffers.items()}
        elif statistics:
            buffers = buffers | {n: buffers[statistics + n] for n in buffers if statistics + n in buffers}
        logits = functional_call(self.model, given | buffers, (inputs,))
        return Output(logits, self.take_features(), params[self.output_weight], buffers)

    def train(
        self,
        algorithm: FedAvg,
        when: When,
        passes: Sequence[Pass],
        start: Start,
        client: int,
        round_: int,
        how: LocalTraining,
        kept: Params | None = None,
    ) -> tuple[float, float, Params]:
        """Make a client's passes over its data with the network that is loaded.

        Gives the mean loss and penalty over their batches, and what is kept of the optimiser's state. The loss is NaN where a
        weight is no longer a finite number: the last step's loss is from before it.
        """
        self.model.train()
        start = self.here(start)
        drawn = torch.get_rng_state()
        history: list[Tensor] = []
        optimizer: Params = {}
        try:
            for index, one in enumerate(passes):
                self._generator.manual_seed(
                    torch_seed(how.seed, purpose("dropout mask", when, index), round_, client)
                )
                self.choose(one)
                prefix = f"{OPTIMIZER}{index}."
                state = {n.removeprefix(prefix): t for n, t in (kept or {}).items() if n.startswith(prefix)}
                losses, state = self._make(algorithm, when, index, one, start, client, round_, how, state)
                history += losses
                if how.keep_optimizer:
                    optimizer |= {prefix + n: t.detach().to("cpu", copy=True) for n, t in state.items()}
            moved = [p for p in self.params.values() if p.requires_grad]
        finally:
            self.choose(None)
        draws.refuse_global(drawn)
        if not history:
            return 0.0, 0.0, optimizer
        mean_loss, mean_penalty = torch.stack(history).cpu().double().mean(0).tolist()
        trained = moved if len(passes) == 1 else list(self.params.values())
        intact = all(bool(parameter.sum(dtype=torch.float32).isfinite()) for parameter in trained)
        return mean_loss if intact else np.nan, mean_penalty, optimizer

    def choose(self, one: Pass | None) -> None:
        """Only what a pass trains moves (None: all that can be trained); bf16 copies follow."""
        for parameter, required in self._trainable.items():
            parameter.requires_grad_(required)
        if one is None or (one.trained is None and not one.fixed):
            return
        names = set(self.moved_by(one))
        for name, parameter in self.params.items():
            parameter.requires_grad_(name in names)
        for cast, master in self._casts:
            cast.requires_grad_(master.requires_grad)

    def moved_by(self, one: Pass) -> tuple[str, ...]:
        """The names of what moves in a pass: never what the model froze; what was attached to it, also if frozen, where it is named."""
        trainable = [name for name, parameter in self.params.items() if self._trainable[parameter]]
        return one.moving(trainable, self.params.keys() - self._own_names)

    @property
    def moving(self) -> list[Tensor]:
        """The parameters that move in this pass, and their bf16 copies."""
        return [parameter for parameter in self._trainable if parameter.requires_grad]

    def _make(
        self,
        algorithm: FedAvg,
        when: When,
        index: int,
        one: Pass,
        start: Start,
        client: int,
        round_: int,
        how: LocalTraining,
        state: Params,
    ) -> tuple[list[Tensor], Params]:
        """One pass: (loss, penalty) of each batch, and the optimiser's state after it."""
        trained = {name: p for name, p in self.params.items() if p.requires_grad}
        copies, leaves, targets = self._moving(trained)
        own = self.federation.shards[client].train
        size = min(how.size(one), len(own))
        rate, lr = how.rate(one, round_), how.rate(Pass(), round_)
        is_bounded = one.low > -np.inf or one.high < np.inf
        if not how.is_plain:
            state = first_state(how.optimizer, {name: p.detach() for name, p in trained.items()}, state)
        history: list[Tensor] = []
        ends: list[Tensor] = []
        for epoch in self.epochs(own, when, index, one, client, round_, how):
            begun = len(history)
            for inputs, labels in epoch:
                if self.stop.is_set():
                    raise Stopped
                if one.once and len(history) == 1:
                    trained = {name: p for name, p in trained.items() if name not in one.once}
                    copies, leaves, targets = self._moving(trained)
                batch = Batch(inputs, labels, how.label_smoothing, lr)
                loss, penalty, gradients = self.gradients(algorithm, batch, start, one.stage, size, leaves)
                with torch.no_grad():
                    if how.is_plain:
                        descend(targets, gradients, rate)
                    else:
                        state = state | self._step(how, trained, copies, gradients, state, rate)
                    if is_bounded:
                        for parameter in trained.values():
                            parameter.clamp_(one.low, one.high)
                    self._follow()
                    history.append(torch.stack([loss, penalty]))
            if one.until:
                ends.append(torch.stack(history[begun:])[:, 0].mean())
                count, spread = one.until
                if len(ends) >= count and float(torch.stack(ends[-count:]).std()) < spread:
                    break
        return history, state

    def _moving(self, trained: Params) -> tuple[list[tuple[nn.Parameter, Tensor]], list[Tensor], list[Tensor]]:
        """What these parameters move by: their bf16 copies, what gradients are taken of, and what each of these changes.

        Where the network computes with a bf16 copy, both take part: the penalty sees the float32 master.
        """
        masters = set(map(id, trained.values()))
        copies = [(cast, master) for cast, master in self._casts if id(master) in masters]
        leaves = [*trained.values(), *(cast for cast, _ in copies)]
        return copies, leaves, [*trained.values(), *(master for _, master in copies)]

    def _step(
        self,
        how: LocalTraining,
        trained: Params,
        copies: Sequence[tuple[nn.Parameter, Tensor]],
        gradients: Sequence[Tensor | None],
        state: Params,
        rate: float,
    ) -> Params:
        """One step of the optimiser; its state after it."""
        found = {n: _dense(g, p) for (n, p), g in zip(trained.items(), gradients, strict=False)}
        of_copies = {id(master): g for (_, master), g in zip(copies, gradients[len(trained) :], strict=True)}
        for name, parameter in trained.items():
            if (more := of_copies.get(id(parameter))) is not None:
                found[name] = found[name] + more.to(parameter.dtype)
        if how.clip:
            found = clipped(found, how.clip)
        after, state = how.optimizer.update(trained, found, state, rate)
        for name, parameter in trained.items():
            parameter.copy_(after[name])
        return state

    def epochs(
        self, own: Indices, when: When, index: int, one: Pass, client: int, round_: int, how: LocalTraining
    ) -> Iterator[Iterable[tuple[Tensor, Tensor]]]:
        """What the client trains on in a pass, batch by batch; in one piece where nobody looks at the end of an epoch."""
        plan = batches(len(own), how, one, stream(how.seed, purpose("shuffle", when, index), round_, client))
        changed = self.drawn(plan, when, index, client, round_, how)
        size = len(plan) if one.until is None else max(1, len(plan) // max(1, one.epochs or how.epochs))
        for at in range(0, len(plan), max(1, size)):
            found = self._gather(own, plan[at : at + size])
            yield found if changed is None else _changed(found, changed[at : at + size], self.black)

    def _gather(self, own: Indices, plan: Sequence[Indices] | Indices) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(plan, np.ndarray):
            return self.samples.batches(own[plan])
        return (self.samples.batch(own[chosen]) for chosen in plan)

    @cached_property
    def black(self) -> float:
        """The least that a pixel can be: bytes become -1 to 1, other numbers stay as they are."""
        return -1.0 if self.samples.inputs.dtype == torch.uint8 else float(self.samples.inputs.min())

    def drawn(
        self, plan: Sequence[Indices] | Indices, when: When, index: int, client: int, round_: int, how: LocalTraining
    ) -> list[Tensor] | None:
        """How the images of each batch are changed; None where they are not."""
        if how.augment == "none":
            return None
        rng = stream(how.seed, purpose("augment", when, index), round_, client)
        device = self.samples.device
        return [torch.from_numpy(augment.draw(how.augment, chosen.shape, rng)).to(device) for chosen in plan]

    def gradients(
        self, algorithm: FedAvg, batch: Batch, start: Start, stage: str, size: int, leaves: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """Loss and penalty of a batch (of `size` samples) and the gradient of their sum."""
        found: Loss = algorithm.loss(self.network, self.params, batch, start, stage)
        gradients = torch.autograd.grad(found.loss + found.penalty, leaves, allow_unused=True)
        return found.loss.detach(), found.penalty.detach(), gradients

    def squared_gradients(self, indices: Indices, batch_size: int) -> Tensor:
        """Of the loaded network: ||d CE / d w||^2 of each whole batch of these samples, in main memory."""
        self.model.eval()
        leaves = [p for p in self.model.parameters() if p.requires_grad]
        size = min(batch_size, len(indices))
        found = []
        for chosen in indices[: len(indices) // size * size].reshape(-1, size):
            inputs, labels = self.samples.batch(chosen)
            loss = F.cross_entropy(self.forward(inputs).logits, labels)
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            parts = [_dense(g, g).double().square().sum() for g in gradients if g is not None]
            found.append(torch.stack(parts).sum())
        return torch.stack(found).cpu()

    def measure(self, indices: Indices) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Of the loaded network, for each sample: is it right, and its cross-entropy."""
        _, right, loss = self.answers(indices)
        return right, loss

    @torch.inference_mode()
    def answers(self, indices: Indices, see: Callable[[int, Tensor, Tensor], None] | None = None) -> Answers:
        """What the loaded network says of each sample; `see` is shown the logits and labels from a position on."""
        self.model.eval()
        predicted, right, loss = [], [], []
        for at in range(0, len(indices), EVALUATION_BATCH):
            inputs, labels = self.samples.batch(indices[at : at + EVALUATION_BATCH])
            logits = self.model(inputs)
            predicted.append(logits.argmax(1))
            right.append(predicted[-1] == labels)
            loss.append(F.cross_entropy(logits, labels, reduction="none"))
            if see:
                see(at, logits, labels)
        if not right:
            return Answers(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_), np.zeros(0))
        return Answers(
            torch.cat(predicted).cpu().numpy(), torch.cat(right).cpu().numpy(), torch.cat(loss).cpu().double().numpy()
        )

    @torch.inference_mode()
    def class_means(self, indices: Indices, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Of the loaded network: the mean of a function of the features, by class, in main memory."""
        self.model.eval()
        classes, width = self.federation.data.classes, self._output.in_features
        sums = torch.zeros_like(of(torch.zeros(classes, width, device=self.samples.device)))
        for at in range(0, len(indices), EVALUATION_BATCH):
            inputs, labels = self.samples.batch(indices[at : at + EVALUATION_BATCH])
            sums.index_add_(0, labels, of(self.forward(inputs).features))
        counts = torch.from_numpy(np.bincount(self.federation.data.labels[indices], minlength=classes))
        return sums.cpu().clone() / counts.clamp_min(1)[:, None]


def require_whole(model: Params, network: Params) -> None:
    """An error where a model is not all that the network has."""
    if model.keys() == network.keys():
        return
    if unknown := sorted(model.keys() - network.keys()):
        raise RunError(f"the algorithm gives a client a model with {unknown[0]}, which the network does not have")
    missing = ", ".join(sorted(network.keys() - model.keys()))
    raise RunError(
        f"the algorithm gives a client a model without {missing}: where only a part of the model travels, `personal` (and "
        "`begin`) must add the rest, such as own | got.model, and `keeps` must name it"
    )


def descend(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], lr: float) -> None:
    """One step of SGD in place; a sparse gradient, of an embedding, touches only the rows it has."""
    dense = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.is_sparse:
            rows = gradient.coalesce()
            parameter.index_add_(0, rows.indices()[0], rows.values().to(parameter.dtype), alpha=-lr)
        elif gradient is not None:
            dense.append((parameter, gradient))
    # one call for all: threads hand over Python's lock at every call
    torch._foreach_sub_([p for p, _ in dense], [g for _, g in dense], alpha=lr)


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _changed(
    batches: Iterable[tuple[Tensor, Tensor]], drawn: Sequence[Tensor], black: float
) -> Iterator[tuple[Tensor, Tensor]]:
    for (inputs, labels), how in zip(batches, drawn, strict=True):
        yield augment.change(inputs, how, black), labels


def batches(samples: int, how: LocalTraining, one: Pass, rng: np.random.Generator) -> Sequence[Indices] | Indices:
    """The batches of a pass as positions: one row each, or a list where some are incomplete.

    A client smaller than a batch trains on all it has.
    """
    chosen = np.arange(samples) if one.share >= 1 else rng.permutation(samples)[: max(1, round(one.share * samples))]
    size = min(how.size(one), len(chosen))
    whole = len(chosen) // size * size
    orders = [rng.permutation(chosen) for _ in range(how.epochs if one.epochs is None else one.epochs)]
    if one.incomplete and whole < len(chosen) - 1:  # norm layers cannot train on a single sample
        split = [np.split(order, range(size, len(order), size)) for order in orders]
        return [batch for epoch in split for batch in epoch][: one.steps]
    if not orders:
        return np.zeros((0, size), np.int64)
    return np.concatenate([order[:whole].reshape(-1, size) for order in orders])[: one.steps]
