"""cwfed beside PFLlib: what is handed over, what is refused, and the whole command against a stand-in and, where there is one, the real thing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cwfed.benchmark import against_pfllib, measured, one_process
from cwfed.benchmark.against_pfllib import Checkout, bench
from cwfed.benchmark.one_process import Expected
from cwfed.cli import app
from cwfed.core.errors import ConfigError, CwfedError, RunError
from cwfed.core.shape import InputShape
from cwfed.data import Dataset, PartitionSpec, SourceSpec, load, share_out
from cwfed.data import pfllib as layout
from cwfed.data.clients import to_network
from cwfed.federation import config as configs
from cwfed.federation.experiment import Experiment
from tests import processes

SHAPE = InputShape((1, 28, 28))


def pictures(folder: Path, clients: int = 2, samples: int = 60) -> list[str]:
    """Small images of MNIST's shape in PFLlib's layout, and the settings that name them."""
    rng = np.random.default_rng(0)
    inputs = rng.integers(256, size=(samples, 28, 28, 1), dtype=np.uint8)
    data = Dataset.from_arrays(
        inputs, np.arange(samples) % 3, name="pictures"
    )  # PFLlib's Ditto fails with two classes
    spec = PartitionSpec("iid", clients, least_samples=1)
    layout.write(share_out(data, spec, seed=0, validation=0.0), folder)
    return ["data.name=pfllib", f"data.path={folder}", "data.samples=0", "train.batch_size=5", "train.rounds=2"]


# --- the layout


def test_a_split_written_for_pfllib_reads_back_equal(tmp_path):
    rng = np.random.default_rng(1)
    inputs = rng.integers(256, size=(90, 5, 4, 3), dtype=np.uint8)
    data = Dataset.from_arrays(inputs, rng.permutation(90) % 3)
    dealt = share_out(data, PartitionSpec("dirichlet", 3, alpha=1.0, least_samples=5), seed=0, validation=0.2)
    layout.write(dealt, tmp_path / "Cifar10")
    found = load(SourceSpec("pfllib", str(tmp_path / "Cifar10")))
    seen = to_network(torch.from_numpy(inputs)).permute(0, 2, 3, 1).numpy()
    assert found.fixed_split is not None
    assert (found.classes, len(found.fixed_split)) == (3, 3)
    for client, (train, test) in enumerate(found.fixed_split):
        shard = dealt.shards[client]
        assert len(shard.validation)
        for mine, theirs in ((np.sort([*shard.train, *shard.validation]), train), (shard.test, test)):
            np.testing.assert_array_equal(found.inputs[theirs], seen[mine])
            np.testing.assert_array_equal(found.labels[theirs], data.labels[mine])
    with (tmp_path / "Cifar10" / "test" / "2.npz").open("rb") as file:  # as PFLlib itself reads it
        raw = np.load(file, allow_pickle=True)["data"].tolist()
    assert raw["x"].shape == (len(dealt.shards[2].test), 3, 5, 4)
    said = json.loads((tmp_path / "Cifar10" / "config.json").read_text())
    assert [sum(n for _, n in row) for row in said["Size of samples for labels in clients"]] == [
        sum(dealt.histogram()[client]) for client in range(3)
    ]


def test_texts_are_written_with_their_lengths(tmp_path):
    tokens = np.arange(40, dtype=np.int32).reshape(10, 4) % 7
    words = tuple(f"word{token}" for token in range(7))
    data = Dataset("texts", tokens, np.arange(10) % 2, ("a", "b"), words)
    dealt = share_out(data, PartitionSpec("iid", 1, least_samples=1), seed=0, validation=0.0)
    layout.write(dealt, tmp_path / "AGNews")
    with (tmp_path / "AGNews" / "train" / "0.npz").open("rb") as file:
        assert np.load(file, allow_pickle=True)["data"].tolist()["x"][0][1] == 4
    found = load(SourceSpec("pfllib", str(tmp_path / "AGNews")))
    np.testing.assert_array_equal(found.inputs[found.fixed_split[0][0]], tokens[dealt.shards[0].train])


def test_the_command_exports_the_layout(tmp_path):
    words = ["data", "export", "--set=data.clients=4", "--out", str(tmp_path / "mine"), "--layout"]
    app([*words, "pfllib"], standalone_mode=False)
    assert len(load(SourceSpec("pfllib", str(tmp_path / "mine"))).fixed_split) == 4
    with pytest.raises(CwfedError, match="--layout 'other' is not known: it is nodes or pfllib"):
        app([*words, "other"], standalone_mode=False)


# --- the same model


def test_both_begin_with_the_same_weights(tmp_path):
    """PFLlib seeds torch with 0 and then makes two convolutions and two linear layers; 64 channels of 4 x 4 are left of 28 x 28."""
    state = torch.get_rng_state()
    ours = against_pfllib.same_cnn(SHAPE, 10)
    assert torch.equal(state, torch.get_rng_state())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5), nn.Linear(64 * 4 * 4, 512), nn.Linear(512, 10)
        )
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
    config = against_pfllib._configs(configs.load(None, [*pictures(tmp_path / "p"), "run.seed=7"]), "ditto")["ditto"]
    begun = Experiment(config).initial
    for name, w in against_pfllib.same_cnn(SHAPE, 3).named_parameters():
        assert torch.equal(begun[name], w)


# --- a stand-in

FACE = """
import argparse, os, sys
parser = argparse.ArgumentParser()
for flag, name in {
    "-algo": "algorithm", "-m": "model", "-data": "dataset", "-ncl": "classes", "-nc": "clients", "-gr": "rounds", "-lbs": "batch",
    "-lr": "lr", "-ls": "epochs", "-eg": "gap", "-dev": "device", "-mu": "mu", "-pls": "own_epochs",
}.items():
    parser.add_argument(flag, "--" + name)
args = parser.parse_args()
assert args.model == "CNN" and args.algorithm in ("FedAvg", "Ditto")
"""
"""What a PFLlib must understand."""

LAYERS = """
print("  (0): Conv2d(1, 32, kernel_size=(5, 5), stride=(1, 1))")
print("  (0): Conv2d(32, 64, kernel_size=(5, 5), stride=(1, 1))")
print("  (0): Linear(in_features=1024, out_features=512, bias=True)")
print("  (fc): Linear(in_features=512, out_features=3, bias=True)")
"""

ROUNDS = """
os.makedirs("../results")
open("../results/mine.txt", "w").close()
print(vars(args))
print("clients there:", len(os.listdir(os.path.join("../dataset", args.dataset, "train"))))
for i in range(int(args.rounds) + 1):
    print(f"-------------Round number: {i}-------------")
    print("Evaluate global models")
    print(f"Averaged Test Accuracy: {0.1 + i / 100:.4f}")
    if args.algorithm == "Ditto":
        print("Evaluate personalized models")
        print(f"Averaged Test Accuracy: {0.5 + i / 100:.4f}")
    print('-'*25, 'time cost', '-'*25, [900.0, 30.0, 50.0][i])
"""


def stand_in(folder: Path, *parts: str) -> Path:
    (folder / "system").mkdir(parents=True)
    (folder / "system" / "main.py").write_text("".join(parts))
    return folder


def there(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_whole_command_against_a_stand_in(tmp_path, capsys):
    from cwfed.cli.console import print_against

    checkout = stand_in(tmp_path / "PFLlib", FACE, LAYERS, ROUNDS)
    before = there(checkout)
    settings = [word for setting in pictures(tmp_path / "pictures") for word in ("--set", setting)]
    words = [
        "bench",
        "--against",
        "pfllib",
        "PFLlib",
        *settings,
        "-a",
        "ditto:lambda=0.5",
        "--repeats",
        "1",
        "--json",
    ]
    done = processes.run([processes.PROGRAM, *words], cwd=tmp_path, check=True)
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "bench" / "pfllib.json").read_text())
    (line,) = result["methods"]
    assert (line["name"], line["phase"]) == ("ditto", "trained")
    # rounds 0, 1, 2 took 900, 30 and 50 s; the first does not count: (30 + 50) / 2. Personal models after two rounds: 0.5 + 0.02
    assert (line["theirs"]["seconds"], line["theirs"]["accuracy"]) == (40.0, 0.52)
    ours = line["ours"]
    assert len(ours["runs"][0]["seconds_by_round"]) == 1
    assert line["ratio"] == 40.0 / ours["seconds"]
    assert (
        line["memory_ratio"] == line["theirs"]["peak_memory_bytes"] / ours["peak_memory_bytes"] < 1
    )  # no torch there
    assert 0 <= ours["accuracy"] <= 1
    assert result["versions"]["pfllib"] == "unknown"
    log = (tmp_path / "bench" / "pfllib-ditto-1.log").read_text()
    assert "clients there: 2" in log
    told = {
        "dataset": "MNIST",
        "classes": "3",
        "clients": "2",
        "rounds": "2",
        "batch": "5",
        "lr": "0.005",
        "epochs": "1",
    }
    for key, value in (told | {"gap": "1", "mu": "0.5", "own_epochs": "1", "device": "cpu"}).items():
        assert f"'{key}': '{value}'" in log
    assert there(checkout) == before
    assert "PFLlib, ditto, turn 1 of 1: 40 s a round" in done.stderr
    print_against(result)
    said = capsys.readouterr().out
    assert "52.00%" in said
    assert "PFLlib at commit unknown" in said


def run_stand_in(folder: Path, *parts: str) -> one_process.Run:
    main = stand_in(folder / "PFLlib", *parts) / "system" / "main.py"
    (folder / "dataset" / "MNIST" / "train").mkdir(parents=True)
    (folder / "system").mkdir()
    flags = ["-algo", "FedAvg", "-m", "CNN", "-data", "MNIST", "-gr", "2"]
    expected = Expected(
        "global", 2, against_pfllib._layers(share_out(some_pictures(), PartitionSpec("iid", 1), 0, 0.0))
    )
    return one_process.run_theirs([sys.executable, str(main), *flags], folder / "system", folder / "log", expected)


def some_pictures() -> Dataset:
    return Dataset.from_arrays(np.zeros((40, 28, 28, 1), np.uint8), np.arange(40) % 3)


def test_the_global_model_is_read_for_fedavg(tmp_path):
    run = run_stand_in(tmp_path, FACE, LAYERS, ROUNDS)
    assert (run.seconds, run.accuracy, run.facts["accuracies"]) == ([30.0, 50.0], 0.12, [0.1, 0.11, 0.12])


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((FACE, LAYERS, ROUNDS.replace("time cost", "took")), "the times of 0 rounds and 3 accuracies"),
        (
            (FACE, LAYERS, ROUNDS.replace("range(int(args.rounds) + 1)", "range(2)")),
            "the times of 2 rounds and 2 acc",
        ),
        ((FACE, LAYERS, ROUNDS.replace("Evaluate global", "Look at global")), "3 rounds and 0 accuracies of global"),
        ((FACE, LAYERS.replace("512", "256"), ROUNDS), "its CNN has other layers than ours"),
        (
            (FACE, "import no_such_package"),
            f"needs the package no_such_package, which {sys.executable} does not have",
        ),
        ((FACE, "sys.exit('out of luck')"), "PFLlib has failed: out of luck; all it printed is in"),
        ((FACE, "os.kill(os.getpid(), 9)"), "PFLlib has failed: it said nothing"),
    ],
)
def test_a_pfllib_that_has_changed_or_fails_is_one_sentence(tmp_path, parts, says):
    with pytest.raises(RunError, match=says):
        run_stand_in(tmp_path, *parts)


@pytest.mark.parametrize(
    ("main", "says"),
    [
        (None, "is not a checkout of PFLlib: it has no system/main.py; clone"),
        ("if:", "cannot be read as a program of PFLlib"),
        (
            FACE.replace('"-lbs"', '"--batch-size"').replace('"Ditto"', '"D"'),
            "has changed: .* does not know -lbs, Ditto; .*d832e76",
        ),
    ],
)
def test_a_checkout_that_is_none_or_has_changed(tmp_path, main, says):
    folder = stand_in(tmp_path / "PFLlib", main) if main else tmp_path
    with pytest.raises(ConfigError, match=says):
        Checkout.at(folder)


def test_the_command_says_it_in_one_sentence(tmp_path):
    done = processes.run([processes.PROGRAM, "bench", "--against", "pfllib", "nowhere"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: nowhere is not a checkout of PFLlib")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--against", "fluke", "nowhere"], "--against 'fluke' is not known: it is --against pfllib DIR"),
        (["mlp", "--against", "pfllib", "nowhere"], "--against has no workloads and no --quick"),
        (["--set", "train.rounds=3"], "--algorithms and --repeats go with --against pfllib DIR"),
        (["--repeats", "3"], "--algorithms and --repeats go with --against pfllib DIR"),
    ],
)
def test_options_that_do_not_go_together(words, says):
    with pytest.raises(CwfedError, match=says):
        app(["bench", *words], standalone_mode=False)


def test_a_commit_and_whether_it_was_changed(tmp_path):
    folder = stand_in(tmp_path, FACE)
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")):
        processes.run(["git", "-C", str(folder), *words], check=True)
    commit = Checkout.at(folder).commit
    assert len(commit) == 40
    (folder / "system" / "main.py").write_text(FACE + "# mine")
    assert Checkout.at(folder).commit == f"{commit} with changes"


# --- what cannot be compared


@pytest.mark.parametrize(
    ("settings", "methods", "says"),
    [
        (["train.momentum=0.9"], "fedavg", "PFLlib has nothing like train.momentum = 0.9: leave it at 0.0"),
        (["train.participation=0.5"], "fedavg", "nothing like train.participation"),
        (["run.evaluate_every=2"], "fedavg", "nothing like run.evaluate_every"),
        (["data.newcomers=1"], "fedavg", "nothing like data.newcomers"),
        (["model.name=mlp"], "fedavg", "the model that both have is the cnn"),
        (["train.rounds=1"], "fedavg", "at least 2"),
        ([], "cwfedavg", "'cwfedavg' is not compared with PFLlib's: did you mean fedavg"),
        ([], "ditto:lambda=1,ditto:lambda=2", "names ditto twice"),
        (
            ["train.batch_size=40"],
            "fedavg",
            "client 0 has 22 training and 8 test samples, and PFLlib needs 40, a batch, and 1",
        ),
        (["data.name=digits", "data.path=''"], "fedavg", "for images of 1x28x28, .* digits has samples of 1x8x8"),
        (["run.device=cpu:0,cpu:1"], "fedavg", "on the CPU or on one GPU"),
    ],
)
def test_what_pfllib_cannot_do_is_named(tmp_path, settings, methods, says):
    checkout = stand_in(tmp_path / "PFLlib", FACE, "sys.exit('was run')")
    with pytest.raises(ConfigError, match=says):
        bench(checkout, tmp_path, None, [*pictures(tmp_path / "p"), *settings], methods)


def test_a_python_that_is_none(tmp_path):
    checkout, settings = stand_in(tmp_path / "PFLlib", FACE), pictures(tmp_path / "p")
    for python, says in (
        ("no-such-python", "is not a program that can be run"),
        ("/bin/false", "not a Python with torch"),
    ):
        with pytest.raises(ConfigError, match=says):
            bench(checkout, tmp_path, None, settings, python=python)


# --- the process


def measure(code: str) -> dict[str, int]:
    command = [sys.executable, "-I", "-S", measured.__file__, sys.executable, "-I", "-S", "-c", code]
    with processes.running(command, stdin=subprocess.PIPE) as process:
        return json.loads(process.stdout.read().splitlines()[-1])


def test_the_peak_is_of_the_process_alone():
    """This one has torch and hundreds of megabytes, which Linux would count into the peak of what it starts."""
    small, large = measure("pass"), measure("b'x' * 200_000_000")
    assert small["exit_code"] == large["exit_code"] == 0
    assert 1e6 < small["peak_memory_bytes"] < 60e6
    assert 200e6 <= large["peak_memory_bytes"] < 260e6
    assert measure("raise SystemExit(3)")["exit_code"] == 3


def test_what_is_measured_ends_with_whoever_asked(tmp_path):
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(10**6)"
    command = [sys.executable, "-I", "-S", measured.__file__, sys.executable, "-c", code]
    with processes.running(command, stdin=subprocess.PIPE) as process:
        processes.until_lines(tmp_path / "pid", 1, process)
        process.stdin.close()
        process.wait(timeout=processes.LIMIT)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# --- the real thing


def test_the_real_pfllib(tmp_path):
    """Named by CWFED_PFLLIB, with the Python that has what it needs as CWFED_PFLLIB_PYTHON (default: ours)."""
    folder = os.environ.get("CWFED_PFLLIB")
    if not folder:
        pytest.skip("no checkout of PFLlib on this machine: set CWFED_PFLLIB to its folder")
    settings = pictures(tmp_path / "p", samples=120)
    before = there(Path(folder) / "system")
    result = bench(
        Path(folder), tmp_path, None, settings, repeats=1, python=os.environ.get("CWFED_PFLLIB_PYTHON", "")
    )
    assert there(Path(folder) / "system") == before
    data = load(SourceSpec("pfllib", str(tmp_path / "p")))
    trained = np.concatenate(
        [train for train, _ in data.fixed_split]
    )  # 45 each, whole batches: PFLlib drops what is left over
    with torch.inference_mode():
        logits = against_pfllib.same_cnn(SHAPE, 3)(to_network(torch.from_numpy(data.inputs[trained])))
        begun = nn.functional.cross_entropy(logits, torch.from_numpy(data.labels[trained])).item()
    for line in result["methods"]:
        log = (tmp_path / f"pfllib-{line['name']}-1.log").read_text()
        first = float(re.search(r"Averaged Train Loss: ([\d.]+)", log)[1])
        assert first == pytest.approx(begun, abs=1e-4)  # the same initial model, of whose loss it prints four digits
        assert line["ratio"] > 0
