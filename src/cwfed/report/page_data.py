"""The data of a report page's plots, as JSON: no more numbers than a reader can see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from cwfed.core.metrics import words
from cwfed.report.figures import nearness, phases_in_words, read_distributions, spread_in_words
from cwfed.report.finished import MEANINGS, UNITS, Horizontal, RunRecord, Vertical, is_of_reported_phase
from cwfed.report.groups import Group, Method
from cwfed.report.heatmaps import columns_to_show
from cwfed.report.many import DOTS, MANY, end_of_colours, evenly, rows_in_words, rows_to_show, worst_to_best
from cwfed.report.style import DIVERGING, PARTS, SEQUENTIAL


def page_data(groups: Sequence[Group]) -> dict[str, Any]:
    """All data for the page's script."""
    own = {name: words(name) for group in groups for name in group.own_metrics()}
    return {
        "groups": [_group(group) for group in groups],
        "style": {"parts": PARTS, "sequential": SEQUENTIAL, "diverging": DIVERGING},
        "axes": {"x": UNITS, "y": MEANINGS | own},
    }


def _group(group: Group) -> dict[str, Any]:
    shared = group.aligned()
    first = group.records[min(shared)]
    rows = rows_to_show(first.histogram) if first.histogram.size else []
    top, clipped = end_of_colours(first.histogram[rows])
    bases = {str(base): _gains(group, base) for base in group.baselines()}
    ys = (*get_args(Vertical), *group.own_metrics())
    return {
        "methods": [_method(group, i) for i in range(len(group.methods))],
        "labels": {y: group.labels(y) for y in ys},
        "meanings": {y: group.meaning(y) for y in ys},
        "notes": {
            "spread": spread_in_words(group),
            "phases": phases_in_words(group),
            "mixed": [y for y in ys if is_of_reported_phase(y)],
        },
        "classes": first.class_names,
        "histogram": {
            "clients": rows,
            "values": first.histogram[rows].tolist() if rows else [],
            "top": top,
            "said": "; ".join(filter(None, (rows_in_words(len(first.histogram)), clipped))),
        },
        "many": max(len(r.client_accuracies()) for r in shared.values()) > MANY,
        "gains": bases,
    }


def _gains(group: Group, base: int) -> dict[str, Any]:
    """By method, the points of each client against a baseline: by client number, or for many clients sorted."""
    found = {i: gained for i in range(len(group.methods)) if (gained := group.gains(base, i))}
    return {str(i): _clients(gained) for i, gained in found.items()}


def _clients(values: Mapping[int, float]) -> dict[str, Any]:
    """One value per client: by number, or for many clients a curve from the worst to the best."""
    if len(values) <= MANY:
        return {"at": list(values), "values": [_short(value) for value in values.values()], "of": len(values)}
    places, ordered = worst_to_best(list(values.values()))
    return {"at": places, "values": [_short(value) for value in ordered], "of": len(values)}


def _method(group: Group, i: int) -> dict[str, Any]:
    """The plot data of a method; of its clients only if they are the same as those of the other methods."""
    method, record, look = group.methods[i], group.records[i], group.looks[i]
    accuracies = record.client_accuracies() if i in group.aligned() else {}
    return {
        "label": method.label,
        "look": {"colour": look.colour, "dash": look.dash, "symbol": look.symbol},
        "series": {y: _series(method, y) for y in (*get_args(Vertical), *group.own_metrics())},
        "clients": _clients({client: 100 * accuracy for client, accuracy in accuracies.items()}),
        "recall": record.summary.per_class and record.summary.per_class.recall,
        "portrait": record.portrait and _portrait(record),
        "traffic": record.summary["traffic"],
        "seconds": {k: v for k, v in record.summary.seconds.items() if k != "total"},
    }


def _portrait(record: RunRecord) -> dict[str, Any]:
    """The models at the end: as many rows as heat maps have room for, and p~ against p."""
    portrait = record.portrait
    assert portrait is not None
    shown = rows_to_show(portrait.distribution)
    clients, whose = [portrait.clients[i] for i in shown], record.rounds[-1].participants
    columns = columns_to_show(clients, whose)
    mixture = [portrait.mixture[i] for i in shown] if portrait.mixture else []
    p, estimate = read_distributions(record)
    dots = evenly(len(p), DOTS)
    some = f"; {len(dots):,} of {len(p):,} dots" if len(dots) < len(p) else ""
    return {
        "clients": clients,
        "received": [portrait.received[i] for i in shown],
        "trained": [portrait.trained[i] for i in shown],
        "classes": portrait.classes,
        "mixture": [row and [row[c] for c in columns] for row in mixture],
        "whose": [whose[c] for c in columns],
        "said": rows_in_words(len(portrait.clients), len(record.started.evaluated)),
        "dots": {"p": _digits(p[dots]), "estimate": _digits(estimate[dots]), "said": nearness(record) + some},
    }


def _series(method: Method, y: Vertical | str) -> dict[str, Any]:
    along = {x: method.series(y, x) for x in get_args(Horizontal)}
    found = along["round"]
    return {
        "x": {x: [_short(v) for v in series.x] for x, series in along.items()},
        "y": [_short(v) for v in found.y],
        "std": found.std and [_short(v) for v in found.std],
    }


def _digits(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
