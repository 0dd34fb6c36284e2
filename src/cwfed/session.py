"""A run with its folder: start, resume, record, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cwfed import memory
from cwfed.config import Config
from cwfed.errors import ConfigError, RunError, did_you_mean
from cwfed.events import Event, Newcomers, Note, Started
from cwfed.folder import RunFolder, experiment
from cwfed.rounds import FinalModels, Progress
from cwfed.simulation import Simulation
from cwfed.summary import summarise
from cwfed.track import tracking

MODELS_LIMIT = 2**30
"""Bytes of final models that `run.save_models = "auto"` writes."""

Summary = dict[str, Any]


def run(
    config: Config | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_dir: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    track: Sequence[str] = (),
    backend: str = "simulator",
) -> Summary:
    """Carry out an experiment and give its summary; with `out`, leave a run folder there.

    With `resume` the run in `out` goes on after its last checkpoint, or starts if there is none; a finished
    one is only read. `config` may then be left out. `on_event` is called with everything that happens; `track`
    names clients that follow a run with a folder live: tensorboard, wandb, mlflow. The backend `flower` runs the
    same experiment through Flower's simulation engine (Ray) instead of in this process.
    """
    carry_out = _backend(backend, data_dir)
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
                    return summary
        elif resume and config is None:
            raise RunError(f"{folder.path} holds no run to resume: give its config, or the folder of another run")
        elif stray := [p.name for p in folder.path.iterdir() if not p.name.startswith(".")]:
            raise RunError(
                f"{folder.path} holds files that are no run of cwfed, such as {stray[0]}: choose another --out"
            )
        try:
            memory.forget_peak()  # several runs may share this process
            return carry_out(
                config or Config(), folder.path, lambda runner: record(runner, folder, on_event, tracked)
            )
        except OSError as error:
            raise RunError(
                f"the run in {folder.path} stopped: {error.strerror or error} ({error.filename or folder.path}); "
                "mend that and go on with --resume"
            ) from error


def _check_existing(folder: RunFolder, config: Config | None, resume: bool) -> Config:
    if not resume:
        state = "a finished run" if folder.finished else "a run that is not finished"
        raise RunError(f"{folder.path} already holds {state}: --resume goes on with it, or choose another --out")
    if config is None:
        return folder.config(imports=True)
    folder.check_same(config)
    return config


def _summary(folder: RunFolder) -> Summary:
    try:
        return folder.summary()
    except RunError as error:
        raise RunError(
            f"{error}; without its summary.json, --resume makes it again from the last checkpoint"
        ) from None


def _more_to_do(folder: RunFolder, config: Config, summary: Summary) -> bool:
    more_rounds = config.train.rounds > summary["rounds"]
    return more_rounds or (config.run.save_models == "all" and not (folder.path / "models").exists())


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

    def welcome(self, progress: Progress) -> Newcomers | None:
        """Measure the models that clients get which never took part."""

    def final_models(self, progress: Progress) -> FinalModels | None:
        """Every client's personal model; None where they are with the clients."""

    def close(self) -> None:
        """Let go of workers and data."""


Backend = Callable[[Config, Path | None, Callable[[Runner], Summary]], Summary]
"""Makes a runner for a config (and a run folder) and has something done with it."""


def _backend(name: str, data_dir: str | None) -> Backend:
    if name == "flower":
        from cwfed.flower.simulation import on_flower

        return partial(on_flower, data_dir)
    if name != "simulator":
        raise ConfigError(f"unknown backend {name!r}: {did_you_mean(name, ('simulator', 'flower'))}")
    return lambda config, _, use: use(Simulation(config, data_dir))


def _in_memory(simulation: Runner, on_event: Callable[[Event], None]) -> Summary:
    events: list[Event] = [simulation.started()]
    on_event(events[0])
    try:
        progress = simulation.start()
        for progress, event in simulation.rounds(progress):
            events.append(event)
            on_event(event)
        if joined := simulation.welcome(progress):
            events.append(joined)
            on_event(joined)
    finally:
        simulation.close()
    return summarise(events)


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
        progress, notes = _prepare(folder, simulation)
        if progress is None:
            progress = start
            tell(simulation.started())
        else:
            on_event(simulation.started())
        for note in [*simulation.notes, *notes]:
            tell(Note(note))

        last_saved, written = time.monotonic(), folder.mark()
        try:
            for reached, event in simulation.rounds(progress):
                folder.append(event)
                progress, written = reached, folder.mark()  # together: what a checkpoint knows, the events have
                on_event(event)
                if time.monotonic() - last_saved >= config.run.checkpoint_seconds:
                    folder.save(progress, written)
                    last_saved = time.monotonic()
        except KeyboardInterrupt:
            if progress.round:
                folder.save(progress, written)
            raise
        folder.save(progress, written)

        if joined := simulation.welcome(progress):
            tell(joined)
        final = simulation.final_models(progress)
        if final and _wants_models(config, final, tell):
            folder.save_models(final.models)
        summary = summarise(folder.events())
        summary["peak_memory_bytes"] = memory.peak()
        folder.write_summary(summary)
        return summary
    finally:
        simulation.close()


def _prepare(folder: RunFolder, simulation: Runner) -> tuple[Progress | None, list[str]]:
    """Write what belongs to the start, or load where the run was; what is worth a note is returned."""
    facts, config = simulation.manifest() | {"experiment": experiment(simulation.config)}, simulation.config
    words = facts.pop("words", None)
    progress, notes = None, list[str]()
    if folder.exists:  # nothing is changed before all of it is known to fit
        if (folder.path / "manifest.json").exists():
            notes = _check_manifest(folder, facts)
        progress, complaints = folder.restore(config, simulation.check_progress)
        notes = complaints + (notes if progress else [])
    folder.write_config(config)  # first: from now on the folder is a run
    if not (folder.path / "manifest.json").exists():
        folder.write_json("manifest.json", facts)
    if words:
        folder.write_json("vocabulary.json", {"words": words})
    return progress, notes


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
    before, here = then.machine.instruction_set, now["machine"]["instruction_set"]
    if before == here:
        return []
    return [f"resumed on another kind of CPU ({before}, now {here}): the last bits may differ from here on"]


def _wants_models(config: Config, final: FinalModels, tell: Callable[[Event], None]) -> bool:
    if config.run.save_models != "auto":
        return config.run.save_models == "all"
    if final.nbytes > MODELS_LIMIT:
        tell(
            Note(
                f"the final models of {final.clients} clients could take {final.nbytes / 2**30:.1f} GiB and were not "
                'written; run.save_models = "all" with --resume writes them'
            )
        )
    return final.nbytes <= MODELS_LIMIT
