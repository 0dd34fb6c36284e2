"""Seconds a round and memory by clients, participants, classes, size of the model and workers, with the lines that fit them.

    python benchmarks/scale.py [clients participants classes numbers workers]

Every point is measured in a process of its own. Writes docs/data/scale.json and docs/scale.png, and prints the tables of docs/performance.md.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from cwfed.data import Dataset
from cwfed.report import drawing

DOCS = Path(__file__).resolve().parents[1] / "docs"
EACH = 16
"""Samples a client."""
ROUNDS = 12


class Curve(NamedTuple):
    """What grows, and what stays as it is."""

    title: str
    points: tuple[int, ...]
    settings: tuple[str, ...]
    clients: int = 100
    classes: int = 10


MLP = ("model.name=mlp", "data.partition=iid", "run.evaluate_clients=20", "data.validation=0")
CURVES = {
    "clients": Curve("clients, 100 of them take part", (100, 1000, 10_000, 100_000), (*MLP, "algorithm.layers=all")),
    "participants": Curve("participants of 10,000 clients", (100, 200, 400, 800), (*MLP, "algorithm.layers=all"), 10_000),
    "classes": Curve("classes, 100 clients, all layers class-wise", (10, 100, 1000), (*MLP, "algorithm.layers=all")),
    "numbers": Curve("units of the MLP's layer, 100 clients", (128, 512, 2048, 8192), (*MLP, "algorithm.layers=all")),
    "workers": Curve("worker threads, the paper's CNN, 20 clients", (1, 2, 4), ("model.name=cnn", "run.engine=threads"), 20),
}  # fmt: skip


def _samples() -> tuple[int, int, int]:
    found = json.loads(os.environ["CWFED_SCALE"])
    return found["samples"], found["classes"], found["side"]


@cache
def data() -> Dataset:
    """Vectors of 64 numbers, or images of 32 x 32, that nobody can learn anything from."""
    samples, classes, side = _samples()
    rng = np.random.default_rng(0)
    shape = (samples, side, side, 3) if side else (samples, 64)
    inputs = rng.normal(size=shape).astype(np.float32)
    return Dataset("scale", inputs, np.arange(samples) % classes, tuple(map(str, range(classes))))


def measure(name: str, point: int) -> dict[str, float]:
    """One point, in this process."""
    from cwfed.federation import config as configs
    from cwfed.federation.simulation import Simulation

    curve = CURVES[name]
    clients = point if name == "clients" else curve.clients
    classes = point if name == "classes" else curve.classes
    is_cnn = name == "workers"
    samples = 3000 if is_cnn else max(EACH * clients, 2 * classes)
    os.environ["CWFED_SCALE"] = json.dumps({"samples": samples, "classes": classes, "side": 32 if is_cnn else 0})
    settings = [*curve.settings, f"data.name={__name__}:data", f"data.clients={clients}", f"train.rounds={ROUNDS}"]
    if not is_cnn:
        settings.append(f"train.participation={point if name == 'participants' else 100}")
    if name == "numbers":
        settings.append(f"model.options.hidden={point}")
    if name == "workers":
        settings.append(f"run.workers={point}")
    simulation = Simulation(configs.load(None, settings))
    numbers = sum(w.numel() for w in simulation.initial.values())
    seconds = [sum(event.seconds.values()) for _, event in simulation.rounds(simulation.start())]
    simulation.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    inputs = samples * (3 * 32 * 32 if is_cnn else 64) * 4
    return {
        "point": point,
        "seconds": statistics.median(seconds[2:]),
        "peak": peak,
        "data": inputs,
        "numbers": numbers,
    }


def line(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """The start and the slope of the line with the least squared relative error: a point counts as much as any other."""
    weights = 1 / np.asarray(ys)
    columns = np.stack([np.ones(len(xs)), np.asarray(xs)], axis=1)
    start, slope = np.linalg.lstsq(columns * weights[:, None], np.ones(len(xs)), rcond=None)[0]
    return float(start), float(slope)


def draw(found: dict[str, list[dict[str, float]]]) -> Figure:
    """A column a curve: seconds above, memory below."""
    figure = Figure(figsize=(2.6 * len(found), 4.6), layout="constrained")
    grid = figure.subplots(2, len(found), squeeze=False, sharex="col")
    for column, (name, points) in enumerate(found.items()):
        xs = [p["point"] for p in points]
        for row, (key, label) in enumerate((("seconds", "seconds a round"), ("peak", "peak memory"))):
            axes = grid[row][column]
            axes.plot(xs, [p[key] for p in points], "o", color="#0072B2")
            if name != "workers":
                start, slope = line(xs, [p[key] for p in points])
                dense = np.geomspace(xs[0], xs[-1])
                axes.plot(dense, start + slope * dense, "-", color="#5F6368", linewidth=1)
            axes.set_xscale("log", base=2 if name == "workers" else 10)
            axes.set_xticks(xs, [f"{x:,}" for x in xs], fontsize=8)
            axes.minorticks_off()
            axes.set_ylim(0, 1.08 * max(p[key] for p in points))
            if row:
                axes.yaxis.set_major_formatter(drawing.BYTES)
                axes.set_xlabel(CURVES[name].title.replace(", ", ",\n", 1), fontsize=8)
            if not column:
                axes.set_ylabel(label)
    figure.suptitle("Points: measured, one process each. Lines: start + slope × x, fitted to them.", fontsize=9)
    return figure


def main(names: list[str]) -> None:
    path = DOCS / "data" / "scale.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in names or list(CURVES):
        found[name] = []
        print(f"\n| {CURVES[name].title} | seconds a round | peak memory | of it data |\n|---:|---:|---:|---:|")
        for point in CURVES[name].points:
            command = [sys.executable, __file__, "--point", name, str(point)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            one = json.loads(done.stdout.splitlines()[-1])
            found[name].append(one)
            print(
                f"| {point:,} | {one['seconds']:.3f} | {one['peak'] / 1e6:.0f} MB | {one['data'] / 1e6:.0f} MB |",
                flush=True,
            )
        if name != "workers":
            xs = [p["point"] for p in found[name]]
            (a, b), (c, d) = (line(xs, [p[key] for p in found[name]]) for key in ("seconds", "peak"))
            print(f"\nfits: {a:.4f} s + {b * 1e6:.3g} µs × x; {c / 1e6:.0f} MB + {d / 1e3:.3g} kB × x", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")  # after every curve: the next may take long
    drawing.save(draw(found), DOCS / "scale")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--point"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main(sys.argv[1:])
