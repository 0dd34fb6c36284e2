"""Pictures for papers and READMEs, drawn with matplotlib: every function gives a figure, `save` writes it."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from cwfed.core.errors import ConfigError
from cwfed.core.types import PHASES, Phase
from cwfed.report.finished import MEANINGS, UNITS, Group, Horizontal, Method, RunRecord, Vertical
from cwfed.report.style import COLOURS, HATCHES, MARKERS, STROKES

mpl.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "cwfed"}
FORMATS = ("png", "pdf", "svg")
LARGE_PNG = 200_000
"""Bytes."""


def check_formats(formats: Sequence[str]) -> None:
    """An error for a format that cannot be written; before hours of work, not after."""
    for ending in formats:
        if ending not in FORMATS:
            raise ConfigError(f"unknown picture format {ending!r}: known are {', '.join(FORMATS)}")


def save(figure: Figure, stem: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """The figure in each format; the same figure gives the same bytes."""
    check_formats(formats)
    dates: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in formats]
    for path, ending in zip(paths, formats, strict=True):
        if ending == "png":
            _save_small_png(figure, path)
        else:
            figure.savefig(path, metadata=dates[ending])
    return paths


def _save_small_png(figure: Figure, path: Path) -> None:
    """Large drawings of lines and letters with 256 colours, which nobody sees; shades of heat maps stay as they are."""
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=130)
    if whole.tell() < LARGE_PNG or any(axes.images for axes in figure.axes):
        path.write_bytes(whole.getvalue())
        return
    with Image.open(whole) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


# --- heat maps


class Panel(NamedTuple):
    """One heat map: rows are clients or class models, columns classes or clients."""

    title: str
    values: NDArray[Any]
    rows: str = "client"
    columns: str = "class"
    diverging: bool = False
    """Differences: centred at zero."""
    row_names: Sequence[int | str] | None = None
    """Where the rows are not 0, 1, 2 and so on."""
    column_names: Sequence[int | str] | None = None


def draw_heat_map(axes: Axes, panel: Panel) -> Any:
    """Darker is more; differences are brown below zero and blue-green above, and both darken."""
    values = np.asarray(panel.values, dtype=float)
    if panel.diverging:
        top = float(np.nanmax(np.abs(values))) or 1.0
        scale: dict[str, Any] = {"cmap": "BrBG", "vmin": -top, "vmax": top}
    else:
        scale = {"cmap": "Blues"}
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **scale)
    axes.set(xlabel=panel.columns, ylabel=panel.rows, title=plain(panel.title))
    axes.spines[:].set_visible(False)
    for axis, names in ((axes.xaxis, panel.column_names), (axes.yaxis, panel.row_names)):
        axis.set_major_locator(MaxNLocator(integer=True))
        if names is not None:
            axis.set_major_formatter(partial(_name_of, names))
    return image


def _name_of(names: Sequence[int | str], place: float, _: object) -> str:
    """What stands at a place of an axis that counts from 0."""
    return plain(str(names[int(place)])[:24]) if place == int(place) and 0 <= place < len(names) else ""


def plain(text: str) -> str:
    """Text that comes from data: its dollars are no mathematics."""
    return text.replace("$", r"\$")


def legend_text(label: str) -> str:
    """Long labels in several lines: the picture is for the curves."""
    return plain(textwrap.fill(label, 32))


def heat_maps(panels: Sequence[Panel], columns: int = 4, title: str = "") -> Figure:
    """Heat maps side by side, each with its own scale."""
    columns = min(columns, len(panels))
    lines = ceil(len(panels) / columns)
    figure = Figure(figsize=(2.9 * columns, 2.6 * lines + (0.3 if title else 0)), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        figure.colorbar(draw_heat_map(axes, panel), ax=axes)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    if title:
        figure.suptitle(title)
    return figure


def distribution(histogram: NDArray[np.int64], title: str, clients: Sequence[str] | None = None) -> Figure:
    """Who holds what; the clients by their names where they have any."""
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.subplots()
    panel = Panel(textwrap.fill(title, 60), histogram, row_names=clients)
    figure.colorbar(draw_heat_map(axes, panel), label="samples")
    return figure


def norms(label: str, record: RunRecord) -> list[Panel]:
    """The output norms of a run's models: on receipt, after training, what that changed, and of its class models."""
    portrait = record.portrait
    if portrait is None:
        return []
    received = np.array(portrait.received)
    trained = np.array([row if row is not None else [np.nan] * received.shape[1] for row in portrait.trained])
    names = portrait.clients
    panels = [Panel(f"{label}:\nreceived", received, row_names=names)]
    if not np.isnan(trained).all():
        panels.append(Panel(f"{label}:\ntrained", trained, row_names=names))
        panels.append(Panel(f"{label}:\ntrained - received", trained - received, diverging=True, row_names=names))
    if portrait.classes:
        panels.append(Panel(f"{label}:\nclass models", np.array(portrait.classes), rows="class model"))
    return panels


def mixture(label: str, record: RunRecord) -> list[Panel]:
    """What each client's model was mixed from."""
    portrait = record.portrait
    if portrait is None or portrait.mixture is None or not any(portrait.mixture):
        return []
    whose = record.rounds[-1].participants
    rows = [row if row is not None else [np.nan] * len(whose) for row in portrait.mixture]
    return [Panel(label, np.array(rows), columns="whose model", row_names=portrait.clients, column_names=whose)]


# --- curves


def draw_curves(axes: Axes, methods: Sequence[Method], y: Vertical, x: Horizontal = "round") -> None:
    """One line a method: the mean over seeds, with a band of one standard deviation."""
    for i, method in enumerate(methods):
        series = method.series(y, x)
        if not series.x:
            continue
        colour = COLOURS[i % len(COLOURS)]
        look: dict[str, Any] = {
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4,
            "markevery": max(1, len(series.x) // 8),
        }
        axes.plot(
            series.x, series.y, STROKES[i % len(STROKES)], color=colour, label=legend_text(method.label), **look
        )
        if series.std:
            low, high = np.subtract(series.y, series.std), np.add(series.y, series.std)
            axes.fill_between(series.x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel=UNITS[x], ylabel=MEANINGS[y])
    axes.grid(alpha=0.3)
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no round 2.5
    if x == "bytes":
        axes.xaxis.set_major_formatter(EngFormatter("B"))


def _curves_of(group: Group, y: Vertical) -> Figure | None:
    """Curves of what runs of earlier versions do not have."""
    return curves(group, y) if any(method.series(y).y for method in group.methods) else None


def curves(group: Group, y: Vertical = "accuracy", x: Horizontal = "round") -> Figure:
    """All methods of an experiment."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    draw_curves(axes, group.methods, y, x)
    axes.set_title(plain(textwrap.fill(group.title, 60)), fontsize=9)
    if axes.lines:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def overview(group: Group) -> Figure:
    """One experiment at a glance: its data, and the accuracy of each method over the rounds, in both phases.

    Both, because one local epoch may do as much as a method does: what is handed out says little about what is used.
    """
    methods = sorted(group.methods, key=lambda m: -m.row["reported"]["mean"])
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    left, *panels = figure.subplots(1, 3, width_ratios=[1, 1.2, 1.2])
    histogram = group.records[0].histogram
    if histogram.size:
        figure.colorbar(draw_heat_map(left, Panel("who holds what", histogram)), ax=left, label="samples")
    else:
        left.text(0.5, 0.5, "who holds what\nis known to the clients only", ha="center", va="center")
        left.set_axis_off()
    for axes, phase in zip(panels, PHASES, strict=True):
        shown = [Method(f"{m.label}: {_best(m, phase)}", m.records) for m in methods]
        draw_curves(axes, shown, phase)
        axes.set_title({"received": "as received", "trained": "after local training"}[phase])
        if axes.lines:
            # few lines leave room below them; many would be covered
            few = len(methods) <= 4
            axes.legend(frameon=False, fontsize="small" if few else "x-small", loc="lower right" if few else "best")
    low = min(axes.get_ylim()[0] for axes in panels)
    high = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(low, high)
    figure.suptitle(
        plain(f"{group.records[0].started.dataset}, all clients' personal models; best round on test"), fontsize=10
    )
    return figure


def _best(method: Method, phase: Phase) -> str:
    """The best round's accuracy; a star marks the phase on which the method is reported."""
    mean = method.row["accuracy"][phase]["best"]["mean"]
    star = "*" if method.first.started.phase == phase else ""
    return f"{100 * mean:.1f} %{star}" if mean is not None else "not measured"


# --- clients


def clients(group: Group) -> Figure:
    """The accuracy of each client under each method, worst to best: who is left behind."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (method, record) in enumerate(zip(group.methods, group.records, strict=True)):
        values = np.sort(list(record.client_accuracies().values()))
        style = MARKERS[i % len(MARKERS)] + STROKES[i % len(STROKES)]
        axes.plot(
            100 * values, style, color=COLOURS[i % len(COLOURS)], label=legend_text(method.label), markersize=3.5
        )
    axes.set(xlabel="clients, worst to best under each method", ylabel=MEANINGS["accuracy"])
    axes.set_title(plain(textwrap.fill(group.title, 60)), fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def classes(group: Group) -> Figure | None:
    """The recall of each class under each method, over all clients."""
    found = [(m.label, r.summary.per_class.recall) for m, r in zip(group.methods, group.records, strict=True)
             if r.summary.per_class]  # fmt: skip
    if not found:
        return None
    values = np.array([[np.nan if v is None else 100 * v for v in recalls] for _, recalls in found])
    figure = Figure(figsize=(6.4, 1.1 + 0.25 * len(found)), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(draw_heat_map(axes, Panel("recall of each class, %; best round", values, rows="")), ax=axes)
    axes.set_yticks(range(len(found)), [legend_text(label) for label, _ in found])
    return figure


def gains(group: Group) -> Figure | None:
    """Points that each client gains or loses against Local and FedAvg."""
    panels = []
    for base in group.baselines():
        rows = {other: found for other in range(len(group.methods)) if (found := group.gains(base, other))}
        if rows:
            names = list(next(iter(rows.values())))
            title = f"points gained against {group.methods[base].label}"
            values = np.array([[row[c] for c in names] for row in rows.values()])
            panels.append((Panel(title, values, rows="", diverging=True, column_names=names, columns="client"), rows))
    if not panels:
        return None
    figure = Figure(figsize=(6.4, sum(1.1 + 0.25 * len(rows) for _, rows in panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[3 + len(rows) for _, rows in panels])
    for axes, (panel, rows) in zip(grid.flat, panels, strict=True):
        figure.colorbar(draw_heat_map(axes, panel), ax=axes)
        axes.set_yticks(range(len(rows)), [legend_text(group.methods[i].label) for i in rows])
    return figure


def distributions(group: Group) -> Figure | None:
    """p~, read from the weights that clients sent last, against p."""
    found = [
        (m.label, read_distributions(r)) for m, r in zip(group.methods, group.records, strict=True) if r.portrait
    ]
    shown = [(label, p, estimate) for label, (p, estimate) in found if len(p)]
    if not shown:
        return None
    columns = min(4, len(shown))
    lines = ceil(len(shown) / columns)
    figure = Figure(figsize=(2.5 * columns, 2.5 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes, (label, p, estimate) in zip(grid.flat, shown, strict=False):
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
        axes.plot(p, estimate, ".", color=COLOURS[0], markersize=3, alpha=0.6)
        axes.set(xlabel="p", ylabel="p~")
        axes.set_title(legend_text(label), fontsize=8)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    return figure


def read_distributions(record: RunRecord) -> tuple[NDArray[Any], NDArray[Any]]:
    """p and p~ of all portrayed clients that trained, flat."""
    portrait = record.portrait
    assert portrait is not None
    rows = [(p, norms) for p, norms in zip(portrait.distribution, portrait.trained, strict=True) if norms]
    p = np.array([p for p, _ in rows])
    lengths = np.array([norms for _, norms in rows]).reshape(p.shape)
    return p.ravel(), (lengths / lengths.sum(-1, keepdims=True).clip(1e-12)).ravel()


def cost(group: Group) -> Figure:
    """What was sent, and where the time went."""
    figure = Figure(figsize=(9, 0.9 + 0.32 * len(group.methods)), layout="constrained")
    labels = [legend_text(method.label) for method in group.methods]
    for axes, key, unit in zip(
        figure.subplots(1, 2, sharey=True), ("traffic", "seconds"), ("bytes sent", "seconds"), strict=True
    ):
        found = [{k: v for k, v in r.summary[key].items() if k != "total"} for r in group.records]
        ends = np.zeros(len(found))
        for i, part in enumerate(dict.fromkeys(part for row in found for part in row)):
            values = np.array([row.get(part, 0.0) for row in found])
            axes.barh(
                labels,
                values,
                left=ends,
                color=COLOURS[i % len(COLOURS)],
                hatch=HATCHES[i % len(HATCHES)],
                label=part,
            )
            ends += values
        axes.set_xlabel(unit)
        if key == "traffic":
            axes.xaxis.set_major_formatter(EngFormatter("B"))
        axes.legend(frameon=False, fontsize=7)
    figure.axes[0].invert_yaxis()
    return figure


def everything(group: Group) -> dict[str, Figure]:
    """All pictures of an experiment by name."""
    histogram = group.records[0].histogram
    found: dict[str, Figure | None] = {
        "overview": overview(group),
        "accuracy-rounds": curves(group),
        "accuracy-bytes": curves(group, x="bytes"),
        "accuracy-seconds": curves(group, x="seconds"),
        "balanced-accuracy": _curves_of(group, "balanced_accuracy"),
        "macro-f1": _curves_of(group, "macro_f1"),
        "classes": classes(group),
        "training-loss": curves(group, "training loss"),
        "test-loss-received": curves(group, "received loss"),
        "test-loss-trained": curves(group, "trained loss"),
        "correlation": curves(group, "correlation"),
        "distance": curves(group, "distance"),
        "clients": clients(group),
        "gains": gains(group),
        "data": distribution(histogram, group.title) if histogram.size else None,
        "distributions": distributions(group),
        "cost": cost(group),
    }
    pairs = [(method.label, record) for method, record in zip(group.methods, group.records, strict=True)]
    output = [panel for label, record in pairs for panel in norms(label, record)]
    mixtures = [panel for label, record in pairs for panel in mixture(label, record)]
    if output:
        found["output-norms"] = heat_maps(output)
    if mixtures:
        found["mixtures"] = heat_maps(mixtures)
    return {name: figure for name, figure in found.items() if figure is not None}
