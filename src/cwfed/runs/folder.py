"""The folder of a run: config, manifest, events, checkpoints, models, summary.

`summary.json` is written last, so a folder that has one is a finished run. While a finished run is given more rounds, its summary stays
and is the result of the earlier rounds, until it is replaced.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from pydantic import ValidationError

from cwfed.core import events, files
from cwfed.core.errors import RunError
from cwfed.core.events import Event
from cwfed.federation import config as configs
from cwfed.federation.config import FREE_TO_CHANGE, Config
from cwfed.federation.manifest import Facts
from cwfed.federation.rounds import Progress, from_tree, to_tree
from cwfed.federation.settings import flat
from cwfed.runs import saved_models
from cwfed.runs.checkpoint import Checkpoints, load
from cwfed.runs.saved_models import Models
from cwfed.runs.summary import Summary, summarise

_EVENTS_SUM = "events_sha256"
_SHARED, _TAIL = "events_shared", "events_tail"
"""In the summary of a run that is being given more rounds: how many bytes of events.jsonl belong to it, and the rest of its events."""


class Mark(NamedTuple):
    """The length and hash of events.jsonl at some moment."""

    length: int
    sha256: str


class Restored(NamedTuple):
    """Where an interrupted run was; without progress if it had no checkpoint yet."""

    progress: Progress | None
    picked: Progress | None
    """The progress of the round that validation had picked, if its models are to be saved."""
    complaints: list[str]


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: str | Path, checkpoints: int = 2) -> None:
        self.path = Path(path)
        self.checkpoints = Checkpoints(self.path / "checkpoints", checkpoints)
        self._events: FileIO | None = None
        self._sha = hashlib.sha256()

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "config.toml").exists()

    @property
    def finished(self) -> bool:
        """Whether the run here is complete."""
        return (self.path / "summary.json").exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder: only one process may write to it. The lock ends with the process, however that ends.

        A folder in which no run was begun is not left behind.
        """
        name = self.path / ".lock"
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock, is_new = _made_or_opened(name)
        except OSError as error:
            raise RunError(f"the output folder {self.path} cannot be written ({error.strerror})") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(
                    os.fstat(lock.fileno()), name.stat()
                ):  # removed below, since it was opened here
                    raise OSError
            except OSError:
                raise RunError(f"{self.path} is in use by another process") from None
            try:
                yield
            finally:
                if self._events:
                    self._events.close()
                    self._events = None
                if not self.exists and is_new:
                    with suppress(OSError):
                        name.unlink()
                        for path in made:
                            path.rmdir()

    # --- the small files

    def write_config(self, config: Config) -> None:
        """Write all settings of the run."""
        files.write_whole(self.path / "config.toml", files.seal_text(config.to_toml()))

    def write_json(self, name: str, table: dict[str, Any]) -> None:
        """Write a JSON file of the run."""
        files.write_whole(self.path / name, json.dumps(files.seal_table(table), indent=1))

    def read_json(self, name: str, *keys: str) -> dict[str, Any]:
        """Read a JSON file of the run, which must have these keys."""
        found = files.read_table(self.path / name, f"{self.path} has no {name}: it is not a finished run of cwfed")
        for key in keys:
            if key not in found:
                raise RunError(f"{self.path / name} is damaged: it has no {key!r}")
        return found

    def facts(self) -> Facts:
        """The checked contents of the manifest."""
        try:
            return Facts.model_validate(self.read_json("manifest.json"), strict=True)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            what = f"{self.path / 'manifest.json'} is damaged: {where} is missing or has the wrong type"
            raise RunError(what) from None

    def config(self, *, imports: bool = False) -> Config:
        """The config of the run. Code that it names ("module:name") is imported only with `imports`, which a run needs."""
        if not self.exists:
            raise RunError(f"{self.path} holds no run of cwfed: it has no config.toml")
        path = self.path / "config.toml"
        text = configs.read(path)
        if not text or not files.is_whole_text(text):
            raise RunError(
                f"{path} is damaged, or was edited: settings of a run are changed with --set "
                "(its first line has a checksum; without that line it is taken as it is)"
            )
        return configs.loads(text, path, imports=imports)

    def is_sealed(self) -> bool:
        """Whether every file of a finished run has its checksum; those of early versions do not."""
        tables = [json.loads(files.read_text(self.path / name)) for name in ("manifest.json", "summary.json")]
        text = configs.read(self.path / "config.toml")
        return files.has_seal(text) and all(files.SEAL in table for table in tables) and _EVENTS_SUM in tables[1]

    def config_of_result(self) -> Config:
        """The config of a finished run, with the rounds of its result even if it is being given more."""
        config = self.config()
        if _SHARED not in self._stored():
            return config
        return config.model_copy(update={"train": config.train.model_copy(update={"rounds": self.rounds_done()})})

    # --- the summary

    def write_summary(self, summary: Summary) -> None:
        """Write the summary, the last file of a run."""
        self.write_json("summary.json", summary.to_dict() | {_EVENTS_SUM: self.mark().sha256})

    def summary(self) -> Summary:
        """The summary of a finished run, checked against its events."""
        return self.result()[0]

    def result(self) -> tuple[Summary, list[Event]]:
        """The summary of a finished run and its events, without those of rounds that it was given since."""
        stored = self._stored()
        content = self._content(stored)
        sealed = stored.get(_EVENTS_SUM)  # earlier versions wrote none
        happened = events.parse(content, self.path / "events.jsonl")
        try:
            summary = summarise(happened)
            given = json.loads(summary.to_json())
        except (ValueError, TypeError, IndexError, ZeroDivisionError, AssertionError) as error:
            raise RunError(f"{self.path} is damaged: its events contradict each other ({error})") from None
        for key, value in given.items():
            if stored.get(key) != value:
                raise RunError(f"{self.path} is damaged: its events do not match its summary ({key} differs)")
        if sealed and sealed != files.sha256(content):
            raise RunError(f"{self.path / 'events.jsonl'} is damaged: it is not as it was when the run finished")
        # what no event says: how much memory it took
        peak, of = stored.get("peak_memory_bytes"), stored.get("peak_memory_of")
        return replace(
            summary,
            peak_memory_bytes=peak if isinstance(peak, int) else None,
            peak_memory_of=of if isinstance(of, str) else "",
        ), happened

    def rounds_done(self) -> int:
        """The number of rounds of the result; 0 if there is none yet."""
        rounds: int = self._stored()["rounds"] if self.finished else 0
        return rounds

    def has_all(self, rounds: int) -> bool:
        """Whether the result has so many rounds, or `run.patience` ended it before: no more will follow."""
        return self.finished and (self.rounds_done() >= rounds or bool(self._stored().get("stopped")))

    def _stored(self) -> dict[str, Any]:
        stored = self.read_json("summary.json", "reported", "rounds")
        kinds = {"rounds": int, _SHARED: int, _TAIL: str}
        for key, kind in kinds.items():
            if type(stored.get(key, kind())) is not kind:
                raise RunError(f"{self.path / 'summary.json'} is damaged: {key} has the wrong type")
        return stored

    def _content(self, stored: dict[str, Any]) -> bytes:
        """events.jsonl as it was when the run finished."""
        try:
            content = files.read_bytes(self.path / "events.jsonl")
        except OSError as error:
            raise RunError(f"the events of the run cannot be read from {self.path}: {error}") from None
        return (
            content[: stored[_SHARED]] + stored[_TAIL].encode() if _SHARED in stored and _TAIL in stored else content
        )

    def _set_apart(self, shared: int) -> None:
        """Before a finished run is continued: keep the summary's events after these bytes in the summary, as events.jsonl will change there."""
        self.summary()  # it must be whole
        stored = self._stored()
        if _SHARED not in stored:
            tail = self._content(stored)[shared:].decode()
            self.write_json("summary.json", stored | {_SHARED: shared, _TAIL: tail})

    def check_same(self, config: Config) -> None:
        """RunError unless a config is the same experiment as the run here."""
        ours, theirs = flat(config.model_dump()), flat(self.config().model_dump())
        keys = (ours.keys() | theirs.keys()) - FREE_TO_CHANGE
        for key in sorted(keys, key=lambda key: (key != "algorithm.name", key)):  # its settings differ with it
            mine, there = ours.get(key), theirs.get(key)
            is_length = key in configs.SETTINGS and configs.SETTINGS[key].changes == "length"
            if mine == there or (is_length and self._may_become_as_long(config)):
                continue
            if is_length and config.train.schedule == "cosine":
                raise RunError(
                    f"{self.path} has {key} = {there!r}, and {mine!r} would be another experiment: every learning rate of a "
                    "cosine schedule depends on it; choose another --out"
                )
            raise RunError(
                f"{self.path} holds another experiment: {key} is {there!r} there and {mine!r} here; "
                "choose another --out or the same settings"
            )

    def _may_become_as_long(self, config: Config) -> bool:
        """Whether `train.rounds` may change to this config's: to more rounds, to those of the result, or, without a result, to fewer that are still ahead."""
        wanted, before, done = config.train.rounds, self.config().train.rounds, self.rounds_done()
        if wanted == done:
            return True
        if config.train.schedule == "cosine":
            return False
        reached = max(self.checkpoints.rounds(), default=0)
        return wanted > before or (not done and wanted >= reached)

    # --- events

    def append(self, event: Event) -> None:
        """Add an event to events.jsonl; it is passed to the system when the call returns."""
        log, line = self._log(), (events.to_json(event) + "\n").encode()
        left = line
        while left:  # a nearly full disk may take only a part
            left = left[log.write(left) or 0 :]
        self._sha.update(line)

    def _log(self) -> FileIO:
        if self._events is None:
            path = self.path / "events.jsonl"
            self._sha = hashlib.sha256(files.read_bytes(path) if path.exists() else b"")
            self._events = FileIO(path, "a")
        return self._events

    def events(self) -> list[Event]:
        """All events so far."""
        return events.read(self.path / "events.jsonl")

    def mark(self) -> Mark:
        """The length and hash of events.jsonl now."""
        return Mark(self._log().tell(), self._sha.hexdigest())

    # --- checkpoints

    def save(self, progress: Progress, mark: Mark, picked: Progress | None = None) -> None:
        """Write a checkpoint, with the length of events.jsonl, so that later events can be cut off.

        It includes the progress of the round that validation has picked so far, if its models are to be saved.
        """
        os.fsync(self._log().fileno())
        facts = {"events": mark.length, _EVENTS_SUM: mark.sha256, "experiment": self.config().fingerprint}
        if picked:
            facts["picked"] = None if picked is progress else to_tree(picked)
        self.checkpoints.save(progress.round, to_tree(progress) | facts)

    def restore(self, config: Config, fits: Callable[[Progress], None]) -> Restored:
        """Go back to the newest intact checkpoint with intact events.

        `fits` raises RunError for progress that the experiment cannot continue from. Events after the checkpoint are removed: these
        rounds will be repeated, to the same bits. The result of a finished run stays readable.
        """

        def check(tree: Any) -> None:
            for progress in self._check(tree, config):
                fits(progress)

        tree, complaints = self.checkpoints.newest(check)
        if tree is None and complaints:
            raise RunError(f"no checkpoint of the run can be used: {complaints[0]}; start again in another folder")
        reached = tree["round"] if tree else 0
        if reached < self.rounds_done():
            why = complaints[0] if complaints else "run.keep_checkpoints = 0, or it was removed"
            raise RunError(
                f"{self.path} has no checkpoint of round {self.rounds_done()}, the last of its result ({why}); without its "
                f"summary.json, --resume gives the result up and goes on from round {reached}"
            )
        path = self.path / "events.jsonl"
        if tree is None:
            path.unlink(missing_ok=True)
            return Restored(None, None, complaints)
        if self.finished:
            self._set_apart(tree["events"])
        os.truncate(path, tree["events"])
        return Restored(from_tree(tree), _picked(tree), complaints)

    def rollback(self, round_: int) -> Path:
        """Go back to the checkpoint of a round, from which a resumed run continues. Returns the folder to which later files were moved."""
        rounds = self.checkpoints.rounds()
        if round_ not in rounds:
            there = ", ".join(map(str, sorted(rounds))) or "none"
            raise RunError(f"{self.path} has no checkpoint of round {round_}; there are those of {there}")
        tree = load(self.checkpoints.path(round_))
        self._check(tree, self.config())
        aside = self.path / "rolled-back" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside.mkdir(parents=True)
        shutil.copy(self.path / "events.jsonl", aside)
        for newer in (r for r in rounds if r > round_):
            self.checkpoints.path(newer).rename(aside / self.checkpoints.path(newer).name)
        if self.finished:
            (self.path / "summary.json").rename(aside / "summary.json")
        os.truncate(self.path / "events.jsonl", tree["events"])
        return aside

    def _check(self, tree: Any, config: Config) -> list[Progress]:
        """RunError unless config, events and checkpoint belong to one run, and the events are intact; returns all progress in the checkpoint."""
        path = self.path / "events.jsonl"
        try:
            progress, picked = from_tree(tree), _picked(tree)
            length, experiment_then = tree["events"], tree["experiment"]
            sealed = tree.get(_EVENTS_SUM)  # earlier versions wrote none
            rounds = [progress.round, picked.round if picked else 1]
            if any(type(number) is not int for number in (*rounds, length)):
                raise TypeError("its numbers are not whole numbers")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"a checkpoint in {self.checkpoints.folder} is not one of this version ({error!r})"
            ) from None
        if experiment_then != config.fingerprint:
            raise RunError(f"the checkpoints in {self.path} do not match its config.toml, which was changed since")
        content = files.read_bytes(path) if path.exists() else b""
        if not 0 <= length <= len(content):
            raise RunError(f"{path} is shorter than the checkpoint of round {progress.round} says: it was damaged")
        content = content[:length]
        if sealed and files.sha256(content) != sealed:
            raise RunError(f"{path} is damaged: it is not as it was at the checkpoint of round {progress.round}")
        done = [event.round for event in events.parse(content, path) if isinstance(event, events.Round)]
        if len(done) != progress.round or done != list(range(1, len(done) + 1)):
            raise RunError(f"{path} is damaged: it does not have the rounds 1 to {progress.round}")
        return [progress, picked] if picked else [progress]

    # --- final models

    @property
    def models(self) -> Path:
        """The folder of the saved models; the former ones if the process was killed while new ones replaced them."""
        folder = self.path / "models"
        return folder if folder.exists() or not files.replaced(folder).exists() else files.replaced(folder)

    def save_models(
        self, last: Models, rounds: dict[str, int] | None = None, validated: Models | None = None
    ) -> None:
        """Save the clients' models, all or none; see `saved_models.write`."""
        scratch = self.path / ".models.new"
        shutil.rmtree(scratch, ignore_errors=True)
        saved_models.write(scratch, last, rounds, validated)
        files.put_folder_in_place(scratch, self.path / "models")


def on_disk(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(found.stat().st_size for found in path.rglob("*") if found.is_file())


def _picked(tree: Any) -> Progress | None:
    """The progress of the round that validation had picked; None in checkpoints of earlier versions."""
    if "picked" not in tree:
        return None
    return from_tree(tree if tree["picked"] is None else tree["picked"])


def _made_or_opened(name: Path) -> tuple[IO[str], bool]:
    """A file for a lock, and whether it is new. Whoever made it may remove it while it is opened here: then it is made again."""
    while True:
        try:
            return name.open("x"), True
        except FileExistsError:
            with suppress(FileNotFoundError):
                files.check_regular(name)
                return name.open("r+"), False
