"""The three pickings and the per-client figures, by hand."""

from __future__ import annotations

import pytest

from cwfed.errors import RunError
from cwfed.events import PhaseResult, Round, Started, from_json, to_json
from cwfed.summary import summarise


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


def test_without_validation_data_there_is_no_validated_picking():
    summary = summarise([STARTED, round_(1, result(0.6, None, [6, 24]))])
    assert summary["accuracy"]["received"] == {"best": 0.6, "validated": None, "last": 0.6}


def test_rounds_that_were_not_evaluated_are_passed_over():
    summary = summarise([STARTED, round_(1, None, None), round_(2, result(0.6, 0.5, [6, 24]))])
    assert summary["picked_rounds"]["received"]["best"] == 2


def test_a_run_without_rounds_has_no_summary():
    with pytest.raises(RunError, match="no finished round"):
        summarise([STARTED])


def test_events_survive_json():
    for event in (STARTED, round_(1, result(0.6, None, [6, 24])), round_(2, None, None, loss=None)):
        assert from_json(to_json(event)) == event
    for bad in ("{}", "[]", '{"event": "party"}', '{"event": "note"}', "nonsense", '{"event": "round", "round": 1}'):
        with pytest.raises(ValueError):
            from_json(bad)
