"""Several runs, one after the other or side by side. Finished runs are reused, interrupted ones are resumed."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, cast

from cwfed.core.errors import CwfedError, GivenUp, RunError
from cwfed.core.events import Event, Round
from cwfed.engine import cores
from cwfed.federation import config as configs
from cwfed.federation.config import Config
from cwfed.runs import session
from cwfed.runs.folder import RunFolder
from cwfed.runs.summary import Summary

START = 8.0
"""Seconds until processes are ready, as each imports torch. Running side by side must save more than that."""


@dataclass(frozen=True)
class Planned:
    """A run that is wanted."""

    label: str
    seed: int
    config: Config
    folder: Path

    def title(self, seeds: int) -> str:
        """The label, with the seed if the series has several seeds."""
        return self.label if seeds == 1 else f"{self.label}, seed {self.seed}"

    @property
    def is_done(self) -> bool:
        """Whether its result has all rounds. (A run that `run.patience` stopped counts as not done.)"""
        return RunFolder(self.folder).rounds_done() >= self.config.train.rounds


@dataclass(frozen=True)
class Done:
    """The outcome of a planned run."""

    planned: Planned
    summary: Summary | None
    """None if the run was given up."""
    reused: bool
    """Whether it was finished already."""
    given_up: str = ""
    """Why it was given up, if it was."""


OnRun = Callable[[Planned], Callable[[Event], None]]
"""Called when a run begins; returns the listener of its events."""


class Series:
    """Carries runs out; their bits do not depend on how many run side by side.

    A run that fails ends the series with its error. So does a run that is given up because it learns nothing, unless `lenient`.
    """

    def __init__(
        self,
        jobs: int = 1,
        *,
        data_dir: str | None = None,
        track: Sequence[str] = (),
        on_run: OnRun = lambda planned: lambda event: None,
        on_done: Callable[[Done], None] = lambda done: None,
        lenient: bool = False,
    ) -> None:
        """`jobs`: how many runs go side by side, each in its own process; 0: one per core if a run leaves cores idle and it saves time."""
        self.jobs, self.data_dir, self.track, self.lenient = jobs, data_dir, track, lenient
        self.on_run, self.on_done = on_run, on_done
        self._seconds: float | None = None  # of the last run that was made in this process and left cores idle
        self._crew: _Crew | None = None

    def __enter__(self) -> Series:
        return self

    def __exit__(self, *error: object) -> None:
        if self._crew:
            self._crew.end()

    def carry_out(self, wanted: Sequence[Planned], more: int = 0) -> list[Done]:
        """Carry out these runs; results in their order. `more`: how many runs will follow in later calls."""
        waiting = deque(enumerate(wanted))
        found: dict[int, Done] = {}
        while waiting:
            together = self._together([planned for _, planned in waiting], more)
            if together == 1:
                number, planned = waiting.popleft()
                finished = iter([(number, self._here(planned))])
            else:
                self._crew = self._crew or _Crew(together, self.data_dir, self.track)
                finished = self._crew.carry_out(waiting, self.on_run)
            for number, done in finished:
                if done.given_up and not self.lenient:
                    raise GivenUp(done.given_up)
                found[number] = done
                self.on_done(done)
        return [found[number] for number in range(len(wanted))]

    def _here(self, planned: Planned) -> Done:
        began = time.monotonic()
        done = _carry_out(planned, self.data_dir, self.track, self.on_run(planned))
        if not done.reused and done.summary and _leaves_cores_idle(planned.folder):
            self._seconds = time.monotonic() - began
        return done

    def _together(self, waiting: Sequence[Planned], more: int) -> int:
        """How many of the waiting runs are made at the same time."""
        most = min(self.jobs or cores(), len(waiting))
        if most == 1 or waiting[0].is_done:  # reading a result needs no process
            return 1
        if self.jobs or self._crew:
            return most
        left = (self._seconds or 0.0) * (len(waiting) + more)  # the first run shows how long they take
        return most if left / most + START < left else 1


def _leaves_cores_idle(folder: Path) -> bool:
    """Whether the engine of a run uses one core only, and no GPU."""
    engine = RunFolder(folder).facts().engine
    return engine.name in ("loop", "vmap") and engine.device == "cpu"


def _carry_out(
    planned: Planned, data_dir: str | None, track: Sequence[str], on_event: Callable[[Event], None]
) -> Done:
    """One run, in this process."""
    watched = Watched(on_event)
    try:
        result = session.run(
            planned.config, planned.folder, resume=True, data_dir=data_dir, on_event=watched, track=track
        )
    except GivenUp as error:
        return Done(planned, None, False, str(error))
    return Done(planned, result.summary, not watched.rounds)


class Watched:
    """Passes events on and counts the rounds; a run without any was finished already."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event, self.rounds = on_event, 0

    def __call__(self, event: Event) -> None:
        self.rounds += isinstance(event, Round)
        self._on_event(event)


# --- side by side


class _Crew:
    """Processes that carry runs out. Each sends its events through a pipe, and ends when the pipe is closed."""

    def __init__(self, size: int, data_dir: str | None, track: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        each = max(1, cores() // size)
        self._processes = list[SpawnProcess]()
        self._idle = list[Connection]()
        with _ignoring_ctrl_c():  # only this process gets Ctrl-C, and ends the others
            for _ in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, data_dir, tuple(track), each))
                process.start()
                theirs.close()
                self._processes.append(process)
                self._idle.append(ours)

    def carry_out(self, waiting: deque[tuple[int, Planned]], on_run: OnRun) -> Iterator[tuple[int, Done]]:
        """Carry out all waiting runs; yields each when it is done, and leaves the queue empty."""
        busy: dict[Connection, tuple[int, Planned, Callable[[Event], None]]] = {}
        while waiting or busy:
            while waiting and self._idle:
                pipe, (number, planned) = self._idle.pop(), waiting.popleft()
                busy[pipe] = number, planned, on_run(planned)
                pipe.send((planned.label, planned.seed, planned.config.to_toml(), planned.folder))
            for pipe in cast(list[Connection], wait(list(busy))):
                number, planned, on_event = busy[pipe]
                told = _told(pipe, planned)
                if isinstance(told, CwfedError):
                    raise told
                if isinstance(told, Done):
                    del busy[pipe]
                    self._idle.append(pipe)
                    yield number, told
                else:
                    on_event(told)

    def end(self) -> None:
        """End all processes; unfinished runs write a checkpoint first."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _told(pipe: Connection, planned: Planned) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise RunError(
            f"the process that made the run in {planned.folder} ended before it (was it out of memory?): the same command "
            "resumes it, --jobs 1 needs least memory"
        ) from None


@contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """In this block Ctrl-C has no effect, and processes that are started in it ignore it for ever."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(pipe: Connection, data_dir: str | None, track: Sequence[str], threads: int) -> None:
    """What a process does until its pipe is closed or it is terminated."""
    import torch

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not disturb writing the checkpoint
        raise KeyboardInterrupt

    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        while True:
            label, seed, text, folder = pipe.recv()
            config = configs.loads(text)
            if not config.run.workers:  # the bits are the same with any number of them
                config = configs.with_settings(config, [f"run.workers={threads}"])
            try:
                pipe.send(_carry_out(Planned(label, seed, config, folder), data_dir, track, pipe.send))
            except CwfedError as error:
                pipe.send(error)
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # the parent has ended
        return
