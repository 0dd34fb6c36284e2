"""Class capture with and without defences, on CIFAR-10 and on digits: the tables and the picture of docs/security.md.

    CWFED_DATA=... python benchmarks/class_capture.py [OUT [STUDY]]        a study by a part of its name; default: all
    python benchmarks/class_capture.py redraw         the picture from the table in docs/security-evidence.md, without any run

20 clients (on digits also 5, where every class has one holder), one of them bad; all accuracies are those of the others, on the
models the server hands out. Three seeds: another split, another attacker, other initial models. Runs that are in OUT already are
only read, unfinished ones go on.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

import cwfed
from cwfed.core.errors import RunError
from cwfed.core.events import Round
from cwfed.federation import config as configs
from cwfed.report.style import HATCHES, PARTS
from cwfed.runs.folder import RunFolder

ROOT = Path(__file__).parent.parent
COMMON = ["run.save_models=none", "run.evaluate_every=5", "adversary.clients=1", "train.lr=0.05"]
SEEDS = (0, 1, 2)
CLEAN, STRONG, ABSURD = "clean", "attack x 100", "attack x 10,000"
STRENGTHS = {CLEAN: 1.0, STRONG: 100.0, ABSURD: 10_000.0}
CAP, BOUND = ["algorithm.class_cap=0.25"], ["guard.norm_bound=2"]
MEDIAN, TRIMMED = ["algorithm.robust=median"], ["algorithm.robust=trimmed", "algorithm.trim=0.3"]
DEFENCES = {
    "none": [],
    "norm bound 2": BOUND,
    "trimmed mean 0.3 and bound": [*TRIMMED, *BOUND],
    "class cap 0.25": CAP,
    "cap and trimmed": [*CAP, *TRIMMED],
    "cap, trimmed and bound": [*CAP, *TRIMMED, *BOUND],
    "median": MEDIAN,
    "trimmed mean 0.3": TRIMMED,
    "cap and bound": [*CAP, *BOUND],
}
OF_OWNERS = ("none", "norm bound 2", "class cap 0.25", "cap and bound")
"""Of rows that are averaged over their owners."""


@dataclass(frozen=True)
class Study:
    """What is run on one kind of data."""

    settings: Sequence[str]
    columns: Sequence[str]
    defences: Sequence[str]


DIGITS = ["data.name=digits", "model.name=mlp", "train.rounds=30"]
STUDIES = {
    "digits, 5 clients": Study([*DIGITS, "data.clients=5"], (CLEAN, STRONG), tuple(DEFENCES)[:5]),
    "digits, 20 clients": Study(DIGITS, (CLEAN, STRONG, ABSURD), tuple(DEFENCES)[:8]),
    "digits, 20 clients, owners by updates": Study(
        [*DIGITS, "algorithm.name=fedavg+balanced+owners", "algorithm.owners=updates"], (CLEAN, STRONG), OF_OWNERS
    ),
    "digits, 20 clients, owners by counts": Study(
        [*DIGITS, "algorithm.name=fedavg+balanced+owners", "algorithm.owners=counts"], (CLEAN, STRONG), OF_OWNERS
    ),
    "cifar10, 20 clients": Study(
        ["data.name=cifar10", "data.samples=4000", "train.rounds=20"], (CLEAN, STRONG), tuple(DEFENCES)[:4]
    ),
}


@dataclass(frozen=True)
class Outcome:
    """How a run ended, for its honest clients."""

    accuracy: float
    """Of the models handed out, in the last round that was evaluated."""
    refused: int
    """Updates; with this attack, of clients whose training diverged on what they were sent."""
    stopped: int
    """The round in which it was given up because every update was refused; 0 where it was not."""


def carry_out(study: str, defence: str, column: str, seed: int, out: Path) -> Outcome:
    name = f"{study} {defence} {column} {seed}".replace(" ", "-").replace(",", "")
    settings = [*COMMON, *STUDIES[study].settings, *DEFENCES[defence], f"adversary.strength={STRENGTHS[column]}"]
    config = configs.load(None, [*settings, f"run.seed={seed}"])
    given_up = False
    try:
        cwfed.run(config, out / name, resume=True, data_dir=os.environ.get("CWFED_DATA"))
    except RunError as error:
        given_up = "was refused" in str(error)
        if not given_up:
            raise
    happened = [event for event in RunFolder(out / name).events() if isinstance(event, Round)]
    evaluated = [event.received.accuracy for event in happened if event.received]
    refused = sum(len(event.refused) for event in happened)
    return Outcome(evaluated[-1], refused, happened[-1].round if given_up else 0)


def mean(outcomes: Sequence[Outcome]) -> float:
    return 100 * statistics.mean(outcome.accuracy for outcome in outcomes)


def cell(outcomes: Sequence[Outcome]) -> str:
    """The mean and the standard deviation over seeds, and how many runs did not get to their end."""
    spread = 100 * statistics.stdev(outcome.accuracy for outcome in outcomes)
    given_up = sum(outcome.stopped > 0 for outcome in outcomes)
    return f"{mean(outcomes):.1f} ± {spread:.1f}" + (f", {given_up} given up" if given_up else "")


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
    """The means, by column and defence."""
    figure, axes = plt.subplots(figsize=(8, 3.6), constrained_layout=True)
    defences = list(next(iter(found.values())))
    width = 0.8 / len(found)
    for i, (column, outcomes) in enumerate(found.items()):
        at = [x + (i - (len(found) - 1) / 2) * width for x in range(len(defences))]
        heights = [outcomes[defence] for defence in defences]
        bars = axes.bar(at, heights, width, label=column, color=PARTS[i], hatch=HATCHES[i], edgecolor="white")
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(defences)), [name.replace(" and ", "\nand ") for name in defences], fontsize=8)
    axes.set_ylabel("accuracy of honest clients, %")
    axes.legend(fontsize=8, ncols=len(found), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def redraw() -> None:
    """The picture from the page's table of one seed."""
    page = (ROOT / "docs" / "security-evidence.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+)% \| ([\d.]+)%[^|]*\|$", page, re.M)
    means = {column: {row[0]: float(row[i]) for row in rows} for i, column in ((1, CLEAN), (2, STRONG))}
    draw(means, ROOT / "docs" / "class-capture.png")


def main(out: str = "runs/class-capture", chosen: str = "") -> None:
    for name, study in STUDIES.items():
        if chosen not in name:
            continue
        found: dict[str, dict[str, list[Outcome]]] = {column: {} for column in study.columns}
        print(f"\n| {name} |", " | ".join(found), "|")
        print("|---|" + "---|" * len(found))
        for defence in study.defences:
            for column in study.columns:
                found[column][defence] = [carry_out(name, defence, column, seed, Path(out)) for seed in SEEDS]
            print(f"| {defence} |", " | ".join(cell(found[column][defence]) for column in found), "|", flush=True)
        if name.startswith("cifar10"):
            means = {column: {name: mean(of) for name, of in by.items()} for column, by in found.items()}
            draw(means, ROOT / "docs" / "class-capture.png")


if __name__ == "__main__":
    redraw() if sys.argv[1:] == ["redraw"] else main(*sys.argv[1:])
