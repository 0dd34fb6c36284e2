"""What people see: progress bars, tables and heat maps in the terminal."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from cwfed.core.errors import Interrupted
from cwfed.core.terminal import FEW_CLASSES, err, escape, out
from cwfed.report.fitting import FittedTable

if TYPE_CHECKING:
    from cwfed.core.events import Event
    from cwfed.runs.summary import Summary


def print_table(table: FittedTable) -> None:
    """All of it, on a terminal of any width."""
    out.print(table, crop=False)


@contextmanager
def progress(
    folder: Path, go_on: str, whole: tuple[str, int] | None = None
) -> Iterator[Callable[[str], Callable[[Event], None]]]:
    """Progress bars with accuracy and time left, on a terminal; silent elsewhere. Notes are always printed.

    `whole` is a name and the number of runs: then a bar over all of them stays on top, and of the runs themselves
    only the last few are shown, so that hundreds fit a screen.
    """
    from cwfed.core.events import Note, Round, Started

    is_wide, is_narrow = (
        err.width >= 120,
        err.width < 72,
    )  # names are cut, words and bars left out, so that numbers stay
    names = Column(max_width=max(12, err.width - (88 if is_wide else 40 if is_narrow else 56)), no_wrap=True)
    columns = (
        TextColumn("{task.description}", table_column=names),
        *([] if is_narrow else [BarColumn(bar_width=20 if is_wide else 8)]),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        *([] if is_narrow else [TimeElapsedColumn()]),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    told: set[str] = set()
    shown: list[TaskID] = []
    with Progress(*columns, console=err, disable=not err.is_terminal) as bars:
        top = bars.add_task(f"[bold]{escape(whole[0])}[/bold], runs", total=whole[1], accuracy="") if whole else None

        def watch(label: str) -> Callable[[Event], None]:
            task = bars.add_task(escape(label), total=None, accuracy="")
            if top is not None:
                bars.update(top, completed=len(shown))
                if len(shown) >= 3:
                    bars.update(shown[-3], visible=False)
            shown.append(task)

            def on_event(event: Event) -> None:
                if isinstance(event, Started):
                    bars.update(task, total=event.rounds)
                    if err.is_terminal and event.engine not in told:
                        told.add(event.engine)
                        err.print(f"engine {escape(event.engine)}", style="dim", highlight=False, soft_wrap=True)
                elif isinstance(event, Round):
                    bars.update(task, completed=event.round)
                    if event.received and event.trained:
                        received, trained = f"{event.received.accuracy:.1%}", f"{event.trained.accuracy:.1%}"
                        words = f"received {received}, trained {trained}" if is_wide else f"{received} {trained}"
                        bars.update(task, accuracy=words)
                elif isinstance(event, Note) and event.message not in told:  # several runs may say the same
                    told.add(event.message)
                    err.print(f"note: {escape(event.message)}", highlight=False, soft_wrap=True)

            return on_event

        try:
            yield watch
            if top is not None:
                bars.update(top, completed=len(shown))
        except KeyboardInterrupt:
            begun = folder.exists() and any(folder.rglob("config.toml"))
            raise Interrupted(f"what is done is in {folder}; {go_on}" if begun else "nothing was done yet") from None


def print_summary(summary: Summary) -> None:
    """A run in a table and a few lines."""
    from cwfed.core.metrics import words
    from cwfed.report.tables import duration, shown, size

    reported, per_client = summary.reported, summary.per_client
    table = FittedTable(
        ("test accuracy", "best on test", "picked on validation", "last round"),
        title=f"{summary.algorithm} on {summary.dataset}, {summary.rounds} rounds, seed {summary.seed}",
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
        _print_worst_classes(summary.per_class.recall)
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


def _print_worst_classes(recalls: list[float | None]) -> None:
    """The classes that the models know least; summary.json has all."""
    known = sorted((recall, k) for k, recall in enumerate(recalls) if recall is not None)
    worst = ", ".join(f"class {k} {recall:.2%}" for recall, k in known[:3])
    out.print(f"classes: least recall {worst}; best {known[-1][0]:.2%} (class {known[-1][1]})", highlight=False)


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
        caption=f"A class is held by {min(holders)} to {max(holders)} clients; --json has all numbers, --out draws them.",
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
