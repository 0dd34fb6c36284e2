"""Hostile and damaged input: one sentence, no hang, no code, no file outside the folder.

A few cases of each target here; tens of thousands with `python -m pytest -m fuzz -s tests/fuzz` (`make fuzz`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib import import_module
from importlib.util import find_spec

import datasets.config
import huggingface_hub.constants
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from cwfed.core.errors import CwfedError
from tests.fuzz.base import TARGETS, World
from tests.fuzz.watch import watched

PARTS = ["settings", "data", "runs"]  # each adds its targets
if find_spec("flwr"):
    PARTS.append("messages")
for part in PARTS:
    import_module(f"tests.fuzz.{part}")

LONG = int(os.environ.get("CWFED_FUZZ_CASES", "3000"))
SHORT = 30
PHASES = (Phase.explicit, Phase.generate)  # a failing case is told as it is: shrinking it would take minutes


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("fuzz"))


def fuzz(world: World, name: str, cases: int, **options) -> Counter[str]:
    """Cases of one target, and how they ended."""
    target, counts = TARGETS[name], Counter[str]()

    @settings(
        max_examples=max(5, cases // target.cost),
        deadline=None,
        database=None,
        phases=PHASES,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    @given(target.cases)
    def run(case):
        counts["cases"] += 1
        outside = sorted(world.folder.parent.iterdir())
        try:
            with watched(world.folder):
                target.act(world, case)
            counts["accepted"] += 1
        except CwfedError as error:
            counts["without a word"] += not str(error)
            counts["refused"] += 1
        assert sorted(world.folder.parent.iterdir()) == outside

    run()
    assert not counts.pop("without a word", 0)
    return counts


@pytest.fixture
def inside(world, monkeypatch):
    """The world's folder as working directory, with a module that must not be imported, and as the place of the cache."""
    (world.folder / "trap.py").write_text("open('trapped', 'w').close()")
    (world.folder / "trapped").unlink(missing_ok=True)
    monkeypatch.chdir(world.folder)
    monkeypatch.setenv("CWFED_CACHE", str(world.folder / "cache"))
    # not by the environment: both read it when they are imported, and what is imported first here would stay offline
    for library in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(world.folder / "hf" / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", world.folder / "hf" / "datasets")


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_cases(world, name):
    fuzz(world, name, SHORT, derandomize=True)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("name", TARGETS)
def test_many_cases(world, name):
    print(json.dumps({"target": name, **fuzz(world, name, LONG)}))
