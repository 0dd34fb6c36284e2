"""The real command in a real process: what it prints, what it leaves, how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys

import click
import numpy as np
import pytest
import typer
from rich.console import Console
from sklearn.datasets import load_digits

from cwfed.cli import app, progress
from cwfed.cli.app import PANELS
from cwfed.core.events import PhaseResult, Round, Started
from cwfed.report import tables
from tests import processes
from tests.conftest import ROOT

SMALL = ["--set=model.name=mlp", "--set=data.clients=5", "--set=train.rounds=2", "--set=train.lr=0.05"]


def cwfed(*arguments, cwd, code=0, env=None):
    command = [sys.executable, "-m", "cwfed", *map(str, arguments)]
    done = processes.run(command, cwd=cwd, env={**os.environ, **(env or {})})
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_run_prints_a_table_and_says_where_everything_is(tmp_path):
    done = cwfed("run", *SMALL, cwd=tmp_path)
    assert "best on test" in done.stdout
    assert "runs/digits-cwfedavg-0: summary.json, config.toml, events.jsonl, models\n" in done.stdout
    assert done.stderr == ""  # quiet when not on a terminal
    assert (tmp_path / "runs" / "digits-cwfedavg-0" / "summary.json").exists()
    done = cwfed("run", *SMALL, "--set=run.save_models=none", cwd=tmp_path)
    assert (
        "runs/digits-cwfedavg-0.2: summary.json, config.toml, events.jsonl\n" in done.stdout
    )  # no models were written
    assert (tmp_path / "runs" / "digits-cwfedavg-0.2" / "summary.json").exists()


def test_run_json_and_config_file(tmp_path):
    (tmp_path / "c.toml").write_text('[algorithm]\nname = "fedprox"\nmu = 0.01\n')
    summary = json.loads(cwfed("run", "c.toml", *SMALL, "--out", "r", "--json", cwd=tmp_path).stdout)
    assert summary["algorithm"] == "fedprox"
    assert json.loads((tmp_path / "r" / "summary.json").read_text()).items() >= summary.items()
    again = json.loads(cwfed("run", "--resume", "--out", "r", "--json", cwd=tmp_path).stdout)
    assert again == summary
    more = cwfed("run", "--resume", "--out", "r", "--set=train.rounds=3", "--json", cwd=tmp_path).stdout
    assert json.loads(more)["rounds"] == 3


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_import_that_swallows_everything_does_not_swallow_ctrl_c(tmp_path, sent):
    """As torch's does while it looks for numpy: the import is finished, and then the program ends."""
    (tmp_path / "greedy.py").write_text(
        f"import os, pathlib\ntry:\n    os.kill(os.getpid(), {int(sent)})\n    pathlib.Path('whole').touch()\n"
        "except BaseException:\n    pass\n\n\ndef load():\n    while True:\n        pass\n"
    )
    done = cwfed("data", "show", "--set", "data.name=greedy:load", cwd=tmp_path, code=130)
    assert (tmp_path / "whole").exists()
    assert done.stderr.strip() == "interrupted"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_leave_a_resumable_run(tmp_path, sent):
    settings = ["--set=model.name=mlp", "--set=train.rounds=100000", "--set=run.engine=loop"]  # loop compiles nothing
    with processes.running([sys.executable, "-m", "cwfed", "run", *settings, "--out", "r"], cwd=tmp_path) as process:
        processes.until_lines(tmp_path / "r" / "events.jsonl", 6, process)
        process.send_signal(sent)
        _, errors = process.communicate(timeout=processes.LIMIT)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert list((tmp_path / "r" / "checkpoints").glob("*.safetensors"))


def test_compare_makes_one_table_and_a_page_and_reuses_finished_runs(tmp_path):
    arguments = ("compare", *SMALL, "-a", "fedavg,cwfedavg:wdr=0", "--seeds", "0,1", "--out", "cmp")
    done = cwfed(*arguments, cwd=tmp_path)
    assert "±" in done.stdout
    assert "cwfedavg:wdr=0" in done.stdout
    assert {p.name for p in (tmp_path / "cmp").iterdir()} == {
        "fedavg", "cwfedavg_wdr=0", "comparison.json", "comparison.md", "report.html", "overview.png",
    }  # fmt: skip
    stamp = (tmp_path / "cmp" / "fedavg" / "seed-1" / "summary.json").stat().st_mtime_ns
    rows = json.loads(cwfed(*arguments, "--json", cwd=tmp_path).stdout)
    assert [row["label"] for row in rows] == ["fedavg", "cwfedavg:wdr=0"]
    assert rows[0]["accuracy"]["received"]["best"]["std"] is not None
    assert (tmp_path / "cmp" / "fedavg" / "seed-1" / "summary.json").stat().st_mtime_ns == stamp


def test_a_method_that_diverges_does_not_cost_the_others(tmp_path):
    """It is named with its seed; where all diverge there is no table."""
    broken = "fedavg+fedopt:server_lr=1e12"
    settings = (*SMALL, "--set", "train.rounds=8", "--out", "cmp")
    done = cwfed("compare", *settings, "-a", f"{broken},fedavg", cwd=tmp_path)
    said = f"{broken}, seed 0: every update of the last 3 rounds was refused"
    assert f"left out: {said}" in done.stdout
    assert said in (tmp_path / "cmp" / "comparison.md").read_text()
    rows = json.loads((tmp_path / "cmp" / "comparison.json").read_text())
    assert [row["label"] for row in rows] == ["fedavg"]
    assert said in cwfed("compare", *settings, "-a", broken, cwd=tmp_path, code=1).stderr


def pfllib_folder(folder, clients=5):
    """PFLlib's layout: the digits 2c and 2c + 1 are client c's."""
    inputs, labels = load_digits(return_X_y=True)
    for client in range(clients):
        own = np.flatnonzero(labels // 2 == client)
        for part, chosen in (("train", own[::2]), ("test", own[1::2])):
            (folder / part).mkdir(parents=True, exist_ok=True)
            data = {"x": inputs[chosen].astype(np.float32), "y": labels[chosen]}
            np.savez(folder / part / f"{client}.npz", data=np.array(data, dtype=object))
    (folder / "config.json").write_text(json.dumps({"num_clients": clients, "num_classes": 10}))


def test_compare_says_what_was_run_and_cuts_no_number(tmp_path):
    """Data that come split: the partition and the number of clients in the config are not theirs."""
    pfllib_folder(tmp_path / "mine")
    settings = ["--set=data.name=pfllib", "--set=data.path=mine", "--set=model.name=mlp", "--set=train.rounds=2"]
    compare = ("compare", *settings, "-a", "fedavg,cwfedavg:wdr=0", "--seeds", "0,1", "--out", "cmp")
    narrow = cwfed(*compare, cwd=tmp_path, env={"COLUMNS": "60"}).stdout
    assert "mine, split as in the folder, 5 clients, mlp" in " ".join(narrow.split())
    rows = json.loads((tmp_path / "cmp" / "comparison.json").read_text())
    for row in rows:
        assert row["reported"].keys() == {"phase", "picking", "mean", "std"}  # nothing of one seed beside the mean
        for text in tables.cells(row)[1:]:
            assert text.replace(" ± ", "±") in narrow
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= 60
    assert "mine, split as in the folder, 5 clients, mlp" in (tmp_path / "cmp" / "report.html").read_text()


def test_what_nobody_holds_stands_under_every_table(tmp_path):
    few = ["--set=model.name=mlp", "--set=data.clients=3", "--set=train.rounds=1"]
    said = "no client holds classes 6, 7, 8, 9"
    done = cwfed("run", *few, "--out", "r", cwd=tmp_path)
    assert said in done.stdout
    assert done.stderr.count(said) == 1
    done = cwfed("compare", *few, "--seeds", "0,1", "--out", "cmp", cwd=tmp_path)
    assert done.stdout.count(said) == 1
    assert done.stderr.count(said) == 1  # not once a run
    for name in ("comparison.md", "comparison.json", "report.html"):
        assert said in (tmp_path / "cmp" / name).read_text()
    cwfed("figures", "r", "--out", "f", "--formats", "svg", cwd=tmp_path)
    for ending in ("md", "tex"):
        assert said in (tmp_path / "f" / f"table.{ending}").read_text()


def test_data_of_many_classes_are_shown_in_any_width(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef data():\n    y = np.arange(3000) % 100\n    return np.ones((3000, 2)), y\n"
    )
    show = ("data", "show", "--set=data.name=mine:data", "--set=data.classes_per_client=10")
    found = json.loads(cwfed(*show, "--json", cwd=tmp_path).stdout)
    shown = cwfed(*show, cwd=tmp_path, env={"COLUMNS": "60"}).stdout
    first = found["histogram"][0]
    top = max(range(100), key=lambda k: first[k])
    assert f"│ 0      │ {sum(first):>7} │      10 │ {top} {first[top]}," in shown
    assert "A class is held by 2 to 2 clients" in shown
    wide = cwfed("data", "show", "--set=data.clients=5", cwd=tmp_path, env={"COLUMNS": "30"}).stdout
    assert wide.count(" client ") > 1  # several tables
    assert " 178 " in wide


def test_data_show_prints_and_draws(tmp_path):
    done = cwfed("data", "show", "--set=data.clients=3", "--out", "who.png", cwd=tmp_path)
    assert "note: no client holds classes 6, 7, 8, 9: 714 of 1,797 samples are not used" in done.stdout
    assert (tmp_path / "who.png").read_bytes()[:4] == b"\x89PNG"
    found = json.loads(cwfed("data", "show", "--json", cwd=tmp_path).stdout)
    assert sum(map(sum, found["histogram"])) == 1797


def test_names_with_brackets_are_printed_as_they_are(tmp_path):
    done = cwfed("run", *SMALL, "--out", "a[/b]c", cwd=tmp_path)
    assert "a[/b]c" in done.stdout


def test_everything_speaks_json(tmp_path):
    assert json.loads(cwfed("data", "list", "--json", cwd=tmp_path).stdout)[0]["name"] == "digits"
    assert json.loads(cwfed("data", "prepare", "digits", "--json", cwd=tmp_path).stdout)["samples"] == 1797
    found = json.loads(cwfed("algorithms", "--json", cwd=tmp_path).stdout)
    assert found["fedamp"]["settings"] == {"name": "fedamp", "alpha": 1000.0, "lambda": 1.0, "sigma": 0.1}


def test_data_list_and_prepare(tmp_path):
    assert "uoft-cs/cifar10" in cwfed("data", "list", cwd=tmp_path).stdout
    assert "1,797 samples of 8 x 8 x 1" in cwfed("data", "prepare", "digits", cwd=tmp_path).stdout


def test_algorithms_are_listed_and_explained(tmp_path):
    listed = re.findall(r"^│ (\S+)", cwfed("algorithms", cwd=tmp_path).stdout, re.M)
    methods = [name for name in listed if name[0] != "+"]
    assert methods == sorted(methods)
    assert "fedavg-ft" in methods
    explained = cwfed("algorithms", "cwfedavg", cwd=tmp_path).stdout
    assert "p~_ij" in explained
    assert "algorithm.wdr" in explained


def test_cost_is_the_paper_s_table(tmp_path):
    rows = json.loads(cwfed("cost", "--model", "resnet18", "--classes", "100", "--json", cwd=tmp_path).stdout)
    assert rows[0]["server"] == 11_227_812
    assert "16.36" in cwfed("cost", "--classes", "100", cwd=tmp_path).stdout
    asked = ("cost", "--model", "cnn", "--json", "-a", "fedavg,cwrows,cwrows:owners=updates")
    plain, counts, updates = json.loads(cwfed(*asked, cwd=tmp_path).stdout)
    assert [counts["method"], updates["method"]] == ["cwrows", "cwrows:owners=updates"]
    assert [counts["up"] - plain["up"], updates["up"] - plain["up"]] == [20 * 10, 0]  # ten label counts a participant


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--set", "train.lrr=1"], "unknown setting train.lrr: did you mean lr?"),
        (["run", "preset:digits/fedvag"], "unknown preset 'digits/fedvag': did you mean digits/fedavg"),
        (["run", "nothing.toml"], "the config file nothing.toml does not exist"),
        (["run", "--set", "data.name=mnist", "--data-dir", "."], "--data-dir or CWFED_DATA"),
        (["run", "--set", "data.clients=2000"], "there are only 1797 samples to share"),
        (["run", "--resume"], "--resume needs the folder"),
        (["run", "--out", "/proc/x"], "cannot be written"),
        (["run", "--set", "train.lr=1e30", "--out", "r"], "the training diverged"),
        (["run", "--set", "model.name=nowhere:build"], "there is no module 'nowhere', neither here nor installed"),
        (["run", "digits/fedavg"], "does not exist: the preset of that name is preset:digits/fedavg"),
        (["compare", "-a", "fedavg,fedavg"], "the same thing twice"),
        (["compare", "-a", ""], "names none"),
        (["compare", "--seeds", "a"], "must be whole numbers"),
        (["compare", "-a", "fedprox:mu"], "settings look like name:key=value"),
        (["compare", "--set", "run.seed=3"], "give seeds as --seeds 0,1,2"),
        (["compare", "-a", "fedavg", "--set", "algorithm.wdr=1"], "is for cwfedavg, which is not among --algorithms"),
        (["algorithms", "fedavgg"], "did you mean fedavg"),
        (
            ["algorithms", "+owners"],
            "owners is a plug-in: write it after the algorithm that it changes, as in fedavg+prior",
        ),
        (["algorithms", "owners"], "owners is a plug-in"),
        (["algorithms", ""], "unknown algorithm ''"),
        (["cost", "--shape", "3by3"], "must look like"),
        (["run", "--resume", "--out", "typo"], "holds no run to resume"),
        (["sweep"], "nothing to sweep"),
        (["sweep", "--grid", "train.lr=0.1,0.2", "--set", "data.validation=0"], "data.validation is 0"),
        (
            ["sweep", "--grid", "train.lr=0.1,0.2", "--set", "train.lr=0.3"],
            "train.lr is swept; leave one of them out",
        ),
        (["sweep", "--grid", "data.alpha=0.1,1"], "make a sweep for each value"),
        (["export", "nowhere"], "nowhere is neither a folder nor an archive"),
        (["leaderboard", "nowhere"], "nowhere is neither a folder nor an archive"),
        (["run", "--log", "/"], "the log / cannot be written"),
        (["data", "show", "--out", "who"], "needs a file extension"),
        (["cost", "--participants", "30"], "only 20 clients"),
        (["data", "show", "--out", "who.nonsense"], "unknown picture format 'nonsense'"),
        (["data", "show", "--out", "no/where.png"], "cannot be written"),
        (["data", "prepare", "cifar11"], "did you mean cifar10"),
        (["run", "--set", "data.path=\udcff"], "is not text in UTF-8"),
        (["run", "--set", "model.options.hidden=1979-05-27"], "must be numbers, texts, lists or tables"),
        (["run", "--set", f"data.name={'x' * 300}:y"], "too long"),
        (["run", "--set", f"train.lr={'[' * 5000}"], "train.lr = '[["),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, arguments, says):
    done = cwfed(*arguments, cwd=tmp_path, code=1, env={"HF_HUB_OFFLINE": "1"})
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_does_not_wait_for_torch(tmp_path):
    code = "import sys, cwfed.cli; assert 'torch' not in sys.modules and 'datasets' not in sys.modules"
    processes.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert "compare" in cwfed("--help", cwd=tmp_path).stdout


def test_help_explains_arguments_too(tmp_path):
    assert "`list` shows them" in cwfed("reproduce", "--help", cwd=tmp_path, env={"COLUMNS": "200"}).stdout


def test_help_has_every_command_under_a_heading():
    root = typer.main.get_command(app)
    listed = [name for names in PANELS.values() for name in names]
    assert sorted(listed) == sorted(root.commands)
    assert root.list_commands(click.Context(root)) == listed
    assert {root.get_command(click.Context(root), name).rich_help_panel for name in listed} == set(PANELS)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_progress_keeps_its_numbers_on_a_narrow_terminal(tmp_path, monkeypatch, width):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(progress, "err", terminal)
    name = "cwFedAvg (Output), seed 2 on Tiny ImageNet, Dirichlet 0.1"
    measured = PhaseResult(0.123, None, None, [])
    started = Started("cwfedavg", "tiny_imagenet", 2, 1000, 20, 200, 1, "received", [], [])
    last_round = Round(1000, [], [], None, None, [], None, None, measured, measured, 0, 0)
    with progress.progress(tmp_path, "go on", whole=("main-comparison", 63)) as watch:
        on_event = watch(name)
        on_event(started)
        on_event(last_round)
    last = terminal.file.getvalue()
    assert "1/63" in last
    assert "1000/1000" in last
    assert "12.3%" in last
    assert name[: 10 if width < 80 else 20] in last


def test_git_ignores_every_default_output_folder():
    ignored = (ROOT / ".gitignore").read_text().split()
    commands, defaults = [typer.main.get_command(app)], set()
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        defaults |= {p.default for p in command.params if "--out" in p.opts and p.default is not None}
    assert {"runs/compare", "demo", "reproduced", "report.html"} <= {str(path) for path in defaults}
    for path in defaults:
        assert {f"/{path}", f"/{path.parts[0]}/"} & set(ignored), path


def test_own_algorithm_model_and_data_from_the_working_directory(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import numpy as np\n"
        "from torch import nn\n"
        "from cwfed import FedAvg\n"
        "@dataclass(frozen=True)\n"
        "class Mine(FedAvg):\n"
        "    strength: float = 2.0\n"
        "def data():\n"
        "    y = np.arange(200) % 4\n"
        "    return np.eye(4)[y], y\n"
        "def model(shape, classes):\n"
        "    m = nn.Sequential(nn.Linear(*shape.dims, classes)); m.output_layer = '0'; return m\n"
    )
    summary = json.loads(
        cwfed("run", "--set=algorithm.name=mine:Mine", "--set=algorithm.strength=3", "--set=data.name=mine:data",
              "--set=model.name=mine:model", "--set=data.clients=4", "--set=train.rounds=2", "--json", cwd=tmp_path).stdout
    )  # fmt: skip
    assert summary["algorithm"] == "mine:Mine"


def test_the_classes_of_a_run_have_the_names_that_the_data_give_them(tmp_path):
    lines = ["size,kind", *(f"{i % 3 + i / 100},{['ox', 'cat', 'eel'][i % 3]}" for i in range(60))]
    (tmp_path / "kinds.csv").write_text("\n".join(lines))
    sets = [
        "data.name=csv",
        "data.path=kinds.csv",
        "data.label_column=kind",
        "data.feature_columns=['size']",
        "data.partition=iid",
        "data.clients=2",
        "train.rounds=1",
    ]
    told = cwfed("run", *(word for one in sets for word in ("--set", one)), cwd=tmp_path).stdout
    (line,) = [line for line in told.splitlines() if line.startswith("classes: ")]
    assert all(name in line for name in ("ox", "cat", "eel"))
    assert ", 1 round, seed 0" in told
