"""Algorithms of the user's own that do what none of ours does."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from cwfed.algorithms import FedAvg
from cwfed.core.errors import ConfigError, RunError
from cwfed.core.types import Download, Start
from cwfed.federation.simulation import Simulation
from cwfed.report import audit
from cwfed.report.finished import read_run
from cwfed.runs import session
from cwfed.runs.folder import RunFolder
from cwfed.testing.conformance import BASE
from tests.conftest import finish, small
from tests.processes import PROGRAM, run
from tests.runs.test_session import interrupt_after


@dataclass(frozen=True)
class PartUp(FedAvg):
    """Uploads a part of the model and forgets the rest."""

    def uploaded(self, names, task):
        return tuple(name for name in names if not name.startswith(task.output))


@dataclass(frozen=True)
class FedPer(PartUp):
    """The output layer never leaves the client, in either direction."""

    phase = "trained"
    keeps_model = True

    def send(self, state, client):
        return Download(({name: w for name, w in state["model"].items() if not name.startswith("output")},))

    def personal(self, got, own, data):
        return own | got.model


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_an_algorithm_that_forgets_a_part_of_the_model_is_told_so(engine):
    with pytest.raises(RunError, match=r"a model without output\.bias, output\.weight: .*must add the rest"):
        finish(Simulation(small(f"algorithm.name={__name__}:PartUp", f"run.engine={engine}")))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_part_of_the_model_may_travel(engine, tmp_path):
    config = small(f"algorithm.name={__name__}:FedPer", f"run.engine={engine}")
    whole = session.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        session.run(config, tmp_path / "run", on_event=interrupt_after(2))
    summary = session.run(config, tmp_path / "run", resume=True)
    assert summary["accuracy"] == whole["accuracy"]
    assert whole["accuracy"]["trained"]["last"] > 0.5
    first = 6 * 4 * (64 * 16 + 16)  # six clients, the first layer, float32
    assert whole["traffic"] == {"down": 3 * first, "up": 3 * first}
    (left_out,) = audit.audit([read_run(tmp_path / "run")])[1]
    assert "hold neither the output layer nor class counts" in left_out.why


@dataclass(frozen=True)
class Counting(FedAvg):
    """Keeps nothing of its model, and remembers how often it took part."""

    def begin(self, got, own, data):
        times = (own or {}).get("times", torch.zeros(()))
        return Start(got.model, notes={"times": times})

    def remember(self, start):
        return {"times": start.notes.get("times", torch.zeros(())) + 1}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_what_is_remembered_comes_back_also_where_nothing_else_is_kept(engine):
    progress, _ = finish(Simulation(small(f"algorithm.name={__name__}:Counting", f"run.engine={engine}")))
    assert [float(kept["times"]) for kept in progress.kept.values()] == [3.0] * 6


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """A hook of it returns nothing, as one does whose author forgot `return`."""

    hook: str = "begin"

    def init(self, fresh, task):
        return None if self.hook == "init" else super().init(fresh, task)

    def uploaded(self, names, task):
        return "output" if self.hook == "uploaded" else super().uploaded(names, task)

    def keeps(self, names, task):
        return ("output.wieght",) if self.hook == "keeps" else super().keeps(names, task)

    def loss(self, *given):
        return super().loss(*given).loss if self.hook == "loss" else super().loss(*given)

    def penalty(self, *given):
        return None if self.hook == "penalty" else super().penalty(*given)

    def finish(self, params, start, data):
        return None if self.hook == "finish" else super().finish(params, start, data)

    def send(self, state, client):
        return None if self.hook == "send" else super().send(state, client)

    def personal(self, got, own, data):
        return None if self.hook == "personal" else super().personal(got, own, data)

    def begin(self, got, own, data):
        start = super().begin(got, own, data)
        changed = {"shape": lambda w: w.flatten(), "numpy": lambda w: w.numpy()}.get(self.hook)
        if changed:
            return Start({name: changed(w) for name, w in start.params.items()})
        return None if self.hook == "begin" else start

    def passes(self, when, task, start):
        found = super().passes(when, task, start)
        return {"passes": None, "a pass": (None,), "list": list(found)}.get(self.hook, found)

    def aggregate(self, state, up):
        return None if self.hook == "aggregate" else super().aggregate(state, up)


@pytest.mark.parametrize("engine", ["loop", "threads", "vmap"])
@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("send", r"Forgetful\.send must return a Download, not NoneType"),
        (
            "personal",
            r"Forgetful\.personal or Forgetful\.begin must return a model as a dict of tensors by name, not",
        ),
        ("begin", r"Forgetful\.begin must return a Start, not NoneType"),
        ("passes", r"Forgetful\.passes must return a tuple of Pass, not NoneType"),
        ("a pass", r"Forgetful\.passes must return a tuple of Pass, not NoneType"),
        ("list", r"Forgetful\.passes must return a tuple of Pass, not list"),
        ("init", r"Forgetful\.init must return the state, a dict, not NoneType"),
        ("uploaded", r"Forgetful\.uploaded must return a tuple of names, not str"),
        ("keeps", r"Forgetful\.keeps names 'output\.wieght', which the model lacks: did you mean output\.weight"),
        ("loss", r"Forgetful\.loss must return a Loss, not Tensor"),
        ("penalty", r"the loss of Forgetful must be two numbers \(loss and penalty\), one of them is NoneType"),
        ("finish", r"Forgetful\.finish must return a dict of tensors by name, not NoneType"),
        ("shape", r"Forgetful\.begin returns fc\.weight in the shape \(1024,\); the network's is \(16, 64\)"),
        ("numpy", r"Forgetful\.begin must return tensors, fc\.weight too, not ndarray"),
        ("aggregate", r"Forgetful\.aggregate must return the new state, a dict, not NoneType"),
    ],
)
def test_a_hook_that_returns_something_else_is_one_sentence(hook, says, engine):
    with pytest.raises(ConfigError, match=says):
        finish(
            Simulation(
                small(f"algorithm.name={__name__}:Forgetful", f"algorithm.hook={hook}", f"run.engine={engine}")
            )
        )


@dataclass(frozen=True)
class OtherArguments(FedAvg):
    def begin(self, got):
        return Start(got.model)


def test_a_hook_that_takes_other_arguments_is_one_sentence():
    with pytest.raises(
        ConfigError, match=r"OtherArguments\.begin is called as begin\(got, own, data\), and does not fit"
    ):
        small(f"algorithm.name={__name__}:OtherArguments").build_algorithm()


@dataclass(frozen=True)
class ByNumber(FedAvg):
    """Has numbers as keys of its state, which no checkpoint can say."""

    def init(self, fresh, task):
        return super().init(fresh, task) | {"seen": {0: torch.zeros(2)}}

    def aggregate(self, state, up):
        return state | super().aggregate(state, up)


def test_a_state_that_cannot_be_saved_is_refused_before_round_1(tmp_path):
    config = small(f"algorithm.name={__name__}:ByNumber", "train.rounds=1")
    with pytest.raises(RunError, match="server/seen cannot be saved: its key 0 is not a text"):
        session.run(config, tmp_path / "run")
    assert not RunFolder(tmp_path / "run").exists


FAULTY = """
from dataclasses import dataclass
from cwfed import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    def aggregate(self, state, up):
        return {"model": up.modles}
"""


def test_an_error_in_the_users_own_code_is_one_sentence_at_the_command_line(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    command = [PROGRAM, "run", *(word for s in (*BASE, "algorithm.name=faulty:Mine") for word in ("--set", s))]
    failed = run(command, cwd=tmp_path)
    assert failed.returncode == 1
    assert "error: your code failed: AttributeError: 'Uploads' object has no attribute 'modles'" in failed.stderr
    assert "faulty.py, line 8" in failed.stderr
    assert "Traceback" not in failed.stderr
    whole = run(command, cwd=tmp_path, env=os.environ | {"CWFED_TRACEBACK": "1"})
    assert whole.returncode == 1
    assert "up.modles" in whole.stderr
    assert "Traceback" in whole.stderr
