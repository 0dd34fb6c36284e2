"""What people see: tables and heat maps in the terminal."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cwfed.core.errors import MOST_NAME, plain
from cwfed.core.terminal import FEW_CLASSES, escape, out
from cwfed.report.fitting import FittedTable

if TYPE_CHECKING:
    from cwfed.runs.summary import Summary


MUCH = 100_000_000
"""Bytes on disk from which on a run says how to keep less."""
KEPT = (("models", "models", True), ("checkpoints", "checkpoints", True), ("pages", "*.html", False))
"""What takes room: its name, the pattern of its files or folders, and whether those are folders."""


def print_table(table: FittedTable) -> None:
    """All of it, on a terminal of any width."""
    out.print(table, crop=False)


def disk_use(folders: Sequence[Path]) -> str:
    """What lies in folders of runs, pages and pictures too, and how to keep less."""
    from cwfed.report.tables import size
    from cwfed.runs.folder import on_disk

    whole = sum(map(on_disk, folders))
    parts = {
        name: sum(
            on_disk(found) for folder in folders for found in folder.rglob(pattern) if found.is_dir() == is_folder
        )
        for name, pattern, is_folder in KEPT
    }
    words = [f"{name} {size(used)}" for name, used in parts.items() if used]
    hints = {"models": "run.save_models=none", "checkpoints": "run.keep_checkpoints=0"}
    less = " and ".join(f"--set {hints[name]}" for name, used in parts.items() if used and name in hints)
    large = f"; less with {less} (docs/sharing.md)" if less and whole > MUCH else ""
    return size(whole) + (f" ({', '.join(words)})" if words else "") + large


def print_summary(summary: Summary, class_names: Sequence[str] = ()) -> None:
    """A run in a table and a few lines."""
    from cwfed.core.metrics import words
    from cwfed.report.tables import duration, rounds, shown, size

    reported, per_client = summary.reported, summary.per_client
    table = FittedTable(
        ("test accuracy", "best on test", "picked on validation", "last round"),
        title=f"{summary.algorithm} on {summary.dataset}, {rounds(summary.rounds)}, seed {summary.seed}",
    )
    for phase, picks in summary["accuracy"].items():
        mark = " (reported)" if phase == reported.phase else ""
        table.add_row(phase + mark, *("–" if a is None else f"{a:.2%}" for a in picks.values()))
    print_table(table)
    if summary.metrics:
        table = FittedTable((f"{reported.phase}, the same rounds", *table.header[1:]))
        for name, picks in summary["metrics"][reported.phase].items():
            table.add_row(words(name), *(shown(name, value) for value in picks.values()))
        print_table(table)
    if reported.metric:
        out.print(f"rounds are picked by {words(reported.metric)}, not by accuracy", highlight=False)
    if summary.per_class:
        _print_worst_classes(summary.per_class.recall, class_names)
    out.print(
        f"clients: mean {per_client.mean:.2%}, std {per_client.std:.2%}, worst tenth {per_client.worst_decile:.2%}; "
        f"traffic {size(summary.traffic.down)} down, {size(summary.traffic.up)} up; "
        f"{duration(summary.seconds['total'])}",
        highlight=False,
    )
    if refused := summary.refused:
        clients = f"{len(refused)} client{'s' * (len(refused) > 1)}"
        skipped = f", {len(summary.skipped)} rounds skipped" if summary.skipped else ""
        out.print(
            f"refused: {sum(refused.values())} updates of {clients}{skipped}; events.jsonl says why", highlight=False
        )
    if joined := summary.newcomers:
        out.print(
            f"newcomers: {joined.histogram:.2%} with a label histogram, {joined.uniform:.2%} without",
            highlight=False,
        )
    for note in summary.notes:
        out.print(f"note: {escape(note)}", highlight=False)


def _print_worst_classes(recalls: list[float | None], names: Sequence[str]) -> None:
    """The classes that the models know least, by the names that the data have for them; summary.json has all."""
    known = sorted((recall, k) for k, recall in enumerate(recalls) if recall is not None)

    def called(k: int) -> str:
        name = plain(names[k], MOST_NAME) if k < len(names) else str(k)
        return f"class {k}" if name == str(k) else escape(name)

    worst = ", ".join(f"{called(k)} {recall:.2%}" for recall, k in known[:3])
    out.print(f"classes: least recall {worst}; best {known[-1][0]:.2%} ({called(known[-1][1])})", highlight=False)


def print_bench(result: dict[str, Any]) -> None:
    """The benchmark as a table."""
    machine = result["machine"]
    numbers = ("reference", "ours", "ratio", "goal", "to loop", "outside", "of peak")
    table = FittedTable(
        ("workload", "engine", "precision", *numbers),
        words=("engine", "precision"),
        names=("engine", "precision"),
        title=f"{machine['cpu']}, {machine['instruction_set']}, {machine['cores']} cores, torch {machine['torch']}",
    )
    for line in result["workloads"]:
        if line["ratio"] is None:
            table.add_row(line["title"], "–", line["precision"], *["–"] * len(numbers))
            continue
        mark = "met" if line["met"] else "floor met" if line["floor_met"] else "not met"
        loop = line["loop_seconds"]
        table.add_row(
            line["title"],
            line["engine"],
            line["precision"],
            f"{line['reference_seconds']:.3g} s",
            f"{line['seconds']:.3g} s",
            f"{line['ratio']:.1f} x",
            f"{line['goal']:g} x, {mark}",
            f"{loop / line['seconds']:.1f} x" if loop else "–",
            f"{line['outside']:.1%}" if "outside" in line else "–",
            f"{line['roofline']['share']:.0%}" if "roofline" in line else "–",
        )
    print_table(table)
    for line in result["workloads"]:
        if line["note"]:
            out.print(f"{escape(line['name'])}: {escape(line['note'])}", highlight=False)
        if "extra_memory_in_stacks" in line:
            share = line["extra_memory_in_stacks"]
            out.print(f"{line['name']}: extra memory {share:.2f} x the stack of models", highlight=False)


def print_against(result: dict[str, Any]) -> None:
    """cwfed beside PFLlib as a table."""
    from cwfed.report.tables import size

    machine, versions = result["machine"], result["versions"]
    table = FittedTable(
        (
            "method",
            "measured",
            "PFLlib",
            "cwfed",
            "ratio",
            "PFLlib memory",
            "cwfed memory",
            "PFLlib accuracy",
            "cwfed accuracy",
        ),
        words=("measured",),
        title=f"{machine['cpu']}, {machine['instruction_set']}, {machine['cores']} cores; seconds are of a round",
    )
    for line in result["methods"]:
        sides = (line["theirs"], line["ours"])
        table.add_row(
            line["name"],
            line["phase"],
            *(f"{side['seconds']:.3g} s" for side in sides),
            f"{line['ratio']:.1f} x",
            *(size(side["peak_memory_bytes"]) for side in sides),
            *(f"{side['accuracy']:.2%}" for side in sides),
        )
    print_table(table)
    out.print(
        f"cwfed {versions['cwfed']} with torch {versions['torch']}; PFLlib at commit {escape(versions['pfllib'])} with torch "
        f"{escape(versions['pfllib_torch'])}",
        highlight=False,
    )


def print_heat_map(
    histogram: list[list[int]],
    classes: tuple[str, ...],
    name: str,
    clients: Sequence[str],
    shifts: Sequence[str] = (),
) -> None:
    """Numbers on shades of blue; of more classes than a screen has columns, what is most at each client."""
    if len(classes) > FEW_CLASSES:
        print_table(_largest_classes(histogram, classes, name, clients, shifts))
        return
    top = max(map(max, histogram))
    title = f"{name}: samples of each class at each client"
    table = FittedTable(("client", *classes, "all", *["shift"][: len(shifts)]), title=title, framed=False)
    for i, (client, row) in enumerate(zip(clients, histogram, strict=True)):
        shades = [Text(str(n), _shade(n / top)) if n else Text("·") for n in row]
        table.add_row(escape(client), *shades, str(sum(row)), *shifts[i : i + 1])
    print_table(table)


def _shade(share: float) -> str:
    return f"black on rgb({230 - int(200 * share)},{240 - int(150 * share)},255)"


def _largest_classes(
    histogram: list[list[int]], classes: tuple[str, ...], name: str, clients: Sequence[str], shifts: Sequence[str]
) -> FittedTable:
    """A line a client: how much it holds, of how many classes, and its largest ones."""
    holders = [sum(1 for n in column if n) for column in zip(*histogram, strict=True)]
    table = FittedTable(
        ("client", "samples", "classes", "largest classes", *["shift"][: len(shifts)]),
        words=("largest classes",),
        title=f"{name}: what each client holds, of {len(classes)} classes",
        caption=f"A class is held by {min(holders):,} to {max(holders):,} clients; --json has all numbers, --out draws them.",
    )
    for i, (client, row) in enumerate(zip(clients, histogram, strict=True)):
        held = sorted(((n, k) for k, n in enumerate(row) if n), key=lambda found: (-found[0], found[1]))
        largest = ", ".join(f"{classes[k]} {n}" for n, k in held[:5])
        more = f", {len(held) - 5} more" if len(held) > 5 else ""
        table.add_row(escape(client), str(sum(row)), str(len(held)), largest + more, *shifts[i : i + 1])
    return table


def attribute_docs(cls: type) -> dict[str, str]:
    """The texts under a class's attributes, from its source and that of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):
            continue
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
                found[statement.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found
