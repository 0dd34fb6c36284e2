"""Whether a run may be resumed: the settings, data, split and code must be those it began with; what else differs becomes a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cwfed.core import plugins
from cwfed.core.errors import RunError
from cwfed.core.events import Note
from cwfed.federation.config import Config
from cwfed.federation.manifest import Facts, changed
from cwfed.runs.backend import Runner
from cwfed.runs.folder import Restored, RunFolder
from cwfed.runs.summary import Summary

RESUMED = "resumed"
"""The first word of notes that say why a run's config alone may not give the same bits again."""


def check_existing(folder: RunFolder, config: Config | None, resume: bool) -> Config:
    """The config with which the run in a folder goes on; RunError if it is not to be resumed, or with other settings."""
    if not resume:
        state = "a finished run" if folder.finished else "a run that is not finished"
        raise RunError(f"{folder.path} already holds {state}: --resume continues it, or choose another --out")
    if config is None:
        return folder.config(imports=True)
    folder.check_same(config)
    begun = folder.config().run.compile  # compiled or not is decided once per run, whatever "auto" would choose now
    return config.but(compile=begun) if config.run.compile == "auto" else config


def whole_summary(folder: RunFolder) -> Summary:
    """The summary of a finished run; RunError, with what to do, if its files are damaged."""
    try:
        return folder.summary()
    except RunError as error:
        raise RunError(
            f"{error}; without its summary.json, --resume makes it again from the last checkpoint"
        ) from None


def more_to_do(folder: RunFolder, config: Config, summary: Summary) -> bool:
    """Whether a finished run is given more rounds, or is to save models that it has not saved."""
    stopped = bool(summary.stopped)  # by `run.patience`: no more rounds follow
    more_rounds = config.train.rounds > summary.rounds and not stopped
    is_whole = stopped or folder.config().train.rounds == summary.rounds  # not while it is being given more rounds
    return more_rounds or (config.run.save_models == "all" and is_whole and not folder.models.exists())


def prepare(folder: RunFolder, runner: Runner) -> tuple[Restored, list[str]]:
    """Write the first files of a new run, or restore an interrupted one; also returns what is worth a note."""
    config = runner.config
    facts = runner.manifest() | {"experiment": config.fingerprint, "code": plugins.sources(config.code())}
    words = facts.pop("words", None)
    restored, notes = Restored(None, None, []), list[str]()
    if folder.exists:  # nothing is written before everything is known to fit
        if (folder.path / "manifest.json").exists():
            notes = _check_manifest(folder, facts) + check_code(folder, config)
        restored = folder.restore(config, runner.check_progress)
        notes = restored.complaints + (notes if restored.progress else [])
    folder.write_config(config)  # first: from now on the folder is a run
    if not (folder.path / "manifest.json").exists():
        folder.write_json("manifest.json", facts)
    if words:
        folder.write_json("vocabulary.json", {"words": words})
    return restored, notes


def _check_manifest(folder: RunFolder, now: dict[str, Any]) -> list[str]:
    """RunError if data, split or settings differ from those of the start; other differences are returned as notes."""
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


def check_code(folder: RunFolder, config: Config) -> list[str]:
    """RunError if the user's own code has changed since the start; a note if that is not known."""
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


def not_alone(path: Path | None) -> list[str]:
    """For the config file of a run: notes that say why this config alone may not give the same bits as that run."""
    folder = RunFolder(path.parent) if path and path.name == "config.toml" else None
    if folder is None or not (folder.path / "events.jsonl").exists():
        return []
    try:
        notes = [event.message for event in folder.events() if isinstance(event, Note)]
    except RunError:  # that folder is damaged: of no concern here
        return []
    return [f"the run in {folder.path} was {note}" for note in notes if note.startswith(f"{RESUMED} ")]
