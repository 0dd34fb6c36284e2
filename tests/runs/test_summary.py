"""The three pickings and the per-client figures, by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from cwfed.core.errors import RunError
from cwfed.core.events import Newcomers, Note, PhaseResult, Round, Spent, Started, from_json, to_json
from cwfed.runs.summary import aggregate, spread, summarise


def result(accuracy, validation, right):
    return PhaseResult(accuracy, validation, 0.5, right)


def round_(number, received, trained=None, **changes):
    fields = {
        "round": number, "participants": [0, 1], "dropped": [], "loss": 1.0 / number, "penalty": 0.0,
        "client_loss": [1.0, 2.0], "correlation": 0.5, "distance": 0.1, "received": received,
        "trained": trained or received, "down": 10, "up": 5, "seconds": {"train": 1.0, "evaluate": 0.5},
    }  # fmt: skip
    return Round(**(fields | changes))


STARTED = Started("cwfedavg", "digits", 3, 3, 2, 10, 100, "received", [0, 1], [10, 40])


def test_pickings_by_hand():
    events = [
        STARTED,
        round_(1, result(0.60, 0.50, [6, 24])),
        round_(2, result(0.90, 0.60, [9, 36])),  # the best on test
        round_(3, result(0.80, 0.70, [4, 36])),  # what validation would have picked, and the last
    ]
    summary = summarise(events)
    assert summary["accuracy"]["received"] == {"best": 0.90, "validated": 0.80, "last": 0.80}
    assert summary["picked_rounds"]["received"] == {"best": 2, "validated": 3, "last": 3}
    assert summary["reported"] == {"accuracy": 0.90, "phase": "received", "picking": "best", "round": 2}
    assert summary["per_client"]["accuracies"] == {"0": 0.9, "1": 0.9}
    assert summary["traffic"] == {"down": 30, "up": 15}
    assert summary["seconds"] == {"train": 3.0, "evaluate": 1.5, "total": 4.5}


def test_per_client_figures_of_the_reported_round():
    summary = summarise([STARTED, round_(1, result(0.74, 0.7, [5, 32]))])
    per_client = summary["per_client"]  # 5/10 and 32/40: every client counts the same here
    assert (per_client["mean"], per_client["worst_decile"]) == (pytest.approx(0.65), 0.5)
    assert per_client["std"] == pytest.approx(0.15)


def test_the_whole_summary_by_hand():
    events = [
        STARTED,
        Note("resumed"),
        round_(1, result(0.60, None, [6, 24]), refused={"1": "too long", "0": "NaN"}, skipped="too few"),
        round_(2, result(0.60, None, [6, 24]), skipped="nobody came"),  # nobody was refused: no matter for the guard
        round_(3, result(0.50, None, [5, 20]), refused={"1": "too long"}, correlation=0.25, loss=0.125),
        Newcomers([5], 0.1, 0.05),
        Newcomers([5, 6], 0.5, 0.25),
    ]
    assert summarise(events) == {
        "algorithm": "cwfedavg", "dataset": "digits", "seed": 3, "rounds": 3, "clients": 2, "parameters": 100,
        "accuracy": {key: {"best": 0.6, "validated": None, "last": 0.5} for key in ("received", "trained")},
        "picked_rounds": {key: {"best": 1, "validated": None, "last": 3} for key in ("received", "trained")},
        "reported": {"accuracy": 0.60, "phase": "received", "picking": "best", "round": 1},
        "per_client": {"mean": 0.6, "std": 0.0, "worst_decile": 0.6, "accuracies": {"0": 0.6, "1": 0.6}},
        "newcomers": {"clients": [5, 6], "histogram": 0.5, "uniform": 0.25},
        "correlation": 0.25, "loss": 0.125, "traffic": {"down": 30, "up": 15},
        "seconds": {"train": 3.0, "evaluate": 1.5, "total": 4.5}, "notes": ["resumed"],
        "refused": {"1": 2, "0": 1}, "skipped": [1],
    }  # fmt: skip


def test_one_run_of_one_round_says_nothing_of_what_did_not_happen():
    summary = summarise(
        [STARTED, round_(1, result(0.6, None, [6, 24]), seconds={"train": 1.00049, "evaluate": 0.00049})]
    )
    assert summary["seconds"] == {"train": 1.0, "evaluate": 0.0, "total": 1.001}  # milliseconds
    assert not summary.keys() & {"refused", "skipped", "privacy"}
    row = aggregate("alone", [summary])
    assert row["reported"] == {"phase": "received", "picking": "best", "mean": 0.6, "std": None}


def test_the_worst_tenth_is_of_the_clients_that_have_test_samples():
    # clients 0 to 19 have i of 20 right, client 20 has no test sample: of 20, the two worst have 0 and 1/20
    started = dataclasses.replace(STARTED, evaluated=list(range(21)), test_samples=[20] * 20 + [0])
    figures = summarise([started, round_(1, result(0.5, None, [*range(20), 0]))])["per_client"]
    assert figures["worst_decile"] == pytest.approx(0.025)
    assert figures["mean"] == pytest.approx(9.5 / 20)
    assert list(figures["accuracies"]) == [str(c) for c in range(20)]


def test_a_federation_says_itself_whose_results_these_are():
    found = PhaseResult(0.5, None, 0.5, [1, 3], clients=[4, 7], samples=[2, 4])
    assert summarise([STARTED, round_(1, found)])["per_client"]["accuracies"] == {"4": 0.5, "7": 0.75}


@pytest.mark.parametrize(
    ("epsilon", "largest"), [({"0": 1.5, "1": 2.5}, 2.5), ({"0": 1.5, "1": None}, None), ({}, None)]
)
def test_the_privacy_that_was_spent_is_that_of_the_worst_client(epsilon, largest):
    spent = Spent(1e-5, epsilon, 0.25)
    summary = summarise([STARTED, round_(1, result(0.6, None, [6, 24]), spent=spent)])
    expected = {"epsilon": largest, "delta": 1e-5, "histogram_epsilon": 0.25, "per_client": epsilon}
    assert summary["privacy"] == expected


def test_by_attributes_as_in_the_file():
    summary = summarise([STARTED, round_(1, result(0.6, None, [6, 24])), round_(2, result(0.5, 0.5, [5, 20]))])
    assert summary.accuracy.received.best == summary["accuracy"]["received"]["best"] == 0.6
    assert summary.picked_rounds.trained.validated == 2
    assert (summary.reported.round, summary.per_client.accuracies["1"], summary.traffic.down) == (1, 0.6, 20)
    assert summary == summary.to_dict() == json.loads(summary.to_json())
    assert list(summary) == list(summary.to_dict())
    assert "stopped" not in summary  # what is empty is not said
    with pytest.raises(KeyError):
        summary["stopped"]


def test_nobody_changes_a_summary():
    summary = summarise([STARTED, round_(1, result(0.6, None, [6, 24]))])
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.rounds = 2
    with pytest.raises(TypeError):
        summary["rounds"] = 2
    summary.to_dict()["accuracy"]["received"]["best"] = 1.0
    assert summary["accuracy"]["received"]["best"] == summary.accuracy.received.best == 0.6


def test_a_metric_without_a_value_is_said_to_have_none():
    started = dataclasses.replace(STARTED, pick="own")
    found = dataclasses.replace(result(0.6, None, [6, 24]), metrics={"own": None})
    reported = summarise([started, round_(1, found)])["reported"]
    assert (reported["metric"], reported["value"]) == ("own", None)


def test_seeds_are_aggregated_by_hand():
    summaries = [
        dataclasses.replace(
            summarise([STARTED, round_(1, result(a, v, [6, 24]), result(a / 2, None, [6, 24]))]), peak_memory_bytes=m
        )
        for a, v, m in ((0.5, 0.25, 10), (0.7, 0.75, None))
    ]
    row = aggregate("ours", summaries)
    std = pytest.approx(0.2 / 2**0.5)  # of two values: their distance / sqrt 2
    both = {"mean": pytest.approx(0.6), "std": std}
    assert (row["label"], row["algorithm"]) == ("ours", "cwfedavg")
    assert row["accuracy"]["received"] == {"best": both, "validated": both, "last": both}
    assert row["accuracy"]["trained"]["best"]["mean"] == pytest.approx(0.3)
    assert row["accuracy"]["trained"]["validated"] == {"mean": None, "std": None}
    assert (row["traffic"], row["seconds"]["mean"]) == ({"mean": 15.0, "std": 0.0}, 1.5)
    assert row["memory"] == {"mean": None, "std": None}, "not known of one of them"
    assert spread([3.0]) == {"mean": 3.0, "std": None}
    assert spread([]) == {"mean": None, "std": None}


def test_without_validation_data_there_is_no_validated_picking():
    summary = summarise([STARTED, round_(1, result(0.6, None, [6, 24]))])
    assert summary["accuracy"]["received"] == {"best": 0.6, "validated": None, "last": 0.6}


def test_rounds_that_were_not_evaluated_are_passed_over():
    summary = summarise([STARTED, round_(1, None, None), round_(2, result(0.6, 0.5, [6, 24]))])
    assert summary["picked_rounds"]["received"]["best"] == 2


def test_a_run_that_never_measured_has_no_summary():
    with pytest.raises(RunError, match="no evaluated round"):
        summarise([STARTED, round_(1, None, None)])


def test_a_run_without_rounds_has_no_summary():
    with pytest.raises(RunError, match="no finished round"):
        summarise([STARTED])


def test_events_survive_json():
    for event in (STARTED, round_(1, result(0.6, None, [6, 24])), round_(2, None, None, loss=None)):
        assert from_json(to_json(event)) == event
    for bad in ("{}", "[]", '{"event": "party"}', '{"event": "note"}', "nonsense", '{"event": "round", "round": 1}'):
        with pytest.raises(ValueError):
            from_json(bad)
