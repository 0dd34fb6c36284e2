"""One worker's place: a copy of the network that models are loaded into, trained and measured.

This is where a client's work happens, in the plainest form; the engines only decide what runs beside what.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from cwfed.algorithms import FedAvg
from cwfed.data import Federation, Samples
from cwfed.data.partition import Indices
from cwfed.dp import SamplePrivacy
from cwfed.engine import draws
from cwfed.engine.precision import Precision, to_bf16
from cwfed.errors import RunError
from cwfed.models import output_layer, parameters_of, statistics
from cwfed.rng import stream, torch_seed
from cwfed.types import Output, Params, Start

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: SGD without momentum, the last incomplete batch dropped."""

    seed: int
    lr: float
    batch_size: int
    epochs: int
    precision: Precision = "fp32"
    privacy: SamplePrivacy | None = None
    """Differential privacy, which changes batches and gradients (`private.py`)."""


class Stopped(Exception):
    """The run was interrupted; whoever is training gives up at the next batch."""


class Answers(NamedTuple):
    """What a network says of some samples, one number each."""

    predicted: NDArray[np.int64]
    right: NDArray[np.bool_]
    loss: NDArray[np.float64]
    """Cross-entropy."""


class _Features:
    """A hook that keeps what the output layer saw. It knows nothing of its bench: a cycle would keep the bench,
    and with it all data, in memory until Python looks for cycles.
    """

    features: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.features = inputs[0]


class ClientView:
    """The client as an algorithm sees it, on a worker's bench."""

    def __init__(self, bench: Bench, client: int, statistics: Params) -> None:
        self._bench, self._client, self._statistics = bench, client, statistics
        self._shard = bench.federation.shards[client]

    @cached_property
    def class_counts(self) -> Tensor:
        """n_ij: the client's training samples by class."""
        return torch.from_numpy(self._bench.federation.class_counts(self._client)).float()

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
        return self._bench.class_means(self._shard.train)


class Bench:
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
        for cast, master in self._casts:
            cast.copy_(master)

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
        """What the penalty needs of a start, on this bench's device."""
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
        return Output(logits, self.take_features(), self._output.weight)

    def train(
        self,
        algorithm: FedAvg,
        start: Start,
        statistics: Params,
        client: int,
        round_: int,
        how: LocalTraining,
    ) -> tuple[float, float]:
        """Train from a start on a client's data; the mean cross-entropy and penalty over its batches.

        The former is NaN where a weight is no longer a finite number: the last step's loss is from before it.
        """
        self.load(start.params | statistics)
        self.model.train()
        start = self.here(start)
        # Where the network computes with a bf16 copy, both take part: the penalty sees the float32 master.
        copies = [(cast, master) for cast, master in self._casts if cast.requires_grad]
        trained = [p for p in self.params.values() if p.requires_grad]
        leaves = [*trained, *(cast for cast, _ in copies)]
        targets = [*trained, *(master for _, master in copies)]
        own = self.federation.shards[client].train
        self._generator.manual_seed(torch_seed(how.seed, "dropout mask", round_, client))
        drawn = torch.get_rng_state()
        history: list[Tensor] = []
        size = min(how.batch_size, len(own))
        for inputs, labels in self.batches(own, client, round_, how):
            if self.stop.is_set():
                raise Stopped
            loss, penalty, gradients = self.gradients(algorithm, inputs, labels, start, size, leaves)
            with torch.no_grad():
                descend(targets, gradients, how.lr)
                self._follow()
                history.append(torch.stack([loss, penalty]))
        draws.refuse_global(drawn)
        mean_loss, mean_penalty = torch.stack(history).cpu().double().mean(0).tolist()
        intact = all(bool(parameter.isfinite().all()) for parameter in trained)
        return mean_loss if intact else np.nan, mean_penalty

    def batches(self, own: Indices, client: int, round_: int, how: LocalTraining) -> Iterable[tuple[Tensor, Tensor]]:
        """What the client trains on in a round, batch by batch."""
        order = batches(len(own), how, stream(how.seed, "shuffle", round_, client))
        return self.samples.batches(own[order])

    def gradients(
        self, algorithm: FedAvg, inputs: Tensor, labels: Tensor, start: Start, size: int, leaves: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """Cross-entropy and penalty of a batch (of `size` samples) and the gradient of their sum."""
        output = self.forward(inputs)
        loss = F.cross_entropy(output.logits, labels)
        penalty = algorithm.penalty(self.params, output, labels, start)
        return loss, penalty, torch.autograd.grad(loss + penalty, leaves, allow_unused=True)

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
    def class_means(self, indices: Indices) -> Tensor:
        """Of the loaded network: the mean normalised feature of each class, in main memory."""
        self.model.eval()
        classes, width = self.federation.data.classes, self._output.in_features
        sums = torch.zeros(classes, width, device=self.samples.device)
        for at in range(0, len(indices), EVALUATION_BATCH):
            inputs, labels = self.samples.batch(indices[at : at + EVALUATION_BATCH])
            sums.index_add_(0, labels, F.normalize(self.forward(inputs).features, dim=1))
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
        "`begin`) must add the rest, such as own | got.model with keeps_model = True"
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


def batches(samples: int, how: LocalTraining, rng: np.random.Generator) -> Indices:
    """The batches of all epochs as positions, one row each. A client smaller than a batch trains on all it has."""
    size = min(how.batch_size, samples)
    epochs = [rng.permutation(samples)[: samples // size * size].reshape(-1, size) for _ in range(how.epochs)]
    return np.concatenate(epochs)
