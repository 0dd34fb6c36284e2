"""Seals: each file of a run says its own checksum."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import cwfed
from cwfed.core import files
from cwfed.core.errors import ConfigError, RunError
from cwfed.federation import config as configs
from cwfed.runs import checkpoint, saved_models, session
from cwfed.runs.folder import RunFolder
from tests.conftest import make_endless, small


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sealed") / "run"
    session.run(small("run.checkpoint_seconds=0", "run.keep_checkpoints=2"), folder)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def change(path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_a_sealed_table_by_hand():
    table = {"b": 1.5, "a": [1, "x"]}
    digest = files.sha256(b'{"a": [1, "x"], "b": 1.5}')
    assert files.seal_table(table) == table | {"sha256": digest}
    assert files.open_table(files.seal_table(table)) == table
    assert files.open_table(table) == table, "files of earlier versions have no seal"
    with pytest.raises(ValueError, match="checksum"):
        files.open_table({"b": 1.25, "a": [1, "x"], "sha256": digest})


def test_a_sealed_text_that_was_cut_off_is_noticed():
    sealed = files.seal_text("rounds = 60\n[run]\nseed = 7\n")
    assert files.is_whole_text(sealed)
    assert not files.is_whole_text(sealed[:-9])
    assert not files.is_whole_text(sealed.replace("60", "70"))
    assert files.is_whole_text("rounds = 60\n")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_whole(path, "before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            files.write_whole(path, "after")
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_number_of_a_checkpoint_that_is_no_tensor_is_sealed_too(tmp_path):
    """Rounds, scores and the length of the events are text in the file's header."""
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, {"round": 41, "w": torch.ones(3)})
    path.write_bytes(path.read_bytes().replace(b"41", b"42"))
    with pytest.raises(RunError, match="checksum"):
        checkpoint.load(path)


def test_checkpoints_of_earlier_versions_are_read(tmp_path):
    tensors = {"/w": torch.ones(3)}
    tree = {"dict": {"round": {"value": 3}, "w": {"tensor": "/w"}}}
    meta = json.dumps({"tree": tree, "digest": checkpoint.digest(tensors)})
    checkpoint.save_file(tensors, tmp_path / "c.safetensors", metadata={"cwfed": meta})
    assert checkpoint.load(tmp_path / "c.safetensors")["round"] == 3


def test_an_event_that_is_still_valid_json_is_noticed(run):
    """A flipped digit in a loss that no summary shows."""
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    event = json.loads(lines[1])
    event["client_loss"][0] += 1
    (run / "events.jsonl").write_text("".join([lines[0], json.dumps(event) + "\n", *lines[2:]]))
    with pytest.raises(RunError, match="not as it was when the run finished"):
        RunFolder(run).summary()
    (run / "summary.json").unlink()
    with pytest.raises(RunError, match="not as it was at the checkpoint of round 3"):
        session.run(None, run, resume=True)


def test_events_damaged_after_a_checkpoint_cost_only_the_rounds_since(run, whole):
    """The newest checkpoint has a mark behind the damage; the one before it has not, and serves."""
    (run / "summary.json").unlink()
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join([*lines[:-1], lines[-1].replace('"round": 3', '"round": 4')]))
    notes = session.run(None, run, resume=True)["notes"]
    assert "events.jsonl is damaged" in notes[0]
    assert RunFolder(run).checkpoints.rounds() == [3, 2]
    left, right = (cwfed.load_model(folder, 1).network.state_dict() for folder in (run, whole))
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_more_rounds_by_a_flipped_bit_are_noticed(run):
    (run / "summary.json").unlink()
    change(run / "config.toml", "rounds = 3", "rounds = 7")
    with pytest.raises(RunError, match=r"config\.toml is damaged, or was edited"):
        session.run(None, run, resume=True)


def test_a_damaged_model_is_not_loaded(run):
    path = run / "models" / "client-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="checksum"):
        cwfed.load_model(run, 1, pick="last")
    change(run / "models" / "index.json", "client-00002", "client-00003")
    with pytest.raises(RunError, match="checksum"):
        cwfed.load_model(run, 2, pick="last")


def test_a_damaged_summary_says_how_it_is_made_again(run):
    first = RunFolder(run).summary()
    change(run / "summary.json", '"peak_memory_bytes": ', '"peak_memory_bytes": 1')
    with pytest.raises(RunError, match=r"without its summary\.json, --resume makes it again"):
        session.run(None, run, resume=True)
    (run / "summary.json").unlink()
    again = session.run(None, run, resume=True)
    assert again["accuracy"] == first["accuracy"]


def test_a_checkpoint_of_another_network_is_refused_before_anything_is_changed(run):
    (run / "summary.json").unlink()
    folder = RunFolder(run)
    for round_ in folder.checkpoints.rounds():
        tree = checkpoint.load(folder.checkpoints.path(round_))
        tree["server"] = {"model": {"other": torch.ones(2)}}
        checkpoint.save(folder.checkpoints.path(round_), tree)
    before = (run / "events.jsonl").read_bytes()
    with pytest.raises(RunError, match="does not fit the experiment"):
        session.run(None, run, resume=True)
    assert (run / "events.jsonl").read_bytes() == before


def test_a_model_file_is_only_looked_for_in_the_folder(run):
    (run / "models" / "index.json").write_text(json.dumps({"0": "../../../secret.safetensors", "1": "/etc/passwd"}))
    for client in (0, 1):
        with pytest.raises(RunError, match="is not the name of a model file"):
            cwfed.load_model(run, client, pick="last")


def test_a_run_that_names_code_is_loaded_only_on_trust(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(
        "from dataclasses import dataclass\nfrom cwfed import FedAvg\n"
        "@dataclass(frozen=True)\nclass Theirs(FedAvg):\n    strength: float = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    session.run(small("algorithm.name=theirs:Theirs"), tmp_path / "run")
    with pytest.raises(RunError, match=r"names code, theirs:Theirs, .* pass trust=True"):
        cwfed.load_model("run", 0)
    assert cwfed.load_model("run", 0, trust=True).predict is not None
    session.run(small("algorithm.name=theirs:Theirs", "train.rounds=4"), tmp_path / "run", resume=True)


@pytest.mark.parametrize("way", ["pipe", "device"])
def test_nothing_waits_for_a_pipe_or_reads_a_device(tmp_path, way):
    """Also where a foreign run would be resumed: its lock, its checkpoint, its models."""
    make_endless(tmp_path / ".lock", way)
    with pytest.raises(RunError, match="a pipe, a device"), RunFolder(tmp_path).locked():
        pass
    make_endless(tmp_path / "round-000001.safetensors", way)
    _, complaints = checkpoint.Checkpoints(tmp_path).newest()
    assert "a pipe, a device" in complaints[0]
    make_endless(tmp_path / "index.json", way)
    with pytest.raises(RunError, match="a pipe, a device"):
        saved_models.read(tmp_path, 0, None, 1)


def saved(folder: RunFolder, value: float) -> None:
    model = {"w": torch.full((3,), value)}
    folder.save_models(iter([(0, model)]), {"last": 2, "validated": 1}, iter([(0, model)]))


def test_a_kill_while_models_are_replaced_loses_none(tmp_path, monkeypatch):
    """At each step on the disk: afterwards the old models are there or the new ones, whole, and saving again works."""
    folder = RunFolder(tmp_path)

    class Killed(BaseException):
        pass

    def kill_at(step):
        """Every call that changes or secures a folder is a step; at this one, and ever after, the process is gone."""
        count = 0

        def counted(function):
            def call(*given, **named):
                nonlocal count
                count += 1
                if count > step:
                    raise Killed
                return function(*given, **named)

            return call

        return counted

    finished, step = False, 0
    while not finished:
        saved(folder, 1.0)
        with monkeypatch.context() as patch:
            counted = kill_at(step)
            patch.setattr(Path, "rename", counted(Path.rename))
            patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
            patch.setattr(os, "fsync", counted(os.fsync))
            try:
                saved(folder, 2.0)
                finished = True
            except Killed:
                pass
        for place in (folder.models, folder.models / "validated"):
            index = folder.read_json(str((place / "index.json").relative_to(tmp_path)))
            values = checkpoint.read_tensors(place / index["0"])[0]["w"].tolist()
            assert values in ([1.0] * 3, [2.0] * 3), step
        step += 1
    assert step > 8  # rmtree, five files and two folders, two renames, the folder around it, rmtree
    assert sorted(p.name for p in tmp_path.iterdir()) == ["models"]


def test_models_are_on_disk_before_they_have_their_name(tmp_path, monkeypatch):
    secured, was = set(), os.fsync

    def fsync(handle):
        secured.add(os.fstat(handle).st_ino)
        was(handle)

    renamed = Path.rename

    def rename(path, target):
        assert {p.stat().st_ino for p in [path, *path.rglob("*")]} <= secured
        return renamed(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    saved(RunFolder(tmp_path), 1.0)
    assert tmp_path.stat().st_ino in secured


@pytest.mark.parametrize(
    ("read", "most"),
    [(files.read_text, files.MOST_TABLE), (files.read_bytes, files.MOST_BYTES), (configs.load, 2**20)],
)
def test_a_file_that_is_too_large_is_not_read(tmp_path, read, most):
    """Its size is asked for first. This one has a hole in place of its bytes: to read it would take the memory."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(most + 1)
    with pytest.raises((OSError, ConfigError), match=f"it has {most + 1:,} bytes, more than the {most:,}"):
        read(tmp_path / "large")
