"""A run and its folder: what it leaves, and that nothing it has done is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file

from cwfed import config as configs
from cwfed import events, session
from cwfed.errors import ConfigError, RunError
from cwfed.events import Note, Round
from cwfed.folder import RunFolder
from tests.conftest import small


def final_bits(path):
    """Everything of a finished run that must not depend on how it got there."""
    summary = json.loads((path / "summary.json").read_text())
    for varying in ("seconds", "peak_memory_bytes", "notes"):
        summary.pop(varying)
    events = [vars(e) | {"seconds": None} for e in RunFolder(path).events() if isinstance(e, Round)]
    for event in events[:-1]:
        event["portrait"] = None  # a run that was given more rounds keeps that of its former last round
    models = {p.name: p.read_bytes() for p in sorted((path / "models").iterdir())}
    return summary, events, models


@pytest.mark.parametrize("algorithm", ["cwfedavg", "local"])
def test_a_run_leaves_its_folder(tmp_path, algorithm):
    out = tmp_path / "run"
    summary = session.run(small(f"algorithm.name={algorithm}"), out)
    assert sorted(p.name for p in out.iterdir() if p.name[0] != ".") == [
        "checkpoints", "config.toml", "events.jsonl", "manifest.json", "models", "summary.json",
    ]  # fmt: skip
    assert json.loads((out / "summary.json").read_text()) == summary
    assert set(summary["accuracy"]) == {"received", "trained"}
    assert set(summary["accuracy"]["received"]) == {"best", "validated", "last"}
    assert summary["reported"]["phase"] == ("trained" if algorithm == "local" else "received")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["machine"]["instruction_set"]
    assert len(manifest["data"]["digest"]) == len(manifest["split"]["digest"]) == 64
    assert len(load_file(out / "models" / "client-00003.safetensors")) == 4


def test_its_config_runs_again_to_the_same_bits(tmp_path):
    session.run(small("train.participation=0.5"), tmp_path / "a")
    session.run(configs.load(tmp_path / "a" / "config.toml"), tmp_path / "b")
    assert final_bits(tmp_path / "a") == final_bits(tmp_path / "b")


def test_clients_that_share_a_model_share_its_file(tmp_path):
    session.run(small("algorithm.name=fedavg"), tmp_path / "run")
    index = json.loads((tmp_path / "run" / "models" / "index.json").read_text())
    assert index == {str(c): "client-00000.safetensors" for c in range(6)}


@pytest.mark.parametrize("algorithm", ["cwfedavg", "fedavg-ft"])
def test_killed_at_random_moments_and_resumed_it_ends_with_the_same_bits(tmp_path, algorithm):
    """Real processes, SIGKILL: the run is not asked."""
    settings = ["model.name=mlp", "train.rounds=60", "train.participation=0.5", "train.dropout=0.1"]
    settings += [f"algorithm.name={algorithm}", "run.checkpoint_seconds=0"]
    session.run(configs.load(None, settings), tmp_path / "whole")

    out = tmp_path / "killed"
    command = [sys.executable, "-m", "cwfed", "run", "--out", str(out), "--resume", *(f"--set={s}" for s in settings)]
    moments = random.Random(algorithm)
    for kill in range(5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wait_for_lines(out / "events.jsonl", 10 * kill + moments.randrange(2, 10), process)
        time.sleep(moments.random() * 0.02)  # anywhere in a round, in an event, in a checkpoint
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (out / "summary.json").exists()
    subprocess.run(command, check=True, capture_output=True)
    assert final_bits(out) == final_bits(tmp_path / "whole")


def wait_for_lines(path, count, process):
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def interrupt_after(rounds):
    def on_event(event):
        if isinstance(event, Round) and event.round == rounds:
            raise KeyboardInterrupt

    return on_event


def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path):
    config = small("train.rounds=5")
    session.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        session.run(config, tmp_path / "run", on_event=interrupt_after(3))
    seen = []
    session.run(None, tmp_path / "run", resume=True, on_event=seen.append)
    assert [e.round for e in seen if isinstance(e, Round)][-1] == 5
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_a_damaged_checkpoint_costs_rounds_but_not_the_run(tmp_path):
    config = small("train.rounds=5", "run.checkpoint_seconds=0")
    session.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        session.run(config, tmp_path / "run", on_event=interrupt_after(4))
    folder = RunFolder(tmp_path / "run")
    newest = folder.checkpoints.path(folder.checkpoints.rounds()[0])
    newest.write_bytes(newest.read_bytes()[:-20])
    notes = []
    session.run(
        None, tmp_path / "run", resume=True, on_event=lambda e: notes.append(e) if isinstance(e, Note) else None
    )
    assert "damaged" in notes[0].message
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_more_rounds_go_on_from_a_finished_run(tmp_path):
    session.run(small("train.rounds=5"), tmp_path / "whole")
    session.run(small("train.rounds=3"), tmp_path / "run")
    session.run(small("train.rounds=5"), tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_a_finished_run_is_only_read(tmp_path):
    first = session.run(small(), tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").stat().st_mtime_ns
    assert session.run(small(), tmp_path / "run", resume=True) == first
    assert (tmp_path / "run" / "summary.json").stat().st_mtime_ns == before


def test_resuming_on_another_kind_of_cpu_is_noted(tmp_path, monkeypatch):
    config = small("train.rounds=4")
    with pytest.raises(KeyboardInterrupt):
        session.run(config, tmp_path / "run", on_event=interrupt_after(2))
    monkeypatch.setattr("cwfed.manifest.instruction_set", lambda: "x86_64 OTHER")
    summary = session.run(config, tmp_path / "run", resume=True)
    assert "another kind of CPU" in summary["notes"][0]


def test_engine_and_workers_may_change_on_resume(tmp_path):
    config = small("train.rounds=4", "run.engine=loop")
    session.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        session.run(config, tmp_path / "run", on_event=interrupt_after(2))
    session.run(small("train.rounds=4", "run.engine=threads", "run.workers=3"), tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_folders_that_cannot_be_used(tmp_path):
    session.run(small(), tmp_path / "run")
    with pytest.raises(RunError, match="already holds a finished run: --resume"):
        session.run(small(), tmp_path / "run")
    with pytest.raises(RunError, match=r"holds another experiment: train\.lr is 0\.05 there and 0\.1 here"):
        session.run(small("train.lr=0.1"), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"train\.rounds is 3 there and 2 here"):
        session.run(small("train.rounds=2"), tmp_path / "run", resume=True)
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"no run of cwfed, such as thesis\.tex"):
        session.run(small(), tmp_path / "stray")
    with pytest.raises(RunError, match="cannot be written"):
        session.run(small(), tmp_path / "stray" / "thesis.tex")
    with pytest.raises(RunError, match="cannot be written"):
        session.run(small(), "/proc/nowhere")
    with pytest.raises(RunError, match="give its folder"):
        session.run(small(), resume=True)


def test_a_folder_in_use_is_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.locked(), pytest.raises(RunError, match="in use by another process"):
        session.run(small(), tmp_path / "run")


def test_other_data_behind_the_same_config_are_noticed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        session.run(small(), tmp_path / "run", on_event=interrupt_after(1))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    manifest["data"]["digest"] = "0" * 64
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="made with another data"):
        session.run(None, tmp_path / "run", resume=True)


@pytest.mark.parametrize("damage", ["short", "nonsense"])
def test_damaged_events_are_named(tmp_path, damage):
    with pytest.raises(KeyboardInterrupt):
        session.run(small(), tmp_path / "run", on_event=interrupt_after(2))
    path = tmp_path / "run" / "events.jsonl"
    content = path.read_text()
    path.write_text(content[:50] if damage == "short" else content.replace('"round"', '"r', 1))
    with pytest.raises(RunError, match="damaged"):
        session.run(None, tmp_path / "run", resume=True)


def test_settings_that_turn_out_wrong_leave_the_folder_free(tmp_path):
    with pytest.raises(ConfigError, match="did you mean"):
        session.run(small("algorithm.layers=outptu"), tmp_path / "run")
    session.run(small("algorithm.layers=output"), tmp_path / "run")


def test_resuming_where_there_is_no_run(tmp_path):
    with pytest.raises(RunError, match="holds no run to resume"):
        session.run(None, tmp_path / "typo", resume=True)


def test_interrupted_while_an_event_is_written_loses_no_round(tmp_path, monkeypatch):
    config = small("train.rounds=5")
    session.run(config, tmp_path / "whole")
    original = events.to_json

    def interrupted(event):
        if isinstance(event, Round) and event.round == 3:
            raise KeyboardInterrupt
        return original(event)

    with monkeypatch.context() as patch:
        patch.setattr(events, "to_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(config, tmp_path / "run")
    session.run(None, tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


@pytest.mark.parametrize("left", [["config.toml"], ["config.toml", "manifest.json"]])
def test_killed_before_the_first_event_it_can_be_resumed(tmp_path, left):
    session.run(small(), tmp_path / "whole")
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    session.run(None, tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_a_config_that_was_edited_does_not_match_the_checkpoints(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        session.run(small(), tmp_path / "run", on_event=interrupt_after(2))
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.05", "lr = 0.9"))
    with pytest.raises(RunError, match=r"do not match its config\.toml"):
        session.run(None, tmp_path / "run", resume=True)


def test_when_no_checkpoint_is_whole_nothing_is_thrown_away(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        session.run(small(), tmp_path / "run", on_event=interrupt_after(2))
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(b"nonsense")
    with pytest.raises(RunError, match="no checkpoint of the run is whole"):
        session.run(None, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["summary.json", "manifest.json"])
@pytest.mark.parametrize("content", ["{}", "[]", "nonsense"])
def test_damaged_small_files_are_named(tmp_path, name, content):
    session.run(small(), tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(RunError, match=f"{name} is damaged"):
        session.run(small("train.rounds=4"), tmp_path / "run", resume=True)


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(tmp_path, monkeypatch):
    config = small("run.checkpoint_seconds=0")
    session.run(config, tmp_path / "whole")

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cwfed.checkpoint.save_file", full)
        with pytest.raises(RunError, match=r"No space left on device.*--resume"):
            session.run(config, tmp_path / "run")
    session.run(None, tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_diverged_training_keeps_what_was_done(tmp_path):
    """A client that diverges in a later round: the rounds before it are in the folder."""
    config = small("train.rounds=3", "run.checkpoint_seconds=0")
    with pytest.raises(KeyboardInterrupt):
        session.run(config, tmp_path / "run", on_event=interrupt_after(2))
    assert RunFolder(tmp_path / "run").checkpoints.rounds() == [2, 1]
    with pytest.raises(RunError, match="round 3 is not a finite number"):
        session.run(small("train.lr=1e30"), tmp_path / "diverged")
    last = [e for e in RunFolder(tmp_path / "diverged").events() if isinstance(e, Round)][-1]
    assert (last.round, last.skipped) == (3, "0 good updates, and guard.least = 1")


def test_models_that_are_too_many_are_left_out_and_can_be_had_later(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "MODELS_LIMIT", 1000)
    summary = session.run(small(), tmp_path / "run")
    assert "were not written" in summary["notes"][0]
    assert not (tmp_path / "run" / "models").exists()
    session.run(small("run.save_models=all"), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "models" / "index.json").exists()


def test_settings_that_came_later_do_not_lock_out_older_runs():
    """A run of the version that had none of them has the hash that this version gives to their older meaning."""
    import hashlib
    import json

    from cwfed import folder

    config = small()
    before = folder.flat(config.model_dump())
    later = {"train.precision", "algorithm.class_cap", "algorithm.robust", "algorithm.trim"}
    later |= {key for key in before if key.startswith(("guard.", "adversary."))}
    before = {k: v for k, v in before.items() if k not in folder.FREE_TO_CHANGE | {"train.rounds"} | later}
    assert folder.experiment(config) == hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()
    for other in ("train.precision=bf16", "algorithm.class_cap=0.5", "guard.norm_bound=2", "adversary.clients=1"):
        assert folder.experiment(small(other)) != folder.experiment(config)
