"""Seconds a round of every engine by model, on digits or on images of 32 x 32: where `auto` draws its lines (docs/performance.md).

python benchmarks/engines.py [rounds]
"""

from __future__ import annotations

import statistics
import sys

from cwfed.benchmark import workloads
from cwfed.federation import config as configs
from cwfed.federation.simulation import Simulation

ENGINES = ("loop", "threads", "processes", "vmap")
MODELS = (
    ("mlp", 128, "digits"),
    ("mlp", 512, "digits"),
    ("mlp", 1024, "digits"),
    ("mlp", 2600, "digits"),
    ("cnn", 512, "digits"),
    ("cnn", 512, f"{workloads.HERE}:images32"),
)


def main(rounds: int = 12) -> None:
    workloads.SAMPLES = 2000
    for model, hidden, data in MODELS:
        engines = ENGINES if data == "digits" else ENGINES[:-1]  # vmap takes minutes there
        settings = [
            f"model.name={model}",
            f"model.options.hidden={hidden}",
            f"data.name={data}",
            "run.compile=never",
            f"train.rounds={rounds}",
        ]
        running = {}
        for name in engines:
            simulation = Simulation(configs.load(None, [*settings, f"run.engine={name}"]))
            running[name] = simulation.rounds(simulation.start())
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, events in running.items():  # in turn, for machines are noisy
                seconds[name].append(sum(next(events)[1].seconds.values()))
        picked = Simulation(configs.load(None, settings)).engine
        medians = "  ".join(f"{name} {statistics.median(found[2:]):.3f} s" for name, found in seconds.items())
        print(
            f"{model} {hidden}, {data.rpartition(':')[2]}: {medians}  auto: {picked.name}, {picked.why}", flush=True
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
