"""The paper's figures: one function per kind, from a spec and its runs to an outcome with pictures and numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from cwfed import algorithms
from cwfed.core import mixing
from cwfed.core.errors import RunError
from cwfed.core.events import Portrait
from cwfed.core.types import Output, Params, Start
from cwfed.engine import Loop
from cwfed.federation.config import with_settings
from cwfed.federation.experiment import deal
from cwfed.federation.simulation import Simulation
from cwfed.report import figures, heatmaps
from cwfed.report.drawing import explain, whole_numbers
from cwfed.report.finished import RunRecord
from cwfed.report.groups import Group, Method
from cwfed.report.heatmaps import CHANGE, NORM, Panel
from cwfed.report.style import COLOURS, COMMON, STROKES, looks
from cwfed.reproduce import aggregation, pathways, pathways_drawing
from cwfed.reproduce.both_phases import phases
from cwfed.reproduce.outcome import Outcome
from cwfed.reproduce.paper_tables import accuracy_of, spread
from cwfed.reproduce.protocol import BEST_ROUND, held_out
from cwfed.reproduce.runner import Workshop
from cwfed.reproduce.spec import Item, Row, Scale, Setup
from cwfed.reproduce.verdict import Cell, Claim, Value, all_hold, decide, error_of_difference
from cwfed.runs.compare import with_algorithm

CLASS_COLOURS = COLOURS[COMMON:]
"""Colours of classes, which differ from those of methods in the same picture."""


def _correlation(a: Any, b: Any) -> float:
    return float(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1])


def _value(number: float | None) -> Cell:
    return Cell(None if number is None else Value(number))


def _cheap(scale: Scale) -> Scale:
    """The paper's own scale, for what takes only seconds there."""
    return "smoke" if scale == "smoke" else "paper"


# --- drawings that need no run


def motivational_example(item: Item, workshop: Workshop) -> Outcome:
    """The example with three clients, which is trained when it is drawn."""
    found = pathways.compute()
    result = Outcome(item, workshop.scale, pictures={item.name: pathways_drawing.draw(found)})
    result.claims = pathways.claims(found)
    return result


def drawing_of_aggregations(item: Item, workshop: Workshop) -> Outcome:
    """The two aggregations with three clients."""
    return Outcome(item, workshop.scale, pictures={item.name: aggregation.draw()})


def data_distributions(item: Item, workshop: Workshop) -> Outcome:
    """Which client holds what, for several degrees of heterogeneity."""
    setups = [Setup(name, _cheap(workshop.scale), workshop.changes) for name in item.settings]
    panels, effective = [], []
    for setup in setups:
        config = setup.config
        dealt = deal(with_settings(config, [f"run.seed={setup.seeds[0]}"]), workshop.data_dir)
        histogram = dealt.histogram()
        panels.append(heatmaps.holdings(histogram, f"alpha = {config.data.alpha:g}", dealt.data.class_names))
        p = histogram / histogram.sum(1, keepdims=True)
        effective.append(float((1 / (p**2).sum(1)).mean()))
    result = Outcome(item, workshop.scale, columns=[panel.title for panel in panels])
    result.rows = [("classes a client has, effectively (1 / sum p²)", [_value(number) for number in effective])]
    result.claims = [
        Claim("a larger alpha spreads a client's data over more classes", effective == sorted(effective))
    ]
    result.pictures = {item.name: heatmaps.heat_maps(heatmaps.in_lines(panels))}
    return result


# --- p~ within the first epoch


class _Watched(algorithms.CwFedAvg):
    """cwFedAvg that remembers p~ before every step."""

    def __init__(self, wdr: float) -> None:
        super().__init__(wdr=wdr)
        object.__setattr__(self, "seen", [])

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        seen: list[Tensor] = self.seen  # type: ignore[attr-defined]
        seen.append(mixing.norm_distribution(output.weight.detach()).clone())
        return super().penalty(params, output, labels, start)


def first_epoch(item: Item, workshop: Workshop) -> Outcome:
    """One client's p~ over the batches of round 1, without and with WDR, and where it ends against p."""
    (name,) = item.settings
    setup = Setup(name, _cheap(workshop.scale), workshop.changes)
    entry = setup.entry(Row(label="", algorithm={"name": "cwfedavg"}))
    config = with_algorithm(setup.config, entry, setup.seeds[0])
    wdr = config.algorithm["wdr"]
    simulation = Simulation(config.but(engine="loop"), workshop.data_dir)
    try:
        counts = np.stack([simulation.federation.class_counts(c) for c in range(simulation.clients)])
        # the client with most samples: its lines are longest
        client = int(np.argmax(counts.sum(1)))
        p = counts[client] / counts[client].sum()
        evolutions = {}
        for label, coefficient in (("without WDR", 0.0), ("with WDR", wdr)):
            algorithm = _Watched(coefficient)
            state = algorithm.init(simulation.fresh, simulation.task)
            last = mixing.norm_distribution(_trained(simulation, algorithm, state, client))
            evolutions[label] = torch.stack([*algorithm.seen, last]).numpy()  # type: ignore[attr-defined]
    finally:
        simulation.close()
    result = Outcome(item, workshop.scale, columns=["correlation with p", "||p - p~||"], digits=3)
    for label, evolution in evolutions.items():
        distance = float(np.linalg.norm(evolution[-1] - p))
        result.rows.append((label, [_value(_correlation(evolution[-1], p)), _value(distance)]))
    plain, regularised = evolutions["without WDR"][-1], evolutions["with WDR"][-1]
    result.claims = [
        Claim("without WDR, p~ correlates with p", _correlation(plain, p) > 0),
        Claim("with WDR, p~ is nearer to p", bool(np.linalg.norm(regularised - p) < np.linalg.norm(plain - p))),
    ]
    result.notes = [
        f"Client {client}, {len(evolution) - 1} batches; p~ is read before each batch and after the last.",
        held_out([config]),
    ]
    result.pictures = {item.name: _draw_first_epoch(evolutions, p, client, simulation.federation.data.class_names)}
    return result


def _trained(simulation: Simulation, algorithm: algorithms.CwFedAvg, state: Any, client: int) -> Tensor:
    """The output layer after a client's visit in round 1."""
    engine = Loop(replace(simulation.engine.job, algorithm=algorithm))
    out = {name: torch.empty(1, *w.shape, dtype=w.dtype) for name, w in simulation.initial.items()}
    engine.visit(1, state, [simulation.visit(client, {})], out)
    engine.close()
    return out[simulation.task.output_weight][0]


def _draw_first_epoch(
    evolutions: dict[str, NDArray[Any]], p: NDArray[Any], client: int, names: Sequence[str]
) -> Figure:
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    *lines, scatter = figure.subplots(1, 3, width_ratios=[1, 1, 1.1])
    top = 1.05 * max(p.max(), *(e.max() for e in evolutions.values()))
    shown = np.argsort(-p)[: max(1, int((p > 0.02).sum()))]  # classes with a share worth a line of its own
    for axes, (label, evolution) in zip(lines, evolutions.items(), strict=True):
        axes.plot(evolution, color="0.75", linewidth=0.6)
        for i, k in enumerate(shown):
            style = STROKES[i // len(CLASS_COLOURS) % 4]
            name = f"class {names[k]}, p = {p[k]:.2f}" if i < 6 and axes is lines[0] else None
            axes.plot(evolution[:, k], style, color=CLASS_COLOURS[i % len(CLASS_COLOURS)], label=name)
        axes.set(title=f"client {client}, {label}", xlabel="batch", ylabel="p~", ylim=(0, top))
        whole_numbers(axes.xaxis)
    without, regularised = looks(["cwfedavg"] * 2)[::-1]
    for (label, evolution), look in zip(evolutions.items(), (without, regularised), strict=True):
        dots = {"color": look.colour, "markerfacecolor": look.face, "markersize": 5, "alpha": 0.8}
        scatter.plot(p, evolution[-1], look.marker, label=f"{label}, after the epoch", **dots)
    scatter.plot([0, top], [0, top], color="0.6", linewidth=0.8)
    scatter.set(title="after the epoch", xlabel="p", ylabel="p~")
    figure.legend(loc="outside right upper", frameon=False, fontsize=7)
    explain(figure, "Grey: the other classes. Right: a marker a class of cwFedAvg's client; on the line, p~ is p.")
    return figure


# --- figures of runs


def _records(item: Item, workshop: Workshop, setting: str) -> dict[str, RunRecord]:
    setup = workshop.setup(setting)
    return {row.label: workshop.records(setup, row)[0] for row in item.rows}


def _portrait(record: RunRecord) -> Portrait:
    if record.portrait is None:
        raise RunError(
            f"{record.path} has no portrait of its models, which heat maps need: a mixture overflowed in its last round"
        )
    return record.portrait


def heat_maps(item: Item, workshop: Workshop) -> Outcome:
    """Data and output-layer norms, and how alike they are."""
    (setting,) = item.settings
    records = _records(item, workshop, setting)
    any_record = next(iter(records.values()))
    result = Outcome(item, workshop.scale, columns=["correlation of norms with p"], digits=3)
    classes: dict[str, Any] = {"column_names": any_record.class_names}
    panels, alike = [], {}
    for name in item.options["panels"]:
        if name == "data":
            panels.append(heatmaps.holdings(any_record.histogram, "data", any_record.class_names))
            continue
        label, what = name.split(":")
        portrait = _portrait(records[label])
        if what == "classes":
            values = np.array(portrait.classes)
            names = {"row_names": classes["column_names"], **classes}
            panels.append(Panel(f"{label}:\nclass models", values, NORM, rows="class model", **names))
            off = values.sum() - np.trace(values)
            ratio = np.trace(values) / len(values) / (off / (values.size - len(values)))
            result.notes.append(f"{label}: a class model's own row is {ratio:.1f} times as long as its other rows.")
            continue
        if what == "difference":
            values = np.array(portrait.trained) - np.array(portrait.received)
            panels.append(Panel(f"{label}:\ntrained - received", values, CHANGE, diverging=True, **classes))
        else:
            values = np.array(getattr(portrait, what))
            panels.append(Panel(f"{label}:\n{what}", values, NORM, **classes))
        alike[name] = _correlation(values, portrait.distribution)
        result.rows.append((name, [_value(alike[name])]))
    whole = {name: value for name, value in alike.items() if not name.endswith("difference")}
    best = max(whole, key=lambda name: whole[name])
    tied = [name for name, value in whole.items() if value == whole[best]]
    result.claims = [
        Claim(
            f"{item.leader}'s output norms are the most similar to the data",
            all(name.split(":")[0] == item.leader for name in tied),  # a tie is not the most similar
            f"most similar: {', '.join(tied)}",
        )
    ]
    lines = heatmaps.in_lines(panels, columns=3 if len(panels) == 6 else 5 if len(panels) == 10 else 4)
    result.pictures = {item.name: heatmaps.heat_maps(lines)}
    return result


def convergence(item: Item, workshop: Workshop) -> Outcome:
    """Training loss over the rounds. A method is faster if its mean loss over the rounds is lower, by more than the noise of the seeds."""
    setups = workshop.setups(item)
    result = Outcome(item, workshop.scale, columns=[setup.title for setup in setups])
    figure = Figure(figsize=(10, 2.7 * -(-len(setups) // 3)), layout="constrained")
    grid = figure.subplots(-(-len(setups) // 3), 3, squeeze=False)
    means: list[list[Value]] = []
    for axes, setup in zip(grid.flat, setups, strict=False):
        methods = [Method(row.label, workshop.records(setup, row)) for row in item.rows]
        group = Group(setup.title, methods)
        figures.draw_curves(axes, group, "training loss")
        axes.set_title(textwrap.fill(setup.title, 30), fontsize=9)
        means.append(
            [spread([float(np.mean([v for _, v in r.points("training loss")])) for r in m.records]) for m in methods]
        )
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    explain(figure, figures.spread_in_words(group))
    labels = [row.label for row in item.rows]
    result.rows = [
        (f"{label}: mean training loss", [Cell(column[i]) for column in means]) for i, label in enumerate(labels)
    ]
    for setup, column, faster in zip(setups, means, item.options["faster"], strict=True):
        there = labels.index(faster)
        others = [value for i, value in enumerate(column) if i != there]
        decisions = [
            decide(other.mean - column[there].mean, error_of_difference(other, column[there])) for other in others
        ]
        detail = ", ".join(f"{label} {value.mean:.3f}" for label, value in zip(labels, column, strict=True))
        words = f"{setup.title}: {faster} converges faster"
        result.claims.append(Claim(words, all_hold(decisions), detail + _by_sign(column[there])))
    result.pictures = {item.name: figure}
    return result


def per_client(item: Item, workshop: Workshop) -> Outcome:
    """Training loss of every client over the rounds it took part in."""
    (setting,) = item.settings
    records = _records(item, workshop, setting)
    losses = {label: _client_losses(record) for label, record in records.items()}
    histogram = next(iter(records.values())).histogram
    p = histogram / histogram.sum(1, keepdims=True)
    effective = 1 / (p**2).sum(1)
    clients = sorted(set.intersection(*(set(found) for found in losses.values())))
    columns, drawn = 5, looks([record.started.algorithm for record in records.values()])
    figure = Figure(figsize=(10, 1.7 * -(-len(clients) // columns)), layout="constrained")
    grid = figure.subplots(-(-len(clients) // columns), columns, squeeze=False, sharex=True)
    lead = []
    for axes, client in zip(grid.flat, clients, strict=False):
        for (label, found), look in zip(losses.items(), drawn, strict=True):
            axes.plot(*zip(*found[client], strict=True), look.stroke, color=look.colour, label=label)
        axes.set_title(f"client {client}: {effective[client]:.1f} classes, n = {histogram[client].sum()}", fontsize=7)
        whole_numbers(axes.xaxis)
        axes.tick_params(labelsize=7, labelbottom=True)  # there may be nothing below
        fedavg, ours = (np.mean([v for _, v in losses[label][client]]) for label in ("FedAvg", "cwFedAvg"))
        lead.append(float((fedavg - ours) / fedavg))
    for axes in grid.flat[len(clients) :]:
        axes.set_visible(False)
    figure.legend(
        *grid.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False, fontsize=8
    )
    figure.supxlabel("round (classes: their effective number, 1 / sum p²; n: samples)", fontsize=8)
    figure.supylabel("training loss", fontsize=8)
    faster = [c for c, value in zip(clients, lead, strict=True) if value > 0]
    slower = [c for c in clients if c not in faster]
    result = Outcome(item, workshop.scale, columns=["clients", "effective classes, mean"])
    for label, members in (("cwFedAvg converges faster", faster), ("FedAvg converges faster", slower)):
        result.rows.append(
            (label, [_value(float(len(members))), _value(float(effective[members].mean()) if members else None)])
        )
    how = _correlation(lead, effective[clients]) if len(clients) > 1 and np.ptp(lead) > 0 else None
    result.claims = [
        Claim("cwFedAvg's lead is larger at clients with fewer effective classes", None if how is None else how < 0,
              "" if how is None else f"correlation of lead and effective classes {how:.2f}"),
    ]  # fmt: skip
    result.pictures = {item.name: figure}
    return result


def _client_losses(record: RunRecord) -> dict[int, list[tuple[int, float]]]:
    found: dict[int, list[tuple[int, float]]] = {}
    for round_ in record.rounds:
        for client, loss in zip(round_.participants, round_.client_loss, strict=True):
            found.setdefault(client, []).append((round_.round, loss))
    return found


def coefficient(item: Item, workshop: Workshop) -> Outcome:
    """Accuracy and regulariser for several coefficients."""
    setups = workshop.setups(item)
    result = Outcome(item, workshop.scale, digits=3)
    result.columns = [f"{setup.title}: {what}" for setup in setups for what in ("accuracy, %", "||p - p~||")]
    figure = Figure(figsize=(4.4 * len(setups), 3.4), layout="constrained")
    table: dict[str, list[Cell]] = {row.label: [] for row in item.rows}
    for axes, setup in zip(np.atleast_1d(figure.subplots(1, len(setups))), setups, strict=True):
        wdrs, accuracies, distances = [], [], []
        for row in item.rows:
            records = workshop.records(setup, row)
            wdrs.append(records[0].config.algorithm["wdr"])
            accuracies.append(accuracy_of(records))
            distances.append(spread([r.points("distance")[-1][1] for r in records]))
            table[row.label] += [Cell(accuracies[-1]), Cell(distances[-1])]
        _draw_coefficient(axes, setup.title, wdrs, accuracies, distances)
        chosen = [row.label for row in item.rows].index("1")
        result.claims += coefficient_claims(setup.title, distances, accuracies, chosen)
    result.notes = [BEST_ROUND]
    result.rows = [(f"{label} times the chosen lambda", cells) for label, cells in table.items()]
    explain(figure, result.averaged.replace("±", "bars: ±"))
    result.pictures = {item.name: figure}
    return result


def coefficient_claims(
    title: str, distances: Sequence[Value], accuracies: Sequence[Value], chosen: int
) -> list[Claim]:
    """The claims: distances must fall from each coefficient to the next, except where the noise of the seeds leaves it open."""
    steps = [decide(a.mean - b.mean, error_of_difference(a, b)) for a, b in pairwise(distances)]
    best = max(accuracies, key=lambda value: value.mean)
    below = best.mean - accuracies[chosen].mean
    near = "kept" if best is accuracies[chosen] else decide(2 - below, error_of_difference(best, accuracies[chosen]))
    return [
        Claim(
            f"{title}: a larger lambda brings p~ nearer to p",
            all_hold(steps),
            f"||p - p~|| {', '.join(f'{value.mean:.4f}' for value in distances)}{_by_sign(distances[0])}",
        ),
        Claim(
            f"{title}: the chosen lambda is within 2 points of the best",
            all_hold([near]),
            f"{below:.1f} points below the best",
        ),
    ]


def _by_sign(value: Value) -> str:
    """What is added to a claim about numbers without a known error."""
    return "" if value.error else "; one seed, so by the sign alone"


def _draw_coefficient(
    axes: Axes, title: str, wdrs: list[float], accuracies: list[Value], distances: list[Value]
) -> None:
    positions = range(len(wdrs))
    names = [f"{2 * wdr:g}" for wdr in wdrs]  # the paper's lambda is twice the equation's coefficient
    (look,) = looks(["cwfedavg"])
    first = axes.errorbar(positions, *_bars(accuracies), fmt="o-", color=look.colour, capsize=2, label="accuracy")
    axes.set(
        title=title,
        xlabel="lambda (as in the paper)",
        ylabel="accuracy, %",
        xticks=list(positions),
        xticklabels=names,
    )
    other = axes.twinx()
    other.spines["right"].set_visible(True)
    second = other.errorbar(
        positions, *_bars(distances), fmt="s--", color="0.35", capsize=2, label="||p - p~|| (right)"
    )
    other.set(ylabel="||p - p~||", ylim=(0, None))
    axes.legend(handles=[first, second], frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)


def _bars(values: Sequence[Value]) -> tuple[list[float], list[float] | None]:
    """Means, and for several seeds their standard deviations."""
    spreads = [value.std for value in values if value.std is not None]
    return [value.mean for value in values], spreads if len(spreads) == len(values) else None


KINDS: dict[str, Callable[[Item, Workshop], Outcome]] = {
    "pathways": motivational_example,
    "aggregation": drawing_of_aggregations,
    "distributions": data_distributions,
    "evolution": first_epoch,
    "heatmaps": heat_maps,
    "convergence": convergence,
    "per_client": per_client,
    "phases": phases,
    "lambda": coefficient,
}
