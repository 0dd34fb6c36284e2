"""Seconds a round of every engine on digits, by model: where `auto` draws its lines (docs/performance.md).

python benchmarks/engines.py
"""

from __future__ import annotations

import statistics

from cwfed.federation import config as configs
from cwfed.federation.simulation import Simulation

ENGINES = ("loop", "threads", "vmap")
MODELS = (("mlp", 128), ("mlp", 512), ("mlp", 1024), ("mlp", 2600), ("cnn", 512))


def main(rounds: int = 12) -> None:
    for model, hidden in MODELS:
        settings = [
            f"model.name={model}",
            f"model.options.hidden={hidden}",
            "run.compile=never",
            f"train.rounds={rounds}",
        ]
        running = {}
        for name in ENGINES:
            simulation = Simulation(configs.load(None, [*settings, f"run.engine={name}"]))
            running[name] = simulation.rounds(simulation.start())
        seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
        for _ in range(rounds):
            for name, events in running.items():  # in turn, for machines are noisy
                seconds[name].append(sum(next(events)[1].seconds.values()))
        picked = Simulation(configs.load(None, settings)).engine
        medians = "  ".join(f"{name} {statistics.median(found[2:]):.3f} s" for name, found in seconds.items())
        print(f"{model} {hidden}: {medians}  auto: {picked.name}, {picked.why}", flush=True)


if __name__ == "__main__":
    main()
