"""Class capture with and without defences, on CIFAR-10 and on digits: the tables and the picture of docs/security.md.

    CWFED_DATA=... python benchmarks/class_capture.py [OUT]

20 clients, one of them bad; all accuracies are those of the 19 others, on the models the server hands out. Runs that are
in OUT already are only read, unfinished ones go on.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

import cwfed
from cwfed import config as configs
from cwfed.errors import RunError
from cwfed.events import Round
from cwfed.folder import RunFolder

ROOT = Path(__file__).parent.parent
COMMON = ["run.save_models=none", "run.evaluate_every=5", "adversary.clients=1", "train.lr=0.05"]
DATA = {
    "cifar10": ["data.name=cifar10", "data.samples=4000", "train.rounds=20"],
    "digits": ["data.name=digits", "model.name=mlp", "train.rounds=30"],
}
CLEAN, STRONG, ABSURD = "clean", "attack x 100", "attack x 10,000"
STRENGTHS = {CLEAN: 1.0, STRONG: 100.0, ABSURD: 10_000.0}
COLUMNS = {"cifar10": (CLEAN, STRONG), "digits": (CLEAN, STRONG, ABSURD)}
CAP, BOUND = ["algorithm.class_cap=0.25"], ["guard.norm_bound=2"]
MEDIAN, TRIMMED = ["algorithm.robust=median"], ["algorithm.robust=trimmed", "algorithm.trim=0.3"]
DEFENCES = {
    "none": [],
    "class cap 0.25": CAP,
    "norm bound 2": BOUND,
    "median": MEDIAN,
    "trimmed mean 0.3": TRIMMED,
    "cap and trimmed": [*CAP, *TRIMMED],
    "cap, trimmed and bound": [*CAP, *TRIMMED, *BOUND],
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

    def __str__(self) -> str:
        words = [f"{self.accuracy:.1%}"]
        words += [f"{self.refused} refused"] if self.refused else []
        words += [f"given up in round {self.stopped}"] if self.stopped else []
        return ", ".join(words)


def carry_out(data: str, defence: str, column: str, out: Path) -> Outcome:
    name = f"{data} {defence} {column}".replace(" ", "-").replace(",", "")
    settings = [*COMMON, *DATA[data], *DEFENCES[defence], f"adversary.strength={STRENGTHS[column]}"]
    config = configs.load(None, settings)
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


def draw(found: dict[str, dict[str, Outcome]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 3.6), constrained_layout=True)
    width = 0.8 / len(found)
    for i, (column, outcomes) in enumerate(found.items()):
        at = [x + (i - (len(found) - 1) / 2) * width for x in range(len(DEFENCES))]
        heights = [100 * outcomes[defence].accuracy for defence in DEFENCES]
        bars = axes.bar(at, heights, width, label=column, color=("#4c72b0", "#dd8452", "#c44e52")[i])
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(DEFENCES)), [name.replace(" and ", "\nand ") for name in DEFENCES], fontsize=8)
    axes.set_ylabel("accuracy of honest clients, %")
    axes.legend(fontsize=8, ncols=len(found), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main(out: str = "runs/class-capture") -> None:
    for data, columns in COLUMNS.items():
        found = {c: {defence: carry_out(data, defence, c, Path(out)) for defence in DEFENCES} for c in columns}
        print(f"\n| {data} |", " | ".join(found), "|")
        print("|---|" + "---|" * len(found))
        for defence in DEFENCES:
            print(f"| {defence} |", " | ".join(str(outcomes[defence]) for outcomes in found.values()), "|")
        if data == "cifar10":
            draw(found, ROOT / "docs" / "class-capture.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
