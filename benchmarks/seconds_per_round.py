"""Seconds per round by step, on synthetic data of the paper's CIFAR-10 shape.

    python benchmarks/seconds_per_round.py [--rounds 3] [--samples 12000] [--json]

Machines differ and are noisy: the engines run in turn, round by round, medians are taken, and what counts is
the ratio to the plain loop within one run.
"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np

from cwfed import config as configs
from cwfed.manifest import cpu_name, instruction_set
from cwfed.simulation import Simulation

SAMPLES = 12_000
STEPS = ("send", "train", "evaluate", "aggregate", "report")


def synthetic():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8), np.arange(SAMPLES) % 10


def measure(engines: list[str], rounds: int, settings: list[str]) -> dict[str, dict[str, float]]:
    base = [f"data.name={__name__}:synthetic", f"train.rounds={rounds + 1}", *settings]
    simulations = {e: Simulation(configs.load(None, [*base, f"run.engine={e}"])) for e in engines}
    running = {e: s.rounds(s.start()) for e, s in simulations.items()}
    seconds: dict[str, list[dict[str, float]]] = {e: [] for e in engines}
    for number in range(rounds + 1):
        for engine, events in running.items():
            _, event = next(events)
            if number:  # the first round warms up
                seconds[engine].append(event.seconds)
    for simulation in simulations.values():
        simulation.close()
    return {e: {step: statistics.median(s[step] for s in found) for step in STEPS} for e, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    globals()["SAMPLES"] = options.samples

    found = measure(["loop", "threads"], options.rounds, options.set)
    totals = {engine: sum(steps.values()) for engine, steps in found.items()}
    if options.json:
        print(json.dumps({"cpu": cpu_name(), "instruction_set": instruction_set(), "seconds": found}))
        return
    print(
        f"{cpu_name()} ({instruction_set()}), {options.samples:,} samples of 32 x 32 x 3, 20 clients, cnn, batch 10"
    )
    print(f"{'engine':10}" + "".join(f"{step:>11}" for step in STEPS) + f"{'round':>11}{'to loop':>11}")
    for engine, steps in found.items():
        row = "".join(f"{steps[step]:11.3f}" for step in STEPS)
        print(f"{engine:10}{row}{totals[engine]:11.3f}{totals['loop'] / totals[engine]:10.2f}x")


if __name__ == "__main__":
    main()
