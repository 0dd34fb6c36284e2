"""Output rows averaged over the owners of their class.

    body    sum_c p_c phi_c                                            FedAvg
    R_k     sum_c q_ck W_ck                                            row k of the one shared output layer, weight and bias
    q_ck    n_ck / sum_c n_ck                                          owners = "counts": clients send their label counts
            ||W_ck - R_k|| / sum_c ||W_ck - R_k||                      owners = "updates": read off the uploads, nothing is sent; R_k: what was sent out

In FedAvg's mean a row is moved by those who have its class and held back by all others; over its owners it moves as far as they say. A class that nobody of the round owns keeps its row (but for momentum of earlier rounds, with `fedopt`).

Limiting cases: clients of equal distributions are FedAvg (but for rounding); a class with one owner has its owner's row, bit for bit.

The server learns the label counts of every participant and round, or an estimate of them from the uploads that it could make of FedAvg's too (docs/privacy.md). q is a claim of the client: who sends a
long row, or claims a class, takes it. `class_cap` bounds every q_ck, `guard.norm_bound` the length (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, ExtraSpec, Params, Sizes, Start, Task, Uploads


@dataclass(frozen=True)
class Owners(FedAvg):
    """Each row of the shared output layer is averaged over the clients that have its class."""

    plugin: ClassVar[str] = "owners"
    travels: ClassVar[str] = 'with owners = "counts" K label counts up'
    work: ClassVar[str] = "server: one more weighted mean, of the output layer"
    not_over: ClassVar[Mapping[str, str]] = {
        "cwfedavg": "both are ways to average output layers class by class",
        "aggregate": "it averages the rows of FedAvg's one output layer, and this one aggregates in a way of its own",
        "send": "it averages the rows of FedAvg's one output layer, and this one hands out something else",
    }

    owners: Literal["counts", "updates"] = "counts"
    """Who owns a class: by label counts that clients send, or by the lengths of their row's updates."""
    class_cap: float = 1.0
    """Most that one participant may have of a row (its q_ck); 1 is no cap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.class_cap <= 1:
            raise ConfigError(f"owners: class_cap must be above 0 and at most 1, it is {self.class_cap}")

    def costs(self, sizes: Sizes) -> list[Cost]:
        counts = sizes.participants * sizes.classes if self.owners == "counts" else 0
        return [replace(row, up=row.up + counts) for row in super().costs(sizes)]

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        state = super().init(fresh, task)
        if task.output_weight not in state["model"]:
            raise ConfigError(f"owners averages uploaded output layers, and {self.name} uploads none")
        return state | {"output": task.output}

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        counts = {"class_counts": ExtraSpec(torch.float32, (task.classes,), 0, counts_samples=True)}
        return super().extras_spec(model, task) | (counts if self.owners == "counts" else {})

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        counts = {"class_counts": data.class_counts} if self.owners == "counts" else {}
        return super().finish(params, start, data) | counts

    def aggregate(self, state: Any, up: Uploads) -> Any:
        after, before = super().aggregate(state, up), state["model"]
        shares = mixing.capped(mixing.column_shares(self.owned(state, up)), self.class_cap)
        rows = {}
        for name in (f"{state['output']}.weight", f"{state['output']}.bias"):
            if name in up.models:
                sent = up.models[name].reshape(*shares.shape, -1)  # a bias is one number a row
                mean = mixing.class_average(sent, shares, before[name].reshape(len(before[name]), -1))
                rows[name] = mean.view_as(before[name])
        return after | {"model": after["model"] | rows, "output": state["output"]}

    def owned(self, state: Any, up: Uploads) -> Tensor:
        """How much of each class the participants have (participants x K), up to a factor per class."""
        if self.owners == "counts":
            return up.extras["class_counts"].double()
        weight = f"{state['output']}.weight"
        lengths: Tensor = torch.linalg.vector_norm(
            up.models[weight].double() - state["model"][weight].double(), dim=2
        )
        return lengths
