"""Progress of runs: bars on a terminal, elsewhere a line now and then; and a log file for those who want one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

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

from cwfed.core.errors import CwfedError, Interrupted, plain
from cwfed.core.terminal import err, escape

if TYPE_CHECKING:
    from cwfed.core.events import Event, Round

EVERY = 60.0
"""Seconds between two lines where there is no terminal."""


class Watcher(Protocol):
    """Somebody who shows how runs get on."""

    def begin(self, label: str) -> Callable[[Event], None]:
        """A run begins: whom to tell its events."""

    def done(self, label: str) -> None:
        """It is over, or was there already."""


class Watch:
    """All watchers: `watch(label)` begins a run, `watch.done(label)` ends it."""

    def __init__(self, watchers: list[Watcher]) -> None:
        self._watchers, self._running = watchers, list[str]()

    def __call__(self, label: str) -> Callable[[Event], None]:
        """Whom to tell the events of a run that begins."""
        self._running.append(label)
        listeners = [watcher.begin(label) for watcher in self._watchers]

        def on_event(event: Event) -> None:
            for listener in listeners:
                listener(event)

        return on_event

    def done(self, label: str) -> None:
        """A run is over, or was there already."""
        self._running.remove(label)
        for watcher in self._watchers:
            watcher.done(label)

    def all_done(self) -> None:
        """So are those that nobody said it of."""
        for label in list(self._running):
            self.done(label)


@contextmanager
def progress(
    folder: Path,
    go_on: str,
    whole: tuple[str, int] | None = None,
    *,
    quiet: bool = False,
    log: Path | None = None,
) -> Iterator[Watch]:
    """How runs get on, for people: on stderr, unless `quiet`, and in the file `log`.

    `whole` is a name and the number of runs: then a bar over all of them stays on top, and of the runs themselves
    only the last few are shown, so that hundreds fit a screen.
    """
    with ExitStack() as open_:
        watchers: list[Watcher] = []
        log_file = _Log(open_.enter_context(_opened(log))) if log else None
        if log_file:
            watchers.append(log_file)
        if not quiet:
            watchers += [_Bars(open_, whole) if err.is_terminal else _Lines(whole), _Notes()]
        try:
            yield (watch := Watch(watchers))
            watch.all_done()
        except KeyboardInterrupt:
            begun = folder.exists() and any(folder.rglob("config.toml"))
            interrupt = Interrupted(f"what is done is in {folder}; {go_on}" if begun else "nothing was done yet")
            if log_file:
                log_file.write(f"interrupted: {interrupt}")
            raise interrupt from None
        except CwfedError as error:
            if log_file:
                log_file.write(f"error: {error}")
            raise


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The log, to be added to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8", errors="replace", buffering=1)  # a line is there when it is written
    except OSError as error:
        raise CwfedError(f"the log {path} cannot be written: {error.strerror}") from None
    with file:
        yield file


def _results(event: Round, total: int | None) -> str:
    """An evaluated round in a line."""
    assert event.received is not None
    assert event.trained is not None
    of = f" of {total}" if total else ""
    return f"round {event.round}{of}, received {event.received.accuracy:.1%}, trained {event.trained.accuracy:.1%}"


class _Bars:
    """A bar for each run, with accuracy and time left."""

    def __init__(self, open_: ExitStack, whole: tuple[str, int] | None) -> None:
        self._is_wide, is_narrow = (
            err.width >= 120,
            err.width < 72,
        )  # names are cut, words and bars left out, so that numbers stay
        names = Column(
            max_width=max(12, err.width - (88 if self._is_wide else 40 if is_narrow else 56)), no_wrap=True
        )
        columns = (
            TextColumn("{task.description}", table_column=names),
            *([] if is_narrow else [BarColumn(bar_width=20 if self._is_wide else 8)]),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            *([] if is_narrow else [TimeElapsedColumn()]),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bars = open_.enter_context(Progress(*columns, console=err))
        self._top: TaskID | None = None
        if whole:
            self._top = self._bars.add_task(f"[bold]{escape(whole[0])}[/bold], runs", total=whole[1], accuracy="")
        self._running: dict[str, TaskID] = {}
        self._over: list[TaskID] = []
        self._engines: set[str] = set()

    def begin(self, label: str) -> Callable[[Event], None]:
        from cwfed.core.events import Round, Started

        task = self._running[label] = self._bars.add_task(escape(label), total=None, accuracy="")

        def on_event(event: Event) -> None:
            if isinstance(event, Started):
                self._bars.update(task, total=event.rounds)
                if event.engine not in self._engines:
                    self._engines.add(event.engine)
                    err.print(f"engine {escape(event.engine)}", style="dim", highlight=False, soft_wrap=True)
            elif isinstance(event, Round):
                self._bars.update(task, completed=event.round)
                if event.received and event.trained:
                    received, trained = f"{event.received.accuracy:.1%}", f"{event.trained.accuracy:.1%}"
                    words = f"received {received}, trained {trained}" if self._is_wide else f"{received} {trained}"
                    self._bars.update(task, accuracy=words)

        return on_event

    def done(self, label: str) -> None:
        task = self._running.pop(label)
        self._bars.stop_task(task)
        if self._top is None:
            return
        self._bars.update(self._top, advance=1)
        self._over.append(task)
        for old in self._over[:-2]:
            self._bars.update(old, visible=False)


class _Lines:
    """Without a terminal (SLURM, CI, nohup): a line per evaluation, at most one a minute for all runs together."""

    def __init__(self, whole: tuple[str, int] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._whole, self._clock = whole, clock
        self._last, self._over = clock(), 0

    def begin(self, label: str) -> Callable[[Event], None]:
        from cwfed.core.events import Round, Started

        total: int | None = None

        def on_event(event: Event) -> None:
            nonlocal total
            if isinstance(event, Started):
                total = event.rounds
            elif isinstance(event, Round) and event.received and event.trained:
                if self._clock() - self._last < EVERY:
                    return
                self._last = self._clock()
                over = f"{self._over} of {self._whole[1]} runs done; " if self._whole else ""
                err.print(f"{over}{escape(label)}: {_results(event, total)}", highlight=False, soft_wrap=True)

        return on_event

    def done(self, label: str) -> None:
        self._over += 1


class _Notes:
    """What a reader of the results should know, each once: several runs may say the same."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def begin(self, label: str) -> Callable[[Event], None]:
        from cwfed.core.events import Note

        def on_event(event: Event) -> None:
            if isinstance(event, Note) and event.message not in self._told:
                self._told.add(event.message)
                err.print(f"note: {escape(event.message)}", highlight=False, soft_wrap=True)

        return on_event

    def done(self, label: str) -> None:
        pass


class _Log:
    """Everything that a reader may want to know later, with the time in UTC."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        """One line."""
        self._file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {plain(text)}\n")

    def begin(self, label: str) -> Callable[[Event], None]:
        from cwfed.core.events import Note, Round, Started

        self.write(f"{label}: begins")
        total: int | None = None

        def on_event(event: Event) -> None:
            nonlocal total
            if isinstance(event, Started):
                total = event.rounds
                words = f"{event.algorithm} on {event.dataset}, seed {event.seed}, {event.rounds} rounds, {event.clients:,} clients"
                self.write(f"{label}: {words}; engine {event.engine}")
            elif isinstance(event, Round) and event.received and event.trained:
                self.write(f"{label}: {_results(event, total)}")
            elif isinstance(event, Note):
                self.write(f"{label}: note: {event.message}")

        return on_event

    def done(self, label: str) -> None:
        self.write(f"{label}: done")
