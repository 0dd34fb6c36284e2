"""Many runs of many people: which of their numbers can be compared, and in what order they come.

Numbers can be compared where the data (by their hash), the split of each seed (by its hash) and the protocol are the same: the
network, how many rounds and local epochs, who takes part, what is measured. How a method was tuned is its author's business.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from cwfed.core.errors import CwfedError
from cwfed.report import page, tables
from cwfed.report.finished import LeftOut, RunRecord, folders, read_run, why_left_out
from cwfed.report.fitting import FittedTable
from cwfed.report.groups import Group, Method, describe, labels

EXPLANATION = (
    "Tables are of numbers that can be compared: the same data and the same split of every seed (by their hashes), the same protocol "
    "(network, rounds, local epochs, participation, adversaries, privacy, what is measured). Numbers of different tables cannot. Order: test accuracy in the round picked on held-out data (in the last round where none are held out), in the phase that is "
    "reported for the method (*). seal: every file of the run says its checksum and matches it, and the numbers were computed anew from its "
    "events. That finds damage, not forgery: to be sure of a number, run its config again."
)
HEADER = ("method", "from", "seeds", "picked", "received", "trained", "last", "worst 10 %", "traffic", "seal")
_SECTIONS = ("model", "adversary", "privacy")
_KEYS = {
    "data.samples", "data.newcomers", "train.rounds", "train.epochs", "train.participation", "train.client_dropout",
    "train.precision", "run.evaluate_every", "run.evaluate_clients", "run.pick",
}  # fmt: skip
"""The protocol, with these sections. How data are dealt out is not among it: the hash of the split says more."""


@dataclass(frozen=True)
class Entry:
    """A line of a leaderboard: one method of one person, a run for each seed."""

    origin: str
    method: Method

    @property
    def value(self) -> float:
        """What it is ranked by."""
        picks = self.method.row["accuracy"][self.method.row["reported"]["phase"]]
        found: float = picks["last" if picks["validated"]["mean"] is None else "validated"]["mean"]
        return found

    def cells(self) -> tuple[str, ...]:
        """As text."""
        row = self.method.row
        phase, accuracy = row["reported"]["phase"], row["accuracy"]
        picked = accuracy[phase]["validated"]
        return (
            self.method.label,
            self.origin,
            ", ".join(str(record.started.seed) for record in self.method.records),
            tables.percent(accuracy[phase]["last"] if picked["mean"] is None else picked),
            *(tables.percent(accuracy[p]["best"]) + ("*" if p == phase else "") for p in ("received", "trained")),
            tables.percent(accuracy[phase]["last"]),
            tables.percent(row["worst_decile"]),
            tables.size(row["traffic"]["mean"]),
            "yes" if all(record.sealed for record in self.method.records) else "no (early version)",
        )


@dataclass(frozen=True)
class Board:
    """What can be compared."""

    title: str
    entries: list[Entry]
    """The best first."""
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "comparable": self.title,
            "notes": self.notes,
            "entries": [
                {
                    "origin": entry.origin,
                    "sealed": all(record.sealed for record in entry.method.records),
                    "seeds": [record.started.seed for record in entry.method.records],
                    "runs": [str(record.path) for record in entry.method.records],
                    "picked": entry.value,
                }
                | entry.method.row
                for entry in self.entries
            ],
        }


def protocol(record: RunRecord) -> dict[str, Any]:
    """The settings that must be the same."""
    found = {
        key: value for key, value in record.settings().items() if key in _KEYS or key.partition(".")[0] in _SECTIONS
    }
    return found | {"model.name": record.manifest["model"]["name"]}  # not "auto"


def split(record: RunRecord) -> str:
    """The hash of who holds what; a run of a real federation, whose server does not know it, is like no other."""
    known = record.manifest["split"]
    return str(known.get("dealt") or known["digest"] or record.path)


def collect(roots: Sequence[Path]) -> tuple[list[tuple[str, RunRecord]], list[LeftOut]]:
    """All whole runs below these folders, each with where it is from: the first folder on the way to it."""
    found: list[tuple[str, RunRecord]] = []
    left_out: list[LeftOut] = []
    known: dict[str, Path] = {}
    for root in roots:
        for path in folders([root]):
            try:
                record = read_run(path)
            except CwfedError as error:
                left_out.append(LeftOut(path, why_left_out(path, error)))
                continue
            way = path.relative_to(root).parts if path != root else (path.name,)
            origin = way[0] if len(way) > 1 else (root.name or str(root))
            key = json.dumps([origin, _same_run(record)])
            if key in known:
                left_out.append(LeftOut(path, f"the same experiment and seed as {known[key]}"))
                continue
            known[key] = path
            found.append((origin, record))
    return found, left_out


def _same_run(record: RunRecord) -> str:
    """Equal for runs that should have the same bits."""
    return json.dumps([record.settings(), record.started.seed, record.manifest["data"]["digest"]], sort_keys=True)


def boards(found: Sequence[tuple[str, RunRecord]]) -> list[Board]:
    """Runs by what they can be compared with."""
    rows: dict[str, list[tuple[str, RunRecord]]] = {}
    for origin, record in found:
        same = [origin, record.settings(), record.manifest["data"]["digest"]]
        rows.setdefault(json.dumps(same, sort_keys=True), []).append((origin, record))
    tables_: dict[str, list[tuple[str, list[RunRecord]]]] = {}
    for row in rows.values():
        records = sorted((record for _, record in row), key=lambda record: record.started.seed)
        first = records[0]
        splits = sorted({split(record) for record in records})
        same = [first.manifest["data"]["digest"], splits, protocol(first)]
        tables_.setdefault(json.dumps(same, sort_keys=True), []).append((row[0][0], records))
    members = sorted(tables_.values(), key=lambda rows: -len(rows))
    titles = _titles([[record for _, records in rows for record in records] for rows in members])
    made: dict[str, tuple[str, RunRecord]] = {}
    return [_board(title, rows, made) for title, rows in zip(titles, members, strict=True)]


def _board(title: str, rows: Sequence[tuple[str, list[RunRecord]]], made: dict[str, tuple[str, RunRecord]]) -> Board:
    names = labels([records for _, records in rows])
    entries = [Entry(origin, Method(name, records)) for (origin, records), name in zip(rows, names, strict=True)]
    ranked = sorted(entries, key=lambda entry: -entry.value)
    notes = [*_differing(ranked), *_again(ranked, made), *tables.footnotes([entry.method.row for entry in ranked])]
    return Board(title, ranked, notes)


def _differing(entries: Sequence[Entry]) -> list[str]:
    """Settings that are no part of the protocol, such as the learning rate, and are not the same for all."""
    settings = [entry.method.first.settings() for entry in entries]
    keys = sorted({key for one in settings for key in one if not key.startswith("algorithm.")})
    notes = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for entry, one in zip(entries, settings, strict=True):
            by_value.setdefault(str(one.get(key)), []).append(entry.method.label)
        if len(by_value) > 1:
            told = "; ".join(f"{value}: {', '.join(dict.fromkeys(names))}" for value, names in by_value.items())
            notes.append(f"{key} is not the same for all: {told}")
    return notes


def _again(entries: Sequence[Entry], made: dict[str, tuple[str, RunRecord]]) -> list[str]:
    """Where two people made the same run: whether it came out the same.

    `made`: by whom a run was made first, in this table or in one above it (somebody with other seeds beside it stands in another table).
    """
    notes = []
    for entry in entries:
        for record in entry.method.records:
            key = _same_run(record)
            if key not in made:
                made[key] = entry.origin, record
                continue
            origin, before = made[key]
            words = f"{record.started.algorithm}, seed {record.started.seed}: {entry.origin} made the same run as {origin}"
            if record.summary.accuracy == before.summary.accuracy:
                notes.append(f"{words}, with the same numbers")
            else:
                one, other = record.summary.reported.accuracy, before.summary.reported.accuracy
                notes.append(
                    f"{words}, with other numbers ({one:.2%} against {other:.2%}): another kind of CPU, another version, or one of "
                    "them is wrong"
                )
    return notes


def _titles(members: Sequence[Sequence[RunRecord]]) -> list[str]:
    """The experiment in a few words, and in what it differs from those of the other tables."""
    firsts = [records[0] for records in members]
    facts = [protocol(first) for first in firsts]
    differing = [key for key in facts[0] if any(other.get(key) != facts[0][key] for other in facts)]
    data = {first.manifest["data"]["digest"] for first in firsts}
    titles = []
    for records, first, settings in zip(members, firsts, facts, strict=True):
        told = [f"{key}={settings.get(key)}" for key in differing if key != "train.rounds"]  # every title has them
        told += [f"data {first.manifest['data']['digest'][:8]}"] if len(data) > 1 else []
        seeds = sorted({record.started.seed for record in records})
        which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        told += [f"split {split(first)[:8]}, {which}"] if len(members) > 1 else []
        titles.append("; ".join([f"{describe(first)}, {tables.rounds(first.config.train.rounds)}", *told]))
    return titles


# --- for people


def terminal(board: Board) -> FittedTable:
    """At a terminal."""
    notes = "\n".join(f"note: {note}" for note in board.notes)
    table = FittedTable(HEADER, words=("from", "seal"), names=("from",), title=board.title, caption=notes)
    for entry in board.entries:
        table.add_row(*entry.cells())
    return table


def markdown(found: Sequence[Board]) -> str:
    """For a document."""
    parts = [EXPLANATION]
    for board in found:
        table = tables.markdown_table(HEADER, [entry.cells() for entry in board.entries])
        parts.append(f"## {board.title}\n\n{table}" + "".join(f"\n- {note}" for note in board.notes))
    return "\n\n".join(parts) + "\n"


def write_page(path: Path, title: str, found: Sequence[Board], left_out: Sequence[LeftOut]) -> None:
    """The tables, and below them all that a report has."""
    groups = [
        Group(
            board.title,
            [Method(f"{entry.method.label}, {entry.origin}", entry.method.records) for entry in board.entries],
            is_ranked_by_test=False,
        )
        for board in found
    ]
    page.write(
        path,
        title,
        groups,
        left_out,
        opening="".join(map(_section, found)) + f"<p class=quiet>{escape(EXPLANATION)}</p>",
        apart="Each table in detail:",
    )


def _section(board: Board) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in HEADER)
    best = "<tr class=best>" if len(board.entries) > 1 else "<tr>"
    body = "".join(
        ("<tr>" if i else best) + "".join(f"<td>{escape(text)}</td>" for text in entry.cells()) + "</tr>"
        for i, entry in enumerate(board.entries)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in board.notes)
    return (
        f"<section class=leaderboard><h2>{escape(board.title)}</h2><div class=scroll><table><thead><tr>{head}</tr>"
        f"</thead><tbody>{body}</tbody></table></div>{f'<ul>{notes}</ul>' if notes else ''}</section>"
    )
