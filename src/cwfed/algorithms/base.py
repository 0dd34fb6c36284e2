"""What an algorithm is: a frozen dataclass of hyper-parameters with pure methods.

The same object runs in the simulator and in a real federation. Server state is a plain nested dict of
tensors and JSON values, so that any algorithm's state can be saved, loaded and compared by one function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from cwfed.core.types import (
    Batch,
    Cost,
    Download,
    ExtraSpec,
    Loss,
    Network,
    Output,
    Params,
    Pass,
    Phase,
    Sizes,
    Start,
    Task,
    Uploads,
    When,
)

S = TypeVar("S")


class ClientData(Protocol):
    """What an algorithm may ask of the client it runs at. Nothing of it leaves unless `finish` sends it.

    Examples:
        >>> import cwfed
        >>> def finish(self, params, start, data):  # a method of an algorithm whose clients send their label counts
        ...     return {"counts": data.class_counts}
    """

    @property
    def output(self) -> str:
        """The name of the network's output layer."""

    @property
    def class_counts(self) -> Tensor:
        """n_ij: the client's training samples by class."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the network's parameters; running statistics of norm layers are not among them."""

    @property
    def statistics(self) -> Params:
        """The client's running statistics where they stay with it (`train.batch_norm = "local"`), else none."""

    def squared_gradients(self, params: Params, batch_size: int) -> Tensor:
        """||d CE / d w||^2 over all parameters of a model that is not in training, for each batch of the client's training
        data in their order; the incomplete one is left out.
        """

    def losses(self, models: Sequence[Params], part: Literal["train", "holdout"]) -> Tensor:
        """The mean cross-entropy of each model on a part of the client's training data."""

    def class_means(self, params: Params) -> Tensor:
        """The mean normalised feature of each class (K x features) under a model; zero where it has no sample."""

    def class_moments(self, params: Params) -> tuple[Tensor, Tensor, Tensor]:
        """Of the features of each class under a model: their mean (K x features) and their mean squared norm (K), zero
        where it has no sample, and how many samples it has (K).
        """


@runtime_checkable
class Algorithm(Protocol[S]):
    """One federated learning method. `FedAvg` implements all of it; others override what they change."""

    name: ClassVar[str]
    """What it is called in a config; a class of cwfed.algorithms that sets it is registered under it."""
    phase: ClassVar[Phase]
    """The phase on which the method is reported: where its personal model is."""
    keeps_model: ClassVar[bool]
    """Whether a client keeps all of the model it trained until its next round; `keeps` can be more particular."""
    travels: ClassVar[str]
    """What a participant downloads and uploads, in words."""
    work: ClassVar[str]
    """What a round costs beyond FedAvg, in words."""

    def costs(self, sizes: Sizes) -> list[Cost]:
        """Its rows in the cost table; the first one is for these hyper-parameters."""

    def held_out(self) -> float:
        """Share of each client's training data that it holds out for the algorithm; not trained on."""

    def check(self, task: Task) -> None:
        """ConfigError, before the first round, for an experiment that the algorithm cannot be run in."""

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        """The network with what the algorithm changes in it, such as its output layer (called `output`).

        Tensors that the algorithm needs beside the network, such as a second model or a weight per class, are modules that
        `cwfed.models.attach` adds to it: they are trained, kept and sent by name like any other.
        """

    # server
    def init(self, fresh: Callable[[int], Params], task: Task) -> S:
        """The state before round 1; `fresh(c)` is the c-th random initial model."""

    def send(self, state: S, client: int) -> Download:
        """What this client is sent."""

    def send_each(self, state: S, clients: Sequence[int]) -> list[Download]:
        """What each of these clients is sent, with the same bits, where that is less work than one after the other. A class
        that has only `send` of its own is asked for one after the other.
        """

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        """Which tensors of the trained model go to the server."""

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        """Which tensors of the trained model stay with the client until its next round (memory per client)."""

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        """What `finish` sends beside a model like this one: the form and bounds of each tensor."""

    def aggregate(self, state: S, up: Uploads) -> S:
        """The state after a round: a new one, the old one stays as it is."""

    def newcomer(self, state: S, class_counts: Sequence[float] | None = None) -> Params:
        """A model for a client that never took part, from its label histogram where it gives one."""

    def class_models(self, state: S) -> Params:
        """The class models as a stack, of those layers that are class-wise; none for most algorithms."""

    # client
    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        """The model the client has on receipt, before it trains: what phase `received` measures."""

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        """Where training starts and what it is pulled to.

        `own` are the tensors the client kept (the initial ones before its first round) with what it remembers beside them,
        None if it keeps none.
        """

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        """The client's passes over its training data: one over everything in training, none on receipt and before the test.

        What is left by passes on receipt is what phase `received` measures and what training starts from. Passes before the
        test are made on a copy of the received model, which is then measured as phase `trained` and thrown away.
        """

    def settle(self, params: Params, start: Start) -> Params:
        """The model after the passes on receipt, from what they have trained."""

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        """What a pass minimises on a batch; `params` are all parameters, those of the pass among them."""

    def shown(self, params: Params) -> Params:
        """The network that is the client's personal model after training, from what it trained (or from what it keeps)."""

    def predictor(self, params: Params, class_counts: Sequence[float], task: Task) -> Params:
        """The network with which a client of these class counts predicts, from its model.

        It is what is measured and saved; what is trained and sent is the model itself.
        """

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        """What is added to the cross-entropy of a batch."""

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        """What goes up beside the model."""

    def remember(self, start: Start) -> Params:
        """What a client keeps beside the tensors of its model; part of its next `own`."""
