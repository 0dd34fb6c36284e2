"""A run with its folder: start, resume, record, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cwfed.core import plugins
from cwfed.core.errors import ConfigError, RunError, WorkerLost
from cwfed.core.events import Event, Newcomers, Note, PhaseResult, Round, Started
from cwfed.federation.config import Config, from_table
from cwfed.federation.manifest import Facts, changed
from cwfed.federation.rounds import FinalModels, Progress
from cwfed.federation.simulation import Simulation
from cwfed.runs import memory
from cwfed.runs.folder import Restored, RunFolder
from cwfed.runs.summary import Summary, pick, summarise
from cwfed.runs.track import tracking

MODELS_LIMIT = 2**30
"""Bytes of all clients' models of one round that `run.save_models = "auto"` writes."""

RESUMED = "resumed"
"""How notes begin that say why a run's config alone may not give its bits again."""


def run(
    config: Config | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_dir: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    track: Sequence[str] = (),
    backend: Backend | None = None,
) -> Summary:
    """Carry out an experiment and give its summary; `cwfed.run` explains the arguments.

    `backend` makes what carries the experiment out; by default it is the simulator, in this process.
    """
    config = _as_config(config)
    carry_out = backend or (lambda config, _, use: use(Simulation(config, data_dir)))
    if out is None:
        if track:
            raise RunError("only a run with an output folder can be tracked: give its folder as --out")
        if resume:
            raise RunError("only a run with an output folder can be resumed: give its folder as --out")
        return carry_out(config or Config(), None, lambda runner: _in_memory(runner, on_event))
    folder = RunFolder(out)
    with tracking(track, folder.path, config) as tracked, folder.locked():
        if folder.exists:
            config = _check_existing(folder, config, resume)
            if folder.finished:
                summary = _summary(folder)
                if not _more_to_do(folder, config, summary):
                    for note in _check_code(folder, config):
                        on_event(Note(note))
                    return summary
        elif resume and config is None:
            raise RunError(f"{folder.path} holds no run to resume: give its config, or the folder of another run")
        elif stray := [p.name for p in folder.path.iterdir() if not p.name.startswith(".")]:
            raise RunError(
                f"{folder.path} holds files that are no run of cwfed, such as {stray[0]}: choose another --out"
            )
        try:
            memory.forget_peak()  # several runs may share this process
            config = config or Config()
            summary = carry_out(config, folder.path, lambda runner: record(runner, folder, on_event, tracked))
            folder.checkpoints.thin(config.run.keep_checkpoints)
            return summary
        except OSError as error:
            raise RunError(
                f"the run in {folder.path} stopped: {error.strerror or error} ({error.filename or folder.path}); "
                "fix that and resume with --resume"
            ) from error


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


def _as_config(config: Config | Mapping[str, Any] | None) -> Config | None:
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


Backend = Callable[[Config, Path | None, Callable[[Runner], Summary]], Summary]
"""Makes a runner for a config (and a run folder) and has something done with it."""


def _in_memory(simulation: Runner, on_event: Callable[[Event], None]) -> Summary:
    events: list[Event] = [simulation.started(), *map(Note, simulation.notes)]
    for event in events:
        on_event(event)
    try:
        progress = simulation.start()
        for progress, event in simulation.rounds(progress):
            events.append(event)
            on_event(event)
        if note := _why_stopped(events):
            events.append(note)
            on_event(note)
        if joined := simulation.welcome(simulation.complete(progress)):
            events.append(joined)
            on_event(joined)
    finally:
        simulation.close()
    return summarise(events)


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


def record(simulation: Runner, folder: RunFolder, *listeners: Callable[[Event], None]) -> Summary:
    """Carry a run out and leave its folder; one that was broken off goes on."""
    config = simulation.config

    def on_event(event: Event) -> None:
        for listener in listeners:
            listener(event)

    def tell(event: Event) -> None:
        folder.append(event)
        on_event(event)

    try:
        start = simulation.start()  # what is wrong with the settings shows before anything is written
        restored, notes = _prepare(folder, simulation)
        started = simulation.started()
        if restored.progress is None:
            progress = start
            tell(started)
        else:
            progress = restored.progress
            on_event(started)
        told = {event.message for event in folder.events() if isinstance(event, Note)}
        for note in [*simulation.notes, *notes]:
            if note not in told:  # what is true of the whole run is said once, however often it is resumed
                tell(Note(note))
        saves = _saves_models(config, simulation.final_models(start))
        picked = _picked_before(folder, started, restored.picked if saves else None)

        def whole(reached: Progress) -> Progress | None:
            return simulation.complete(reached) if saves else None

        last_saved, written = time.monotonic(), folder.mark()
        try:
            for reached, event in simulation.rounds(progress):
                folder.append(event)
                better = _after(picked, event, started, partial(whole, reached))
                # together: what a checkpoint knows, the events have
                progress, written, picked = reached, folder.mark(), better
                on_event(event)
                if time.monotonic() - last_saved >= config.run.checkpoint_seconds:
                    folder.save(progress, written, picked.progress)
                    last_saved = time.monotonic()
        except (KeyboardInterrupt, WorkerLost):
            if progress.round:
                folder.save(progress, written, picked.progress)
            raise
        folder.save(progress, written, picked.progress)
        if (why := _why_stopped(folder.events())) and why.message not in told:
            tell(why)

        progress = simulation.complete(progress)
        if joined := simulation.welcome(progress):
            tell(joined)
        _save_models(folder, simulation, progress, picked, tell)
        summary = replace(summarise(folder.events()), peak_memory_bytes=memory.peak(), peak_memory_of=memory.since())
        folder.write_summary(summary)
        return summary
    finally:
        simulation.close()


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


def _save_models(
    folder: RunFolder, simulation: Runner, progress: Progress, picked: Picked, tell: Callable[[Event], None]
) -> None:
    """Write every client's model of the last round, and of the round that validation picked, where that is another one."""
    config, final = simulation.config, simulation.final_models(progress)
    if final is None or config.run.save_models == "none":
        return
    if not _saves_models(config, final):
        tell(
            Note(
                f"the final models of {final.clients} clients could take {final.nbytes / 2**30:.1f} GiB and were not "
                'written; run.save_models = "all" with --resume writes them'
            )
        )
        return
    rounds, validated = {"last": progress.round}, None
    if picked.round and picked.round != progress.round:
        validated = simulation.final_models(picked.progress) if picked.progress else None
        if validated is None:
            tell(
                Note(
                    f"only the models of the last round were written: when round {picked.round} was made, which "
                    "validation picked, its models were not kept"
                )
            )
    if validated or picked.round == progress.round:
        rounds["validated"] = picked.round
    folder.save_models(final.models, rounds, validated.models if validated else None)
