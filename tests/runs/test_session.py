"""A run and its folder: what it leaves, and that nothing it has done is lost."""

from __future__ import annotations

import fcntl
import json
import random
import signal
import sys

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file

import cwfed
from cwfed.core import events, files
from cwfed.core.errors import ConfigError, RunError
from cwfed.core.events import Note, Round
from cwfed.federation import config as configs
from cwfed.report.finished import read_run
from cwfed.runs import picking, resuming, session
from cwfed.runs.folder import RunFolder
from tests import processes
from tests.conftest import EARLY, ROOT, all_digits, small
from tests.test_cli import cwfed as cli


def final_bits(path):
    """Everything of a finished run that must not depend on how it got there."""
    summary = json.loads((path / "summary.json").read_text())
    for varying in ("seconds", "peak_memory_bytes", "notes", "sha256", "events_sha256"):
        summary.pop(varying)
    events = [vars(e) | {"seconds": None} for e in RunFolder(path).events() if isinstance(e, Round)]
    for event in events[:-1]:
        event["portrait"] = None  # a run that was given more rounds keeps that of its former last round
    found = sorted(p for p in (path / "models").rglob("*") if p.is_file())
    models = {str(p.relative_to(path)): p.read_bytes() for p in found}
    return summary, events, models


@pytest.mark.parametrize("algorithm", ["cwfedavg", "local"])
def test_a_run_leaves_its_folder(tmp_path, algorithm):
    out = tmp_path / "run"
    summary = session.run(small(f"algorithm.name={algorithm}"), out)
    assert sorted(p.name for p in out.iterdir() if p.name[0] != ".") == [
        "checkpoints", "config.toml", "events.jsonl", "manifest.json", "models", "summary.json",
    ]  # fmt: skip
    assert RunFolder(out).summary() == summary
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
    index = RunFolder(tmp_path / "run").read_json("models/index.json")
    assert index == {str(c): "client-00000.safetensors" for c in range(6)}


@pytest.mark.parametrize("algorithm", ["cwfedavg", "fedavg-ft"])
def test_killed_at_random_moments_and_resumed_it_ends_with_the_same_bits(tmp_path, algorithm):
    """Real processes, SIGKILL: the run is not asked."""
    settings = [
        "model.name=mlp",
        "data.samples=300",
        "data.clients=8",
        "train.rounds=32",
        "train.participation=0.5",
        "train.client_dropout=0.1",
    ]
    settings += [f"algorithm.name={algorithm}", "run.checkpoint_seconds=0"]
    session.run(configs.load(None, settings), tmp_path / "whole")

    out = tmp_path / "killed"
    command = ["run", "--out", str(out), "--resume", *(f"--set={s}" for s in settings)]
    moments = random.Random(algorithm)
    for kill in range(3):
        lines, seconds = 10 * kill + moments.randrange(2, 10), moments.random() * 0.02
        dying = (
            f"from pathlib import Path; from tests.processes import die_after_lines; from cwfed.cli import main;"
            f"die_after_lines(Path({str(out / 'events.jsonl')!r}), {lines}, {seconds}); main()"
        )  # anywhere in a round, in an event, in a checkpoint
        done = processes.run([sys.executable, "-c", dying, *command], cwd=ROOT, warm=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (out / "summary.json").exists()
    processes.run([sys.executable, "-m", "cwfed", *command], check=True, warm=True)
    assert final_bits(out) == final_bits(tmp_path / "whole")


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


def test_rounds_of_a_cosine_schedule_are_part_of_the_experiment(tmp_path):
    """A run of 3 that got 5 would have had other rates in its first 3 than the whole run of 5."""
    session.run(small("train.rounds=3", "train.schedule=cosine"), tmp_path / "run")
    with pytest.raises(RunError, match=r"train\.rounds = 3, and 5 would be another experiment: .*cosine"):
        session.run(small("train.rounds=5", "train.schedule=cosine"), tmp_path / "run", resume=True)


def test_an_unfinished_run_may_end_earlier_but_not_before_where_it_is(tmp_path):
    session.run(small("train.rounds=3"), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        session.run(small("train.rounds=5"), tmp_path / "run", on_event=interrupt_after(2))
    with pytest.raises(RunError, match="rounds is 5 there and 1 here"):
        session.run(small("train.rounds=1"), tmp_path / "run", resume=True)
    assert session.run(small("train.rounds=3"), tmp_path / "run", resume=True)["rounds"] == 3
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")
    assert read_run(tmp_path / "run").config.train.rounds == 3


def test_more_rounds_that_are_broken_off_leave_the_result_as_it_was(tmp_path):
    """With newcomers, whose event comes after the last checkpoint."""

    def config(rounds):
        return small(f"train.rounds={rounds}", "data.newcomers=1")

    def kept():
        record = read_run(tmp_path / "run")
        return record.summary, record.rounds, record.config.train.rounds, cwfed.load_model(tmp_path / "run", 0).round

    session.run(config(8), tmp_path / "whole")
    first = session.run(config(4), tmp_path / "run")
    before = kept()
    assert before[0] == first
    assert before[2] == 4
    for broken_off_in in (5, 6):
        with pytest.raises(KeyboardInterrupt):
            session.run(config(8), tmp_path / "run", resume=True, on_event=interrupt_after(broken_off_in))
        assert kept() == before
        assert session.run(config(4), tmp_path / "run", resume=True) == first  # back to what there was
    summary = session.run(None, tmp_path / "run", resume=True)  # and on to what was begun
    assert summary["rounds"] == 8
    assert [e.kind for e in RunFolder(tmp_path / "run").events()] == ["started", *["round"] * 8, "newcomers"]
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")
    assert read_run(tmp_path / "run").config.train.rounds == 8


@pytest.mark.parametrize(("keep", "left"), [(0, []), (1, [3]), (2, [3, 2])])
def test_a_finished_run_keeps_as_many_checkpoints_as_wanted(tmp_path, keep, left):
    """Without any its result is still there, and whoever wants more rounds is told; nothing is changed."""
    config = small("run.checkpoint_seconds=0", f"run.keep_checkpoints={keep}", "run.save_models=none")
    summary = session.run(config, tmp_path / "run")
    assert RunFolder(tmp_path / "run").checkpoints.rounds() == left
    assert session.run(config, tmp_path / "run", resume=True) == summary
    if keep:
        return
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    for more in ("train.rounds=5", "run.save_models=all"):
        with pytest.raises(RunError, match=r"no checkpoint of round 3.*run\.keep_checkpoints = 0, or it was removed"):
            session.run(small("run.keep_checkpoints=0", more), tmp_path / "run", resume=True)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_a_result_is_not_given_up_for_more_rounds_without_being_asked(tmp_path):
    """Its last checkpoint is damaged: going on would do some of its rounds again."""
    session.run(small("train.rounds=5"), tmp_path / "whole")
    session.run(small("run.checkpoint_seconds=0", "run.keep_checkpoints=2"), tmp_path / "run")
    newest = RunFolder(tmp_path / "run").checkpoints.path(3)
    newest.write_bytes(newest.read_bytes()[:-20])
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(RunError, match=r"no checkpoint of round 3.*summary\.json.*goes on from round 2"):
        session.run(small("train.rounds=5"), tmp_path / "run", resume=True)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    (tmp_path / "run" / "summary.json").unlink()
    session.run(small("train.rounds=5"), tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


@pytest.mark.parametrize("algorithm", ["cwfedavg", "fedavg-ft"])
def test_the_models_that_validation_picked_survive_a_break(tmp_path, algorithm):
    """Picked before the break, in a round whose checkpoint is long gone; one that keeps models and one that does not."""
    config = small("train.rounds=8", "train.lr=1.0", f"algorithm.name={algorithm}", "run.checkpoint_seconds=0")
    summary = session.run(config, tmp_path / "whole")
    picked = summary["picked_rounds"][summary["reported"]["phase"]]["validated"]
    assert picked < 6
    for stop in (6, 7):
        with pytest.raises(KeyboardInterrupt):
            session.run(config, tmp_path / "run", resume=stop > 6, on_event=interrupt_after(stop))
    session.run(None, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "models" / "validated" / "index.json").exists()
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
    monkeypatch.setattr("cwfed.federation.manifest.instruction_set", lambda: "x86_64 OTHER")
    summary = session.run(config, tmp_path / "run", resume=True)
    assert "another kind of CPU" in summary["notes"][0]


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_resuming_with_another_version_is_noted(tmp_path, package):
    with pytest.raises(KeyboardInterrupt):
        session.run(small(), tmp_path / "run", on_event=interrupt_after(2))
    manifest = RunFolder(tmp_path / "run").read_json("manifest.json")
    manifest["versions"][package] = "0.9"
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(files.seal_table(manifest)))
    summary = session.run(small(), tmp_path / "run", resume=True)
    assert f"resumed with another {package} (0.9, now " in summary["notes"][0]


def test_engine_and_workers_may_change_on_resume(tmp_path):
    config = small("train.rounds=4", "run.engine=loop")
    session.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        session.run(config, tmp_path / "run", on_event=interrupt_after(2))
    session.run(small("train.rounds=4", "run.engine=threads", "run.workers=3"), tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_resuming_on_an_engine_that_rounds_otherwise_is_noted(tmp_path):
    """Nor is its config alone the recipe of its bits any more: whoever runs that again is told so."""
    with pytest.raises(KeyboardInterrupt):
        session.run(small("run.engine=loop"), tmp_path / "run", on_event=interrupt_after(2))
    summary = session.run(small("run.engine=vmap"), tmp_path / "run", resume=True)
    (note,) = summary["notes"]
    assert "resumed on another engine (loop on cpu, now vmap on cpu)" in note
    again = cli("run", tmp_path / "run" / "config.toml", "--set=train.rounds=1", cwd=tmp_path)
    assert f"was {note}" in " ".join(again.stderr.split())
    assert resuming.not_alone(tmp_path / "runs" / "digits-cwfedavg-0" / "config.toml") == []


def test_folders_that_cannot_be_used(tmp_path):
    session.run(small(), tmp_path / "run")
    with pytest.raises(RunError, match="already holds a finished run: --resume"):
        session.run(small(), tmp_path / "run")
    with pytest.raises(RunError, match=r"another experiment: algorithm\.name is 'cwfedavg' there and 'fedavg' here"):
        session.run(small("algorithm.name=fedavg"), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"holds another experiment: train\.lr is 0\.05 there and 0\.1 here"):
        session.run(small("train.lr=0.1"), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"train\.rounds is 3 there and 2 here"):
        session.run(small("train.rounds=2"), tmp_path / "run", resume=True)
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"do not belong to a run of cwfed, such as thesis\.tex"):
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


def test_a_run_that_does_not_begin_leaves_nothing(tmp_path):
    """Each mistake would leave a folder with a lock in it, and the next run would be called runs/digits-cwfedavg-0.2."""
    with pytest.raises(RunError, match="holds no run to resume"):
        session.run(None, tmp_path / "typo", resume=True)
    with pytest.raises(ConfigError, match="only 1797 samples"):
        session.run(all_digits("data.clients=2000"), tmp_path / "new" / "below" / "new")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(RunError, match="do not belong to a run of cwfed"):
        session.run(small(), tmp_path / "other")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["other", "other/thesis.tex"]


def test_a_lock_that_was_removed_since_it_was_opened_is_none(tmp_path, monkeypatch):
    """Another process did not begin its run, and took its lock away, while this one waited for it: a third would not see ours."""
    folder, lock = RunFolder(tmp_path), fcntl.flock

    def late(file, how):
        (tmp_path / ".lock").unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(RunError, match="in use by another process"), folder.locked():
        pass


def test_a_lock_that_is_removed_while_it_is_opened_is_made_again(tmp_path, monkeypatch):
    """It is then this process's own, which takes it away where no run begins."""
    folder, name = RunFolder(tmp_path), tmp_path / ".lock"
    name.touch()
    monkeypatch.setattr(files, "check_regular", lambda path: path.unlink())
    with folder.locked():
        assert name.exists()
    assert not name.exists()


def test_other_data_behind_the_same_config_are_noticed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        session.run(small(), tmp_path / "run", on_event=interrupt_after(1))
    manifest = RunFolder(tmp_path / "run").read_json("manifest.json")
    manifest["data"]["digest"] = "0" * 64
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(files.seal_table(manifest)))
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


def test_a_config_may_be_nested_dicts():
    table = {"model": {"name": "mlp"}, "data": {"clients": 4}, "train": {"rounds": 1}}
    assert session.run(table)["clients"] == 4
    with pytest.raises(ConfigError, match=r"unknown setting train\.round"):
        session.run({"train": {"round": 1}})
    with pytest.raises(ConfigError, match=r"nested dicts, not 'some\.toml': cwfed\.load_config"):
        session.run("some.toml")


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
    with pytest.raises(RunError, match=r"config\.toml is damaged, or was edited"):
        session.run(None, tmp_path / "run", resume=True)


def test_when_no_checkpoint_is_whole_nothing_is_thrown_away(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        session.run(small(), tmp_path / "run", on_event=interrupt_after(2))
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(b"nonsense")
    with pytest.raises(RunError, match="no checkpoint of the run can be used"):
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
        patch.setattr("cwfed.runs.checkpoint.save_file", full)
        with pytest.raises(RunError, match=r"No space left on device.*--resume"):
            session.run(config, tmp_path / "run")
    session.run(None, tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_diverged_training_keeps_what_was_done(tmp_path):
    """A client that diverges in a later round: the rounds before it are in the folder."""
    config = all_digits("train.rounds=3", "run.checkpoint_seconds=0")
    with pytest.raises(KeyboardInterrupt):
        session.run(config, tmp_path / "run", on_event=interrupt_after(2))
    assert RunFolder(tmp_path / "run").checkpoints.rounds() == [2, 1]
    with pytest.raises(RunError, match="round 3 is not a finite number"):
        session.run(all_digits("train.lr=1e30"), tmp_path / "diverged")
    last = [e for e in RunFolder(tmp_path / "diverged").events() if isinstance(e, Round)][-1]
    assert (last.round, last.skipped) == (3, "0 good updates, and guard.least = 1")


def test_models_that_are_too_many_are_left_out_and_can_be_had_later(tmp_path, monkeypatch):
    monkeypatch.setattr(picking, "MODELS_LIMIT", 1000)
    summary = session.run(small(), tmp_path / "run")
    assert "were not written" in summary["notes"][0]
    assert not (tmp_path / "run" / "models").exists()
    with pytest.raises(RunError, match=r'larger than run\.save_models = "auto".*--set run\.save_models=all'):
        cwfed.load_model(tmp_path / "run", 0)
    summary = session.run(small("run.save_models=all"), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "models" / "index.json").exists()
    assert not [note for note in summary["notes"] if "were not written" in note]


def test_models_that_were_not_kept_when_validation_picked_them_are_named(tmp_path):
    summary = session.run(small(*EARLY, "run.save_models=none"), tmp_path / "run")
    picked = summary["picked_rounds"]["received"]["validated"]
    assert picked < 8
    summary = session.run(small(*EARLY, "run.save_models=all"), tmp_path / "run", resume=True)
    assert f"those of round {picked}, which validation picked" in summary["notes"][0]
    assert cwfed.load_model(tmp_path / "run", 0).pick == "last"
    with pytest.raises(RunError, match='pick = "last"'):
        cwfed.load_model(tmp_path / "run", 0, pick="validated")


def test_settings_that_came_later_do_not_lock_out_older_runs():
    """The hash is the one that the version before `train.precision`, the first of them, gave this config."""
    golden = "b2d21ea168fe5cd1e8c9b082e41ca5138dd4ae6068a5f299ad62ed26a25fe899"
    assert all_digits().fingerprint == golden
    assert all_digits("run.engine=loop", "run.workers=1", "train.rounds=9").fingerprint == golden
    for changed in ("train.precision=bf16", "guard.least=2", "algorithm.class_cap=0.5", "run.seed=1", "train.lr=0.1"):
        assert all_digits(changed).fingerprint != golden
