"""Algorithms of the user's own that do what none of ours does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cwfed.algorithms import FedAvg
from cwfed.core.errors import RunError
from cwfed.core.types import Download, Start
from cwfed.federation.simulation import Simulation
from cwfed.report import audit
from cwfed.report.finished import read_run
from cwfed.runs import session
from tests.conftest import finish, small
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
