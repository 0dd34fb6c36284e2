"""How soon Flower asks again for a part of a message that is not there yet."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.supercore.inflatable import inflatable_utils

from cwfed.flower import waits


@pytest.fixture
def waited(monkeypatch):
    """The seconds that Flower would have waited."""
    seconds = []

    class Told(threading.Event):
        def wait(self, timeout=None):
            if timeout is None:  # of threads and pools
                return super().wait()
            return seconds.append(timeout)

    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))
    monkeypatch.setattr(inflatable_utils.threading, "Event", Told)
    monkeypatch.setattr(inflatable_utils.random, "uniform", lambda low, high: 0.0)
    return seconds


def late(tries):
    left = [tries]

    def pull(number):
        left[0] -= 1
        if left[0] >= 0:
            raise inflatable_utils.ObjectUnavailableError(number)
        return b"here"

    return pull


def test_a_part_that_is_not_there_yet_is_asked_for_sooner(waited):
    assert inflatable_utils.pull_objects(["a"], late(3)) == {"a": b"here"}
    assert waited == [1, 2, 4]  # Flower's own: seven seconds
    waited.clear()
    waits.ask_sooner()
    assert inflatable_utils.pull_objects(["a"], late(6)) == {"a": b"here"}
    assert waited == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
