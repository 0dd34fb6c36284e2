"""The pictures of an experiment for papers and READMEs, with matplotlib; every public function returns a figure or draws on axes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cwfed.core.types import PHASES, Phase
from cwfed.report import heatmaps, tables
from cwfed.report.drawing import (
    BYTES,
    explain,
    height_for,
    legend_beside,
    legend_text,
    line_of,
    plain,
    save,
    whole_numbers,
)  # fmt: skip
from cwfed.report.finished import PHASE_WORDS, UNITS, Horizontal, RunRecord, Vertical
from cwfed.report.groups import Group, Method
from cwfed.report.many import MANY, worst_to_best
from cwfed.report.style import HATCHES, PARTS

__all__ = ["draw_curves", "everything", "overview", "read_distributions", "save"]


def draw_curves(
    axes: Axes, group: Group, y: Vertical, x: Horizontal = "round", labels: Sequence[str] | None = None
) -> None:
    """One line a method: the mean over seeds, with a band of one standard deviation."""
    for method, look, label in zip(group.methods, group.looks, labels or group.labels(y), strict=True):
        series = method.series(y, x)
        if not series.x:
            continue
        axes.plot(series.x, series.y, label=legend_text(label), **line_of(look, len(series.x)))
        if series.std:
            low, high = np.subtract(series.y, series.std), np.add(series.y, series.std)
            axes.fill_between(series.x, low, high, color=look.colour, alpha=0.15, linewidth=0)
    axes.set(xlabel=UNITS[x], ylabel=group.meaning(y))
    axes.grid(alpha=0.3)
    if x == "round":
        whole_numbers(axes.xaxis)
    if x == "bytes":
        axes.xaxis.set_major_formatter(BYTES)


def spread_in_words(group: Group) -> str:
    """A sentence about what the curves are means of, and what their bands are."""
    return tables.averaged([method.row for method in group.methods], "band: ±")


def phases_in_words(group: Group, y: Vertical | str = "accuracy") -> str:
    """A sentence about what "received" and "trained" after a name mean, if names have them."""
    says = group.labels(y) != [method.label for method in group.methods]
    told = ", ".join(f"{phase}: {words}" for phase, words in PHASE_WORDS.items())
    return f"Each method in the phase on which it is reported ({told})." if says else ""


def _titled(group: Group, labels: Sequence[str]) -> tuple[Figure, Axes]:
    """Room for curves with their legend beside them."""
    figure = Figure(figsize=(6.8, height_for(labels)), layout="constrained")
    axes = figure.subplots()
    axes.set_title(plain(textwrap.fill(group.title, 60)), fontsize=9)
    return figure, axes


def curves(group: Group, y: Vertical = "accuracy", x: Horizontal = "round") -> Figure:
    """All methods of an experiment."""
    figure, axes = _titled(group, group.labels(y))
    draw_curves(axes, group, y, x)
    legend_beside(axes)
    explain(figure, spread_in_words(group), phases_in_words(group, y))
    return figure


def _curves_of(group: Group, y: Vertical) -> Figure | None:
    """Curves of a metric that runs of earlier versions may not have."""
    return curves(group, y) if any(method.series(y).y for method in group.methods) else None


def overview(group: Group) -> Figure:
    """One experiment at a glance: its data, and the accuracy of each method over the rounds, in both phases.

    Both, because one local epoch may do as much as a method does: what is handed out says little about what is used.
    """
    best = [f"{m.label}: {' / '.join(_best(m, phase) for phase in PHASES)}" for m in group.methods]
    figure = Figure(figsize=(13.5, height_for(best, 3.9)), layout="constrained")
    left, *panels = figure.subplots(1, 3, width_ratios=[1, 1.15, 1.15])
    record = group.records[0]
    holdings = (
        heatmaps.holdings(record.histogram, "who holds what", record.class_names) if record.histogram.size else None
    )
    if holdings:
        heatmaps.draw_with_bar(figure, left, holdings)
    else:
        left.text(0.5, 0.5, "who holds what\nis known to the clients only", ha="center", va="center")
        left.set_axis_off()
    for axes, phase in zip(panels, PHASES, strict=True):
        draw_curves(axes, group, phase, labels=best)
        axes.set_title(PHASE_WORDS[phase])
    low = min(axes.get_ylim()[0] for axes in panels)
    high = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(low, high)
    order = sorted(range(len(best)), key=lambda i: -group.methods[i].row["reported"]["mean"])
    found = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = [legend_text(best[i]) for i in order if legend_text(best[i]) in found]
    if names:
        title = "best round on test, %:\nas received / after local training"
        lines = [found[name] for name in names]
        figure.legend(lines, names, title=title, frameon=False, loc="outside right upper", alignment="left")
    explain(
        figure,
        "* the phase on which the method is reported.",
        spread_in_words(group),
        f"Who holds what: {holdings.said}." if holdings and holdings.said else "",
    )
    figure.suptitle(plain(f"{record.started.dataset}, all clients' personal models"), fontsize=10)
    return figure


def _best(method: Method, phase: Phase) -> str:
    """The best round's accuracy; a star marks the phase on which the method is reported."""
    mean = method.row["accuracy"][phase]["best"]["mean"]
    return "not measured" if mean is None else f"{100 * mean:.1f}{'*' if method.phase == phase else ''}"


# --- clients


def clients(group: Group) -> Figure:
    """The accuracy of each client under each method, worst to best."""
    figure, axes = _titled(group, group.labels())
    for record, look, label in zip(group.records, group.looks, group.labels(), strict=True):
        places, values = worst_to_best(list(record.client_accuracies().values()))
        axes.plot(
            places, 100 * np.array(values), label=legend_text(label), **line_of(look, max(0, len(places) - MANY))
        )
    axes.set(xlabel="clients, worst to best under each method", ylabel=group.meaning("accuracy"))
    whole_numbers(axes.xaxis)
    axes.grid(alpha=0.3)
    legend_beside(axes)
    explain(figure, _one_run(group), phases_in_words(group))
    return figure


def _one_run(group: Group) -> str:
    """A sentence about which run a picture of single clients shows."""
    several = any(len(method.records) > 1 for method in group.methods)
    return f"Best round of the run with seed {group.records[0].started.seed}." if several else "Best round."


def classes(group: Group) -> Figure | None:
    """The recall of each class under each method, over all clients."""
    found = [(label, record.summary.per_class.recall) for label, record in zip(group.labels(), group.records, strict=True)
             if record.summary.per_class]  # fmt: skip
    if not found:
        return None
    values = np.array([[np.nan if v is None else 100 * v for v in recalls] for _, recalls in found])
    figure = Figure(figsize=(6.4, 1.6 + 0.25 * len(found)), layout="constrained")
    axes = figure.subplots()
    panel = heatmaps.Panel(
        "recall of each class", values, "recall, %", rows="", column_names=group.records[0].class_names
    )
    heatmaps.draw_with_bar(figure, axes, panel)
    axes.set_yticks(range(len(found)), [legend_text(label) for label, _ in found])
    explain(figure, _one_run(group), phases_in_words(group))
    return figure


def gains(group: Group) -> Figure | None:
    """Points that each client gains or loses against Local and FedAvg; for many clients as sorted curves."""
    found = {
        base: {i: gained for i in range(len(group.methods)) if (gained := group.gains(base, i))}
        for base in group.baselines()
    }
    found = {base: rows for base, rows in found.items() if rows}
    if not found:
        return None
    many = max(len(gained) for rows in found.values() for gained in rows.values()) > MANY
    heights = [2.6 if many else 1.2 + 0.25 * len(rows) for rows in found.values()]
    figure = Figure(figsize=(6.8, sum(heights) + 0.2), layout="constrained")
    grid = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)
    for axes, (base, rows) in zip(grid.flat, found.items(), strict=True):
        if many:
            _sorted_gains(axes, group, base, rows)
        else:
            heatmaps.draw_with_bar(figure, axes, heatmaps.gains(group, base, rows))
            axes.set_yticks(range(len(rows)), [legend_text(group.labels()[i]) for i in rows])
    explain(figure, _one_run(group), phases_in_words(group))
    return figure


def _sorted_gains(axes: Axes, group: Group, base: int, rows: dict[int, dict[int, float]]) -> None:
    for i, gained in rows.items():
        places, points = worst_to_best(list(gained.values()))
        axes.plot(places, points, label=legend_text(group.labels()[i]), **line_of(group.looks[i], len(places)))
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set(
        xlabel="clients, worst to best under each method",
        ylabel="points",
        title=f"gained against {plain(group.labels()[base])}",
    )
    axes.grid(alpha=0.3)
    legend_beside(axes)


def distributions(group: Group) -> Figure | None:
    """p~, read from the weights that clients sent last, against p."""
    found = [(i, *read_distributions(record)) for i, record in enumerate(group.records) if record.portrait]
    shown = [(i, p, estimate) for i, p, estimate in found if len(p)]
    if not shown:
        return None
    columns = min(4, len(shown))
    lines = ceil(len(shown) / columns)
    figure = Figure(figsize=(2.5 * columns, 2.7 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes, (i, p, estimate) in zip(grid.flat, shown, strict=False):
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
        axes.plot(p, estimate, ".", color=group.looks[i].colour, markersize=3, alpha=0.6)
        axes.set(xlabel="p", ylabel="p~")
        axes.tick_params(labelbottom=True)  # there may be nothing below
        axes.set_title(f"{legend_text(group.methods[i].label)}\n{nearness(group.records[i])}", fontsize=8)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    explain(figure, "A dot: one class of one client. On the line, p~ is p.")
    return figure


def nearness(record: RunRecord) -> str:
    """How close p~ was to p in a run's last round, by correlation and distance: a flat p~ may correlate well and still be far away."""
    last = record.rounds[-1]
    known = (("correlation", last.correlation, ".2f"), ("||p - p~||", last.distance, ".3f"))
    return ", ".join(f"{what} {value:{digits}}" for what, value, digits in known if value is not None)


def read_distributions(record: RunRecord) -> tuple[NDArray[Any], NDArray[Any]]:
    """p and p~ of the portrayed clients that trained last, flat: of what they sent, or of their models where no output layer is sent."""
    portrait = record.portrait
    assert portrait is not None
    read = portrait.trained if portrait.sent is None else portrait.sent
    rows = [(p, norms) for p, norms in zip(portrait.distribution, read, strict=True) if norms]
    p = np.array([p for p, _ in rows])
    lengths = np.array([norms for _, norms in rows]).reshape(p.shape)
    return p.ravel(), (lengths / lengths.sum(-1, keepdims=True).clip(1e-12)).ravel()


def cost(group: Group) -> Figure:
    """What was sent, and where the time went."""
    figure = Figure(figsize=(9, 1.5 + 0.32 * len(group.methods)), layout="constrained")
    labels = [legend_text(method.label) for method in group.methods]
    for axes, key, unit in zip(
        figure.subplots(1, 2, sharey=True), ("traffic", "seconds"), ("data sent", "seconds"), strict=True
    ):
        found = [{k: v for k, v in r.summary[key].items() if k != "total"} for r in group.records]
        ends = np.zeros(len(found))
        for i, part in enumerate(dict.fromkeys(part for row in found for part in row)):
            values = np.array([row.get(part, 0.0) for row in found])
            look = {"color": PARTS[i % len(PARTS)], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white"}
            axes.barh(range(len(labels)), values, left=ends, label=plain(part), **look)
            ends += values
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xlabel(unit)
        if key == "traffic":
            axes.xaxis.set_major_formatter(BYTES)
        if ends.size:
            axes.legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0)
    figure.axes[0].invert_yaxis()
    seed = group.records[0].started.seed
    explain(figure, f"Of the run with seed {seed}." if any(len(m.records) > 1 for m in group.methods) else "")
    return figure


def everything(group: Group) -> dict[str, Figure]:
    """All pictures of an experiment by name."""
    first = group.records[0]
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
        "data": heatmaps.distribution(first.histogram, group.title, first.class_names)
        if first.histogram.size
        else None,
        "distributions": distributions(group),
        "cost": cost(group),
    }
    pairs = [(method.label, record) for method, record in zip(group.methods, group.records, strict=True)]
    output = [panels for label, record in pairs if (panels := heatmaps.norms(label, record))]
    mixtures = [panel for label, record in pairs for panel in heatmaps.mixture(label, record)]
    if output:
        found["output-norms"] = heatmaps.heat_maps(output)
    if mixtures:
        found["mixtures"] = heatmaps.heat_maps(heatmaps.in_lines(mixtures))
    return {name: figure for name, figure in found.items() if figure is not None}
