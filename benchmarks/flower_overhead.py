"""What Flower costs a round, against the simulator in this process: the same experiment, the same bits.

    python benchmarks/flower_overhead.py [20 100]

The model has 582,000 numbers and hardly anything to learn from, so that a round is mostly messages. The simulator runs its `loop` engine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import cwfed
from cwfed.core.events import Event, Round
from cwfed.federation import config as configs


def seconds(clients: int, backend: str) -> float:
    """The median round by the clock on the wall, the first one left out: there Ray's actors load their data."""
    settings = ["model.name=mlp", "model.options.hidden=7760", "train.rounds=6", "train.lr=0.01", "run.engine=loop"]
    config = configs.load(None, [*settings, f"data.clients={clients}", "data.partition=iid", "run.save_models=none"])
    ends: list[float] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Round):
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        cwfed.run(config, Path(folder) / "run", backend=backend, on_event=on_event)
    return statistics.median(end - before for before, end in pairwise(ends))


def main() -> None:
    print("| clients | simulator, s | on Flower and Ray, s | ratio | more a client, ms |")
    print("|---:|---:|---:|---:|---:|")
    for clients in map(int, sys.argv[1:] or ["20", "100"]):
        ours, theirs = seconds(clients, "simulator"), seconds(clients, "flower")
        more = 1000 * (theirs - ours) / clients
        print(f"| {clients} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.1f} x | {more:.0f} |", flush=True)


if __name__ == "__main__":
    main()
