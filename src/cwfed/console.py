"""What people see: progress bars, tables and heat maps in the terminal."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from cwfed.errors import Interrupted

if TYPE_CHECKING:
    from cwfed.events import Event

out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
err = Console(stderr=True)


@contextmanager
def progress(
    folder: Path, go_on: str, whole: tuple[str, int] | None = None
) -> Iterator[Callable[[str], Callable[[Event], None]]]:
    """Progress bars with accuracy and time left, on a terminal; silent elsewhere. Notes are always printed.

    `whole` is a name and the number of runs: then a bar over all of them stays on top, and of the runs themselves
    only the last few are shown, so that hundreds fit a screen.
    """
    from cwfed.events import Note, Round, Started

    is_wide = err.width >= 120  # elsewhere names are cut and words are left out, so that bars and numbers stay
    names = Column(max_width=max(12, err.width - (88 if is_wide else 56)), no_wrap=True)
    columns = (
        TextColumn("{task.description}", table_column=names),
        BarColumn(bar_width=20 if is_wide else 8),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
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
                elif isinstance(event, Note):
                    err.print(f"note: {escape(event.message)}", highlight=False, soft_wrap=True)

            return on_event

        try:
            yield watch
            if top is not None:
                bars.update(top, completed=len(shown))
        except KeyboardInterrupt:
            begun = folder.exists() and any(folder.rglob("config.toml"))
            raise Interrupted(f"what is done is in {folder}; {go_on}" if begun else "nothing was done yet") from None


def print_summary(summary: dict[str, Any]) -> None:
    """A run in a table and a few lines."""
    from cwfed.report.tables import duration, size

    reported, per_client, accuracy = summary["reported"], summary["per_client"], summary["accuracy"]
    table = Table(
        title=f"{summary['algorithm']} on {summary['dataset']}, {summary['rounds']} rounds, seed {summary['seed']}"
    )
    for name in ("test accuracy", "best on test", "picked on validation", "last round"):
        table.add_column(name, justify="left" if name == "test accuracy" else "right")
    for phase, picks in accuracy.items():
        mark = " (reported)" if phase == reported["phase"] else ""
        table.add_row(phase + mark, *("–" if a is None else f"{a:.2%}" for a in picks.values()))
    out.print(table)
    out.print(
        f"clients: mean {per_client['mean']:.2%}, std {per_client['std']:.2%}, "
        f"worst tenth {per_client['worst_decile']:.2%}; "
        f"traffic {size(summary['traffic']['down'])} down, {size(summary['traffic']['up'])} up; "
        f"{duration(summary['seconds']['total'])}",
        highlight=False,
    )
    if refused := summary.get("refused"):
        clients = f"{len(refused)} client{'s' * (len(refused) > 1)}"
        skipped = f", {len(summary['skipped'])} rounds skipped" if "skipped" in summary else ""
        out.print(
            f"refused: {sum(refused.values())} updates of {clients}{skipped}; events.jsonl says why", highlight=False
        )
    if joined := summary["newcomers"]:
        out.print(
            f"newcomers: {joined['histogram']:.2%} with a label histogram, {joined['uniform']:.2%} without",
            highlight=False,
        )


def print_bench(result: dict[str, Any]) -> None:
    """The benchmark as a table."""
    machine = result["machine"]
    table = Table(
        title=f"{machine['cpu']}, {machine['instruction_set']}, {machine['cores']} cores, torch {machine['torch']}"
    )
    for name in ("workload", "engine", "precision"):
        table.add_column(name)
    for name in ("reference", "ours", "ratio", "goal", "to loop", "outside", "of peak"):
        table.add_column(name, justify="right")
    for line in result["workloads"]:
        if line["ratio"] is None:
            table.add_row(escape(line["title"]), "–", line["precision"], *["–"] * 7)
            continue
        mark = "met" if line["met"] else "floor met" if line["floor_met"] else "not met"
        loop = line["loop_seconds"]
        table.add_row(
            escape(line["title"]),
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
    out.print(table)
    for line in result["workloads"]:
        if line["note"]:
            out.print(f"{escape(line['name'])}: {escape(line['note'])}", highlight=False)
        if "extra_memory_in_stacks" in line:
            share = line["extra_memory_in_stacks"]
            out.print(f"{line['name']}: extra memory {share:.2f} x the stack of models", highlight=False)


def print_heat_map(histogram: list[list[int]], classes: tuple[str, ...], name: str) -> None:
    """Shades of blue; numbers where there is room for them."""
    top = max(map(max, histogram))
    numbers = len(classes) <= 20
    table = Table(
        title=f"{escape(name)}: samples of each class at each client", box=None, padding=(0, 1) if numbers else 0
    )
    table.add_column("client", justify="right")
    for k in classes if numbers else range(len(classes)):
        table.add_column(escape(str(k)[:8]) if numbers else "", justify="right")
    table.add_column("all", justify="right")
    for client, row in enumerate(histogram):
        shades = [
            f"[on rgb({230 - int(200 * n / top)},{240 - int(150 * n / top)},255) black]{n if numbers else '  '}[/]"
            if n
            else ("·" if numbers else " ")
            for n in row
        ]
        table.add_row(str(client), *shades, str(sum(row)))
    out.print(table)


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
