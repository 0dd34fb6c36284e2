"""A run with its folder: start, resume, record, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cwfed.core import plugins
from cwfed.core.errors import ConfigError, RunError, StopRun, WorkerLost
from cwfed.core.events import Event, Newcomers, Note, PhaseResult, Round, Started
from cwfed.federation.config import Config, from_table
from cwfed.federation.given import NOTHING, Given
from cwfed.federation.manifest import Facts, changed
from cwfed.federation.rounds import FinalModels, Progress, is_over, to_tree
from cwfed.federation.simulation import Simulation
from cwfed.runs import memory
from cwfed.runs.checkpoint import require_savable
from cwfed.runs.folder import Restored, RunFolder
from cwfed.runs.predict import FromMemory, PersonalModel, load_model
from cwfed.runs.result import Result
from cwfed.runs.saved_models import Pick
from cwfed.runs.summary import Summary, pick, summarise
from cwfed.runs.track import tracking

MODELS_LIMIT = 2**30
"""Bytes of all clients' models of one round that `run.save_models = "auto"` writes."""

RESUMED = "resumed"
"""How notes begin that say why a run's config alone may not give its bits again."""


Steps = Generator[Event, None, Result]
"""A run as it happens: yields every event, gives the result. Thrown in, StopRun ends it after this round; closed, it leaves a checkpoint."""


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
    """Carry out an experiment and give its result; `cwfed.run` explains the arguments.

    `backend` makes what carries the experiment out; by default it is the simulator, in this process.
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
    """The same in the simulator, event by event."""
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
    """Carry a run out; a listener may end it with StopRun."""
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
    """Yield an event; gives why the run is to stop, where somebody says so."""
    try:
        yield event
    except StopRun as stop:
        return str(stop)
    return None


class _Opened(NamedTuple):
    """A run's folder that is ours now."""

    folder: RunFolder
    config: Config
    tracked: Callable[[Event], None]
    finished: Summary | None
    """Of a run with nothing left to do."""


@contextmanager
def _opened(
    config: Config | Mapping[str, Any] | None, out: str | Path, resume: bool, track: Sequence[str], given: Given
) -> Iterator[_Opened]:
    """Take a folder for a run, new or resumed."""
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
            chosen = _check_existing(folder, chosen, resume)
            if folder.finished:
                summary = _summary(folder)
                finished = None if _more_to_do(folder, chosen, summary) else summary
        elif resume and chosen is None:
            raise RunError(f"{folder.path} holds no run to resume: give its config, or the folder of another run")
        elif stray := [p.name for p in folder.path.iterdir() if not p.name.startswith(".")]:
            raise RunError(
                f"{folder.path} holds files that are no run of cwfed, such as {stray[0]}: choose another --out"
            )
        yield _Opened(folder, chosen or Config(), tracked, finished)


@contextmanager
def _disk(opened: _Opened) -> Iterator[None]:
    """What goes wrong with the disk while a run is carried out; a finished one keeps as many checkpoints as it is told."""
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
    """A run that is finished already."""
    assert opened.finished is not None
    for note in _check_code(opened.folder, opened.config):
        on_event(Note(note))
    return _from_folder(opened.finished, opened.folder)


def _from_folder(summary: Summary, folder: RunFolder) -> Result:
    """The result of a finished run, read from its folder when it is asked for."""

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
    """The result of a run whose models are on no disk."""
    if isinstance(runner, Simulation) and _saves_models(runner.config, runner.final_models(last)):
        return Result.of(summary, lambda: happened, FromMemory(runner, last, picked.progress), path)

    def no_model(*_: object) -> PersonalModel:
        raise RunError(
            f'the models were not kept: run.save_models = "{runner.config.run.save_models}" keeps none of these ("all" does), '
            "or they are with the clients of another process"
        )

    return Result.of(summary, lambda: happened, no_model, path)


def not_alone(path: Path | None) -> list[str]:
    """Why a config file alone does not give the bits of the run that it was written by, where it is a run's own."""
    folder = RunFolder(path.parent) if path and path.name == "config.toml" else None
    if folder is None or not (folder.path / "events.jsonl").exists():
        return []
    try:
        notes = [event.message for event in folder.events() if isinstance(event, Note)]
    except RunError:  # what else is wrong with that folder does not matter here
        return []
    return [f"the run in {folder.path} was {note}" for note in notes if note.startswith(f"{RESUMED} ")]


def as_config(config: Config | Mapping[str, Any] | None) -> Config | None:
    """A config from nested dicts; None stays None."""
    if config is None or isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return from_table(dict(config))
    raise ConfigError(
        f"a config is a cwfed.Config or nested dicts, not {config!r}: cwfed.load_config(path) reads a config file"
    )


def _check_existing(folder: RunFolder, config: Config | None, resume: bool) -> Config:
    if not resume:
        state = "a finished run" if folder.finished else "a run that is not finished"
        raise RunError(f"{folder.path} already holds {state}: --resume continues it, or choose another --out")
    if config is None:
        return folder.config(imports=True)
    folder.check_same(config)
    begun = folder.config().run.compile  # a run stays compiled, or not, whatever "auto" would choose here and now
    return config.but(compile=begun) if config.run.compile == "auto" else config


def _summary(folder: RunFolder) -> Summary:
    try:
        return folder.summary()
    except RunError as error:
        raise RunError(
            f"{error}; without its summary.json, --resume makes it again from the last checkpoint"
        ) from None


def _more_to_do(folder: RunFolder, config: Config, summary: Summary) -> bool:
    stopped = bool(summary.stopped)  # by its patience: more rounds would not be made
    more_rounds = config.train.rounds > summary.rounds and not stopped
    is_whole = stopped or folder.config().train.rounds == summary.rounds  # and not on its way to more rounds
    return more_rounds or (config.run.save_models == "all" and is_whole and not folder.models.exists())


class Runner(Protocol):
    """Something that carries an experiment out: the simulator, or a federation."""

    config: Config
    notes: list[str]
    """What the user should know before the first round."""

    def start(self) -> Progress:
        """Before round 1."""

    def started(self) -> Started:
        """The first event of the run."""

    def manifest(self) -> dict[str, Any]:
        """Under what circumstances the run is made."""

    def check_progress(self, progress: Progress) -> None:
        """RunError for progress that the rounds cannot go on from."""

    def rounds(self, progress: Progress) -> Iterator[tuple[Progress, Event]]:
        """Carry out the rounds that are left; after each event, where the run is."""

    def complete(self, progress: Progress) -> Progress:
        """Progress with all that the clients keep, where that can be had: what their models are made from."""

    def welcome(self, progress: Progress) -> Newcomers | None:
        """Measure the models that clients get which never took part; the progress is complete."""

    def final_models(self, progress: Progress) -> FinalModels | None:
        """Every client's personal model, from complete progress; None where they are with the clients."""

    def close(self) -> None:
        """Let go of workers and data."""


Backend = Callable[[Config, Path | None, Callable[[Runner], Result]], Result]
"""Makes a runner for a config (and a run folder) and has something done with it."""


class Picked(NamedTuple):
    """The round that validation has picked so far, and from what its models are made where they are to be saved."""

    round: int = 0
    worth: float = -inf
    progress: Progress | None = None


def _after(picked: Picked, event: Event, started: Started, progress: Callable[[], Progress | None]) -> Picked:
    """What validation picks when this has happened too: as `summary.pick` does, the first of equals."""
    result: PhaseResult | None = getattr(event, started.phase) if isinstance(event, Round) else None
    if not isinstance(event, Round) or result is None:
        return picked
    worth = started.worth(result.held_out(started.pick))
    return Picked(event.round, worth, progress()) if worth > picked.worth else picked


def _why_stopped(events: Sequence[Event]) -> Note | None:
    """What a reader should know of a run that ended before all rounds were done."""
    last = next((event for event in reversed(events) if isinstance(event, Round)), None)
    return Note(last.stopped) if last and last.stopped else None


def _in_memory(simulation: Runner) -> Steps:
    """A run that leaves nothing on disk."""
    happened: list[Event] = []
    picked, stopped = Picked(), None
    try:
        progress, started = simulation.start(), simulation.started()
        saves = _saves_models(simulation.config, simulation.final_models(progress))

        def kept(reached: Progress) -> Progress | None:
            return reached if saves else None

        first: list[Event] = [started, *map(Note, simulation.notes)]
        for event in first:
            happened.append(event)
            stopped = (yield from _told(event)) or stopped
        with closing(_rounds(simulation, progress, stopped)) as rounds:
            for progress, event in rounds:
                happened.append(event)
                picked = _after(picked, event, started, partial(kept, progress))
                if (stopped := (yield from _told(event))) and not is_over(simulation.config, progress):
                    break
        if stopped and not is_over(simulation.config, progress):
            return _from_memory(_stopped(happened, stopped), happened, simulation, progress, picked)
        if note := _why_stopped(happened):
            happened.append(note)
            yield from _told(note)
        if joined := simulation.welcome(simulation.complete(progress)):
            happened.append(joined)
            yield from _told(joined)
        return _from_memory(summarise(happened), happened, simulation, progress, picked)
    finally:
        simulation.close()


def record(simulation: Runner, folder: RunFolder, *listeners: Callable[[Event], None]) -> Result:
    """Carry a run out and leave its folder; one that was broken off goes on."""
    return drain(_recorded(simulation, folder), *listeners)


def _recorded(simulation: Runner, folder: RunFolder, tracked: Callable[[Event], None] = lambda event: None) -> Steps:
    """A run that leaves a folder."""
    config = simulation.config

    def tell(event: Event, is_new: bool = True) -> Generator[Event, None, str | None]:
        if is_new:
            folder.append(event)
        tracked(event)
        return (yield from _told(event))

    try:
        start = simulation.start()  # what is wrong with the settings shows before anything is written
        require_savable(to_tree(start))
        restored, notes = _prepare(folder, simulation)
        started = simulation.started()
        progress = restored.progress or start
        stopped = yield from tell(started, is_new=restored.progress is None)
        told = {event.message for event in folder.events() if isinstance(event, Note)}
        for note in [*simulation.notes, *notes]:
            if note not in told:  # what is true of the whole run is said once, however often it is resumed
                stopped = (yield from tell(Note(note))) or stopped
        saves = _saves_models(config, simulation.final_models(start))
        picked = _picked_before(folder, started, restored.picked if saves else None)

        def whole(reached: Progress) -> Progress | None:
            return simulation.complete(reached) if saves else None

        last_saved, written = time.monotonic(), folder.mark()
        try:
            with closing(_rounds(simulation, progress, stopped)) as rounds:
                for reached, event in rounds:
                    folder.append(event)
                    better = _after(picked, event, started, partial(whole, reached))
                    # together: what a checkpoint knows, the events have
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
            return _from_memory(_stopped(happened, stopped), happened, simulation, progress, picked, folder.path)
        if (why := _why_stopped(folder.events())) and why.message not in told:
            yield from tell(why)

        progress = simulation.complete(progress)
        if joined := simulation.welcome(progress):
            yield from tell(joined)
        for note in _save_models(folder, simulation, progress, picked):
            yield from tell(Note(note))
        summary = replace(summarise(folder.events()), peak_memory_bytes=memory.peak(), peak_memory_of=memory.since())
        folder.write_summary(summary)
        return _from_folder(summary, folder)
    finally:
        simulation.close()


def _rounds(
    simulation: Runner, progress: Progress, stopped: str | None
) -> Generator[tuple[Progress, Event], None, None]:
    """The rounds that are left; none where somebody has stopped the run before the first."""
    if not stopped:
        yield from simulation.rounds(progress)


def _stopped(happened: Sequence[Event], why: str) -> Summary:
    """The summary of a run that a listener has stopped."""
    if not any(isinstance(event, Round) and (event.received or event.trained) for event in happened):
        raise RunError(f"the run was stopped before its first evaluated round ({why}): there is no result yet")
    return replace(summarise(happened), stopped=why)


def _picked_before(folder: RunFolder, started: Started, progress: Progress | None) -> Picked:
    """What validation picked before the run was broken off; of its progress, what the checkpoint has."""
    happened = [event for event in folder.events() if isinstance(event, Round)]
    found = pick(happened, started.phase, started).validated
    if found is None:
        return Picked()
    worth = started.worth(found[1].held_out(started.pick))
    return Picked(found[0], worth, progress if progress and progress.round == found[0] else None)


def _prepare(folder: RunFolder, simulation: Runner) -> tuple[Restored, list[str]]:
    """Write what belongs to the start, or load where the run was; what is worth a note is returned."""
    config = simulation.config
    facts = simulation.manifest() | {"experiment": config.fingerprint, "code": plugins.sources(config.code())}
    words = facts.pop("words", None)
    restored, notes = Restored(None, None, []), list[str]()
    if folder.exists:  # nothing is changed before all of it is known to fit
        if (folder.path / "manifest.json").exists():
            notes = _check_manifest(folder, facts) + _check_code(folder, config)
        restored = folder.restore(config, simulation.check_progress)
        notes = restored.complaints + (notes if restored.progress else [])
    folder.write_config(config)  # first: from now on the folder is a run
    if not (folder.path / "manifest.json").exists():
        folder.write_json("manifest.json", facts)
    if words:
        folder.write_json("vocabulary.json", {"words": words})
    return restored, notes


def _check_manifest(folder: RunFolder, now: dict[str, Any]) -> list[str]:
    """Data, split and settings must be those of the start; what else differs is worth a note."""
    then = folder.facts()
    for what, before in (("data", then.data.digest), ("split", then.split.digest)):
        if before != now[what]["digest"]:
            raise RunError(
                f"{folder.path} was made with another {what}: the hash in its manifest differs from this one"
            )
    if then.experiment not in ("", now["experiment"]):
        raise RunError(f"the manifest in {folder.path} does not match its config.toml, which was changed since")
    differ = {"on another kind of CPU": (then.machine.instruction_set, now["machine"]["instruction_set"])}
    engine = Facts.model_validate(now).engine
    if then.engine.rounding() != engine.rounding():
        differ["on another engine"] = then.engine.words(), engine.words()
    for package in ("torch", "numpy", "cwfed"):
        here = now["versions"][package]
        differ[f"with another {package}"] = then.versions.get(package, here), here
    return [
        f"{RESUMED} {how} ({before}, now {here}): the last bits may differ from here on"
        for how, (before, here) in differ.items()
        if before != here
    ]


def _check_code(folder: RunFolder, config: Config) -> list[str]:
    """The user's own code must be that of the start; what is not known of it is worth a note."""
    named = config.code()
    if not named or not (folder.path / "manifest.json").exists():
        return []
    then = folder.facts().code
    if then is None:
        return [
            f"the run in {folder.path} was begun by a version that did not record the user's code: whether that of "
            f"{named[0]} was changed since is not known"
        ]
    if file := changed(then, plugins.sources(named)):
        raise RunError(
            f"{folder.path} was made with other code: {file} was changed since; choose another --out, or remove that "
            "folder to run it again"
        )
    return []


def _saves_models(config: Config, final: FinalModels | None) -> bool:
    wanted = config.run.save_models
    return final is not None and (wanted == "all" or (wanted == "auto" and final.nbytes <= MODELS_LIMIT))


def _save_models(folder: RunFolder, simulation: Runner, progress: Progress, picked: Picked) -> Iterator[str]:
    """Write every client's model of the last round, and of the round that validation picked, where that is another one; gives what a
    reader should know of it.
    """
    config, final = simulation.config, simulation.final_models(progress)
    if final is None or config.run.save_models == "none":
        return
    if not _saves_models(config, final):
        yield (
            f"the final models of {final.clients:,} clients could take {final.nbytes / 2**30:.1f} GiB and were not "
            'written; run.save_models = "all" with --resume writes them'
        )
        return
    rounds, validated = {"last": progress.round}, None
    if picked.round and picked.round != progress.round:
        validated = simulation.final_models(picked.progress) if picked.progress else None
        if validated is None:
            yield (
                f"only the models of the last round were written: when round {picked.round} was made, which "
                "validation picked, its models were not kept"
            )
    if validated or picked.round == progress.round:
        rounds["validated"] = picked.round
    folder.save_models(final.models, rounds, validated.models if validated else None)
