"""An own algorithm in one file: a frozen dataclass that overrides what its paper changes.

This one is FedAvg with server momentum (FedAvgM, Hsu et al., 2019):

    v <- beta v + (w - average),   w <- w - v        beta = 0 is FedAvg

The same from the command line, in this folder: cwfed compare -a fedavg,own_algorithm:FedAvgM:beta=0.7
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import cwfed
from cwfed import mixing
from cwfed.types import Params, Task, Uploads


@dataclass(frozen=True)
class FedAvgM(cwfed.FedAvg):
    """FedAvg with momentum on the server."""

    beta: float = 0.9
    """Momentum; 0 is FedAvg."""

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        model = fresh(0)
        return {"model": model, "velocity": {name: torch.zeros_like(w) for name, w in model.items()}}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        average = mixing.average(up.models, mixing.sample_weights(up.counts))
        velocity = {n: self.beta * v + (state["model"][n] - average[n]) for n, v in state["velocity"].items()}
        return {"model": {n: w - velocity[n] for n, w in state["model"].items()}, "velocity": velocity}


def main() -> None:
    for beta in (0.0, 0.7):
        settings = [
            "algorithm.name=own_algorithm:FedAvgM",
            f"algorithm.beta={beta}",
            "train.rounds=20",
            "train.lr=0.05",
        ]
        summary = cwfed.run(cwfed.load_config(settings=settings))
        print(f"beta = {beta}: {summary['reported']['accuracy']:.1%}")


if __name__ == "__main__":
    main()
