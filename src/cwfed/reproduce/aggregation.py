"""The supplement's drawing of the two aggregations, with the numbers of the motivational example.

Three clients, two classes. FedAvg makes one model of three and hands out copies; class-wise aggregation makes a model
for each class and mixes these for each client. Both send one model up and one down a client. The p_ij are the true
ones here; in a run the server reads them from the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor

from cwfed.core import mixing
from cwfed.reproduce.pathways import COUNTS
from cwfed.reproduce.pathways_drawing import CLASS_COLOURS, CLASS_INKS, INK

CLIENTS = (0.7, 2.15, 3.6)
"""Where the three clients stand in a panel, in inches from its left."""
CLASSES = (0.87, 3.43)
"""Where the two class models stand."""
PANEL = (4.3, 3.7)
"""Width and height of a panel in inches."""
LOW, MIDDLE, HIGH = 0.62, 1.62, 3.05
"""Heights of the clients, of the server's side of the network, and of the server's other models."""
ALONG = ((0.5, 0.7), (0.5, 0.5), (0.7, 0.5))
"""Where on the arrow between client i and class j its label meets neither another label nor another arrow."""
NEUTRAL, PLAIN = "#707070", "#E3E3E3"
DOTTED = (0, (1, 1.6))
WORDS = ("first", "second")


class Weights(NamedTuple):
    """The weights of the drawing's arrows."""

    clients: Tensor
    """p_i, a client's share of all samples."""
    prior: Tensor
    """p_ij, a client's share of each class (3 x 2)."""
    classes: Tensor
    """q_ij, who makes the model of class j (3 x 2)."""


def weights() -> Weights:
    """From the counts of the motivational example."""
    counts = torch.tensor(COUNTS, dtype=torch.float64)
    shares, prior = mixing.sample_weights(counts.sum(1)), counts / counts.sum(1, keepdim=True)
    return Weights(shares, prior, mixing.class_weights(shares, prior))


def draw() -> Figure:
    """Four panels: FedAvg above, class-wise below; up to the server on the left, back to the clients on the right."""
    width, height = 9.0, 8.15
    figure = Figure(figsize=(width, height))
    given = weights()
    for drawer, left, bottom in (
        (_average, 0.13, 4.35),
        (_replicate, 4.57, 4.35),
        (_aggregate_by_class, 0.13, 0.45),
        (_mix_for_clients, 4.57, 0.45),
    ):
        place = (left / width, bottom / height, PANEL[0] / width, PANEL[1] / height)
        axes = figure.add_axes(place, label=drawer.__name__)
        axes.set(xlim=(0, PANEL[0]), ylim=(0, PANEL[1]))
        axes.axis("off")
        drawer(axes, given)
    arrows: list[dict[str, Any]] = [
        {"linestyle": DOTTED, "linewidth": 1.6, "label": "travels over the network"},
        {"linestyle": "-", "linewidth": 1.6, "label": "happens at the server; the width is the weight"},
    ]
    lines = [Line2D([], [], color=NEUTRAL, **arrow) for arrow in arrows]
    bars = [
        Rectangle((0, 0), 1, 1, fc=c, label=f"{word} class") for c, word in zip(CLASS_COLOURS, WORDS, strict=True)
    ]
    figure.legend(handles=[*lines, *bars], loc="lower center", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK)
    return figure


# the panels


def _average(axes: Axes, given: Weights) -> None:
    _stage(axes, "(a) FedAvg: local model aggregation", r"$w^G = \sum_i\, p_i\, w_i^L$")
    server = _model(axes, CLIENTS[1], HIGH, "$w^G$")
    for i, local in enumerate(_upload(axes)):
        _weigh(axes, local, server, f"p_{i + 1}", given.clients[i], 0.45)


def _replicate(axes: Axes, given: Weights) -> None:
    _stage(axes, "(b) FedAvg: global model replication", r"$w_i^L \leftarrow w^G$")
    server = _model(axes, CLIENTS[1], HIGH, "$w^G$")
    for i in range(len(CLIENTS)):
        _send(axes, server, _client(axes, i, "$w^G$"))


def _aggregate_by_class(axes: Axes, given: Weights) -> None:
    _stage(axes, "(c) Class-wise local model aggregation", r"$w_j^G = \sum_i\, q_{ij}\, w_i^L$")
    server = [_model(axes, x, HIGH, f"$w_{j + 1}^G$", j) for j, x in enumerate(CLASSES)]
    for i, local in enumerate(_upload(axes)):
        for j, of_class in enumerate(server):
            _weigh(axes, local, of_class, f"q_{{{i + 1}{j + 1}}}", given.classes[i, j], ALONG[i][j], j)


def _mix_for_clients(axes: Axes, given: Weights) -> None:
    _stage(axes, "(d) Class-wise global model aggregation", r"$w_i^{L*} = \sum_j\, p_{ij}\, w_j^G$")
    server = [_model(axes, x, HIGH, f"$w_{j + 1}^G$", j) for j, x in enumerate(CLASSES)]
    for i, x in enumerate(CLIENTS):
        name = f"$w_{i + 1}^{{L*}}$"
        personal = _model(axes, x, MIDDLE, name)
        _send(axes, personal, _client(axes, i, name))
        for j, of_class in enumerate(server):
            _weigh(axes, of_class, personal, f"p_{{{i + 1}{j + 1}}}", given.prior[i, j], 1 - ALONG[i][j], j)


def _upload(axes: Axes) -> list[Box]:
    """The clients' models on their way to the server; what the server then has."""
    arrived = []
    for i, x in enumerate(CLIENTS):
        name = f"$w_{i + 1}^L$"
        arrived.append(_model(axes, x, MIDDLE, name))
        _send(axes, _client(axes, i, name), arrived[-1])
    return arrived


# the parts


class Box(NamedTuple):
    """A model in the drawing."""

    centre: tuple[float, float]
    patch: FancyBboxPatch


def _stage(axes: Axes, title: str, equation: str) -> None:
    """The server, the title, and what happens as an equation."""
    width, top = PANEL[0] - 0.1, PANEL[1] - 0.33
    axes.text(0.05, top + 0.2, title, va="center", fontsize=9.5, weight="bold", color=INK)
    axes.text(PANEL[0] - 0.05, top + 0.2, equation, ha="right", va="center", fontsize=9, color=INK)
    shape = FancyBboxPatch(
        (0.05, 1.32), width, top - 1.32, boxstyle="round,pad=0,rounding_size=0.1", fc="#F6F6F6", ec="#C8C8C8"
    )
    axes.add_patch(shape)
    axes.text(0.15, top - 0.1, "server", va="top", fontsize=8.5, color=INK)


def _model(axes: Axes, x: float, y: float, name: str, of_class: int | None = None) -> Box:
    fill, ink = (PLAIN, "black") if of_class is None else (CLASS_COLOURS[of_class], CLASS_INKS[of_class])
    patch = FancyBboxPatch(
        (x - 0.24, y - 0.16), 0.48, 0.32, boxstyle="round,pad=0,rounding_size=0.06", fc=fill, ec=INK, lw=0.8
    )
    axes.add_patch(patch)
    axes.text(x, y, name, ha="center", va="center", fontsize=10, color=ink)
    return Box((x, y), patch)


def _client(axes: Axes, i: int, name: str) -> Box:
    """A client's model, with its samples by class below as a bar."""
    x, counts = CLIENTS[i], COUNTS[i]
    left, width = x - 0.5, 1.0
    for count, fill in zip(counts, CLASS_COLOURS, strict=True):
        part = width * count / sum(counts)
        axes.add_patch(Rectangle((left, 0.27), part, 0.08, fc=fill))
        left += part
    axes.text(x, 0.21, f"client {i + 1}: {counts[0]} + {counts[1]}", ha="center", va="top", fontsize=8, color=INK)
    return _model(axes, x, LOW, name)


def _send(axes: Axes, start: Box, end: Box) -> None:
    """A dotted line; the head is an arrow of its own, without a line, since its edges would be dotted too."""
    _arrow(axes, start, end, arrowstyle="-", color=NEUTRAL, linewidth=1.6, linestyle=DOTTED, shrinkB=8)
    _arrow(axes, start, end, color=NEUTRAL, linewidth=0, mutation_scale=16)


def _weigh(
    axes: Axes, start: Box, end: Box, symbol: str, weight: Tensor, along: float, of_class: int | None = None
) -> None:
    """An arrow as wide as its weight; the label stands on it, that far along."""
    colour = NEUTRAL if of_class is None else CLASS_COLOURS[of_class]
    width = 0.5 + 6 * float(weight)
    _arrow(axes, start, end, color=colour, linewidth=width, mutation_scale=7 + 1.6 * width)
    x, y = (a + along * (b - a) for a, b in zip(start.centre, end.centre, strict=True))
    back = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": colour, "lw": 0.6}
    axes.text(x, y, f"${symbol}$ = {weight:.2f}", ha="center", va="center", fontsize=7.5, bbox=back)


def _arrow(axes: Axes, start: Box, end: Box, **style: Any) -> None:
    """From edge to edge of two boxes."""
    usual: dict[str, Any] = {"arrowstyle": "-|>", "shrinkA": 1, "shrinkB": 2.5, "joinstyle": "miter"}
    arrow = FancyArrowPatch(start.centre, end.centre, patchA=start.patch, patchB=end.patch, **(usual | style))
    axes.add_patch(arrow)
