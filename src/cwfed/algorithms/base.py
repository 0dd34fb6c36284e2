"""What an algorithm is: a frozen dataclass of hyper-parameters with pure methods.

The same object runs in the simulator and in a real federation. Server state is a plain nested dict of tensors and JSON values, so that
the state of any algorithm can be saved, loaded and compared in one way.
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
    """What an algorithm may ask of the client at which it runs. Nothing of it leaves the client unless `finish` sends it.

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
        """n_ij: how many training samples of each class the client has."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the network's parameters; running statistics of norm layers are not among them."""

    @property
    def statistics(self) -> Params:
        """The client's running statistics if they stay with it (`train.batch_norm = "local"`), else none."""

    def squared_gradients(self, params: Params, batch_size: int) -> Tensor:
        """||d CE / d w||^2 over all parameters, for each full batch of the client's training data in their order; the model is in
        evaluation mode.
        """

    def losses(self, models: Sequence[Params], part: Literal["train", "holdout"]) -> Tensor:
        """The mean cross-entropy of each model on a part of the client's training data."""

    def class_means(self, params: Params) -> Tensor:
        """The mean normalised feature of each class (K x features) under a model; zero for a class without samples."""

    def class_moments(self, params: Params) -> tuple[Tensor, Tensor, Tensor]:
        """For the features of each class under a model: their mean (K x features), their mean squared norm (K), and the number of
        samples (K). The first two are zero for a class without samples.
        """


@runtime_checkable
class Algorithm(Protocol[S]):
    """One federated learning method. `FedAvg` implements all of these hooks; others override what they change."""

    name: ClassVar[str]
    """The name in a config; a class of cwfed.algorithms that sets it is registered under it."""
    phase: ClassVar[Phase]
    """The phase on which the method is reported: the one in which the model is personal."""
    keeps_model: ClassVar[bool]
    """Whether a client keeps the whole model that it trained until its next round; `keeps` can choose tensors."""
    travels: ClassVar[str]
    """What a participant downloads and uploads, in words for people."""
    work: ClassVar[str]
    """What a round costs beyond FedAvg, in words for people."""

    def costs(self, sizes: Sizes) -> list[Cost]:
        """The algorithm's rows in the cost table; the first is for these hyper-parameters."""

    def held_out(self) -> float:
        """The share of each client's training data that is held out for the algorithm's own use."""

    def check(self, task: Task) -> None:
        """Raise ConfigError, before the first round, if the algorithm cannot run in this experiment."""

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        """The network with the algorithm's changes, for example to its output layer, whose name is `output`.

        Tensors that the algorithm needs besides the network, such as a second model or a weight per class, are added with
        `cwfed.attach`: they are trained, kept and sent by name like any other tensor.
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
        """The names of the tensors of the trained model that go to the server."""

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        """The names of the tensors of the trained model that stay with the client until its next round (memory per client)."""

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        """The form and bounds of each tensor that `finish` sends besides a model like this one."""

    def aggregate(self, state: S, up: Uploads) -> S:
        """The state after a round. It is a new object; the old state must not be changed."""

    def newcomer(self, state: S, class_counts: Sequence[float] | None = None) -> Params:
        """A model for a client that never took part, from its label histogram if it gives one."""

    def class_models(self, state: S) -> Params:
        """The class models as a stack, for the layers that are class-wise; empty for most algorithms."""

    # client
    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        """The model that the client has on receipt, before it trains: phase `received` measures it."""

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        """Where training starts, and what it is pulled to.

        `own` has the tensors that the client kept (before its first round the initial ones) and what it remembers besides; None if
        it keeps nothing.
        """

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        """The client's passes over its training data. Default: one that trains everything in training, none on receipt and before the test.

        The result of the passes on receipt is what phase `received` measures and where training starts. Passes before the test train
        a copy of the received model, which is then measured as phase `trained` and thrown away.
        """

    def settle(self, params: Params, start: Start) -> Params:
        """The model after the passes on receipt, from the tensors as these have trained them."""

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        """What a pass minimises on a batch; `params` are all parameters, including those that the pass does not train."""

    def shown(self, params: Params) -> Params:
        """The client's personal model after training, from the tensors that it trained (or that it keeps)."""

    def predictor(self, params: Params, class_counts: Sequence[float], task: Task) -> Params:
        """The model with which a client with these class counts predicts, from its own model.

        It is measured and saved in place of that model, but never trained or sent.
        """

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        """The term that is added to the cross-entropy of a batch."""

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        """The extras: tensors that the client uploads besides its model."""

    def remember(self, start: Start) -> Params:
        """Tensors that a client keeps besides those of its model; they are in its next `own`.

        It is also asked with a start that has parameters alone, for names and shapes, by which what is kept is checked on resume.
        """
