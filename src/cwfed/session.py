"""A run with its folder: start, resume, record, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cwfed import manifest, memory
from cwfed.config import Config
from cwfed.errors import RunError
from cwfed.events import Event, Note
from cwfed.folder import RunFolder, experiment
from cwfed.simulation import Progress, Simulation
from cwfed.summary import summarise
from cwfed.track import tracking
from cwfed.types import Params, nbytes

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
) -> Summary:
    """Carry out an experiment and give its summary; with `out`, leave a run folder there.

    With `resume` the run in `out` goes on after its last checkpoint, or starts if there is none; a finished
    one is only read. `config` may then be left out. `on_event` is called with everything that happens; `track`
    names clients that follow a run with a folder live: tensorboard, wandb, mlflow.
    """
    if out is None:
        if track:
            raise RunError("only a run with an output folder can be tracked: give its folder as --out")
        if resume:
            raise RunError("only a run with an output folder can be resumed: give its folder as --out")
        return _in_memory(Simulation(config or Config(), data_dir), on_event)
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
            return _in_folder(config or Config(), folder, data_dir, on_event, tracked)
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


def _in_memory(simulation: Simulation, on_event: Callable[[Event], None]) -> Summary:
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


def _in_folder(
    config: Config, folder: RunFolder, data_dir: str | None, *listeners: Callable[[Event], None]
) -> Summary:
    def on_event(event: Event) -> None:
        for listener in listeners:
            listener(event)

    def tell(event: Event) -> None:
        folder.append(event)
        on_event(event)

    memory.forget_peak()  # several runs may share this process
    simulation = Simulation(config, data_dir)
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
        if _wants_models(config, simulation, tell):
            folder.save_models(_final_models(simulation, progress))
        summary = summarise(folder.events())
        summary["peak_memory_bytes"] = memory.peak()
        folder.write_summary(summary)
        return summary
    finally:
        simulation.close()


def _prepare(folder: RunFolder, simulation: Simulation) -> tuple[Progress | None, list[str]]:
    """Write what belongs to the start, or load where the run was; what is worth a note is returned."""
    facts, config = _manifest(simulation), simulation.config
    progress, notes = None, list[str]()
    if folder.exists:  # nothing is changed before all of it is known to fit
        if (folder.path / "manifest.json").exists():
            notes = _check_manifest(folder, facts)
        progress, complaints = folder.restore(config, simulation.check)
        notes = complaints + (notes if progress else [])
    folder.write_config(config)  # first: from now on the folder is a run
    if not (folder.path / "manifest.json").exists():
        folder.write_json("manifest.json", facts)
    if words := simulation.federation.data.words:
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


def _manifest(simulation: Simulation) -> dict[str, Any]:
    federation = simulation.federation
    return manifest.manifest(
        seed=simulation.config.run.seed,
        experiment=experiment(simulation.config),
        algorithm=simulation.config.algorithm_name,
        model={"name": simulation.model_name, "parameters": simulation.parameters},
        data={
            "name": federation.data.name,
            "digest": federation.data.digest,
            "samples": len(federation.data.labels),
            "shape": list(federation.shape.dims),
            "vocabulary": federation.shape.vocabulary,
            "classes": federation.data.class_names,
        },
        split={"digest": federation.digest(), "histogram": federation.histogram().tolist()},
        batch_norm=simulation.config.train.batch_norm,
        engine={
            "name": simulation.engine.name,
            "workers": simulation.engine.workers,
            "why": simulation.engine.why,
            "device": str(simulation.device),
            "precision": simulation.config.train.precision,
        },
    )


def _wants_models(config: Config, simulation: Simulation, tell: Callable[[Event], None]) -> bool:
    if config.run.save_models != "auto":
        return config.run.save_models == "all"
    size = nbytes(simulation.fresh(0)) * simulation.clients
    if size > MODELS_LIMIT:
        tell(
            Note(
                f"the final models of {simulation.clients} clients could take {size / 2**30:.1f} GiB and were not "
                'written; run.save_models = "all" with --resume writes them'
            )
        )
    return size <= MODELS_LIMIT


def _final_models(simulation: Simulation, progress: Progress) -> Iterator[tuple[int, Params]]:
    for client in range(simulation.clients):
        yield client, simulation.final_model(progress, client)
