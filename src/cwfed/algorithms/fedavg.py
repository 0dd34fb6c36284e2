"""FedAvg. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

    w = sum_i p_i w_i over the participants; everybody receives w.

Beside it the two methods that differ only in what they do with that: `Local` never communicates, and
`FedAvgFT` is FedAvg measured after every client has fine-tuned the received model on its own data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

from torch import Tensor, nn

from cwfed.algorithms.base import Algorithm, ClientData
from cwfed.core import mixing
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


class OneModel(TypedDict):
    """The state of methods with a single global model."""

    model: Params


@dataclass(frozen=True)
class FedAvg:
    """One global model: the clients' models averaged by their number of samples.

    Examples:
        >>> from dataclasses import dataclass
        >>> import cwfed
        >>> @dataclass(frozen=True)
        ... class Lazy(cwfed.FedAvg):
        ...     keep: float = 0.9
        ...     def begin(self, got, own, data):
        ...         return cwfed.Start({name: self.keep * w for name, w in got.model.items()})
        >>> Lazy(keep=0.8)  # for cwfed.run(algorithm=...)
        Lazy(keep=0.8)
    """

    name: ClassVar[str] = "fedavg"
    phase: ClassVar[Phase] = "received"
    keeps_model: ClassVar[bool] = False
    travels: ClassVar[str] = "2 models a participant: one down, one up"
    work: ClassVar[str] = "nothing beyond training and one weighted mean"

    def __post_init__(self) -> None:
        """A subclass raises ConfigError here for impossible settings; plug-ins call super()."""

    def costs(self, sizes: Sizes) -> list[Cost]:
        note = "every client keeps its own model" if self.keeps_model else f"every client keeps {sizes.kept:,}"
        once = sizes.participants * sizes.travelling
        return [Cost(self.name, sizes.travelling, once, once, note if sizes.kept else "")]

    def held_out(self) -> float:
        return 0.0

    def check(self, task: Task) -> None:
        pass

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        return model

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        return OneModel(model=self.travelling(fresh(0), task))

    def send(self, state: Any, client: int) -> Download:
        return Download((state["model"],))

    def send_each(self, state: Any, clients: Sequence[int]) -> list[Download]:
        return [self.send(state, client) for client in clients]

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return names

    def travelling(self, model: Params, task: Task) -> Params:
        """The part of a model that is uploaded, which is what the server keeps."""
        return {name: model[name] for name in self.uploaded(tuple(model), task)}

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return names if self.keeps_model else ()

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        return {}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        return OneModel(model=mixing.average(up.models, mixing.sample_weights(up.counts)))

    def newcomer(self, state: Any, class_counts: Sequence[float] | None = None) -> Params:
        model: Params = state["model"]
        return model

    def class_models(self, state: Any) -> Params:
        return {}

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        if own is None:
            return got.model
        remembered = self.remember(Start(got.model)).keys()
        kept = {name: w for name, w in own.items() if name not in remembered}
        if kept.keys() <= got.model.keys():
            return got.model  # not a copy: clients that share a model are measured together
        return kept | got.model

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        return Start(params=self.personal(got, own, data))

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        return (Pass(),) if when == "training" else ()

    def settle(self, params: Params, start: Start) -> Params:
        return params

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        output = network(params, batch.inputs)
        return Loss(batch.cross_entropy(output.logits), self.penalty(params, output, batch.labels, start))

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        return output.logits.new_zeros(())

    def shown(self, params: Params) -> Params:
        return params

    def predictor(self, params: Params, class_counts: Sequence[float], task: Task) -> Params:
        return params

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        return {}

    def remember(self, start: Start) -> Params:
        return {}


for _name, _hook in vars(FedAvg).items():
    if callable(_hook) and not _hook.__doc__ and hasattr(Algorithm, _name):
        _hook.__doc__ = getattr(Algorithm, _name).__doc__  # help(cwfed.FedAvg.begin), and of all that override it


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg whose clients fine-tune what they receive: the paper's Figure 4c. Same rounds, other phase."""

    name: ClassVar[str] = "fedavg-ft"
    phase: ClassVar[Phase] = "trained"
    keeps_model: ClassVar[bool] = True


@dataclass(frozen=True)
class Local(FedAvg):
    """Every client alone: it starts from the common initial model and only ever trains its own."""

    name: ClassVar[str] = "local"
    phase: ClassVar[Phase] = "trained"
    keeps_model: ClassVar[bool] = True
    travels: ClassVar[str] = "nothing"
    work: ClassVar[str] = "nothing beyond training; every client keeps its model"

    def costs(self, sizes: Sizes) -> list[Cost]:
        return [Cost(self.name, 0, 0, 0, "every client keeps its own model")]

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        return OneModel(model=fresh(0))  # for newcomers

    def send(self, state: Any, client: int) -> Download:
        return Download(())

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return ()

    def aggregate(self, state: Any, up: Uploads) -> Any:
        return state

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        assert own is not None, "a client of a method that keeps models always has one"
        return own
