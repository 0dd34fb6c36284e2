"""The tables of docs/comparison.md as bars, so that the pictures show what the tables say.

    python benchmarks/comparison_bars.py

draws docs/compare-cifar10.png and docs/compare-cifar100.png. Rows with a dagger are left out: they are not current.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from cwfed.report.style import HATCHES, PARTS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES = {
    "CIFAR-10, pathological, 40 rounds": "compare-cifar10",
    "CIFAR-100, Dirichlet(0.1), 25 rounds": "compare-cifar100",
}
"""By the first heading of a table."""


class Bar(NamedTuple):
    """One method: received and trained accuracy in per cent, and which of them is reported."""

    label: str
    received: float
    trained: float
    reports_trained: bool


def bars(page: str, heading: str) -> list[Bar]:
    """The rows of the table with this heading that are current."""
    lines = page.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        label, received, trained = (cell.strip() for cell in line.split("|")[1:4])
        if "†" not in label:
            numbers = (float(cell.rstrip("*")) for cell in (received, trained))
            found.append(Bar(label.removesuffix(" ‡").strip("*"), *numbers, trained.endswith("*")))
    return found


def draw(title: str, found: list[Bar]) -> Figure:
    """Two bars a method; a star marks the reported one."""
    figure = Figure(figsize=(9, 0.42 * len(found) + 1), layout="constrained")
    axes = figure.subplots()
    for i, phase in enumerate(("received", "trained")):
        places = [row + 0.38 * i for row in range(len(found))]
        values = [bar.trained if i else bar.received for bar in found]
        drawn = axes.barh(places, values, 0.36, color=PARTS[i], hatch=HATCHES[i], edgecolor="white", label=phase)
        texts = [
            f"{v:.1f}{'*' if bar.reports_trained == bool(i) else ''}" for v, bar in zip(values, found, strict=True)
        ]
        axes.bar_label(drawn, texts, padding=2, fontsize=7)
    axes.set_yticks([row + 0.19 for row in range(len(found))], [bar.label for bar in found])
    axes.invert_yaxis()
    axes.set(xlabel="test accuracy, %, best round (* the phase that is reported)", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper right", ncols=2, fontsize=8)
    return figure


def main() -> None:
    page = (DOCS / "comparison.md").read_text(encoding="utf-8")
    for heading, name in PICTURES.items():
        draw(heading, bars(page, heading)).savefig(DOCS / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
