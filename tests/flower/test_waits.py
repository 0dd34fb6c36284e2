"""How soon Flower's programs look again for what is not there yet."""

from __future__ import annotations

import select
import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

import flwr.supercore.cli
import flwr.supernode.cli
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.superexec import run_superexec
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from cwfed.flower import bell, waits
from tests import processes


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


@pytest.fixture
def slept(monkeypatch):
    """The seconds that were slept, by a clock that sleeping moves."""
    clock = SimpleNamespace(now=100.0, slept=[])

    def sleep(seconds):
        clock.now += seconds
        clock.slept.append(seconds)

    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep, time=lambda: 7.0))
    return clock


def test_a_supernode_rests_between_questions_unless_it_was_kept_waiting(slept):
    clock = waits.Clock()
    clock.sleep(3)
    clock.sleep(3)
    assert slept.slept == [3, 3], "a SuperLink without a gate is asked as often as Flower asks"
    slept.now += 20  # the gate has kept it waiting
    clock.sleep(3)
    slept.now += 1
    clock.sleep(3)
    assert slept.slept == [3, 3, 0, 2]
    assert clock.time() == 7.0, "the rest is Python's"


def test_a_supernode_looks_often_for_the_answer_of_its_own_process(slept, waited, monkeypatch):
    """In Flower's own loop: who sleeps otherwise there is not Flower 1.41."""
    monkeypatch.setattr(start_client_internal, "time", start_client_internal.time)
    monkeypatch.setattr(InMemoryNodeState, "store_message", InMemoryNodeState.store_message)
    monkeypatch.setattr(flwr.supernode.cli, "flower_supernode", lambda: ran.append(list(sys.argv)))
    ran, looks = [], iter([[], [], [], StopIteration])

    def look(**_):
        found = next(looks)
        if found is StopIteration:
            raise KeyboardInterrupt
        return found

    waits.run_supernode()
    assert ran == [sys.argv]
    assert inflatable_utils.pull_objects(["a"], late(1)) == {"a": b"here"}
    assert waited == [0.1]
    with pytest.raises(KeyboardInterrupt):
        start_client_internal._push_messages(SimpleNamespace(get_messages_legacy=look), None, None, None)
    assert slept.slept == [0.05] * 3


def test_a_helper_is_woken_when_there_is_work(tmp_path, monkeypatch):
    """Between Flower's own memory of a node and Flower's own loop of its helper."""
    monkeypatch.setenv(bell.FOLDER, str(tmp_path / "bells"))
    monkeypatch.setattr(start_client_internal, "time", start_client_internal.time)
    monkeypatch.setattr(InMemoryNodeState, "store_message", InMemoryNodeState.store_message)
    monkeypatch.setattr(run_superexec, "time", run_superexec.time)
    stored = []

    def store(reply_to):
        about = SimpleNamespace(message_id=str(len(stored)), reply_to_message_id=reply_to)
        stored.append(InMemoryNodeState.store_message(state, SimpleNamespace(metadata=about)))

    def helper():
        clock = run_superexec.time
        began = clock.monotonic()
        clock.sleep(0.01)
        assert clock.monotonic() - began < processes.LIMIT / 2
        store("")
        clock.sleep(processes.LIMIT)  # which would be for ever
        store("an answer wakes nobody")
        assert not select.select([clock._bell], [], [], 0)[0]

    monkeypatch.setattr(flwr.supernode.cli, "flower_supernode", lambda: None)
    monkeypatch.setattr(flwr.supercore.cli, "flower_superexec", helper)
    waits.run_supernode()
    state = InMemoryNodeState(ObjectStoreFactory().store())
    waits.run_superexec()
    assert stored == ["0", "1"]
