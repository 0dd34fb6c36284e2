"""A table and curves of methods in both phases, of the paper and beyond it: from the runs that are finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from cwfed.core.types import PHASES, Phase
from cwfed.report import figures
from cwfed.report.drawing import explain
from cwfed.report.finished import PHASE_WORDS
from cwfed.report.groups import Group, Method
from cwfed.reproduce.outcome import Outcome
from cwfed.reproduce.paper_tables import accuracy_of, spread
from cwfed.reproduce.protocol import BEST_ROUND
from cwfed.reproduce.runner import Workshop
from cwfed.reproduce.spec import Item
from cwfed.reproduce.verdict import Cell, Pairs, judge, order_claim, parse

STEP = 10
"""Every so many rounds the curves are given in words."""


def phases(item: Item, workshop: Workshop) -> Outcome:
    """Methods x settings in both phases, best round on test, with curves: of the runs that are finished."""
    result = Outcome(item, workshop.scale)
    columns: list[list[Cell]] = []
    pairs, panels, lacking = Pairs(), [], dict[str, list[str]]()
    for at, setup in enumerate(workshop.setups(item)):
        jobs = {row.label: workshop.jobs_of(setup, row) for row in item.rows}
        there = [row for row in item.rows if all(job.state == "finished" for job in jobs[row.label])]
        lacking[setup.title] = [row.label for row in item.rows if row not in there]
        methods = {row.label: Method(row.label, workshop.records(setup, row)) for row in there}
        known = [row for row in there if row.published]
        judged = judge(
            [row.label for row in known],
            [accuracy_of(methods[row.label].records) for row in known],
            [parse(row.published[at]) for row in known],
            pairs,
            setup.title,
        )
        verdicts = dict(zip([row.label for row in known], judged, strict=True))
        for phase in PHASES:
            result.columns.append(f"{setup.title}, {phase}")
            columns.append([_cell(methods.get(row.label), phase, verdicts.get(row.label)) for row in item.rows])
        if methods:
            published = {row.label: parse(row.published[at]).mean for row in known}
            panels.append((Group(setup.title, list(methods.values())), published))
    rows = [(row.label, [column[i] for column in columns]) for i, row in enumerate(item.rows)]
    result.rows = [(label, cells) for label, cells in rows if any(cell.ours for cell in cells)]
    claim = order_claim(pairs)
    absent = {
        row.label for row in item.rows if row.published and any(row.label in labels for labels in lacking.values())
    }
    if absent and claim.holds:  # what the runs that are there say is not yet the paper's claim
        detail = f"{claim.detail}; without {', '.join(row.label for row in item.rows if row.label in absent)}"
        claim = replace(claim, holds=None, detail=detail)
    result.pairs, result.claims = pairs, [claim]
    if panels:  # seeds may be finished, and no method with all of them
        result.pictures = {item.name: curves(panels)}
    result.notes = [f"{BEST_ROUND} The paper's number stands beside the phase on which the method is reported."]
    result.notes += [by_round(group) for group, _ in panels]
    if missing := [f"{title}: {', '.join(labels)}" for title, labels in lacking.items() if labels]:
        result.notes.append(f"Not run (or not to the end): {'; '.join(missing)}.")
    return result


def _cell(method: Method | None, phase: Phase, judged: Cell | None) -> Cell:
    """A method's result in a phase; in the phase on which it is reported, with the paper's number and a verdict."""
    if method is None:
        return Cell(None)
    if judged is not None and method.phase == phase:
        return judged
    return Cell(spread([100 * (run.summary.accuracy.of(phase).best or 0.0) for run in method.records]))


def by_round(group: Group) -> str:
    """The curves in words: each method's accuracy in its reported phase, every tenth round that was evaluated (or in each, of a short run)."""
    found = [(method, method.series("accuracy")) for method in group.methods]
    evaluated = sorted({int(x) for _, series in found for x in series.x})
    chosen = [number for number in evaluated if number % STEP == 0] or evaluated
    texts = []
    for method, series in found:
        at = dict(zip(map(int, series.x), series.y, strict=True))
        values = ", ".join(f"{at[number]:.1f}" if number in at else "–" for number in chosen)
        texts.append(f"{method.label} ({PHASE_WORDS[method.phase]}) {values}")
    return f"{group.title}, after rounds {', '.join(map(str, chosen))}: {'; '.join(texts)}."


def curves(panels: Sequence[tuple[Group, dict[str, float]]]) -> Figure:
    """Accuracy over the rounds, one row of panels per phase; the paper's final numbers are at the right edge."""
    figure = Figure(figsize=(4.2 * len(panels) + 2.6, 7), layout="constrained")
    grid = figure.subplots(len(PHASES), len(panels), squeeze=False, sharey="col")
    shown: dict[str, Artist] = {}
    for line, phase in zip(grid, PHASES, strict=True):
        for axes, (group, published) in zip(line, panels, strict=True):
            figures.draw_curves(axes, group, phase, labels=[method.label for method in group.methods])
            axes.set_title(f"{group.title}\n{PHASE_WORDS[phase]}", fontsize=9)
            for method, look in zip(group.methods, group.looks, strict=True):
                if method.phase == phase and method.label in published:
                    axes.axhline(published[method.label], 0.94, 1, color=look.colour, linewidth=3)
            shown |= {str(name): mark for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles=list(shown.values()), labels=list(shown), loc="outside right upper", frameon=False, fontsize=8
    )
    explain(
        figure,
        "Thick, at the right edge: the paper's number after 1,000 rounds, in the phase on which it is reported.",
    )
    return figure
