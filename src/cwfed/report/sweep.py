"""A sweep as a table and a page, in the order of held-out data, which alone decide."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from cwfed.core import files
from cwfed.core.metrics import words
from cwfed.report import page, tables
from cwfed.report.finished import LeftOut, read_run
from cwfed.report.fitting import FittedTable
from cwfed.report.groups import Group, Method, describe
from cwfed.runs.sweep import Sweep, Tried

SHOWN = 12
"""The most settings with curves on the page; the table has all."""


def decided(sweep: Sweep) -> str:
    """How the best was picked."""
    seeds = f"the mean over {len(sweep.seeds)} seeds" if len(sweep.seeds) > 1 else "of one seed"
    return (
        f"validation: {words(sweep.pick)} on held-out training data, {seeds}, in the round that it picks, in the phase that is "
        "reported for the method. It alone decides. test: accuracy on test data in that round, for the reader: test "
        "accuracy never decides."
    )


def header(sweep: Sweep) -> tuple[str, ...]:
    """The columns."""
    return ("setting", "validation", "test", "phase", "time of a run")


def cells(sweep: Sweep, tried: Tried) -> tuple[str, ...]:
    """One setting as text."""
    row = tried.row
    if row is None:
        return (tried.candidate.label, "–", "–", "–", "–")
    phase = row["reported"]["phase"]
    return (
        tables.label(row),
        tables.spread_of(sweep.pick, row["validation"]),
        tables.percent(row["accuracy"][phase]["validated"]),
        phase,
        tables.duration(row["seconds"]["mean"]),
    )


def notes(sweep: Sweep) -> list[str]:
    """What a reader should know."""
    return [f"{labels}: no result, {why}" for labels, why in _given_up(sweep)] + tables.footnotes(
        [one.row for one in sweep.tried if one.row]
    )


def _given_up(sweep: Sweep) -> list[tuple[str, str]]:
    """The settings without a result, grouped by reason."""
    whose: dict[str, list[str]] = {}
    for one in sweep.tried:
        if one.row is None:
            whose.setdefault(one.why_not, []).append(one.candidate.label)
    return [("; ".join(labels), why) for why, labels in whose.items()]


def terminal(sweep: Sweep, title: str) -> FittedTable:
    """For people at a terminal."""
    caption = "\n".join([decided(sweep), *(f"note: {note}" for note in notes(sweep))])
    table = FittedTable(header(sweep), words=("phase",), title=title, caption=caption)
    for one in sweep.tried:
        table.add_row(*cells(sweep, one))
    return table


def markdown(sweep: Sweep) -> str:
    """For a document."""
    table = tables.markdown_table(header(sweep), [cells(sweep, one) for one in sweep.tried])
    return table + "".join(f"\n{text}\n" for text in (decided(sweep), *notes(sweep)))


def as_dict(sweep: Sweep) -> dict[str, Any]:
    """For programs."""
    return {
        "picked_by": f"{sweep.pick} on held-out training data",
        "seeds": sweep.seeds,
        "best": dict(sweep.best.candidate.values),
        "tried": [
            {"values": dict(one.candidate.values), "given_up": one.why_not} | (one.row or {}) for one in sweep.tried
        ],
    }


def write(sweep: Sweep, folder: Path) -> str:
    """Write sweep.json, sweep.md, best.toml and report.html; returns the experiment in a few words."""
    methods = [
        Method(one.candidate.label, [read_run(run, one.candidate.label) for run in one.row["runs"]])
        for one in sweep.tried[:SHOWN]
        if one.row
    ]
    title = describe(methods[0].first)
    files.write_whole(folder / "sweep.json", json.dumps(as_dict(sweep), indent=1))
    files.write_whole(folder / "sweep.md", markdown(sweep))
    files.write_whole(folder / "best.toml", best_config(sweep))
    of_settings = len({method.first.started.algorithm for method in methods}) == 1
    heading = f"The {len(methods)} best settings" if len(methods) < len(sweep.tried) else "All settings"
    page.write(
        folder / "report.html",
        title,
        [Group(heading, methods, is_ranked_by_test=False, of_settings=of_settings)],
        [LeftOut(Path(labels), why) for labels, why in _given_up(sweep)],
        opening=_section(sweep, len(methods)),
    )
    return title


def best_config(sweep: Sweep) -> str:
    """The best config as a file for `cwfed run`, with comments about how it was found."""
    row = sweep.best.row
    assert row is not None
    lines = (
        f"# {sweep.best.candidate.label}: the best of {len(sweep.tried)} settings, picked by cwfed sweep",
        f"# by {words(sweep.pick)} on held-out training data ({tables.spread_of(sweep.pick, row['validation'])}; seeds {', '.join(map(str, sweep.seeds))})",
    )
    return "\n".join([*lines, "", sweep.config.to_toml()])


def _section(sweep: Sweep, shown: int) -> str:
    head = "".join(f"<th scope=col><button>{escape(name)}</button></th>" for name in header(sweep))
    lines = []
    for number, one in enumerate(sweep.tried):
        label, *texts = cells(sweep, one)
        row = one.row
        values: list[float | None] = [None] * 4
        if row:
            test = row["accuracy"][row["reported"]["phase"]]["validated"]["mean"]
            values = [row["validation"]["mean"], test, None, row["seconds"]["mean"]]
        numbers = "".join(
            f'<td data-value="{"" if value is None else repr(float(value))}">{escape(text)}</td>'
            for text, value in zip(texts, values, strict=True)
        )
        lines.append(f"<tr{' class=best' if number == 0 else ''}><td>{escape(label)}</td>{numbers}</tr>")
    table = f"<table class=sortable><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    below = f" Below: the {shown} best of {len(sweep.tried)} settings by that." if shown < len(sweep.tried) else ""
    return (
        f"<section id=sweep><h2>The sweep</h2><div class=scroll>{table}</div>"
        f"<p class=quiet>{escape(decided(sweep) + below)} The best is in <code>best.toml</code>.</p></section>"
    )
