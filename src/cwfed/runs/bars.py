"""The progress of a run that is started from Python: a bar in a terminal, one in a notebook, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape as html
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cwfed.core.errors import plain
from cwfed.core.events import Event, Note, Round, Started
from cwfed.core.terminal import err, escape

Listener = Callable[[Event], None]
WIDTH = 20
"""Characters of a bar that is text."""


@contextmanager
def watching(wanted: bool | None) -> Iterator[Listener]:
    """A listener that shows progress; by default in a terminal and in a notebook only. With True, elsewhere too: a line per evaluated round."""
    if wanted is False:
        yield lambda event: None
    elif is_notebook():
        yield _InNotebook()
    elif err.is_terminal:
        with _in_terminal() as listener:
            yield listener
    else:
        yield _line if wanted else lambda event: None


def is_notebook() -> bool:
    """Whether this process is a kernel of Jupyter; IPython in a terminal is not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def accuracies(event: Round) -> str:
    """The accuracies of a round in words; "" if it was not evaluated."""
    found = [(phase, getattr(event, phase)) for phase in ("received", "trained")]
    return ", ".join(f"{phase} {result.accuracy:.1%}" for phase, result in found if result)


@contextmanager
def _in_terminal() -> Iterator[Listener]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=WIDTH),
        MofNCompleteColumn(),
        TextColumn("{task.fields[reached]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as bars:
        task = bars.add_task("run", total=None, reached="")

        def listener(event: Event) -> None:
            if isinstance(event, Started):
                bars.update(task, total=event.rounds, description=escape(f"{event.algorithm} on {event.dataset}"))
            elif isinstance(event, Round):
                bars.update(task, completed=event.round)
                if reached := accuracies(event):
                    bars.update(task, reached=reached)
            elif isinstance(event, Note):
                err.print(f"note: {escape(event.message)}", highlight=False, soft_wrap=True)

        yield listener


class _InNotebook:
    """One output of the cell, replaced in every round. It needs no widgets, and a saved notebook shows the last state."""

    def __init__(self) -> None:
        self._shown = Shown()
        self._handle: Any = None

    def __call__(self, event: Event) -> None:
        from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

        if isinstance(event, Note):
            print(f"note: {event.message}", file=sys.stderr)
            return
        self._shown.tell(event)
        if self._handle is None:
            self._handle = display(self._shown, display_id=True)
        else:
            self._handle.update(self._shown)


class Shown:
    """How far a run is, as text and as HTML."""

    def __init__(self) -> None:
        self.label, self.done, self.total, self.reached = "run", 0, 0, ""

    def tell(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Started):
            self.label, self.total = plain(f"{event.algorithm} on {event.dataset}"), event.rounds
        elif isinstance(event, Round):
            self.done, self.reached = event.round, accuracies(event) or self.reached

    def __repr__(self) -> str:
        full = WIDTH * self.done // max(1, self.total)
        return f"{self.label} [{'#' * full}{'.' * (WIDTH - full)}] round {self.done} of {self.total} {self.reached}".rstrip()

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.done}" max="{max(1, self.total)}"></progress>'
        return f"<div>{html(self.label)} {bar} round {self.done} of {self.total} {html(self.reached)}</div>"


def _line(event: Event) -> None:
    """Print a line for an evaluated round or a note."""
    if isinstance(event, Round) and (reached := accuracies(event)):
        print(f"round {event.round}: {reached}", file=sys.stderr, flush=True)
    elif isinstance(event, Note):
        print(f"note: {event.message}", file=sys.stderr, flush=True)
