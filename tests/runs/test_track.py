"""Tracking: the clients store what the events say, and none of them can stop a run."""

from __future__ import annotations

import json
import os
import struct
import sys

import pytest

from cwfed.core.errors import ConfigError, RunError
from cwfed.core.events import Note, PhaseResult, Round, Started
from cwfed.runs import session, track
from cwfed.runs.folder import RunFolder
from tests import processes
from tests.conftest import small


def a_round(number: int, **fields) -> Round:
    """Nothing was evaluated, unless the test says so."""
    base = {
        "participants": [0, 1],
        "dropped": [],
        "loss": 0.5,
        "penalty": None,
        "client_loss": [0.25, 0.75],
        "correlation": None,
        "distance": None,
        "received": None,
        "trained": None,
        "down": 100,
        "up": 10,
    }
    return Round(round=number, **base | fields)


STARTED = Started("fedavg", "digits", 0, 3, 2, 10, 7, "received", [0, 1], [5, 5])


def expected(events) -> dict[int, dict[str, float]]:
    """What a client should have by step, worked out from the events of a whole run."""
    steps, down, up = {}, 0, 0
    for event in events:
        if isinstance(event, Round):
            down, up = down + event.down, up + event.up
            steps[event.round] = track.scalars(event, down, up)
    return steps


def run_tracked(name, out, *settings, resume=False, stop_after=None):
    """A small run with one tracker; the events it sent out."""
    seen = []
    config = small("train.rounds=4", *settings)
    with track.tracking([name], out, None if resume else config) as tell:

        def on_event(event):
            seen.append(event)
            tell(event)
            if isinstance(event, Round) and event.round == stop_after:
                raise KeyboardInterrupt

        session.run(None if resume else config, out, resume=resume, on_event=on_event)
    return seen


# --- events to numbers


def test_scalars_of_a_round():
    received = PhaseResult(accuracy=0.75, validation=0.5, loss=1.25, right=[3, 3])
    trained = PhaseResult(accuracy=1.0, validation=None, loss=None, right=[4, 4])
    event = a_round(2, penalty=0.125, distance=0.2, received=received, trained=trained, seconds={"train": 1.5})
    assert track.scalars(event, 300, 30) == {
        "accuracy/received": 0.75,
        "accuracy/trained": 1.0,
        "validation/received": 0.5,
        "loss/train": 0.5,
        "loss/received": 1.25,
        "penalty": 0.125,
        "distance": 0.2,
        "traffic/down": 300.0,
        "traffic/up": 30.0,
        "seconds/train": 1.5,
    }
    assert track.scalars(a_round(1, loss=None), 0, 0) == {"traffic/down": 0.0, "traffic/up": 0.0}


class Recorder:
    """A client that remembers what it is told, and fails at what the test chooses."""

    made: list[Recorder]

    def __init__(self, run, fails=""):
        self.run, self.fails, self.told = run, fails, []
        if fails == "start":
            raise ConnectionError("no route\n  to host [red]")
        Recorder.made.append(self)

    def tell(self, what, *args):
        self.told.append((what, *args))
        if what == self.fails:
            raise ConnectionError("no route\n  to host [red]")

    def log(self, step, scalars):
        self.tell("log", step, dict(scalars))

    def note(self, message):
        self.tell("note", message)

    def close(self, finished):
        self.tell("close", finished)


@pytest.fixture
def recorder(monkeypatch):
    """A tracker called "good", and one called "bad" that fails where it is told to."""
    Recorder.made = []

    def set_up(fails=""):
        monkeypatch.setitem(track.TRACKERS, "good", (Recorder, "json", "json"))
        monkeypatch.setitem(track.TRACKERS, "bad", (lambda run: Recorder(run, fails), "json", "json"))
        return Recorder.made

    return set_up


def test_a_client_is_told_everything(tmp_path, recorder):
    made = recorder()
    seen = []
    config = small("data.clients=20", "data.newcomers=2", "model.options.hidden=8")
    with track.tracking(["good"], tmp_path / "run", config) as tell:
        session.run(config, tmp_path / "run", on_event=lambda e: (seen.append(e), tell(e)))
        tell(Note("by the way"))
    [client] = made
    assert client.run.name == "run"
    assert client.run.settings["model.options.hidden"] == 8
    assert client.run.settings["algorithm.name"] == "cwfedavg"
    logged = [(step, numbers) for what, step, numbers in client.told[:-2]]
    assert logged[:3] == list(expected(seen).items())
    joined = seen[-1]
    assert logged[3:] == [(3, {"newcomers/histogram": joined.histogram, "newcomers/uniform": joined.uniform})]
    assert client.told[-2:] == [("note", "by the way"), ("close", True)]


def test_the_traffic_of_a_resumed_run_goes_on(tmp_path, recorder):
    recorder()
    with pytest.raises(KeyboardInterrupt):
        run_tracked("good", tmp_path / "run", stop_after=2)
    run_tracked("good", tmp_path / "run", resume=True)
    first, second = Recorder.made
    assert first.told[-1] == ("close", False)
    assert first.run.id == second.run.id
    told = {step: numbers for client in (first, second) for what, step, *numbers in client.told if what == "log"}
    whole = expected(RunFolder(tmp_path / "run").events())
    assert {step: numbers for step, [numbers] in told.items()} == whole


def test_a_new_run_in_the_same_place_is_another_run(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "manifest.json").write_text('{"started": "today"}')
    config = small()
    first = track._identity(out, config)
    assert first == track._identity(out, small("run.workers=2", "train.rounds=9"))  # a resumed run may change these
    assert first != track._identity(out, small("run.seed=1"))
    (out / "manifest.json").write_text('{"started": "tomorrow"}')
    assert first != track._identity(out, config)


def test_a_finished_run_that_is_only_read_starts_no_client(tmp_path, recorder):
    made = recorder()
    session.run(small(), tmp_path / "run")
    with track.tracking(["good"], tmp_path / "run") as tell:
        session.run(None, tmp_path / "run", resume=True, on_event=tell)
    assert not made


# --- what goes wrong


def test_an_unknown_name_is_found_before_anything_starts(tmp_path, recorder):
    made = recorder()
    with (
        pytest.raises(ConfigError, match=r"unknown tracker 'tensorbord': did you mean tensorboard\?"),
        track.tracking(["good", "tensorbord"], tmp_path / "run", small()),
    ):
        pass
    assert not made
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("wandb", "wandb", 'pip install "cwfed\\[wandb\\]"'),
        ("mlflow", "mlflow", 'pip install "cwfed\\[mlflow\\]"'),
        ("tensorboard", "tensorboardX", 'pip install "tensorboardX"'),
    ],
)
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, name, module, command):
    monkeypatch.setitem(sys.modules, module, None)
    with (
        pytest.raises(ConfigError, match=f"tracking with {name} needs {module} .*: {command}$"),
        track.tracking([name], tmp_path / "run", small()),
    ):
        pass


def test_a_folder_is_not_the_package(tmp_path, monkeypatch):
    """W&B leaves a folder `wandb` in the working directory, and Python imports every folder."""
    monkeypatch.setitem(track.TRACKERS, "left", (Recorder, "left_over_folder", "cwfed[wandb]"))
    (tmp_path / "left_over_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pytest.raises(ConfigError, match=r"needs left_over_folder \(it is not installed\): pip install"),
        track.tracking(["left"], tmp_path / "run", small()),
    ):
        pass


@pytest.mark.parametrize("fails", ["log", "note", "close"])
def test_a_client_that_fails_does_not_stop_the_run(tmp_path, recorder, capsys, fails):
    recorder(fails)
    with track.tracking(["bad", "good"], tmp_path, small()) as tell:
        for event in (STARTED, a_round(1), Note("a"), a_round(2), Note("b"), a_round(3)):
            tell(event)
    bad, good = Recorder.made
    assert [what for what, *_ in good.told] == ["log", "note", "log", "note", "log", "close"]
    assert [what for what, *_ in bad.told].count(fails) <= 2  # and the last time is its own end
    assert ("log", 3, {"loss/train": 0.5, "traffic/down": 300.0, "traffic/up": 30.0}) in good.told
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "goes on without tracking with bad, which failed: no route to host [red]" in said


def test_a_client_that_does_not_start_is_an_error(tmp_path, recorder):
    recorder("start")
    config = small()
    with (
        pytest.raises(RunError, match=r"^tracking with bad cannot start: no route to host \[red\]$"),
        track.tracking(["good", "bad"], tmp_path / "run", config) as tell,
    ):
        session.run(config, tmp_path / "run", on_event=tell)
    assert Recorder.made[0].told == [("close", False)]


# --- TensorBoard


def records(path):
    """The messages of an event file, with their checksums checked."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, at = path.read_bytes(), 0
    while at < len(data):
        size = data[at : at + 8]
        end = at + 12 + struct.unpack("<Q", size)[0]
        body = data[at + 12 : end]
        assert struct.unpack("<I", data[at + 8 : at + 12])[0] == masked_crc32c(size)
        assert struct.unpack("<I", data[end : end + 4])[0] == masked_crc32c(body)
        yield Event.FromString(body)
        at = end + 4


def read_board(folder):
    """Scalars by step and the texts, as TensorBoard has them after it read all files in order."""
    from tensorboardX.proto.event_pb2 import SessionLog

    steps: dict[int, dict[str, float]] = {}
    texts: dict[int, str] = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in records(path):
            if event.session_log.status == SessionLog.START:
                steps = {step: values for step, values in steps.items() if step < event.step}
                texts = {step: text for step, text in texts.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == "notes/text_summary":
                    texts[event.step] = value.tensor.string_val[0].decode()
                elif not value.tag.startswith("_hparams_"):
                    assert value.tag not in steps.get(event.step, {})
                    steps.setdefault(event.step, {})[value.tag] = value.simple_value
    return steps, texts


def nearly(steps):
    """TensorBoard's numbers are float32."""
    return {step: pytest.approx(values, rel=1e-6) for step, values in steps.items()}


def test_tensorboard_has_what_the_events_say(tmp_path):
    seen = run_tracked("tensorboard", tmp_path / "run")
    steps, texts = read_board(tmp_path / "run")
    assert len(steps) == 4
    assert steps == nearly(expected(seen))
    assert steps[4]["accuracy/received"] == pytest.approx(seen[-1].received.accuracy)
    assert not texts


def test_tensorboard_has_the_settings(tmp_path):
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    with track.tracking(["tensorboard"], tmp_path, small()) as tell:
        tell(STARTED)
    [path] = (tmp_path / "tensorboard").iterdir()
    assert "tfevents" in path.name
    found = {v.tag: v.metadata.plugin_data for event in records(path) for v in event.summary.value}
    told = HParamsPluginData.FromString(found["_hparams_/session_start_info"].content).session_start_info.hparams
    assert told["train.lr"].number_value == 0.05
    assert told["data.name"].string_value == "digits"
    assert told["data.balanced"].bool_value is False
    shown = HParamsPluginData.FromString(found["_hparams_/experiment"].content).experiment
    assert [m.name.tag for m in shown.metric_infos] == list(track.SHOWN)


def test_tensorboard_forgets_the_rounds_that_a_resumed_run_does_again(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run_tracked("tensorboard", out, "run.checkpoint_seconds=0", stop_after=3)
    newest = RunFolder(out).checkpoints.path(3)
    newest.unlink()  # as after a kill: round 3 is logged, but was not saved
    seen = run_tracked("tensorboard", out, resume=True)
    assert [event.round for event in seen if isinstance(event, Round)] == [3, 4]
    assert len(list((out / "tensorboard").iterdir())) == 2  # though both began in the same second
    steps, _ = read_board(out)
    assert steps == nearly(expected(RunFolder(out).events()))


def test_tensorboard_shows_notes_at_their_round(tmp_path):
    def session_of(*events):
        with track.tracking(["tensorboard"], tmp_path, small()) as tell:
            for event in (STARTED, *events):
                tell(event)

    session_of(a_round(1), Note("a"), a_round(2), Note("b"), a_round(3), Note("c"))
    session_of(Note("resumed"), a_round(3), Note("d"))
    assert read_board(tmp_path)[1] == {1: "a", 2: "a\n\nb", 3: "resumed\n\nd"}


def test_tensorboard_shows_the_notes_of_a_run_without_rounds(tmp_path):
    with track.tracking(["tensorboard"], tmp_path, small()) as tell:
        tell(STARTED)
        tell(Note("a"))
    assert read_board(tmp_path)[1] == {0: "a"}


def test_a_full_disk_does_not_stop_the_run(tmp_path, capsys):
    """/dev/full takes nothing, as a full disk does."""
    config = small()
    with track.tracking(["tensorboard"], tmp_path / "run", config) as tell:

        def on_event(event):
            tell(event)
            if isinstance(event, Started):
                with open("/dev/full", "wb") as full:
                    [path] = (tmp_path / "run" / "tensorboard").iterdir()
                    opened = next(fd for fd in os.listdir("/proc/self/fd") if points_to(fd, path))
                    os.dup2(full.fileno(), int(opened))

        summary = session.run(config, tmp_path / "run", on_event=on_event)
    assert summary["rounds"] == 3
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert "No space left on device" in said


def points_to(fd, path):
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path.resolve())
    except OSError:
        return False


# --- the others, where they are installed


def wandb_records(path):
    """The records of an offline run: chunks of LevelDB's log format after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, body = path.read_bytes(), 7, b""
    while at + 7 < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        body += data[at + 7 : at + 7 + size]
        at += 7 + size
        if at > len(data):
            return
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(body)
            body = b""


def read_wandb(out):
    """Steps, settings and summary of the newest offline run in a folder."""
    *_, path = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    # its own process may write the file a moment after finish() returns
    processes.until(lambda: any(record.HasField("exit") for record in wandb_records(path)))
    steps, settings, summary = {}, {}, {}
    for record in wandb_records(path):
        for item in record.run.config.update:
            settings[item.key] = json.loads(item.value_json)
        for item in record.summary.update:
            summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        values = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        if values:
            steps[record.history.step.num] = {k: v for k, v in values.items() if k[0] != "_"}
    return path, steps, settings, summary


def test_wandb_has_what_the_events_say(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "run"
    seen = run_tracked("wandb", out)
    path, steps, settings, _ = read_wandb(out)
    assert steps == expected(seen)
    assert settings["train.lr"] == 0.05
    assert settings["algorithm.name"] == "cwfedavg"
    assert path.stem.removeprefix("run-") == track._identity(out, small())

    other = tmp_path / "other"
    other.mkdir()
    with track.tracking(["wandb"], other, small()) as tell:
        for event in (STARTED, a_round(1), Note("a"), Note("b")):
            tell(event)
    assert read_wandb(other)[3]["notes"] == "a\nb"


def test_mlflow_has_what_the_events_say_and_goes_on_when_resumed(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # needs no database; MLflow 3 asks for this
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "")  # set_experiment changes it: this puts it back
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run_tracked("mlflow", out, "run.checkpoint_seconds=0", stop_after=3)
    RunFolder(out).checkpoints.path(3).unlink()
    run_tracked("mlflow", out, resume=True)

    [run] = mlflow.search_runs(output_format="list", experiment_names=["cwfed"])
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"
    assert run.data.params["train.lr"] == "0.05"
    assert run.data.params["data.path"] == ""
    whole = expected(RunFolder(out).events())
    for name in whole[4]:
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
        assert [metric.step for metric in history] == [1, 2, 3, 4]
        if not name.startswith("seconds/"):  # round 3 was done twice
            assert {metric.step: metric.value for metric in history} == {s: whole[s][name] for s in whole}

    for message in ("a", "b"):
        with track.tracking(["mlflow"], out) as tell:
            tell(STARTED)
            tell(Note(message))
    [run] = mlflow.search_runs(output_format="list", experiment_names=["cwfed"])
    assert run.data.tags["notes"] == "a\nb"
    assert mlflow.active_run() is None
