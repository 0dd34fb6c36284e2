"""Live tracking of a run: TensorBoard, Weights & Biases and MLflow get the same numbers under the same names."""

from __future__ import annotations

import hashlib
import importlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cwfed.core import files
from cwfed.core.errors import ConfigError, RunError, did_you_mean
from cwfed.core.events import Event, Newcomers, Note, Round, Started
from cwfed.core.metrics import finite, recall
from cwfed.core.terminal import FEW_CLASSES, err, escape
from cwfed.federation.config import Config
from cwfed.federation.settings import flat
from cwfed.runs.folder import RunFolder

PROJECT = "cwfed"
"""The project or experiment of the runs, if the user's environment does not name one."""
SHOWN = ("accuracy/received", "accuracy/trained", "validation/received", "validation/trained")
"""The numbers that TensorBoard's table of hyper-parameters shows."""


@contextmanager
def tracking(
    names: Sequence[str], folder: str | Path, config: Config | None = None
) -> Iterator[Callable[[Event], None]]:
    """A listener for the events of the run in `folder`; without a config, it is read from there.

    The trackers start with the run's first event, not before: their files would make a new run's folder look used, and a finished run
    that is only read needs no tracker.
    """
    trackers = _Trackers(_makers(names), Path(folder), config)
    finished = False
    try:
        yield trackers.tell
        finished = True
    finally:
        trackers.close(finished)


def scalars(event: Round, down: int, up: int) -> dict[str, float]:
    """The numbers of a round by name; `down` and `up` are all bytes sent up to and with it."""
    found: dict[str, float | None] = {
        "loss/train": event.loss,
        "penalty": event.penalty,
        "correlation": event.correlation,
        "distance": event.distance,
        "traffic/down": down,
        "traffic/up": up,
    }
    for phase, result in (("received", event.received), ("trained", event.trained)):
        if result:
            found[f"accuracy/{phase}"] = result.accuracy
            found[f"validation/{phase}"] = result.validation
            found[f"loss/{phase}"] = result.loss
            found |= {f"{name}/{phase}": value for name, value in result.metrics.items()}
            found |= {f"validation_{name}/{phase}": value for name, value in result.validation_metrics.items()}
            if result.classes and len(result.classes.samples) <= FEW_CLASSES:
                recalls = recall(result.classes.table()).tolist()
                found |= {f"recall/{phase}/{k}": finite(value) for k, value in enumerate(recalls)}
    found |= {f"seconds/{step}": seconds for step, seconds in event.seconds.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


# --- the trackers


@dataclass(frozen=True)
class Tracked:
    """What a tracker is told about the run when it starts."""

    folder: Path
    settings: dict[str, Any]
    """All settings, as section.key."""
    id: str
    """An id that stays the same when the run is resumed, and differs for a new run in the same folder."""

    @property
    def name(self) -> str:
        """The name of the run for people."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """Shows a run while it goes on."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers of a round; steps never go back."""

    def note(self, message: str) -> None:
        """Something a reader of the results should know."""

    def close(self, finished: bool) -> None:
        """Nothing comes after this; `finished` is whether the run came to its end."""


class TensorBoard:
    """Event files in the run's folder, one for every time it is started or resumed.

    The messages are tensorboardX's, the writing is not: its writer works in a thread, and when that thread meets a
    full disk it ends, and the next numbers wait for it for ever. It would also overwrite a file of the same second.
    """

    def __init__(self, run: Tracked) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import hparams, text

        self._proto, self._summary, self._text, self._checksum = event_pb2, summary_pb2.Summary, text, masked_crc32c
        self._step: int | None = None
        self._notes: list[str] = []
        folder = run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.iterdir()))  # TensorBoard reads the files in the order of their names
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{number:04d}"
        self._file = (folder / name).open("xb")
        self._write(0, file_version="brain.Event:2")
        plain = {k: v if isinstance(v, str | bool | int | float) else str(v) for k, v in run.settings.items()}
        columns, row, _ = hparams(plain, dict.fromkeys(SHOWN, 0.0))
        self._write(0, summary=columns)
        self._write(0, summary=row)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        is_first = self._step is None
        self._step = step
        if is_first:  # a resumed run does some rounds again: TensorBoard forgets what older files say about them
            self._write(step, session_log=self._proto.SessionLog(status=self._proto.SessionLog.START))
            self._write_notes()
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(step, summary=self._summary(value=values))

    def note(self, message: str) -> None:
        self._notes.append(message)
        if self._step is not None:  # else the round is not known yet
            self._write_notes()

    def close(self, finished: bool) -> None:
        try:
            if self._step is None:
                self._step = 0
                self._write_notes()
        finally:
            self._file.close()

    def _write_notes(self) -> None:
        """Write all notes, because a text replaces an earlier one at the same step."""
        if self._notes:
            self._write(self._step or 0, summary=self._text("notes", "\n\n".join(self._notes)))

    def _write(self, step: int, **what: Any) -> None:
        data = self._proto.Event(wall_time=time.time(), step=step, **what).SerializeToString()
        size = struct.pack("<Q", len(data))
        for part in (size, data):
            self._file.write(part + struct.pack("<I", self._checksum(part)))
        self._file.flush()


class WandB:
    """A run of Weights & Biases. Its steps cannot go back, so rounds that a resumed run repeats stay as they were."""

    def __init__(self, run: Tracked) -> None:
        import wandb

        ours = {
            "WANDB_PROJECT": ("project", PROJECT),
            "WANDB_NAME": ("name", run.name),
            "WANDB_DIR": ("dir", str(run.folder)),
            "WANDB_RUN_ID": ("id", run.id),
            "WANDB_RESUME": ("resume", "allow"),
        }
        chosen: dict[str, Any] = {key: value for name, (key, value) in ours.items() if not os.environ.get(name)}
        # create_new: a run that the user's own program has open stays as it is
        self._run: Any = wandb.init(config=run.settings, reinit="create_new", **chosen)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if step >= self._run.starting_step:
            self._run.log(dict(scalars), step=step)

    def note(self, message: str) -> None:
        self._run.summary["notes"] = _lines(self._run.summary.get("notes"), message)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow:
    """A run of MLflow. Nothing in it can be replaced, so its settings and rounds stay as they were."""

    def __init__(self, run: Tracked) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._done, self._notes, known = 0, "", set()
        if not (os.environ.get("MLFLOW_EXPERIMENT_NAME") or os.environ.get("MLFLOW_EXPERIMENT_ID")):
            mlflow.set_experiment(PROJECT)
        before = None
        if not os.environ.get("MLFLOW_RUN_ID"):
            same = f"tags.cwfed_run = '{run.id}'"
            before = next(iter(mlflow.search_runs(filter_string=same, max_results=1, output_format="list")), None)
        if before:
            history = mlflow.MlflowClient().get_metric_history(before.info.run_id, "traffic/down")
            self._done = max((metric.step for metric in history), default=0)
            self._notes, known = before.data.tags.get("notes", ""), set(before.data.params)
        mlflow.start_run(
            run_id=before.info.run_id if before else None,
            run_name=run.name,
            tags={"cwfed_run": run.id},
            nested=mlflow.active_run() is not None,  # in one that the user's own program has open
        )
        try:
            mlflow.log_params({k: v for k, v in run.settings.items() if k not in known})
        except Exception:
            self.close(finished=False)
            raise

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if step > self._done:
            self._mlflow.log_metrics(dict(scalars), step=step)

    def note(self, message: str) -> None:
        self._notes = _lines(self._notes, message)
        self._mlflow.set_tag("notes", self._notes)

    def close(self, finished: bool) -> None:
        self._mlflow.end_run("FINISHED" if finished else "FAILED")


def _lines(before: str | None, message: str) -> str:
    return f"{before}\n{message}" if before else message


Maker = Callable[[Tracked], Tracker]

TRACKERS: dict[str, tuple[Maker, str, str]] = {
    "tensorboard": (TensorBoard, "tensorboardX", "tensorboardX"),
    "wandb": (WandB, "wandb", "cwfed[wandb]"),
    "mlflow": (MLflow, "mlflow", "cwfed[mlflow]"),
}
"""By name: the class, the module it needs, and what to install for that."""


def _makers(names: Sequence[str]) -> dict[str, Maker]:
    """The classes of these names; unknown names and missing packages are found here, before anything starts."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}: {did_you_mean(name, TRACKERS)}")
    makers = {}
    for name in names:
        maker, module, package = TRACKERS[name]
        try:
            found = importlib.import_module(module)
            # a folder of that name, such as the one wandb leaves, is no package, though Python imports it
            reason = None if found.__file__ else "it is not installed"
        except ModuleNotFoundError as error:
            reason = "it is not installed" if error.name == module else _sentence(error)
        except Exception as error:  # a broken package: whatever stops it is the answer
            reason = _sentence(error)
        if reason:
            raise ConfigError(f'tracking with {name} needs {module} ({reason}): pip install "{package}"')
        makers[name] = maker
    return makers


# --- from events to the trackers


class _Trackers:
    """Passes events to the trackers; one that fails gets no more."""

    def __init__(self, makers: dict[str, Maker], folder: Path, config: Config | None) -> None:
        self.makers, self.folder, self.config = makers, folder, config
        self.trackers: dict[str, Tracker] = {}
        self.round, self.down, self.up = 0, 0, 0

    def tell(self, event: Event) -> None:
        if isinstance(event, Started):
            self._start()
        elif isinstance(event, Round):
            self.round, self.down, self.up = event.round, self.down + event.down, self.up + event.up
            numbers = scalars(event, self.down, self.up)
            self._each(lambda tracker: tracker.log(event.round, numbers))
        elif isinstance(event, Newcomers) and self.round:
            joined = {"newcomers/histogram": event.histogram, "newcomers/uniform": event.uniform}
            self._each(lambda tracker: tracker.log(self.round, joined))
        elif isinstance(event, Note):
            self._each(lambda tracker: tracker.note(event.message))

    def close(self, finished: bool) -> None:
        self._each(lambda tracker: tracker.close(finished))
        self.trackers.clear()

    def _start(self) -> None:
        if not self.makers:
            return
        folder = RunFolder(self.folder)
        config = self.config or folder.config()
        if (self.folder / "events.jsonl").exists():  # a resumed run: its traffic goes on from there
            done = [event for event in folder.events() if isinstance(event, Round)]
            self.down, self.up = sum(event.down for event in done), sum(event.up for event in done)
        run = Tracked(self.folder, flat(config.model_dump()), _identity(self.folder, config))
        for name, make in self.makers.items():
            try:
                self.trackers[name] = make(run)
            except Exception as error:  # it is somebody else's code: whatever stops it is the answer
                raise RunError(f"tracking with {name} cannot start: {_sentence(error)}") from error

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # a lost network or a full disk there must not cost the run
                del self.trackers[name]
                with suppress(Exception):
                    tracker.close(finished=False)
                text = f"warning: the run goes on without tracking with {name}, which failed: {_sentence(error)}"
                err.print(escape(text), highlight=False, soft_wrap=True)


def _identity(folder: Path, config: Config) -> str:
    """A hash of the folder, the experiment, and the manifest, which has the start time."""
    manifest = folder / "manifest.json"
    begun = files.read_text(manifest) if manifest.exists() else ""
    parts = (str(folder.resolve()), config.fingerprint, begun)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _sentence(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
