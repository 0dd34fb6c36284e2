"""The folder a run leaves: config, manifest, events, checkpoints, models, summary.

`summary.json` is written last: a folder that has one is a finished run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from cwfed import config as configs
from cwfed import events, files
from cwfed.checkpoint import Checkpoints, digest, write_tensors
from cwfed.config import Config
from cwfed.errors import RunError
from cwfed.events import Event
from cwfed.manifest import Facts
from cwfed.rounds import Progress, from_tree, to_tree
from cwfed.summary import summarise
from cwfed.types import Params

ADDED_LATER = {
    "train.precision": "fp32",
    "guard.least": 1,
    "guard.most_samples": 10**9,
    "guard.norm_bound": 0.0,
    "adversary.clients": 0,
    "adversary.attack": "class-capture",
    "adversary.strength": 100.0,
    "adversary.target": 0,
    "algorithm.class_cap": 1.0,
    "algorithm.robust": "mean",
    "algorithm.trim": 0.1,
    "privacy.norms": "exact",
    "privacy.norm_noise": 0.5,
    "privacy.norm_levels": 2,
    "privacy.dp": "off",
    "privacy.dp_clip": 1.0,
    "privacy.dp_noise": 1.0,
    "privacy.dp_delta": 1e-5,
    "privacy.dp_histogram": 0.0,
}
"""Settings that older runs do not have: at these values they mean what was done then."""
FREE_TO_CHANGE = {
    "run.engine",
    "run.workers",
    "run.compile",
    "run.device",
    "run.checkpoint_seconds",
    "run.save_models",
}
"""Settings that a resumed run may change: they do not change its results. `train.rounds` may grow."""

_EVENTS_SUM = "events_sha256"


class Mark(NamedTuple):
    """How far events.jsonl was at some moment."""

    length: int
    sha256: str


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = Checkpoints(self.path / "checkpoints")
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
        """Only one process at a time may write here; the lock ends with the process, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a")
        except OSError as error:
            raise RunError(f"the output folder {self.path} cannot be written ({error.strerror})") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"{self.path} is in use by another process") from None
            try:
                yield
            finally:
                if self._events:
                    self._events.close()
                    self._events = None

    # --- the small files

    def write_config(self, config: Config) -> None:
        """The settings of the run, complete."""
        files.write_whole(self.path / "config.toml", files.seal_text(config.to_toml()))

    def write_json(self, name: str, table: dict[str, Any]) -> None:
        """A JSON file of the run."""
        files.write_whole(self.path / name, json.dumps(files.seal_table(table), indent=1))

    def read_json(self, name: str, *keys: str) -> dict[str, Any]:
        """A JSON file of the run, which has at least these keys."""
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
            if isinstance(found, list):  # the vocabulary of an earlier version
                found = {"words": found}
            if not isinstance(found, dict):
                raise ValueError("it is not a table")
            found = files.open_table(found)
        except FileNotFoundError:
            raise RunError(f"{self.path} has no {name}: it is not a finished run of cwfed") from None
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self.path / name} is damaged ({error})") from None
        for key in keys:
            if key not in found:
                raise RunError(f"{self.path / name} is damaged: it has no {key!r}")
        return found

    def facts(self) -> Facts:
        """What the manifest says, checked."""
        try:
            return Facts.model_validate(self.read_json("manifest.json"), strict=True)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            what = f"{self.path / 'manifest.json'} is damaged: {where} is missing or of another kind"
            raise RunError(what) from None

    def config(self, *, imports: bool = False) -> Config:
        """The config of the run here. Unless it is to be run, code that it names ("module:name") is not imported."""
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

    # --- the summary

    def write_summary(self, summary: dict[str, Any]) -> None:
        """The last file of a run: it is finished when this is there."""
        self.write_json("summary.json", summary | {_EVENTS_SUM: self.mark().sha256})

    def summary(self) -> dict[str, Any]:
        """The summary of a finished run, which must be the one that its events give."""
        stored = self.read_json("summary.json", "reported", "rounds")
        sealed = stored.pop(_EVENTS_SUM, None)  # earlier versions wrote none
        happened = self.events()
        try:
            given = json.loads(json.dumps(summarise(happened)))
        except (ValueError, TypeError, IndexError, ZeroDivisionError, AssertionError) as error:
            raise RunError(f"{self.path} is damaged: its events contradict each other ({error})") from None
        for key, value in given.items():
            if stored.get(key) != value:
                raise RunError(f"{self.path} is damaged: its events do not match its summary ({key} differs)")
        if sealed and sealed != files.sha256((self.path / "events.jsonl").read_bytes()):
            raise RunError(f"{self.path / 'events.jsonl'} is damaged: it is not as it was when the run finished")
        return stored

    def check_same(self, config: Config) -> None:
        """A resumed run must be the same experiment."""
        ours, theirs = flat(config.model_dump()), flat(self.config().model_dump())
        for key in sorted((ours.keys() | theirs.keys()) - FREE_TO_CHANGE):
            mine, there = ours.get(key), theirs.get(key)
            if mine == there or _grew(key, mine, there):
                continue
            raise RunError(
                f"{self.path} holds another experiment: {key} is {there!r} there and {mine!r} here; "
                "choose another --out or the same settings"
            )

    # --- events

    def append(self, event: Event) -> None:
        """Add a line to events.jsonl; it is out of this process when the call returns."""
        log, line = self._log(), (events.to_json(event) + "\n").encode()
        left = line
        while left:  # a nearly full disk takes a part
            left = left[log.write(left) or 0 :]
        self._sha.update(line)

    def _log(self) -> FileIO:
        if self._events is None:
            path = self.path / "events.jsonl"
            self._sha = hashlib.sha256(path.read_bytes() if path.exists() else b"")
            self._events = FileIO(path, "a")
        return self._events

    def events(self) -> list[Event]:
        """All events so far."""
        return events.read(self.path / "events.jsonl")

    def mark(self) -> Mark:
        """How far events.jsonl is now."""
        return Mark(self._log().tell(), self._sha.hexdigest())

    # --- checkpoints

    def save(self, progress: Progress, mark: Mark) -> None:
        """A checkpoint; it remembers how events.jsonl was then, to cut off what came after it."""
        os.fsync(self._log().fileno())
        facts = {"events": mark.length, _EVENTS_SUM: mark.sha256, "experiment": experiment(self.config())}
        self.checkpoints.save(progress.round, to_tree(progress) | facts)

    def restore(self, config: Config, fits: Callable[[Progress], None]) -> tuple[Progress | None, list[str]]:
        """The newest whole checkpoint whose events are whole; None where the run did not get that far.

        `fits` raises RunError for progress that the experiment cannot go on from. What came after the checkpoint, events
        and summary, is taken away: it will be done again, to the same bits.
        """
        tree, complaints = self.checkpoints.newest(lambda tree: fits(self._check(tree, config)))
        if tree is None and complaints:
            raise RunError(f"no checkpoint of the run can be used: {complaints[0]}; start again in another folder")
        (self.path / "summary.json").unlink(missing_ok=True)
        path = self.path / "events.jsonl"
        if tree is None:
            path.unlink(missing_ok=True)
            return None, complaints
        os.truncate(path, tree["events"])
        return from_tree(tree), complaints

    def _check(self, tree: Any, config: Config) -> Progress:
        """Config, events and checkpoint must be of one run, and the events as they were then."""
        path = self.path / "events.jsonl"
        try:
            progress, length, experiment_then = from_tree(tree), tree["events"], tree["experiment"]
            sealed = tree.get(_EVENTS_SUM)  # earlier versions wrote none
            if type(progress.round) is not int or type(length) is not int:
                raise TypeError("its numbers are none")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"a checkpoint in {self.checkpoints.folder} is of another kind ({error!r})") from None
        if experiment_then != experiment(config):
            raise RunError(f"the checkpoints in {self.path} do not match its config.toml, which was changed since")
        content = path.read_bytes() if path.exists() else b""
        if not 0 <= length <= len(content):
            raise RunError(f"{path} is shorter than the checkpoint of round {progress.round} says: it was damaged")
        content = content[:length]
        if sealed and files.sha256(content) != sealed:
            raise RunError(f"{path} is damaged: it is not as it was at the checkpoint of round {progress.round}")
        done = [event.round for event in events.parse(content, path) if isinstance(event, events.Round)]
        if len(done) != progress.round or done != list(range(1, len(done) + 1)):
            raise RunError(f"{path} is damaged: it does not have the rounds 1 to {progress.round}")
        return progress

    # --- final models

    def save_models(self, models: Iterator[tuple[int, Params]]) -> None:
        """One safetensors file a personal model, and an index of who has which."""
        scratch, final = self.path / ".models.new", self.path / "models"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        index: dict[str, str] = {}
        names: dict[str, str] = {}  # by content: clients with the same model share its file
        for client, model in models:
            content = digest(model)
            if content not in names:
                names[content] = f"client-{client:05d}.safetensors"
                write_tensors(scratch / names[content], {name: w.contiguous() for name, w in model.items()})
            index[str(client)] = names[content]
        (scratch / "index.json").write_text(json.dumps(files.seal_table(index), indent=1))
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)


def experiment(config: Config) -> str:
    """A hash of all settings that a resumed run must share."""
    settings = {k: v for k, v in flat(config.model_dump()).items() if k not in FREE_TO_CHANGE | {"train.rounds"}}
    for key, value in ADDED_LATER.items():
        if settings.get(key) == value:
            del settings[key]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _grew(key: str, now: Any, before: Any) -> bool:
    return key == "train.rounds" and now > before


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
