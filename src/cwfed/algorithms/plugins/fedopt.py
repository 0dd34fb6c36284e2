"""FedOpt. Reddi et al., Adaptive Federated Optimization, 2021.

The clients' mean update is taken for a gradient, and the server makes a step of an optimiser with it; with momentum it is FedAvgM (Hsu et al., 2019).

    D = w~ - w                                      w: what was sent out; w~: what the method beneath makes of the uploads
    momentum    m <- b1 m + D                       w <- w + lr m
    adam        m <- b1 m + (1 - b1) D              v <- b2 v + (1 - b2) D^2                    w <- w + lr m / (sqrt(v) + tau)
    yogi        m as in adam                        v <- v - (1 - b2) D^2 sign(v - D^2)         the same step
    adagrad     m as in adam                        v <- v + D^2                                the same step

D stands where a gradient would. m starts at 0, v at tau^2. No bias correction, as in the paper.

Limiting cases: momentum with server_momentum = 0 and server_lr = 1 is the method beneath (but for rounding). Clients that send back what they received: momentum
alone moves the model.

Only parameters are stepped. Running statistics of norm layers are averaged as before; public versions step them too, and a variance may become negative.

The server is sent what it was sent before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Params, Sizes, Task, Uploads


@dataclass(frozen=True)
class FedOpt(FedAvg):
    """The server takes the mean of the clients' updates as a gradient: momentum, Adam, Yogi or Adagrad."""

    plugin: ClassVar[str] = "fedopt"
    work: ClassVar[str] = "server: one step of an optimiser; keeps one (momentum) or two more models"
    not_over: ClassVar[Mapping[str, str]] = {
        "aggregate": "it makes a step from FedAvg's one model to the next, and this one aggregates in a way of its own",
        "send": "it makes a step from FedAvg's one model to the next, and this one hands out something else",
    }

    server: Literal["momentum", "adam", "yogi", "adagrad"] = "momentum"
    """The server's optimiser."""
    server_lr: float = 1.0
    """Its learning rate; adaptive ones want far less than 1, such as 0.01."""
    server_momentum: float = 0.9
    """b1, how much of the last step's direction stays."""
    server_decay: float = 0.99
    """b2, how much of the second moment stays (adam, yogi)."""
    tau: float = 1e-3
    """How far the step adapts: smaller is further (adam, yogi, adagrad)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_lr <= 0 or self.tau <= 0:
            raise ConfigError(f"fedopt: server_lr and tau must be above 0, they are {self.server_lr} and {self.tau}")
        if not (0 <= self.server_momentum < 1 and 0 <= self.server_decay < 1):
            raise ConfigError(
                "fedopt: server_momentum and server_decay must be at least 0 and below 1, they are "
                f"{self.server_momentum} and {self.server_decay}"
            )

    def costs(self, sizes: Sizes) -> list[Cost]:
        more = (1 if self.server == "momentum" else 2) * sizes.travelling
        return [replace(row, server=row.server + more) for row in super().costs(sizes)]

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        state = super().init(fresh, task)
        stepped = {name: w for name, w in state["model"].items() if name in task.parameters}
        moments = {"first": {name: torch.zeros_like(w) for name, w in stepped.items()}}
        if self.server != "momentum":
            moments["second"] = {name: torch.full_like(w, self.tau**2) for name, w in stepped.items()}
        return state | {"moments": moments}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        after, before = super().aggregate(state, up), state["model"]
        first, second = state["moments"]["first"], state["moments"].get("second", {})
        change = {name: after["model"][name] - before[name] for name in first}
        new = 1.0 if self.server == "momentum" else 1 - self.server_momentum
        first = {name: self.server_momentum * m + new * change[name] for name, m in first.items()}
        second = {name: self._second(v, change[name].square()) for name, v in second.items()}
        lengths = {name: v.sqrt() + self.tau for name, v in second.items()}
        stepped = {name: before[name] + self.server_lr * m / lengths.get(name, 1.0) for name, m in first.items()}
        moments = {"first": first} | ({"second": second} if second else {})
        return after | {"model": after["model"] | stepped, "moments": moments}

    def _second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        if self.server == "adagrad":
            return v + square
        if self.server == "yogi":
            return v - (1 - self.server_decay) * square * torch.sign(v - square)
        return self.server_decay * v + (1 - self.server_decay) * square
