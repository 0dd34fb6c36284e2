"""The folder a run leaves: config, manifest, events, checkpoints, models, summary.

`summary.json` is written last: a folder that has one is a finished run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cwfed import config as configs
from cwfed import events
from cwfed.checkpoint import Checkpoints, digest, write_tensors
from cwfed.config import Config
from cwfed.errors import RunError
from cwfed.events import Event
from cwfed.simulation import Progress, from_tree, to_tree
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


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self._events: IO[str] | None = None

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

    def write(self, name: str, text: str) -> None:
        """A small file, whole or not at all."""
        scratch = self.path / f".{name}.new"
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, self.path / name)

    def read_json(self, name: str, *keys: str) -> Any:
        """A JSON file of the run, which has at least these keys."""
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{self.path} has no {name}: it is not a finished run of cwfed") from None
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self.path / name} is damaged ({error})") from None
        for key in keys:
            if not isinstance(found, dict) or key not in found:
                raise RunError(f"{self.path / name} is damaged: it has no {key!r}")
        return found

    def config(self) -> Config:
        """The config of the run here."""
        if not self.exists:
            raise RunError(f"{self.path} holds no run of cwfed: it has no config.toml")
        return configs.load(self.path / "config.toml")

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
        log = self._log()
        log.write(events.to_json(event) + "\n")
        log.flush()

    def _log(self) -> IO[str]:
        if self._events is None:
            self._events = (self.path / "events.jsonl").open("a", encoding="utf-8")
        return self._events

    def events(self) -> list[Event]:
        """All events so far."""
        return events.read(self.path / "events.jsonl")

    # --- checkpoints

    def position(self) -> int:
        """How long events.jsonl is now."""
        return self._log().tell()

    def save(self, progress: Progress, position: int) -> None:
        """A checkpoint; it remembers how long events.jsonl was then, to cut off what came after it."""
        os.fsync(self._log().fileno())
        facts = {"events": position, "experiment": experiment(self.config())}
        self.checkpoints.save(progress.round, to_tree(progress) | facts)

    def restore(self, config: Config) -> tuple[Progress | None, list[str]]:
        """The newest whole checkpoint, events.jsonl cut back to it; None where the run did not get that far."""
        tree, complaints = self.checkpoints.newest()
        path = self.path / "events.jsonl"
        if tree is None:
            if complaints:
                raise RunError(f"no checkpoint of the run is whole: {complaints[0]}; start again in another folder")
            path.unlink(missing_ok=True)
            return None, complaints
        if tree["experiment"] != experiment(config):
            raise RunError(f"the checkpoints in {self.path} do not match its config.toml, which was changed since")
        if not path.exists() or path.stat().st_size < tree["events"]:
            raise RunError(f"{path} is shorter than the checkpoint of round {tree['round']} says: it was damaged")
        os.truncate(path, tree["events"])
        done = [event.round for event in self.events() if isinstance(event, events.Round)]
        if done != list(range(1, tree["round"] + 1)):
            raise RunError(f"{path} is damaged: it does not have the rounds 1 to {tree['round']}")
        return from_tree(tree), complaints

    # --- final models

    def save_models(self, models: Iterator[tuple[int, Params]]) -> None:
        """One safetensors file a personal model, and an index of who has which."""
        scratch, final = self.path / ".models.new", self.path / "models"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        index: dict[str, str] = {}
        files: dict[str, str] = {}  # by content: clients with the same model share its file
        for client, model in models:
            content = digest(model)
            if content not in files:
                files[content] = f"client-{client:05d}.safetensors"
                write_tensors(scratch / files[content], {name: w.contiguous() for name, w in model.items()})
            index[str(client)] = files[content]
        (scratch / "index.json").write_text(json.dumps(index, indent=1))
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
