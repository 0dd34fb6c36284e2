"""The engine with worker processes: the loop's bits, real kills, and nothing left running."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from cwfed.algorithms import ALGORITHMS, CwFedAvg, FedAvg
from cwfed.core.errors import ConfigError, RunError
from cwfed.engine import find_devices
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from cwfed.runs import session
from cwfed.runs.folder import RunFolder
from tests.conftest import ROOT, finish, leaves, small, without_seconds
from tests.processes import running, until

FEW = ("train.participation=0.7", "data.samples=200", "data.clients=4")


def outcome(*settings):
    progress, events = finish(Simulation(small(*FEW, *settings)))
    return leaves(to_tree(progress)), [without_seconds(event) for event in events]


CASES = {
    "kept models, a combination": ["algorithm.name=fedfomo+prior"],
    "running statistics, passes of its own, an optimiser": [
        "model.name=tests.engine.test_engines:with_batch_norm",
        "model.options={}",
        "train.batch_norm=local",
        "algorithm.name=fedrep",
        "train.optimizer=adam",
        "train.keep_optimizer=true",
    ],
    "passes on receipt, dropout": [
        "model.name=tests.engine.test_engines:with_dropout",
        "model.options={}",
        "algorithm.name=fedala",
        "data.augment=crop",
    ],
    "private": ["privacy.dp=sample", "algorithm.name=fedavg"],
}
SLOW = ("passes on receipt, dropout", "private")
"""A worker takes some seconds to import torch, and as many for the accountant."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_worker_processes_give_the_loops_bits(case):
    found = outcome(*CASES[case], "run.engine=processes", "run.workers=1")
    assert found == outcome(*CASES[case], "run.engine=loop")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_in_worker_processes(name):
    """What it sends, keeps and remembers goes through the shared memory, of whatever kind and shape it is."""
    settings = (f"algorithm.name={name}", "train.rounds=2")
    assert outcome(*settings, "run.engine=processes", "run.workers=1") == outcome(*settings, "run.engine=loop")


# --- devices


@dataclass(frozen=True)
class Tells(CwFedAvg):
    """Says on which device each process has the data."""

    def finish(self, params, start, data):
        place = Path(os.environ["CWFED_TEST_FOLDER"]) / f"{os.getpid()}"
        place.write_text(str(data._worker.samples.device))
        return super().finish(params, start, data)


def test_each_worker_has_its_device(tmp_path, monkeypatch):
    """CPUs that stand for GPUs: torch knows cpu:1, and computes on the one there is. Two workers, the loop's bits."""
    monkeypatch.setenv("CWFED_TEST_FOLDER", str(tmp_path))
    algorithm = f"algorithm.name={__name__}:Tells"
    simulation = Simulation(
        small(*FEW, algorithm, "run.device=cpu:0,cpu:1", "train.participation=1", "train.rounds=100000")
    )
    about = simulation.manifest()["engine"]
    assert (about["name"], about["workers"], about["device"]) == ("processes", 2, "cpu:0,cpu:1")
    assert "there are 2 devices" in about["why"]
    rounds = simulation.rounds(simulation.start())
    told = lambda: sorted(place.read_text() for place in tmp_path.iterdir())  # noqa: E731
    for progress, _ in rounds:  # the second worker may become ready later
        if len(told()) == 2:
            break
    simulation.close()
    assert told() == ["cpu:0", "cpu:1"]
    one = Simulation(
        small(*FEW, algorithm, "run.engine=loop", "train.participation=1", f"train.rounds={progress.round}")
    )
    assert leaves(to_tree(progress)) == leaves(to_tree(finish(one)[0]))


def test_which_devices(monkeypatch):
    assert find_devices("cpu:0, cpu:1") == (torch.device("cpu:0"), torch.device("cpu:1"))
    with pytest.raises(ConfigError, match=r"run\.device = 'cuda:7' cannot be used here"):
        find_devices("cpu,cuda:7")
    with pytest.raises(ConfigError, match=r'"threads" works on one device, and run\.device names 2'):
        find_devices("cpu:0,cpu:1", "threads")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert find_devices("auto") == (torch.device("cuda:0"), torch.device("cuda:1"))
    assert find_devices("auto", "vmap") == (torch.device("cuda"),)


# --- what goes wrong


@dataclass(frozen=True)
class Dies(FedAvg):
    """Its process is killed, once, as by a machine without memory."""

    def finish(self, params, start, data):
        flag = Path(os.environ["CWFED_TEST_FLAG"])
        if data._client == 2 and flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return {}


def test_a_worker_that_is_killed_is_one_sentence_and_the_run_can_be_resumed(tmp_path, monkeypatch):
    flag = tmp_path / "flag"
    monkeypatch.setenv("CWFED_TEST_FLAG", str(flag))
    config = small("data.samples=200", f"algorithm.name={__name__}:Dies", "train.rounds=5", "run.workers=2")

    def kill_in_round_3(event):
        if getattr(event, "round", 0) == 2:
            flag.touch()

    sentence = r"a worker process was ended by SIGKILL .*while it trained client 2 in round 3: --resume continues"
    with pytest.raises(RunError, match=sentence):
        session.run(config.but(engine="processes"), tmp_path / "run", on_event=kill_in_round_3)
    assert len([e for e in RunFolder(tmp_path / "run").events() if hasattr(e, "participants")]) == 2
    resumed = session.run(config.but(engine="loop"), tmp_path / "run", resume=True)
    whole = session.run(config.but(engine="loop"), tmp_path / "whole")
    assert (resumed.accuracy, resumed.rounds) == (whole.accuracy, 5)


@dataclass(frozen=True)
class Raises(FedAvg):
    def finish(self, params, start, data):
        if data._client == 1:
            raise ZeroDivisionError("of the user's own")
        return {}


def test_an_error_in_a_worker_comes_out_with_its_place_and_workers_can_be_asked_again():
    simulation = Simulation(small(*FEW, f"algorithm.name={__name__}:Raises", "run.engine=processes", "run.workers=1"))
    with pytest.raises(ZeroDivisionError, match="of the user's own") as caught:
        list(simulation.rounds(simulation.start()))
    assert any("in finish" in note for note in caught.value.__notes__)
    assert not simulation.engine._crew
    assert simulation._measure_received(simulation.start()).keys() == {0, 1, 2, 3}
    simulation.close()


def with_a_lock(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    model.output_layer, model.lock = "1", Lock()
    return model


class Lock:
    """Can be copied, not sent elsewhere."""

    def __init__(self):
        self.lock = threading.Lock()

    def __deepcopy__(self, memo):
        return self


def test_what_cannot_be_sent_to_a_worker_is_one_sentence():
    with pytest.raises(ConfigError, match=r'cannot send this experiment to its workers, use "threads": .*lock'):
        Simulation(small(f"model.name={__name__}:with_a_lock", "model.options={}", "run.engine=processes"))


# --- nothing is left running


SCRIPT = """
import sys, time
from dataclasses import dataclass
from pathlib import Path

import cwfed
from cwfed.algorithms import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):  # of the script itself, which has no `if __name__ == "__main__"`
    def finish(self, params, start, data):
        if data._client in (2, 3):  # in the middle of a client, for ever
            (folder / str(data._client)).touch()
            time.sleep(36000)
        return {}

folder = Path(sys.argv[1])
config = cwfed.load_config(settings=["model.name=mlp", "data.samples=200", "data.clients=4", "algorithm.name=__main__:Mine",
                                     "run.engine=processes", "run.workers=2"])
cwfed.run(config, folder / "run")
"""


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGKILL"])
def test_nothing_is_left_running(tmp_path, how):
    """The workers have the script's output, which is at its end when the last of them is gone: they are busy, and cannot be asked."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with running([sys.executable, script, tmp_path], env=env) as process:
        busy = lambda: (tmp_path / "2").exists() and (tmp_path / "3").exists()  # noqa: E731
        until(busy, lambda: process.poll() is None, lambda: process.stderr.read())
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        else:
            process.kill()
        _, said = process.communicate()
    assert said.count("Traceback") == (how == "Ctrl-C"), said  # of the script, not of its workers
    assert process.returncode == (-signal.SIGKILL if how == "SIGKILL" else -signal.SIGINT)
