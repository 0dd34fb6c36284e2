"""The motivational example as a picture: every model as a graph, its critical pathways drawn strongly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch

from cwfed.report.style import COLOURS
from cwfed.reproduce.pathways import (
    COUNTS,
    SIZES,
    WEIGHTS,
    Panel,
    Pathways,
    critical,
    into_outputs,
    panels,
    vector,
)

POSITIVE, NEGATIVE = COLOURS[2], COLOURS[1]
CLASS_COLOURS = (COLOURS[0], COLOURS[3])
CLASS_INKS = ("white", "black")
"""What can be read on the colours of the classes."""
INK = "#303030"
WIDTH, HEIGHT = 9.0, 7.8
"""Of the picture, in inches; places within it are inches too, from the lower left corner."""
TITLES = ("Trained without WDR", "Trained with WDR", "After the class-wise mixing")
SERVER_TITLES = ("FedAvg: one average of all", "Class-wise: one average per class")


def draw(found: Pathways) -> Figure:
    """Three rows of networks, the clients' on the left, the server's on the right."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    page = figure.add_axes((0, 0, 1, 1))
    page.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    page.axis("off")
    lefts, bottoms = (0.2, 1.96, 3.72, 5.62, 7.24), (4.88, 2.5, 0.12)  # of the columns, of the rows
    column, row_height = 1.6, 2.22

    for left, i, counts in zip(lefts, (1, 2, 3), COUNTS, strict=False):
        middle, shares = left + column / 2, [n / sum(counts) for n in counts]
        page.text(middle, 7.58, f"client {i}", ha="center", fontsize=10, weight="bold", color=INK)
        page.text(middle, 7.38, "{} + {} samples".format(*counts), ha="center", fontsize=8, color=INK)
        page.text(middle, 7.2, "$p$ = {:.2f} and {:.2f}".format(*shares), ha="center", fontsize=8, color=INK)
    page.text(7.22, 7.58, "server", ha="center", fontsize=10, weight="bold", color=INK)

    rows = panels(found)
    thickest = max(float(vector(panel.model).abs().max()) for row in rows for panel in row)
    for row, bottom, title in zip(rows, bottoms, TITLES, strict=True):
        _band(page, 0.12, 5.28, bottom, row_height, title)
        places = [*lefts[:3], *(lefts[3:] if len(row) == 5 else [(lefts[3] + lefts[4]) / 2])]
        for panel, left in zip(row, places, strict=False):
            place = (left / WIDTH, (bottom + 0.45) / HEIGHT, column / WIDTH, 1.5 / HEIGHT)
            _draw_network(figure.add_axes(place, label=panel.name), panel, thickest)
    for bottom, title in zip(bottoms, SERVER_TITLES, strict=False):
        _band(page, 5.56, 3.32, bottom, row_height, title)
    _draw_legend(figure, (5.56 / WIDTH, bottoms[2] / HEIGHT, 3.32 / WIDTH, row_height / HEIGHT))
    return figure


def _band(page: Axes, left: float, width: float, bottom: float, height: float, title: str) -> None:
    shape = FancyBboxPatch(
        (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.08", fc="#F6F6F6", ec="none"
    )
    page.add_patch(shape)
    page.text(left + 0.12, bottom + height - 0.12, title, va="top", fontsize=8.5, color=INK)


def _draw_network(axes: Axes, panel: Panel, thickest: float) -> None:
    """Inputs on the left, outputs on the right, what it is below."""
    axes.set(xlim=(-0.3, 2.7), ylim=(-0.4, 3.4))
    axes.axis("off")
    places = [[(float(layer), 1.5 + (size - 1) / 2 - k) for k in range(size)] for layer, size in enumerate(SIZES)]
    masks = critical(panel.model)
    for name, (sources, targets) in zip(WEIGHTS, pairwise(places), strict=True):
        for t, target in enumerate(targets):
            for s, source in enumerate(sources):
                weight = float(panel.model[name][t, s]) / thickest
                axes.plot(*zip(source, target, strict=True), **_line(weight, bool(masks[name][t, s])))
    colours = (["white"] * SIZES[0], ["#D9D9D9"] * SIZES[1], CLASS_COLOURS)
    for layer, fills in zip(places, colours, strict=True):
        xs, ys = zip(*layer, strict=True)
        axes.scatter(xs, ys, s=95, c=list(fills), edgecolors=INK, linewidths=0.8, zorder=4)
    for j, (x, y) in enumerate(places[-1]):
        axes.text(
            x, y - 0.01, str(j), ha="center", va="center", fontsize=7, color=CLASS_INKS[j], weight="bold", zorder=5
        )
        axes.text(x + 0.2, y - 0.01, f"{panel.p_tilde[j]:.2f}", va="center", fontsize=8, color=INK)
    axes.text(1.2, -0.42, f"${panel.name}$  {panel.words}", ha="center", va="top", fontsize=8.5)
    into = "critical into 0 and 1:  {} and {}".format(*into_outputs(panel.model))
    axes.text(1.2, -0.92, into, ha="center", va="top", fontsize=7, color="#606060")


def _line(weight: float, strong: bool) -> dict[str, Any]:
    """How a weight is drawn, given as a part of the largest one."""
    if not strong:
        return {"color": "#C4C4C4", "linewidth": 0.5, "zorder": 1}
    width = 0.6 + 4.4 * abs(weight)
    if weight > 0:
        return {"color": POSITIVE, "linewidth": width, "zorder": 2}
    dashes = (5 / width, 2.5 / width)  # matplotlib counts in widths; so they have the same length at any width
    return {"color": NEGATIVE, "linewidth": width, "linestyle": (0, dashes), "zorder": 3}


def _draw_legend(figure: Figure, place: tuple[float, float, float, float]) -> None:
    strong, weak = _line(0.6, True), _line(0, False)
    neurons = {"marker": "o", "linestyle": "none", "markersize": 9, "markeredgecolor": INK, "markeredgewidth": 0.8}
    entries = [
        (strong, "positive weight, the width is its magnitude"),
        (_line(-0.6, True), "negative weight"),
        (weak, "the 12 weights that are not critical"),
        ({"color": CLASS_COLOURS[0], **neurons}, "output of class 0"),
        ({"color": CLASS_COLOURS[1], **neurons}, "output of class 1"),
    ]
    axes = figure.add_axes(place, label="legend")
    axes.axis("off")
    handles = [Line2D([], [], label=label, **style) for style, label in entries]
    upper: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.01, 1.0), "frameon": False}
    axes.legend(handles=handles, fontsize=8, labelcolor=INK, handlelength=2.6, labelspacing=0.8, **upper)
    words = (
        "Critical: the 8 of 20 weights with the largest magnitude.",
        r"Number beside an output: $\tilde{p}$, its row's share of the",
        "norms of all rows. Inputs are on the left.",
    )
    for i, line in enumerate(words):
        axes.text(0.04, 0.25 - 0.09 * i, line, fontsize=8, color=INK, transform=axes.transAxes)
