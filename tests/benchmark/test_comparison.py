"""The table of all methods: what is published is kept, what is missing is run, the best get more seeds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys

import pytest

import cwfed
from tests.conftest import ROOT

spec = importlib.util.spec_from_file_location("comparison", ROOT / "benchmarks" / "comparison.py")
comparison = importlib.util.module_from_spec(spec)
sys.modules["comparison"] = comparison  # where its dataclasses look for their annotations
spec.loader.exec_module(comparison)

SETTING = comparison.SETTINGS["cifar10"]


def recorded(method, validated, seed=0, **more):
    values = {"phase": "received", "received": 50.0, "trained": 40.0, "last": 1.0, "validation": 2.0, "worst": 3.0}
    return comparison.Record(
        "cifar10", SETTING.named(method), seed, **values | more, validated=validated, traffic=3.5e6
    )


def test_of_a_run_that_was_made_twice_the_new_one_counts():
    old, other, new = recorded("fedavg", 10.0), recorded("fedavg", 11.0, seed=1), recorded("fedavg", 12.0)
    assert comparison.together([old, other], [new]) == [new, other]


def test_mean_and_deviation_are_over_the_seeds_of_a_method():
    rows = comparison.table_rows(
        "cifar10", [recorded("fedavg", 10.0), recorded("ditto", 20.0, 0), recorded("ditto", 22.0, 1)]
    )
    assert [row.method for row in rows] == ["ditto", "fedavg"], "the best first"
    table = comparison.as_table(SETTING, rows).splitlines()
    # the mean of 20 and 22 is 21, their sample deviation sqrt(1 + 1) = 1.41
    assert (
        table[-2]
        == "| `ditto` | 50.00 ± 0.00* | 40.00 ± 0.00 | 21.00 ± 1.41 | 1.00 ± 0.00 | 3.00 ± 0.00 | 3.5 MB | 2 |"
    )
    assert table[-1] == "| `fedavg` | 50.00* | 40.00 | 10.00 | 1.00 | 3.00 | 3.5 MB | 1 |"
    assert comparison.as_numbers(SETTING, rows[0])["command"].split("-a ")[1].startswith("ditto --seeds 0,1 --set ")


def test_what_is_missing_is_seed_0_of_all_and_then_the_best_and_the_controls(tmp_path):
    known = [recorded(method, float(i)) for i, method in enumerate(comparison.METHODS)]
    wanted = comparison.missing("cifar10", tmp_path, known[1:])
    assert [(one.label, one.seed) for one in wanted] == [(comparison.METHODS[0], 0)]
    wanted = comparison.missing("cifar10", tmp_path, [*known, recorded(comparison.METHODS[-1], 50.0, seed=1)])
    best = [SETTING.named(method) for method in comparison.METHODS[-10:]]
    assert {one.label for one in wanted} == {*best, *map(SETTING.named, comparison.CONTROLS)}
    assert (best[-1], 1) not in {(one.label, one.seed) for one in wanted}, "it is published"
    assert (best[-1], 2) in {(one.label, one.seed) for one in wanted}
    worse = comparison.missing("cifar10", tmp_path, [*known, recorded(comparison.METHODS[-1], 0.0, seed=1)])
    assert worse == wanted, "seed 0 says who is best: the list does not grow with every seed"


def test_a_record_says_what_the_run_says(tmp_path):
    config = cwfed.load_config(
        settings=["data.samples=300", "train.rounds=3", "algorithm.name=ditto", "data.clients=4"]
    )
    result = cwfed.run(config, out=tmp_path)
    found = comparison.record("cifar10", "ditto", tmp_path, 0)
    assert found.phase == "trained"
    assert found.trained == pytest.approx(100 * result.accuracy.trained.best, abs=0.005)
    assert found.received == pytest.approx(100 * result.accuracy.received.best, abs=0.005)
    assert found.validated == pytest.approx(100 * result.accuracy.trained.validated, abs=0.005)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    held_out = [event["trained"]["validation"] for event in events if event["event"] == "round"]
    assert found.validation == pytest.approx(100 * max(held_out), abs=0.005)


def test_the_published_records_are_the_published_rows():
    numbers = json.loads(comparison.NUMBERS.read_text(encoding="utf-8"))
    records = comparison.stored()
    assert [dataclasses.asdict(one) for one in records] == numbers["runs"]
    for name, setting in comparison.SETTINGS.items():
        made = [comparison.as_numbers(setting, row) for row in comparison.table_rows(name, records)]
        assert [row for row in numbers["rows"] if row["setting"] == setting.title] == made
        page = (comparison.DOCS / "comparison.md").read_text(encoding="utf-8")
        assert not made or comparison.as_table(setting, comparison.table_rows(name, records)) in page
