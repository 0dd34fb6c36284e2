"""The messages between server and client, and what an algorithm may know about the experiment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from cwfed.core.errors import ConfigError, did_you_mean

Params: TypeAlias = dict[str, Tensor]
"""One model: tensors by name. Stacked, each tensor has a leading axis of models."""

Phase: TypeAlias = Literal["received", "trained"]
"""Which model of a client is measured: as handed out by the server, or after its local training."""

Norm: TypeAlias = Literal["batch", "group", "layer", "instance"]
"""Kinds of norm layers."""

PHASES: tuple[Phase, Phase] = ("received", "trained")

When: TypeAlias = Literal["receipt", "training", "test"]
"""When a client makes a pass over its data: first of all, as its training, or on a copy of its model before it is tested."""


@dataclass(frozen=True)
class Training:
    """How clients train, as far as an algorithm may know."""

    lr: float = 0.005
    """The highest learning rate of the run: schedules only lower it."""
    batch_size: int = 10
    epochs: int = 1
    is_plain: bool = True
    """Whether a step is the learning rate times the gradient, and nothing else."""

    def require_plain(self, name: str, why: str) -> None:
        """ConfigError for a method whose steps are those of plain SGD."""
        if not self.is_plain:
            raise ConfigError(
                f'{name}: {why}: set train.optimizer = "sgd" without momentum, weight decay and clipping'
            )


@dataclass(frozen=True)
class Task:
    """What an algorithm may know about the experiment before the first round.

    Examples:
        >>> def keeps(self, names, task):  # a method of an algorithm: the output layer stays with the client
        ...     return task.layers[task.output]
    """

    clients: int
    classes: int
    layers: Mapping[str, tuple[str, ...]]
    """Layer name -> its parameter names, from input to output."""
    output: str
    """The name of the output layer, one of `layers`."""
    seed: int = 0
    """For algorithms that need random numbers on the server."""
    norms: Mapping[str, Norm] = field(default_factory=dict)
    """Name of every norm layer -> its kind, also for layers without parameters."""
    training: Training = field(default_factory=Training)

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameter names; running statistics of norm layers are not among them."""
        return tuple(name for names in self.layers.values() for name in names)

    @property
    def output_weight(self) -> str:
        """The name of the output layer's weight matrix, one row a class."""
        return f"{self.output}.weight"

    def select(self, choice: str | int | tuple[str, ...]) -> tuple[str, ...]:
        """The parameter names of a choice: "all", "none", "output", a number n (the last n layers), or names of layers.

        The name of a block stands for all of its layers: "layer4" for every layer whose name begins with "layer4.".
        """
        names = list(self.layers)
        if choice == "all":
            chosen = names
        elif choice == "none":
            chosen = []
        elif choice == "output":
            chosen = [self.output]
        elif isinstance(choice, int):
            if not 0 <= choice <= len(names):
                raise ConfigError(f"layers = {choice}, but the model has {len(names)} layers")
            chosen = names[len(names) - choice :]
        else:
            wanted = (choice,) if isinstance(choice, str) else choice
            chosen = []
            for want in wanted:
                found = [name for name in names if name == want or name.startswith(f"{want}.")]
                if not found:
                    known = {*names, "all", "none", "output"}
                    raise ConfigError(f"the model has no layer {want!r}: {did_you_mean(want, known)}")
                chosen += found
        return tuple(name for layer in names if layer in chosen for name in self.layers[layer])

    def tensors(self, choice: str | int | tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
        """The tensors of a model that belong to the layers that `select` chooses, running statistics of norm layers included."""
        chosen = set(self.select(choice))
        if chosen == set(self.parameters):
            return names
        layers = {name.rpartition(".")[0] for name in chosen}
        statistics = set(names) - set(self.parameters)
        return tuple(n for n in names if n in chosen or (n in statistics and n.rpartition(".")[0] in layers))


@dataclass(frozen=True)
class Download:
    """What the server sends to one client: usually one model, and small tensors besides (notes).

    Examples:
        >>> import cwfed, torch
        >>> cwfed.Download(({"w": torch.ones(2)},)).model["w"].tolist()
        [1.0, 1.0]
    """

    models: tuple[Params, ...]
    notes: Params = field(default_factory=dict)

    @property
    def model(self) -> Params:
        """The only model, for the many algorithms that send one."""
        (model,) = self.models
        return model

    @property
    def nbytes(self) -> int:
        """The traffic of this message."""
        return sum(map(nbytes, self.models)) + nbytes(self.notes)


@dataclass(frozen=True)
class Start:
    """Where a client's training starts, and what the penalty of its loss is computed from.

    Examples:
        >>> import cwfed
        >>> def begin(self, got, own, data):  # a method of an algorithm: train what came, and be pulled to it
        ...     return cwfed.Start(got.model, anchor=got.model)
    """

    params: Params
    anchor: Params = field(default_factory=dict)
    notes: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """A pass of a client over its training data: which tensors move, for how long, on how much of the data.

    Examples:
        >>> import cwfed
        >>> def passes(self, when, task, start):  # a method of an algorithm: first the output layer, then all
        ...     head = cwfed.Pass(trained=task.layers[task.output], epochs=1)
        ...     return (head, cwfed.Pass()) if when == "training" else ()
    """

    trained: tuple[str, ...] | None = None
    """The tensors that move; those that the model has frozen stay frozen. None: all that can be trained."""
    epochs: int | None = None
    """None: `train.epochs`."""
    steps: int | None = None
    """At most so many batches; None: all."""
    batch_size: int | None = None
    """None: `train.batch_size`."""
    once: tuple[str, ...] = ()
    """Tensors that move in the first step only."""
    lr: float = 1.0
    """A factor of the learning rate."""
    rate: float | None = None
    """A learning rate of its own in place of `train.lr`, the same in every round."""
    share: float = 1.0
    """The share of the training data that is used, drawn anew for every pass."""
    incomplete: bool = False
    """Whether the last, incomplete batch of an epoch is used too, if it has at least two samples."""
    low: float = -inf
    """The tensors that move are kept between `low` and `high`."""
    high: float = inf
    until: tuple[int, float] | None = None
    """(n, spread): the pass ends early, when the losses of the last n epochs have a standard deviation below `spread`."""
    stage: str = ""
    """A name by which the algorithm's `loss` knows which of its passes this is."""
    fixed: tuple[str, ...] = ()
    """Tensors that do not move although they are in `trained`."""

    def moving(self, trainable: Iterable[str], beside: Iterable[str] = ()) -> tuple[str, ...]:
        """The names of the tensors that move: of `trainable`, and of those that an algorithm put `beside` the network if `trained` names them."""
        names = tuple(trainable)
        can = {*names, *beside}
        named = names if self.trained is None else (name for name in self.trained if name in can)
        return tuple(name for name in named if name not in self.fixed)


class Output(NamedTuple):
    """The network's output for a batch, for the penalty.

    Examples:
        >>> def penalty(self, params, output, labels, start):  # a method of an algorithm: short rows
        ...     return 0.01 * output.weight.square().sum()
    """

    logits: Tensor
    features: Tensor
    """The input of the output layer."""
    weight: Tensor
    """The output layer's weight matrix as it is at this batch, one row a class."""
    buffers: Mapping[str, Tensor] = MappingProxyType({})
    """The network's buffers, such as running means, after this batch."""


class Network(Protocol):
    """The network as a function, for losses that evaluate it at other tensors than the current ones.

    Examples:
        >>> import cwfed
        >>> def loss(self, network, params, batch, start, stage):  # a method of an algorithm: the plain loss
        ...     answers = network(params, batch.inputs)
        ...     return cwfed.Loss(batch.cross_entropy(answers.logits), answers.logits.new_zeros(()))
    """

    def __call__(self, params: Params, inputs: Tensor, statistics: str | None = "") -> Output:
        """The network's output with these parameters, by their names in the network.

        It uses and updates the running statistics whose names begin with `statistics` ("": the network's own); with None it uses a copy
        that is thrown away.
        """


class Batch(NamedTuple):
    """Samples of a client to train on.

    Examples:
        >>> import cwfed, torch
        >>> batch = cwfed.Batch(inputs=torch.zeros(2, 3), labels=torch.tensor([0, 1]))
        >>> round(float(batch.cross_entropy(torch.zeros(2, 2))), 3)
        0.693
    """

    inputs: Tensor
    labels: Tensor
    label_smoothing: float = 0.0
    lr: float | Tensor = 0.0
    """`train.lr` as it is in this round; a pass may have a rate of its own."""

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """The cross-entropy of these logits, with the experiment's label smoothing."""
        return F.cross_entropy(logits, self.labels, label_smoothing=self.label_smoothing)


class Loss(NamedTuple):
    """What a client minimises: the sum of both, which are reported separately.

    Examples:
        >>> import cwfed, torch
        >>> cwfed.Loss(loss=torch.tensor(0.7), penalty=torch.tensor(0.1)).penalty
        tensor(0.1000)
    """

    loss: Tensor
    penalty: Tensor


LARGEST = 1e18
"""The largest number of an honest upload: products of two such numbers, and sums of very many, still fit into float32."""


class ExtraSpec(NamedTuple):
    """The form of a tensor that a client sends; the guard refuses any other.

    Examples:
        >>> import cwfed, torch
        >>> def extras_spec(self, model, task):  # a method of an algorithm whose clients send their label counts
        ...     return {"counts": cwfed.ExtraSpec(torch.float32, (task.classes,), low=0, counts_samples=True)}
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float = -LARGEST
    high: float = LARGEST
    counts_samples: bool = False
    """Whether its numbers must add up to the client's number of training samples."""
    is_update: bool = False
    """Whether `guard.norm_bound` bounds its length (of all such tensors of a client together), as it does that of the model's update."""


@dataclass(frozen=True)
class Uploads:
    """What the participants of a round sent, sorted by client; `models` are stacked on a leading axis.

    Examples:
        >>> import cwfed, torch
        >>> up = cwfed.Uploads((0, 3), {"w": torch.tensor([[1.0], [3.0]])}, counts=torch.tensor([10, 30]))
        >>> cwfed.mixing.average(up.models, cwfed.mixing.sample_weights(up.counts))["w"].tolist()
        [2.5]
    """

    clients: tuple[int, ...]
    models: Params
    counts: Tensor
    """Training samples of each participant."""
    extras: Params = field(default_factory=dict)
    """What `finish` of the algorithm added, stacked likewise."""

    @property
    def nbytes(self) -> int:
        """The traffic of these messages."""
        return nbytes(self.models) + nbytes(self.extras)

    def only(self, rows: Sequence[int]) -> Uploads:
        """The uploads of some participants, by row; the same object if these are all."""
        if len(rows) == len(self.clients):
            return self
        models, extras = ({name: w[list(rows)] for name, w in kind.items()} for kind in (self.models, self.extras))
        return Uploads(tuple(self.clients[row] for row in rows), models, self.counts[list(rows)], extras)


@dataclass(frozen=True)
class Sizes:
    """The size of an experiment in numbers of 4 bytes each, from which the cost of a method follows.

    Examples:
        >>> import cwfed
        >>> cwfed.Sizes(model=100, head=20, classes=10, clients=20, participants=5).once
        500
    """

    model: int
    """Parameters of the network, as the method adapted it."""
    head: int
    """Parameters of its output layer."""
    classes: int
    clients: int
    participants: int
    uploaded: int = -1
    """Parameters that are uploaded; -1: all."""
    kept: int = 0
    """Numbers that every client keeps between its rounds."""
    features: int = 0
    """Inputs of the output layer, d."""

    @property
    def once(self) -> int:
        """One model for each participant."""
        return self.participants * self.model

    @property
    def travelling(self) -> int:
        """Numbers of a model that travel."""
        return self.model if self.uploaded < 0 else self.uploaded


@dataclass(frozen=True)
class Cost:
    """One row of the cost table.

    Examples:
        >>> import cwfed
        >>> sizes = cwfed.Sizes(model=100, head=20, classes=10, clients=20, participants=5)
        >>> [row.up for row in cwfed.FedAvg().costs(sizes)]
        [500]
    """

    method: str
    server: int
    """Numbers the server keeps between rounds."""
    down: int
    """Numbers sent to the participants in a round."""
    up: int
    """Numbers sent by the participants in a round."""
    note: str = ""


def nbytes(params: Params) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in params.values())
