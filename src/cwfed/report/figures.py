"""Pictures for papers and READMEs, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from cwfed.report.runs import RunRecord
from cwfed.report.style import COLOURS

mpl.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def draw_distribution(axes: Axes, histogram: NDArray[np.int64], title: str = "who holds what") -> Any:
    """Clients x classes, as in the paper's heat maps."""
    image = axes.imshow(histogram, cmap="Blues", aspect="auto", interpolation="nearest")
    axes.set(xlabel="class", ylabel="client", title=title)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return image


def distribution(histogram: NDArray[np.int64], path: Path, title: str) -> None:
    """The heat map of a partition as a picture."""
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(draw_distribution(axes, histogram, title), label="samples")
    figure.savefig(path, dpi=150)


def overview(records: Sequence[RunRecord], path: Path) -> None:
    """One experiment at a glance: its data, and the accuracy of each run over the rounds."""
    many = len(records) > 4  # then the legend stands beside the curves, not on them
    figure = Figure(figsize=(11 if many else 9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    histogram = np.asarray(records[0].manifest["split"]["histogram"])
    figure.colorbar(draw_distribution(left, histogram), ax=left, label="samples")
    for i, record in enumerate(records):
        phase = record.started.phase
        rounds, accuracies = record.curve(phase)
        colour, style = COLOURS[i % len(COLOURS)], ("-", "--", ":", "-.")[i // len(COLOURS) % 4]
        label = f"{record.label}: {100 * max(accuracies):.1f} %"
        right.plot(rounds, 100 * np.asarray(accuracies), style, color=colour, label=label)
    right.set(
        xlabel="round", ylabel="test accuracy, %", title=f"{records[0].started.dataset}, all clients' personal models"
    )
    right.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no round 2.5
    right.grid(alpha=0.3)
    handles, labels = right.get_legend_handles_labels()
    order = sorted(range(len(records)), key=lambda i: -max(records[i].curve(records[i].started.phase)[1]))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)} if many else {"loc": "lower right"}
    right.legend([handles[i] for i in order], [labels[i] for i in order], frameon=False, **place)
    figure.savefig(path, dpi=150)
