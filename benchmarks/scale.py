"""10,000 clients: seconds a round and memory by the number of participants (docs/performance.md).

python benchmarks/scale.py
"""

from __future__ import annotations

import resource
import statistics
from functools import cache

import numpy as np

from cwfed.data import Dataset
from cwfed.federation import config as configs
from cwfed.federation.simulation import Simulation


@cache
def many() -> Dataset:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(400_000, 64)).astype(np.float32)
    return Dataset("many", inputs, rng.integers(10, size=400_000), tuple("0123456789"))


def main(rounds: int = 12) -> None:
    settings = ["data.clients=10000", "data.partition=iid", "model.name=mlp", "algorithm.layers=all"]
    settings += [f"data.name={__name__}:many", "run.evaluate_clients=100", f"train.rounds={rounds}"]
    for participants in (100, 200, 400, 800):
        simulation = Simulation(configs.load(None, [*settings, f"train.participation={participants}"]))
        seconds = [sum(event.seconds.values()) for _, event in simulation.rounds(simulation.start())]
        simulation.close()
        median = statistics.median(seconds[2:])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        each = median / participants * 1e3
        print(f"{participants}: {median:.3f} s a round, {each:.2f} ms a participant, peak {peak:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
