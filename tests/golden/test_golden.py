"""The core computes what it computed when the golden runs were recorded."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.golden import RECORD, carry_out, cases, probe

EXPECTED = json.loads(RECORD.read_text())
CASES = dict(cases())


@cache
def rounds_alike() -> bool:
    return bool(probe() == EXPECTED["probe"])


SOME_METHODS = ("cwfedavg", "fedavg", "fedfomo", "fednh")
"""Of the others only the plain run is done every time, on text and with batch norm by `make test-all`."""


def is_slow(name: str) -> bool:
    return ("words" in name or "batch norm" in name) and not name.startswith(tuple(f"{m}, " for m in SOME_METHODS))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if is_slow(name) else []) for name in CASES]
)
def test_a_golden_run(name):
    found, expected = carry_out(CASES[name]), EXPECTED["runs"][name]
    assert found["losses"] == pytest.approx(expected["losses"], rel=0.02)
    if rounds_alike():
        assert found["bits"] == expected["bits"], (
            "other bits: if that is meant, `python -m tests.golden` records them"
        )


def test_every_golden_run_is_recorded():
    assert EXPECTED["runs"].keys() == CASES.keys()
