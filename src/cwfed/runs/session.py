"""Carries a run out, in memory or with a folder: start, resume, record, finish.

A run is a generator of events (`Steps`), so that a caller can take one round at a time. `run` and `drain` take all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cwfed.core.errors import ConfigError, RunError, StopRun, WorkerLost
from cwfed.core.events import Event, Note, Round
from cwfed.federation.config import Config, from_table
from cwfed.federation.given import NOTHING, Given
from cwfed.federation.rounds import Progress, is_over, to_tree
from cwfed.federation.simulation import Simulation
from cwfed.runs import memory, resuming
from cwfed.runs.backend import Backend, Runner
from cwfed.runs.checkpoint import require_savable
from cwfed.runs.folder import RunFolder
from cwfed.runs.picking import Picked, after, picked_before, save_models, saves_models
from cwfed.runs.predict import FromMemory, PersonalModel, load_model
from cwfed.runs.result import Result
from cwfed.runs.saved_models import Pick
from cwfed.runs.summary import Summary, summarise
from cwfed.runs.track import tracking

Steps = Generator[Event, None, Result]
"""A run as it happens: yields every event and returns the result. `throw(StopRun)` ends it after this round; `close` leaves a checkpoint."""


def run(
    config: Config | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_dir: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    track: Sequence[str] = (),
    backend: Backend | None = None,
    given: Given = NOTHING,
) -> Result:
    """Carry out an experiment and return its result; `cwfed.run` explains the arguments.

    `backend` makes the runner; by default it is the simulator, in this process.
    """
    if backend is None:
        return drain(steps(config, out, resume=resume, data_dir=data_dir, track=track, given=given), on_event)
    if given:
        raise ConfigError(
            "objects cannot be given to this backend, whose clients are in other processes: name data, algorithm and model in the config"
        )
    if out is None:
        _check_without_folder(resume, track)
        return backend(as_config(config) or Config(), None, lambda runner: drain(_in_memory(runner), on_event))
    with _opened(config, out, resume, track, given) as opened:
        if opened.finished:
            return _read(opened, on_event)
        with _disk(opened):
            return backend(
                opened.config,
                opened.folder.path,
                lambda runner: record(runner, opened.folder, on_event, opened.tracked),
            )


def steps(
    config: Config | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_dir: str | None = None,
    track: Sequence[str] = (),
    given: Given = NOTHING,
) -> Steps:
    """Carry out an experiment in the simulator, event by event."""
    if out is None:
        _check_without_folder(resume, track)
        named = given.named_in(as_config(config) or Config())
        return (yield from _in_memory(Simulation(named, data_dir, given.dataset)))
    with _opened(config, out, resume, track, given) as opened:
        if opened.finished:
            notes: list[Event] = []
            result = _read(opened, notes.append)
            for note in notes:
                yield from _told(note)
            return result
        with _disk(opened):
            simulation = Simulation(opened.config, data_dir, given.dataset)
            return (yield from _recorded(simulation, opened.folder, opened.tracked))


def drain(steps: Steps, *listeners: Callable[[Event], None]) -> Result:
    """Carry a run out to its end; a listener may end it earlier with StopRun."""
    stop: StopRun | None = None
    with closing(steps):
        while True:
            try:
                event = steps.throw(stop) if stop else next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
            stop = None
            try:
                for listener in listeners:
                    listener(event)
            except StopRun as asked:
                stop = asked


def _told(event: Event) -> Generator[Event, None, str | None]:
    """Yield an event; returns the reason if the caller answers with StopRun, else None."""
    try:
        yield event
    except StopRun as stop:
        return str(stop)
    return None


class _Opened(NamedTuple):
    """A run's folder, locked for this process."""

    folder: RunFolder
    config: Config
    tracked: Callable[[Event], None]
    finished: Summary | None
    """The summary, if the run has nothing left to do."""


@contextmanager
def _opened(
    config: Config | Mapping[str, Any] | None, out: str | Path, resume: bool, track: Sequence[str], given: Given
) -> Iterator[_Opened]:
    """Lock the folder of a run, new or resumed, and decide with which config it goes on."""
    folder = RunFolder(out)
    chosen = as_config(config)
    if given and not (chosen is None and resume and folder.exists):
        chosen = given.named_in(chosen or Config())
    with tracking(track, folder.path, chosen) as tracked, folder.locked():
        finished = None
        if folder.exists:
            if given and chosen is None and resume:
                given.named_in(Config())  # its config names what is given
                chosen = given.named_in(folder.config(imports=True))
            chosen = resuming.check_existing(folder, chosen, resume)
            if folder.finished:
                summary = resuming.whole_summary(folder)
                finished = None if resuming.more_to_do(folder, chosen, summary) else summary
        elif resume and chosen is None:
            raise RunError(f"{folder.path} holds no run to resume: give its config, or the folder of another run")
        elif stray := [p.name for p in folder.path.iterdir() if not p.name.startswith(".")]:
            raise RunError(
                f"{folder.path} holds files that do not belong to a run of cwfed, such as {stray[0]}: choose another --out"
            )
        yield _Opened(folder, chosen or Config(), tracked, finished)


@contextmanager
def _disk(opened: _Opened) -> Iterator[None]:
    """While a run is carried out: errors of the disk are one sentence, and when it is finished surplus checkpoints are removed."""
    folder = opened.folder
    try:
        memory.forget_peak()  # several runs may share this process
        yield
        if folder.finished:
            folder.checkpoints.thin(opened.config.run.keep_checkpoints)
    except OSError as error:
        raise RunError(
            f"the run in {folder.path} stopped: {error.strerror or error} ({error.filename or folder.path}); "
            "fix that and resume with --resume"
        ) from error


def _check_without_folder(resume: bool, track: Sequence[str]) -> None:
    if track:
        raise RunError("only a run with an output folder can be tracked: give its folder as --out")
    if resume:
        raise RunError("only a run with an output folder can be resumed: give its folder as --out")


def _read(opened: _Opened, on_event: Callable[[Event], None]) -> Result:
    """The result of a run that is finished already."""
    assert opened.finished is not None
    for note in resuming.check_code(opened.folder, opened.config):
        on_event(Note(note))
    return _from_folder(opened.finished, opened.folder)


def _from_folder(summary: Summary, folder: RunFolder) -> Result:
    """The result of a finished run; its events and models are read from its folder on demand."""

    def model_of(client: int | None, class_counts: Sequence[float] | None, pick: Pick | None) -> PersonalModel:
        return load_model(folder.path, client, class_counts=class_counts, pick=pick, trust=True)  # it was just run

    return Result.of(summary, lambda: folder.result()[1], model_of, folder.path)


def _from_memory(
    summary: Summary,
    happened: Sequence[Event],
    runner: Runner,
    last: Progress,
    picked: Picked,
    path: Path | None = None,
) -> Result:
    """The result of a run that has not saved its models."""
    if isinstance(runner, Simulation) and saves_models(runner.config, runner.final_models(last)):
        return Result.of(summary, lambda: happened, FromMemory(runner, last, picked.progress), path)

    def no_model(*_: object) -> PersonalModel:
        raise RunError(
            f'the models were not kept: run.save_models = "{runner.config.run.save_models}" does not keep them ("all" does), '
            "or they are with the clients, in other processes"
        )

    return Result.of(summary, lambda: happened, no_model, path)


def as_config(config: Config | Mapping[str, Any] | None) -> Config | None:
    """A config from nested dicts; None stays None."""
    if config is None or isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return from_table(dict(config))
    raise ConfigError(
        f"a config is a cwfed.Config or nested dicts, not {config!r}: cwfed.load_config(path) reads a config file"
    )


def _why_stopped(events: Sequence[Event]) -> Note | None:
    """A note if the run ended before all rounds were done (`run.patience`)."""
    last = next((event for event in reversed(events) if isinstance(event, Round)), None)
    return Note(last.stopped) if last and last.stopped else None


def _in_memory(runner: Runner) -> Steps:
    """Carry out a run that leaves nothing on disk."""
    happened: list[Event] = []
    picked, stopped = Picked(), None
    try:
        progress, started = runner.start(), runner.started()
        saves = saves_models(runner.config, runner.final_models(progress))

        def kept(reached: Progress) -> Progress | None:
            return reached if saves else None

        first: list[Event] = [started, *map(Note, runner.notes)]
        for event in first:
            happened.append(event)
            stopped = (yield from _told(event)) or stopped
        with closing(_rounds(runner, progress, stopped)) as rounds:
            for progress, event in rounds:
                happened.append(event)
                picked = after(picked, event, started, partial(kept, progress))
                if (stopped := (yield from _told(event))) and not is_over(runner.config, progress):
                    break
        if stopped and not is_over(runner.config, progress):
            return _from_memory(_stopped(happened, stopped), happened, runner, progress, picked)
        if note := _why_stopped(happened):
            happened.append(note)
            yield from _told(note)
        if joined := runner.welcome(runner.complete(progress)):
            happened.append(joined)
            yield from _told(joined)
        return _from_memory(summarise(happened), happened, runner, progress, picked)
    finally:
        runner.close()


def record(runner: Runner, folder: RunFolder, *listeners: Callable[[Event], None]) -> Result:
    """Carry a run out and write its folder; an interrupted run is resumed."""
    return drain(_recorded(runner, folder), *listeners)


def _recorded(runner: Runner, folder: RunFolder, tracked: Callable[[Event], None] = lambda event: None) -> Steps:
    """Carry out a run that leaves a folder."""
    config = runner.config

    def tell(event: Event, is_new: bool = True) -> Generator[Event, None, str | None]:
        if is_new:
            folder.append(event)
        tracked(event)
        return (yield from _told(event))

    try:
        start = runner.start()  # first of all: a wrong setting is an error before anything is written
        require_savable(to_tree(start))
        restored, notes = resuming.prepare(folder, runner)
        started = runner.started()
        progress = restored.progress or start
        stopped = yield from tell(started, is_new=restored.progress is None)
        told = {event.message for event in folder.events() if isinstance(event, Note)}
        for note in [*runner.notes, *notes]:
            if note not in told:  # a note about the whole run is written once, however often the run is resumed
                stopped = (yield from tell(Note(note))) or stopped
        saves = saves_models(config, runner.final_models(start))
        picked = picked_before(folder, started, restored.picked if saves else None)

        def whole(reached: Progress) -> Progress | None:
            return runner.complete(reached) if saves else None

        last_saved, written = time.monotonic(), folder.mark()
        try:
            with closing(_rounds(runner, progress, stopped)) as rounds:
                for reached, event in rounds:
                    folder.append(event)
                    better = after(picked, event, started, partial(whole, reached))
                    # only together: a checkpoint must never be ahead of the events
                    progress, written, picked = reached, folder.mark(), better
                    stopped = yield from tell(event, is_new=False)
                    if stopped and not is_over(config, progress):
                        break
                    if time.monotonic() - last_saved >= config.run.checkpoint_seconds:
                        folder.save(progress, written, picked.progress)
                        last_saved = time.monotonic()
        except (KeyboardInterrupt, GeneratorExit, WorkerLost):
            if progress.round:
                folder.save(progress, written, picked.progress)
            raise
        if progress.round:
            folder.save(progress, written, picked.progress)
        if stopped and not is_over(config, progress):
            happened = folder.events()
            return _from_memory(_stopped(happened, stopped), happened, runner, progress, picked, folder.path)
        if (why := _why_stopped(folder.events())) and why.message not in told:
            yield from tell(why)
        progress = runner.complete(progress)
        if joined := runner.welcome(progress):
            yield from tell(joined)
        for note in save_models(folder, runner, progress, picked):
            yield from tell(Note(note))
        return _finished(folder)
    finally:
        runner.close()


def _finished(folder: RunFolder) -> Result:
    """Write the summary, the last file of a run; the result."""
    summary = replace(summarise(folder.events()), peak_memory_bytes=memory.peak(), peak_memory_of=memory.since())
    folder.write_summary(summary)
    return _from_folder(summary, folder)


def _rounds(runner: Runner, progress: Progress, stopped: str | None) -> Generator[tuple[Progress, Event], None, None]:
    """The rounds that are left; none if a listener has stopped the run before the first."""
    if not stopped:
        yield from runner.rounds(progress)


def _stopped(happened: Sequence[Event], why: str) -> Summary:
    """The summary of a run that a listener has stopped."""
    if not any(isinstance(event, Round) and (event.received or event.trained) for event in happened):
        raise RunError(f"the run was stopped before its first evaluated round ({why}): there is no result yet")
    return replace(summarise(happened), stopped=why)
