"""Several runs: reused, resumed, side by side; the bits are those of each alone."""

from __future__ import annotations

import signal
import sys

import pytest

from cwfed.core.errors import GivenUp, RunError
from cwfed.runs import series as running
from cwfed.runs import session
from cwfed.runs.series import Planned, Series
from tests import processes
from tests.conftest import small
from tests.runs.test_session import final_bits

FEW = ("data.samples=400", "train.rounds=2", "run.save_models=all")


def planned(folder, *seeds, settings=()):
    return [Planned("run", s, small(*FEW, *settings, f"run.seed={s}"), folder / f"seed-{s}") for s in seeds]


def test_side_by_side_gives_the_bits_of_one_by_one_and_reuses_what_is_there(tmp_path):
    """Two processes of our own; the third run was there and has no round. Then one of them meets an error, which is that of all."""
    wanted = planned(tmp_path / "both", 0, 1, 2)
    session.run(wanted[2].config, wanted[2].folder)
    began, ended, rounds = [], [], []

    def on_run(one):
        began.append(one.seed)
        return lambda event: rounds.append(one.seed) if event.kind == "round" else None

    with Series(2, on_run=on_run, on_done=lambda done: ended.append(done.planned.seed)) as series:
        done = series.carry_out(wanted)
        other = planned(tmp_path / "both", 3, 4, settings=["train.lr=0.01"])
        (other[1].folder).mkdir()
        (other[1].folder / "stray").touch()
        with pytest.raises(RunError, match="holds files that do not belong to a run of cwfed"):
            series.carry_out(other)
    assert all(not process.is_alive() for process in series._crew._processes)
    assert [one.planned.seed for one in done] == [0, 1, 2]
    assert [one.reused for one in done] == [False, False, True]
    assert sorted(began) == [0, 1, 2, 3, 4]
    assert sorted(ended)[:3] == [0, 1, 2]
    assert sorted(rounds)[:4] == [0, 0, 1, 1]
    for one in planned(tmp_path / "alone", 0, 1):
        session.run(one.config, one.folder)
        bits, alone = final_bits(tmp_path / "both" / one.folder.name), final_bits(one.folder)
        assert bits == alone


def test_a_run_that_learns_nothing_ends_the_series_unless_it_is_lenient(tmp_path):
    wanted = planned(tmp_path, 0, settings=["train.lr=1e30"])
    with pytest.raises(GivenUp, match="diverged"):
        Series().carry_out(wanted)
    (done,) = Series(lenient=True).carry_out(wanted)
    assert done.summary is None
    assert "diverged" in done.given_up


@pytest.mark.parametrize(
    ("seconds", "left", "more", "together"),
    [
        (None, 4, 0, 1),  # nothing is known yet
        (1.0, 4, 0, 1),  # 4 s one by one; 4 / 4 + 8 = 9 s side by side
        (4.0, 4, 0, 4),  # 16 s; 16 / 4 + 8 = 12 s
        (2.0, 4, 4, 4),  # the same 16 s, with those that are asked for later
    ],
)
def test_they_go_side_by_side_where_that_saves_time(tmp_path, monkeypatch, seconds, left, more, together):
    monkeypatch.setattr(running, "cores", lambda: 8)
    series = Series(0)
    series._seconds = seconds
    assert series._together(planned(tmp_path, *range(left)), more) == together
    assert Series(3)._together(planned(tmp_path, *range(left)), more) == 3  # whoever says how many gets as many


def test_a_run_that_uses_all_cores_is_not_joined_by_others(tmp_path):
    for engine, idle in (("loop", True), ("threads", False)):
        (one,) = planned(tmp_path / engine, 0, settings=[f"run.engine={engine}", "run.workers=2"])
        series = Series(0)
        series.carry_out([one])
        assert (series._seconds is not None) is idle


@pytest.mark.slow
def test_interrupted_side_by_side_all_runs_can_be_resumed(tmp_path):
    """SIGTERM to the parent alone: its processes write a checkpoint and end with it."""
    settings = [
        "--set=model.name=mlp",
        "--set=train.rounds=100000",
        "--set=run.engine=loop",
        "--set=data.samples=400",
    ]
    command = [sys.executable, "-m", "cwfed", "compare", *settings, "-a", "fedavg", "--seeds", "0,1", "--jobs", "2"]
    with processes.running([*command, "--out", "c"], cwd=tmp_path) as process:
        for seed in (0, 1):
            processes.until_lines(tmp_path / "c" / "fedavg" / f"seed-{seed}" / "events.jsonl", 4, process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=processes.LIMIT)
    assert process.returncode == 130
    assert "the same command resumes it" in errors
    assert "Traceback" not in errors
    for seed in (0, 1):
        assert list((tmp_path / "c" / "fedavg" / f"seed-{seed}" / "checkpoints").glob("*.safetensors"))
