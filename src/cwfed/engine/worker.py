"""How one client trains: its passes over its data, batch by batch, in the plainest form.

The engines only decide which client is trained where and when; `vmap` alone trains in a way of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from cwfed.algorithms import FedAvg
from cwfed.core import augment
from cwfed.core.augment import Augment
from cwfed.core.optimizers import SGD, Optimizer, Schedule, clipped, first_state
from cwfed.core.rng import stream, torch_seed
from cwfed.core.types import Batch, Loss, Params, Pass, Start, When
from cwfed.data import Federation, Samples
from cwfed.data.partition import Indices
from cwfed.engine import draws
from cwfed.engine.loaded_network import LoadedNetwork, dense
from cwfed.engine.precision import Precision
from cwfed.engine.view import ClientView
from cwfed.privacy.dp import SamplePrivacy
from cwfed.privacy.noise import Noise


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
    """The name of a pass's random stream, such as "shuffle, test 1"; the first training pass has the plain name, "shuffle"."""
    return of if (when, index) == ("training", 0) else f"{of}, {when} {index}"


OPTIMIZER = "optimizer."
"""The prefix of the names under which a client keeps its optimiser's state."""


class Stopped(Exception):
    """Raised at the next batch of a client that is training when the run is interrupted."""


class ClientWorker(LoadedNetwork):
    """Trains clients, one at a time, with a network of its own."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        samples: Samples,
        stop: threading.Event,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__(model, federation, samples, precision)
        self.stop = stop

    def view(self, client: int, statistics: Params) -> ClientView:
        """What an algorithm may ask of a client; `statistics` are the running statistics that stay with it."""
        return ClientView(self, client, statistics)

    def here(self, start: Start) -> Start:
        """The anchor and notes of a start, on this worker's device; its model is loaded already."""
        device = self.samples.device
        anchor, notes = ({n: t.to(device) for n, t in what.items()} for what in (start.anchor, start.notes))
        return Start({}, anchor, notes)

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
        """Train the loaded model: a client's passes over its data, in their order.

        Returns the mean loss and penalty over all batches, and the optimiser's state that the client keeps. The loss is NaN if a
        weight is no longer finite; the loss of the last step was computed before that step, so it cannot show it.
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
                losses, state = self._make_pass(algorithm, when, index, one, start, client, round_, how, state)
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
        """Set `requires_grad` for the tensors that a pass trains, and for their bf16 copies. None: all that can be trained."""
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
        """The names of the tensors that a pass moves.

        What the user's model froze never moves. What an algorithm attached to it moves if the pass names it, even if it is frozen.
        """
        trainable = [name for name, parameter in self.params.items() if self._trainable[parameter]]
        return one.moving(trainable, self.params.keys() - self._own_names)

    @property
    def moving(self) -> list[Tensor]:
        """The parameters that move in this pass, and their bf16 copies."""
        return [parameter for parameter in self._trainable if parameter.requires_grad]

    def _make_pass(
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
        """One pass: (loss, penalty) of each batch, and the optimiser's state after the pass."""
        trained = {name: p for name, p in self.params.items() if p.requires_grad}
        copies, leaves, targets = self._leaves(trained)
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
                    copies, leaves, targets = self._leaves(trained)
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

    def _leaves(self, trained: Params) -> tuple[list[tuple[nn.Parameter, Tensor]], list[Tensor], list[Tensor]]:
        """For these parameters: their bf16 copies as (copy, master), the leaves of the gradient, and the tensor that each leaf's gradient
        moves.

        A parameter with a bf16 copy is two leaves that move the same tensor: the network computes with the copy, the penalty with the
        float32 master.
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
        found = {n: dense(g, p) for (n, p), g in zip(trained.items(), gradients, strict=False)}
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
        """The batches of a pass, epoch by epoch; all of them as one epoch unless the pass may end early (`until`)."""
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
        """The least value of a pixel, as the network sees it: bytes are scaled to -1 .. 1, floats stay as they are."""
        return -1.0 if self.samples.inputs.dtype == torch.uint8 else float(self.samples.inputs.min())

    def drawn(
        self, plan: Sequence[Indices] | Indices, when: When, index: int, client: int, round_: int, how: LocalTraining
    ) -> list[Tensor] | None:
        """The random changes of each batch's images (`augment.draw`); None without augmentation."""
        if how.augment == "none":
            return None
        rng = stream(how.seed, purpose("augment", when, index), round_, client)
        device = self.samples.device
        return [torch.from_numpy(augment.draw(how.augment, chosen.shape, rng)).to(device) for chosen in plan]

    def gradients(
        self, algorithm: FedAvg, batch: Batch, start: Start, stage: str, size: int, leaves: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """Loss and penalty of a batch, and the gradient of their sum. `size`: samples of a full batch."""
        found: Loss = algorithm.loss(self.network, self.params, batch, start, stage)
        gradients = torch.autograd.grad(found.loss + found.penalty, leaves, allow_unused=True)
        return found.loss.detach(), found.penalty.detach(), gradients


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
