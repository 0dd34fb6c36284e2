"""The suite finds what is wrong: each mistake that algorithms have, made on purpose."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import cwfed
from cwfed import FedAvg, testing
from cwfed.core.errors import CwfedError
from cwfed.testing.conformance import table_of
from tests import processes
from tests.conftest import ROOT


@dataclass(frozen=True)
class Scaled(FedAvg):
    """Its weights do not sum to 1."""

    factor: float = 1.1

    def aggregate(self, state, up):
        new = super().aggregate(state, up)
        return new | {"model": {n: self.factor * w for n, w in new["model"].items()}}


@dataclass(frozen=True)
class InPlace(FedAvg):
    """Changes the state that it is given."""

    def aggregate(self, state, up):
        for n, w in super().aggregate(state, up)["model"].items():
            state["model"][n].copy_(w)
        return state


@dataclass(frozen=True)
class Counting(FedAvg):
    """Keeps something outside of its state, so that no two runs are alike."""

    calls: ClassVar = itertools.count(1)

    def aggregate(self, state, up):
        new = super().aggregate(state, up)
        return new | {"model": {n: w * (1 + 1e-3 * next(self.calls)) for n, w in new["model"].items()}}


@dataclass(frozen=True)
class Greedy(FedAvg):
    """Keeps all uploads, and says that it costs what FedAvg does."""

    def aggregate(self, state, up):
        return super().aggregate(state, up) | {"all": up.models}


@dataclass(frozen=True)
class Unannounced(FedAvg):
    """Sends what it does not announce."""

    def finish(self, params, start, data):
        return {"stowaway": torch.ones(3)}


MISTAKES = [
    (Scaled, "when_nobody_moves_nothing_moves", "moved although nobody trained"),
    (InPlace, "aggregating_does_not_change_the_state_it_is_given", "changed the state of an earlier one in place"),
    (Counting, "the_seed_decides_everything", "two runs with the same seed differ"),
    (Greedy, "server_memory_is_what_cwfed_cost_says", "`costs` says"),
]


@pytest.mark.parametrize(("algorithm", "name", "sentence"), MISTAKES, ids=lambda x: getattr(x, "__name__", None))
def test_a_mistake_is_found(algorithm, name, sentence):
    suite = testing.Suite()
    suite.algorithm = algorithm
    with pytest.raises(AssertionError, match=sentence):
        getattr(suite, f"test_{name}")()


def test_what_is_sent_unannounced_is_found():
    suite = testing.Suite()
    suite.algorithm = Unannounced
    with pytest.raises(CwfedError, match="refused: what comes beside the model has an unknown tensor stowaway"):
        suite.test_the_guard_knows_what_an_honest_upload_looks_like()


NAMES = ("test_when_nobody_moves_nothing_moves", "test_its_config_table_builds_it_again")
others = {name: None for name in vars(testing.Suite) if name.startswith("test_") and name not in NAMES}
TwoChecks = type("TwoChecks", (testing.Suite,), others)


def test_check_names_what_failed_and_only_that():
    testing.check(FedAvg, suite=TwoChecks)
    with pytest.raises(AssertionError) as failed:
        testing.check(Scaled, suite=TwoChecks)
    first, *rest = str(failed.value).splitlines()
    assert first == f"{__name__}:Scaled does not conform:"
    assert len(rest) == 1
    assert rest[0].startswith("when nobody moves nothing moves: ")
    testing.check(Scaled, "algorithm.factor=1", suite=TwoChecks)
    testing.check(Scaled(factor=1.0), suite=TwoChecks)


def test_an_algorithm_by_name_by_class_or_made():
    assert table_of("fedprox") == {"name": "fedprox"}
    assert table_of(cwfed.CwFedAvg)["name"] == "cwfedavg"
    assert table_of(Scaled(2.0)) == {"name": f"{__name__}:Scaled", "factor": 2.0}


def test_the_example_runs_as_its_reader_runs_it(tmp_path):
    for path in (ROOT / "examples").glob("*own_algorithm.py"):
        shutil.copy(path, tmp_path)
    quick = "config_table or honest_upload or nobody_moves or does_not_change"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own_algorithm.py", "-k", quick]
    done = processes.run(command, cwd=tmp_path, env={**os.environ}, check=True)
    assert "4 passed" in done.stdout
