"""What people see while runs are made: bars, lines, a log; and the options that every command has."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cwfed import __version__
from cwfed.cli import app, progress
from cwfed.cli import run as commands
from cwfed.core.errors import CwfedError, Interrupted
from cwfed.core.events import Note, PhaseResult, Round, Started
from cwfed.report.tables import size
from cwfed.runs import compare
from tests import processes
from tests.conftest import small

STARTED = Started("fedavg", "digits", 0, 20, 6, 10, 1, "received", [], [], engine="loop")
SETTINGS = ["model.name=mlp", "data.clients=5", "data.samples=400", "train.rounds=2"]


def evaluated(number):
    result = PhaseResult(number / 100, None, None, [])
    return Round(number, [], [], None, None, [], None, None, result, result, 0, 0)


def not_evaluated(number):
    return Round(number, [], [], None, None, [], None, None, None, None, 0, 0)


@pytest.fixture
def said(monkeypatch):
    """stderr that is no terminal."""
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(progress, "err", console)
    return console.file


def test_without_a_terminal_a_line_per_evaluation_and_at_most_one_a_minute(said):
    """A round takes 25 s, every second one is evaluated: at 50, 100, 150 and 200 s. Lines at 100 (the first minute is over) and 200."""
    now = [0.0]
    lines = progress._Lines(("sweep", 3), clock=lambda: now[0])
    on_event = lines.begin("lr=0.1")
    on_event(STARTED)
    for number in range(1, 9):
        now[0] += 25
        on_event(not_evaluated(number) if number % 2 else evaluated(number))
    assert said.getvalue().splitlines() == [
        "0 of 3 runs done; lr=0.1: round 4 of 20, received 4.0%, trained 4.0%",
        "0 of 3 runs done; lr=0.1: round 8 of 20, received 8.0%, trained 8.0%",
    ]
    lines.done("lr=0.1")
    on_event = lines.begin("lr=0.2")  # the minute is that of all runs
    now[0] += 59
    on_event(evaluated(1))
    now[0] += 1
    on_event(evaluated(2))
    assert said.getvalue().splitlines()[2:] == ["1 of 3 runs done; lr=0.2: round 2, received 2.0%, trained 2.0%"]


def test_notes_are_said_once_and_quiet_says_nothing(said, tmp_path):
    for quiet, expected in ((True, ""), (False, "note: look out\n")):
        with progress.progress(tmp_path, "go on", quiet=quiet) as watch:
            for label in ("a", "b"):
                watch(label)(Note("look out"))
        assert said.getvalue() == expected


def test_the_log_has_everything_with_its_time_and_is_added_to(said, tmp_path):
    log = tmp_path / "new" / "run.log"
    with progress.progress(tmp_path, "go on", quiet=True, log=log) as watch:
        on_event = watch("run")
        for event in (STARTED, not_evaluated(1), evaluated(2), Note("two\nlines")):
            on_event(event)
    with pytest.raises(CwfedError), progress.progress(tmp_path, "go on", log=log):
        raise CwfedError("no such thing")
    with pytest.raises(Interrupted), progress.progress(tmp_path, "go on", log=log):
        raise KeyboardInterrupt
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    assert [line.partition(" ")[2] for line in lines] == [
        "run: begins",
        "run: fedavg on digits, seed 0, 20 rounds, 6 clients; engine loop",
        "run: round 2 of 20, received 2.0%, trained 2.0%",
        "run: note: two lines",
        "run: done",
        "error: no such thing",
        "interrupted: nothing was done yet",
    ]


def test_a_log_that_cannot_be_written_is_one_sentence_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    for log in (tmp_path, tmp_path / "file" / "log"):
        with pytest.raises(CwfedError, match="cannot be written"):
            commands.run(set_=SETTINGS, out_dir=tmp_path / "r", log=log)
        assert not (tmp_path / "r").exists()


def test_bars_count_the_runs_that_are_over(monkeypatch, tmp_path):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(progress, "err", terminal)
    with progress.progress(tmp_path, "go on", whole=("sweep", 5)) as watch:
        for label in ("a", "b", "c"):
            watch(label)(STARTED)
        watch.done("b")  # side by side, they end in any order
    assert "3/5" in terminal.file.getvalue()


def test_run_says_what_is_on_disk(tmp_path, capsys):
    commands.run(set_=SETTINGS, out_dir=tmp_path / "r", quiet=True)
    printed = capsys.readouterr()
    assert re.search(r"On disk: [\d.]+ kB \(models [\d.]+ kB, checkpoints [\d.]+ kB\)\n", printed.out)
    assert printed.err == ""
    commands.compare(set_=SETTINGS, out_dir=tmp_path / "c", algorithms="fedavg", quiet=True)
    (whole,) = re.findall(
        r"On disk: ([\d.]+ MB) \(checkpoints [\d.]+ kB, pages [\d.]+ MB\)\n", capsys.readouterr().out
    )
    assert whole == size(sum(file.stat().st_size for file in (tmp_path / "c").rglob("*") if file.is_file()))
    assert not list((tmp_path / "c").rglob("models"))  # a comparison wants numbers
    assert (
        compare.without_models(small("run.save_models=all")).run.save_models == "all"
    )  # unless somebody says otherwise


def test_the_version():
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.output == f"cwfed {__version__}\n"


def test_the_shell_completes_commands(tmp_path):
    """What bash asks when somebody types `cwfed swe<TAB>`; torch is not imported for it."""
    env = {**os.environ, "_CWFED_COMPLETE": "complete_bash", "COMP_WORDS": "cwfed swe", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['cwfed']; from cwfed.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    assert processes.run([sys.executable, "-c", code], cwd=tmp_path, env=env).stdout.split() == ["sweep"]
