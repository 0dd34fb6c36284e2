"""Heat maps with matplotlib: which client holds what, output norms, mixtures, classes. Darker is more, and zero is white."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cwfed.report.drawing import explain, name_places, plain
from cwfed.report.finished import RunRecord
from cwfed.report.groups import Group
from cwfed.report.many import MANY, end_of_colours, evenly, rows_in_words, rows_to_show

NORM = "norm of the output row"
CHANGE = "change of the norm"
SHARE = "share"


class Panel(NamedTuple):
    """One heat map: rows are clients or class models, columns classes or clients."""

    title: str
    values: NDArray[Any]
    unit: str
    """The label of the colour bar; panels with the same unit in a row share a scale."""
    rows: str = "client"
    columns: str = "class"
    diverging: bool = False
    """Whether these are differences, with a scale centred at zero."""
    row_names: Sequence[object] | None = None
    """The names of the rows, if they are not 0, 1, 2 and so on."""
    column_names: Sequence[object] | None = None
    said: str = ""
    """A sentence about what is left out."""
    top: float | None = None
    """The value at which the colours end, if it is not the largest."""


def scale_of(panels: Sequence[Panel]) -> tuple[float, float]:
    """The common scale of these panels: from 0, or symmetric around it."""
    found = np.concatenate([np.asarray(panel.values, dtype=float).ravel() for panel in panels])
    known = found[np.isfinite(found)]
    top = float(np.abs(known).max() if panels[0].diverging else known.max()) if known.size else 1.0
    top = min(top, max(top if panel.top is None else panel.top for panel in panels))
    return (-top or -1.0, top or 1.0) if panels[0].diverging else (0.0, top if top > 0 else 1.0)


def draw_heat_map(axes: Axes, panel: Panel, scale: tuple[float, float] | None = None) -> Any:
    """Darker is more; differences are brown below zero and blue-green above, and both darken."""
    values = np.asarray(panel.values, dtype=float)
    low, high = scale or scale_of([panel])
    colours = "BrBG" if panel.diverging else "Blues"
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, vmin=low, vmax=high)
    axes.set(xlabel=panel.columns, ylabel=panel.rows, title=plain(panel.title))
    axes.spines[:].set_visible(False)
    for axis, names, count in (
        (axes.xaxis, panel.column_names, values.shape[1]),
        (axes.yaxis, panel.row_names, values.shape[0]),
    ):
        name_places(axes, axis, range(count) if names is None else names)
    return image


def draw_with_bar(figure: Figure, axes: Axes, panel: Panel) -> None:
    """One heat map with its own scale."""
    figure.colorbar(draw_heat_map(axes, panel), ax=axes, label=panel.unit, extend=_beyond([panel], scale_of([panel])))


def _beyond(panels: Sequence[Panel], scale: tuple[float, float]) -> str:
    """The ends of the colour bar that are drawn pointed, because there are values beyond them."""
    has_less = any(np.nanmin(panel.values, initial=0.0) < scale[0] - 1e-6 for panel in panels)
    has_more = any(np.nanmax(panel.values, initial=0.0) > scale[1] + 1e-6 for panel in panels)
    return ("neither", "max", "min", "both")[2 * has_less + has_more]


def heat_maps(lines: Sequence[Sequence[Panel]]) -> Figure:
    """Heat maps in rows; those of one unit in a row share a scale and a colour bar."""
    columns = max(map(len, lines))
    figure = Figure(figsize=(2.6 * columns + 0.9, 2.6 * len(lines) + 0.2), layout="constrained")
    grid = figure.subplots(len(lines), columns, squeeze=False)
    for line, places in zip(lines, grid, strict=True):
        by_unit: dict[tuple[str, bool], list[int]] = {}
        for i, panel in enumerate(line):
            by_unit.setdefault((panel.unit, panel.diverging), []).append(i)
        for (unit, _), members in by_unit.items():
            scale = scale_of([line[i] for i in members])
            images = [draw_heat_map(places[i], line[i], scale) for i in members]
            pointed = _beyond([line[i] for i in members], scale)
            figure.colorbar(images[-1], ax=[places[i] for i in members], label=unit, extend=pointed)
        for axes in places[len(line) :]:
            axes.set_visible(False)
    explain(
        figure, *(f"{words}." for words in dict.fromkeys(panel.said for line in lines for panel in line) if words)
    )
    return figure


def in_lines(panels: Sequence[Panel], columns: int = 4) -> list[list[Panel]]:
    """Panels in rows of so many."""
    columns = min(columns, len(panels))
    return [list(panels[i * columns : (i + 1) * columns]) for i in range(ceil(len(panels) / columns))]


# --- of runs


def holdings(
    histogram: NDArray[np.int64],
    title: str,
    classes: Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
) -> Panel:
    """Which client holds what, with names of classes and clients if there are any."""
    rows = rows_to_show(histogram)
    names: dict[str, Any] = {"row_names": [clients[i] for i in rows] if clients else rows, "column_names": classes}
    top, clipped = end_of_colours(histogram[rows])
    said = "; ".join(filter(None, (rows_in_words(len(histogram)), clipped)))
    return Panel(title, histogram[rows], "samples", said=said, top=top, **names)


def distribution(
    histogram: NDArray[np.int64],
    title: str,
    classes: Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
) -> Figure:
    """Which client holds what, as a picture of its own."""
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    panel = holdings(histogram, textwrap.fill(title, 60), classes, clients)
    draw_with_bar(figure, figure.subplots(), panel)
    explain(figure, panel.said)
    return figure


def norms(label: str, record: RunRecord) -> list[Panel]:
    """The output norms of a run's models: on receipt, after training, of its class models, and what training changed."""
    portrait = record.portrait
    if portrait is None:
        return []
    shown = rows_to_show(portrait.distribution)
    received = np.array(portrait.received)[shown]
    known = [portrait.trained[i] for i in shown]
    trained = np.array([row if row is not None else [np.nan] * received.shape[1] for row in known])
    names: dict[str, Any] = {
        "row_names": [portrait.clients[i] for i in shown],
        "column_names": record.class_names,
        "said": rows_in_words(len(portrait.clients), len(record.started.evaluated)),
    }
    panels = [Panel(f"{label}:\nreceived", received, NORM, **names)]
    if not np.isnan(trained).all():
        panels.append(Panel(f"{label}:\ntrained", trained, NORM, **names))
    if portrait.classes:
        classes: dict[str, Any] = {"row_names": record.class_names, "column_names": record.class_names}
        panels.append(
            Panel(f"{label}:\nclass models", np.array(portrait.classes), NORM, rows="class model", **classes)
        )
    if not np.isnan(trained).all():
        panels.append(Panel(f"{label}:\ntrained - received", trained - received, CHANGE, diverging=True, **names))
    return panels


def mixture(label: str, record: RunRecord) -> list[Panel]:
    """Panels that show from what each client's model was mixed."""
    portrait = record.portrait
    if portrait is None or portrait.mixture is None or not any(portrait.mixture):
        return []
    shown = rows_to_show(portrait.distribution)
    clients, whose = [portrait.clients[i] for i in shown], record.rounds[-1].participants
    columns = columns_to_show(clients, whose)
    known = [portrait.mixture[i] for i in shown]
    rows = [[row[c] for c in columns] if row is not None else [np.nan] * len(columns) for row in known]
    names: dict[str, Any] = {"row_names": clients, "column_names": [whose[c] for c in columns]}
    said = rows_in_words(len(portrait.clients), len(record.started.evaluated))
    return [Panel(label, np.array(rows), SHARE, columns="whose model", said=said, **names)]


def columns_to_show(clients: Sequence[int], whose: Sequence[int]) -> list[int]:
    """Of those whose models were mixed, all; of many, those that have a row too, in the order of the rows."""
    if len(whose) <= MANY:
        return list(range(len(whose)))
    places = {client: place for place, client in enumerate(whose)}
    return [places[client] for client in clients if client in places] or evenly(len(whose), MANY).tolist()


def gains(group: Group, base: int, rows: dict[int, dict[int, float]]) -> Panel:
    """Points that each of a few clients gains or loses against a method, one row a method."""
    clients = list(next(iter(rows.values())))
    values = np.array([[row[c] for c in clients] for row in rows.values()])
    title = f"points gained against {group.labels()[base]}"
    return Panel(title, values, "points", rows="", columns="client", diverging=True, column_names=clients)
