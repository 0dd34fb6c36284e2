"""What the guard costs, as a share of a round: checking 20 good updates, and the same where one of them is refused.

    [CWFED_DATA=...] python benchmarks/guard.py [ROUNDS]

Counted in CPU seconds, medians over rounds: on a busy machine a long step waits more often than a short one. (Where clients train on n cores, the
check on one of them is n times that share of the time on the clock.)
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence

from cwfed.federation import config as configs
from cwfed.federation.guard import Guard
from cwfed.federation.simulation import Simulation

WORKLOADS = {
    "MLP, digits": ["model.name=mlp"],
    "MLP, digits, without evaluation": ["model.name=mlp", "run.evaluate_every=1000"],
    "CNN, digits": ["model.name=cnn"],
}
CIFAR10 = {"CNN, CIFAR-10, 4,000 samples": ["data.name=cifar10", "data.samples=4000", "model.name=cnn"]}


class Timed(Guard):
    """Adds up the CPU seconds of checking."""

    checking = 0.0

    def problems(self, *given):
        began = time.process_time()
        found = super().problems(*given)
        Timed.checking += time.process_time() - began
        return found


def share(settings: Sequence[str], rounds: int) -> tuple[float, float]:
    """CPU seconds of a round, and the share of checking; without the first rounds, and the last, which has a portrait."""
    simulation = Simulation(configs.load(None, [f"train.rounds={rounds}", *settings]), os.environ.get("CWFED_DATA"))
    simulation.guard = Timed(**vars(simulation.guard))
    seconds, shares = [], []
    began, checked = time.process_time(), Timed.checking
    for _ in simulation.rounds(simulation.start()):
        now = time.process_time()
        seconds.append(now - began)
        shares.append((Timed.checking - checked) / (now - began))
        began, checked = now, Timed.checking
    simulation.close()
    middle = slice(rounds // 3, -1)
    return statistics.median(seconds[middle]), statistics.median(shares[middle])


def main(rounds: str = "12") -> None:
    refusing = ["adversary.clients=1", "adversary.attack=not-a-number"]
    for name, settings in (WORKLOADS | (CIFAR10 if os.environ.get("CWFED_DATA") else {})).items():
        seconds, good = share(settings, int(rounds))
        _, refused = share([*settings, *refusing], int(rounds))
        print(f"| {name} | {1000 * seconds:.3g} ms | {good:.2%} | {refused:.2%} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
