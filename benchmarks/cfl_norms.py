"""How long the clients' updates are, which is what CFL's thresholds eps1 and eps2 are compared with.

    python benchmarks/cfl_norms.py [SETTING] [SCALE] [ROUNDS]

prints (norm of the mean update, largest norm of an update) for each round, in a federation that is never split.
"""

from __future__ import annotations

import os
import sys

import torch

from cwfed.algorithms.cfl import CFL
from cwfed.federation.config import with_settings
from cwfed.federation.simulation import Simulation
from cwfed.reproduce.spec import Row, Setup
from cwfed.runs.compare import with_algorithm


class Watched(CFL):
    """CFL that reports instead of splitting."""

    def split(self, gram: torch.Tensor) -> None:
        norms = gram.diagonal().clamp_min(0).sqrt()
        print(f"({gram.mean().clamp_min(0).sqrt():.2f}, {norms.max():.2f})", flush=True)


def main(setting: str = "cifar10-pathological", scale: str = "small", rounds: str = "2") -> None:
    setup = Setup(setting, scale)
    entry = setup.entry(Row(label="", algorithm={"name": "cfl"}))
    settings = [f"train.rounds={rounds}", "run.evaluate_every=1000"]
    simulation = Simulation(
        with_settings(with_algorithm(setup.config, entry, 0), settings), os.environ.get("CWFED_DATA")
    )
    simulation.algorithm = Watched(warm_up=0)
    for _ in simulation.rounds(simulation.start()):
        pass
    simulation.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
