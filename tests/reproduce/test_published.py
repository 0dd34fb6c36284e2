"""The table of whole data in docs/results.md follows from the runs that are published with it, as archives."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from cwfed.core.types import PHASES
from cwfed.report.finished import read_run
from tests.conftest import ROOT

spec = importlib.util.spec_from_file_location("results_tool", ROOT / "tools" / "results.py")
tool = importlib.util.module_from_spec(spec)
sys.modules["results_tool"] = tool
spec.loader.exec_module(tool)
ARCHIVES = sorted(tool.RUNS.rglob("*.cwfed"))


def test_the_page_has_what_the_runs_say():
    (on_page,) = tool.PLACE.findall(tool.PAGE.read_text(encoding="utf-8"))
    assert on_page.strip() == tool.section(tool.outcome()), "python tools/results.py makes it"


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.parent.name)
def test_a_published_run_is_whole_and_of_all_the_data(path):
    record = read_run(path)
    assert record.sealed
    assert record.config.data.samples == 0
    assert record.started.test_samples == read_run(ARCHIVES[0]).started.test_samples, "the same split"
    assert all(getattr(record.rounds[-1], phase).accuracy > 0 for phase in PHASES)
