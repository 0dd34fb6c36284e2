"""cwFedAvg's mixing by a programme in place of a = p~ Q^T (the idea of FedPAC's classifier collaboration, on p~).

    a_i = argmin over the simplex of  ||p~_i - sum_c a_c p~_c||^2 + rho sum_c a_c^2 / p_c        c: the participants, p_c their shares of the samples
    w_i = sum_c a_ic w_c                                                                         of the class-wise layers

p~ Q^T mixes clients that share one class and not the rest; the programme looks for those that together have the client's distribution, and rho for how many.

Limiting cases: rho -> infinity is a = p, FedAvg; rho -> 0 takes clients of the same distribution only. (p_c in place of n_c: rho then does not depend on how much data there are.)

The server reads p~ off the uploads as in cwFedAvg, and is sent nothing more. It keeps the participants' class-wise layers, also where classes are fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cwfed.algorithms.cwfedavg import CwFedAvg
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Params, Sizes, Task, Uploads


@dataclass(frozen=True)
class Programme(CwFedAvg):
    """Class-wise layers are mixed by a quadratic programme on the class distributions."""

    plugin: ClassVar[str] = "programme"
    work: ClassVar[str] = (
        "server: a quadratic programme of as many numbers as participants per client, keeps their class-wise layers"
    )

    rho: float = 0.1
    """Weight of the spread over many clients: 0 takes the nearest mixture, a large one is FedAvg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rho < 0:
            raise ConfigError(f"programme: rho must not be negative, it is {self.rho}")
        if self.robust != "mean":
            raise ConfigError("programme mixes uploads, not class models: robust must be mean")

    def costs(self, sizes: Sizes) -> list[Cost]:
        """One row, for class-wise output layers."""
        lean, *_ = super().costs(sizes)
        copies = sizes.travelling + (sizes.participants - 1) * sizes.head
        numbers = (sizes.clients + sizes.participants) * sizes.classes
        note = "the participants' output layers"
        return [replace(lean, method=self.name, server=copies + numbers, note=note)]

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        state = super().init(fresh, task)
        one = torch.ones(1, dtype=torch.float64)
        return state | {"sources": state["prior"][:1], "shares": one}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        after: Any = super().aggregate(state, up)
        shares, sources = mixing.sample_weights(up.counts), after["prior"][list(up.clients)]
        return after | {
            "basis": {name: up.models[name] for name in state["basis"]},
            "recipe": mixing.class_weights(shares, sources).T,
            "sources": sources,
            "shares": shares,
        }

    def weights(self, state: Any, distribution: Tensor) -> Tensor:
        return self.mixture(distribution, state["sources"], state["shares"])

    def mixture(self, distribution: Tensor, sources: Tensor, shares: Tensor) -> Tensor:
        """a: as sum_c a_c = 1, the programme is the length of sum_c a_c (p~_c - p~_i), and one more square of a for the spread."""
        apart = sources - distribution
        weights = mixing.nearest_to_origin(apart @ apart.T + torch.diag(self.rho / shares))
        return mixing.capped(weights[:, None], self.class_cap)[:, 0]
