"""What the guard costs, as a share of a round: checking 20 good updates, and a round in which one is refused.

    [CWFED_DATA=...] python benchmarks/guard.py [ROUNDS]

Every round says in its event how long each step took; this prints the median share of the step `guard`.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence

from cwfed import config as configs
from cwfed.simulation import Simulation

CIFAR10 = ["data.name=cifar10", "data.samples=4000"]
WORKLOADS = {
    "MLP, digits": ["model.name=mlp"],
    "MLP, digits, without evaluation": ["model.name=mlp", "run.evaluate_every=1000"],
    "CNN, digits": ["model.name=cnn"],
    **({"CNN, CIFAR-10, 4,000 samples": [*CIFAR10, "model.name=cnn"]} if os.environ.get("CWFED_DATA") else {}),
}


def share(settings: Sequence[str], rounds: int) -> tuple[float, float]:
    """Seconds of a round, and the guard's share of it; the first rounds are left out."""
    simulation = Simulation(configs.load(None, [f"train.rounds={rounds}", *settings]), os.environ.get("CWFED_DATA"))
    steps = [event.seconds for _, event in simulation.rounds(simulation.start())][rounds // 5 : -1]
    simulation.close()
    seconds = [sum(step.values()) for step in steps]
    shares = [step["guard"] / whole for step, whole in zip(steps, seconds, strict=True)]
    return statistics.median(seconds), statistics.median(shares)


def main(rounds: str = "10") -> None:
    refusing = ["adversary.clients=1", "adversary.attack=not-a-number"]
    for name, settings in WORKLOADS.items():
        seconds, good = share(settings, int(rounds))
        _, refused = share([*settings, *refusing], int(rounds))
        print(f"| {name} | {1000 * seconds:.0f} ms | {good:.2%} | {refused:.2%} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
