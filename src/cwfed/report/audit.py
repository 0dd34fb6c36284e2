"""The privacy audit of finished runs: how well the server could rebuild its clients' class counts. It reads events only."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cwfed.core.events import Round
from cwfed.report.drawing import explain, height_for, legend_text, line_of, whole_numbers
from cwfed.report.finished import LeftOut, RunRecord
from cwfed.report.groups import Group, Method, methods
from cwfed.report.style import STROKES, Look
from cwfed.report.tables import averaged, markdown_table

ESTIMATES = {
    "norms": "row norms of the uploaded output layer, cwFedAvg's p~",
    "change": "change of the output bias from what was sent",
    "lengths": "lengths of the output rows' changes from what was sent",
    "sent": "class counts that the algorithm sends",
}
HEADER = ("run", "accuracy", "estimate", "round", "error", "samples", "rank", "AUC", "found", "mistaken")
EXPLANATION = (
    "What a server can say about its clients' classes. error: share of a client's samples that the estimate puts in a wrong "
    "class, |p - p~| / 2 (1/K for every class would have the error in brackets); samples: the same in samples, as n_i is known. "
    "rank: Spearman's correlation of p~ with p. AUC: chance that a class the client lacks has a smaller p~ than one it has. "
    "found, mistaken: absent and present classes that the rule p~ < 1/2K calls absent. Means over the participants of the round; "
    "accuracy: of the reported phase, best round. "
    + "; ".join(f"{name}: {what}" for name, what in ESTIMATES.items())
    + "."
)


@dataclass(frozen=True)
class Line:
    """One estimate in one round of a run: means over the participants."""

    run: str
    folder: str
    accuracy: float
    estimate: str
    round: int
    error: float
    guess: float | None
    """The error of the guess 1/K for every class, for comparison; None if the run has no portrait."""
    samples: float
    rank: float | None
    auc: float | None
    found: float | None
    mistaken: float | None

    def cells(self) -> tuple[str, ...]:
        """The line as texts, for a table."""
        guess = "" if self.guess is None else f" ({self.guess:.2f})"
        return (
            self.run,
            f"{self.accuracy:.2%}",
            self.estimate,
            str(self.round),
            f"{self.error:.3f}{guess}",
            f"{self.samples:.0f}",
            *("–" if value is None else f"{value:.2f}" for value in (self.rank, self.auc, self.found, self.mistaken)),
        )


def audit(records: Sequence[RunRecord]) -> tuple[list[Line], list[LeftOut]]:
    """All estimates in all rounds of these runs; and the runs that cannot be audited, with the reason."""
    lines: list[Line] = []
    left_out: list[LeftOut] = []
    for method in methods(records):
        for record in method.records:
            if any(r.leaks for r in record.rounds):
                lines += _lines(_label(method, record), record)
            else:
                left_out.append(LeftOut(record.path, _why_not(record)))
    return lines, left_out


def _label(method: Method, record: RunRecord) -> str:
    return method.label if len(method.records) == 1 else f"{method.label}, seed {record.started.seed}"


def _why_not(record: RunRecord) -> str:
    if not any(r.up for r in record.rounds):
        return f"{record.started.algorithm} uploads nothing, so there is nothing to audit"
    if "federation" in record.manifest:
        return (
            "only its nodes know the class counts that an estimate would be compared with: audit a simulation of it"
        )
    if not any(r.participants for r in record.rounds):
        return "no update was aggregated in any of its rounds"
    return (
        f"the uploads of {record.started.algorithm} hold neither the output layer nor class counts (or the run is of a "
        "version that did not measure them: then run it again)"
    )


def _lines(label: str, record: RunRecord) -> list[Line]:
    guess = _guess(record)
    fixed = (label, str(record.path), record.summary.reported.accuracy)
    return [line for r in record.rounds for line in _in_round(r, fixed, guess)]


def _in_round(round_: Round, fixed: tuple[str, str, float], guess: float | None) -> list[Line]:
    return [
        Line(
            *fixed,
            estimate,
            round_.round,
            float(np.mean(leak.error)),
            guess,
            leak.samples,
            _mean(leak.rank),
            _mean(leak.auc),
            leak.found,
            leak.mistaken,
        )
        for estimate, leak in round_.leaks.items()
    ]


def _guess(record: RunRecord) -> float | None:
    if record.portrait is None:
        return None
    p = np.array(record.portrait.distribution)
    return float(np.abs(p - 1 / p.shape[1]).sum(1).mean() / 2)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def some_rounds(lines: Sequence[Line]) -> list[Line]:
    """The first, the middle and the last round of each run and estimate, for a table."""
    shown = []
    for same in _series(lines).values():
        places = dict.fromkeys((0, (len(same) - 1) // 2, len(same) - 1))
        shown += [same[place] for place in places]
    return shown


def markdown(lines: Sequence[Line]) -> str:
    """A table for a document."""
    return markdown_table(HEADER, [line.cells() for line in lines]) + f"\n{EXPLANATION}\n"


def as_csv(lines: Sequence[Line]) -> str:
    """All rounds, plain numbers, for a spreadsheet."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in dataclasses.fields(Line)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(dataclasses.asdict, lines))
    return text.getvalue()


PANELS = {
    "error": "error of the estimated class counts\n(share of samples in a wrong class)",
    "rank": "rank correlation with the truth",
    "auc": "telling absent classes from present ones\n(AUC; 0.5 is a coin)",
}


def picture(records: Sequence[RunRecord]) -> Figure:
    """Error, rank correlation and separation over the rounds: one colour per method, as in every picture, and one stroke per estimate."""
    group = Group("", methods(records))
    found = [
        (method.label, look, [_lines(method.label, record) for record in method.records])
        for method, look in zip(group.methods, group.looks, strict=True)
        if any(r.leaks for record in method.records for r in record.rounds)
    ]
    every = [line for _, _, runs in found for run in runs for line in run]
    known = dict.fromkeys([*ESTIMATES, *(line.estimate for line in every)])  # other versions may have others
    strokes: dict[str, Any] = {name: STROKES[i % len(STROKES)] for i, name in enumerate(known)}
    estimates = [name for name in known if any(line.estimate == name for line in every)]
    figure = Figure(
        figsize=(13, height_for([*(label for label, _, _ in found), *estimates, "", ""])), layout="constrained"
    )
    grid = figure.subplots(1, len(PANELS))
    for axes, (key, title) in zip(grid, PANELS.items(), strict=True):
        for _, look, runs in found:
            for name in estimates:
                _draw(
                    axes, [[line for line in run if line.estimate == name] for run in runs], key, look, strokes[name]
                )
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("round")
        whole_numbers(axes.xaxis)
        axes.grid(alpha=0.3)
    for guess in {line.guess for line in every if line.guess is not None}:
        grid[0].axhline(guess, color="0.5", linewidth=0.8)
    grid[0].set_ylim(bottom=0)
    handles = [
        Line2D([], [], label=legend_text(label), **line_of(look) | {"linestyle": ""}) for label, look, _ in found
    ]
    handles += [Line2D([], [], color="0.3", linestyle=strokes[name], label=name) for name in estimates]
    handles.append(Line2D([], [], color="0.5", linewidth=0.8, label="1/K for every class"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    rows = [method.row for method in group.methods]
    told = "; ".join(f"{name}: {ESTIMATES[name]}" for name in estimates if name in ESTIMATES)
    explain(figure, f"{told[:1].upper()}{told[1:]}. Means over a round's participants.", averaged(rows, "band: ±"))
    return figure


def _draw(axes: Axes, runs: Sequence[Sequence[Line]], key: str, look: Look, stroke: str) -> None:
    """One estimate under one method: the mean over its runs, and a band of one standard deviation."""
    rounds = sorted(set.intersection(*({line.round for line in run} for run in runs)))
    if not rounds:
        return
    by_round = [{line.round: getattr(line, key) for line in run} for run in runs]
    values = np.array([[np.nan if row[r] is None else row[r] for r in rounds] for row in by_round], dtype=float)
    axes.plot(rounds, values.mean(0), **line_of(look, len(rounds)) | {"linestyle": stroke})
    if len(runs) > 1:
        std = values.std(0, ddof=1)
        axes.fill_between(
            rounds, values.mean(0) - std, values.mean(0) + std, color=look.colour, alpha=0.15, linewidth=0
        )


def _series(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line.run, line.estimate), []).append(line)
    return found
