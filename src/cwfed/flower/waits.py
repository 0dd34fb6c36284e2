"""Shorter waits in Flower's own programs, where Flower has no setting for them.

A message is announced before its numbers have arrived. Flower (1.41) asks for them, waits a second, then two, then four: what arrives after 1.1 s is
taken after 3 s, what arrives after 3.1 s after 7 s. A SuperNode checks twice a second whether an answer has arrived, and as often for each part of
it. If it asks for messages and gets none, it sleeps for three seconds, even if the gate has kept it waiting for twenty. Its helper, the
SuperExec, asks it once a second whether there is work. In the processes that cwfed starts (those of messages, the server, the SuperNode and
its helper) these waits are shorter.
"""

from __future__ import annotations

import select
import sys
import time
from typing import Any

from flwr.app import Message
from flwr.supercore.inflatable import inflatable_utils

from cwfed.flower import bell

FIRST, LONGEST = 0.1, 1.0
"""Seconds of the first wait, and of the longest; waits double."""
TRIES = 7200
"""So many that Flower's total time stays the same."""
FOR_AN_ANSWER, AT_A_TIME = 0.5, 0.05
"""Seconds between a SuperNode's checks, in its own memory, for the answer of a process that it has started: Flower's, and ours."""


def ask_sooner() -> None:
    """Shorten the waits for numbers in this process, and in those forked from it."""
    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        sooner = {"initial_backoff": FIRST, "backoff_cap": LONGEST, "max_tries_per_object": TRIES}
        function.__kwdefaults__ = (function.__kwdefaults__ or {}) | sooner


class Clock:
    """Replaces the module `time` where a SuperNode waits."""

    def __init__(self) -> None:
        self._rested = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep a shorter time for an answer. For a message, sleep only what is left since the last time, so that Flower's rate of requests stays."""
        if seconds == FOR_AN_ANSWER:
            time.sleep(AT_A_TIME)
            return
        time.sleep(max(0.0, self._rested + seconds - time.monotonic()))
        self._rested = time.monotonic()


class AlarmClock:
    """Replaces the module `time` where a SuperNode's helper waits for work: a bell wakes it."""

    def __init__(self, hung: int) -> None:
        self._bell = hung

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep until there is work, but at most so long."""
        select.select([self._bell], [], [], seconds)
        bell.heard(self._bell)


def run_supernode() -> None:
    """Run Flower's own program `flower-supernode` with these waits; it rings a bell when there is work. Its arguments are in `sys.argv`."""
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    store_message = InMemoryNodeState.store_message

    def rung(state: InMemoryNodeState, message: Message) -> str | None:
        stored = store_message(state, message)  # its task is stored before the message
        if not message.metadata.reply_to_message_id:
            bell.ring("work")
        return stored

    ask_sooner()
    start_client_internal.time = Clock()  # type: ignore[assignment, attr-defined]
    InMemoryNodeState.store_message = rung  # type: ignore[assignment, method-assign]
    flower_supernode()


def run_superexec() -> None:
    """Run Flower's own program `flower-superexec`, which listens to that bell."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec import run_superexec

    if (hung := bell.hang("work")) is not None:
        run_superexec.time = AlarmClock(hung)  # type: ignore[assignment, attr-defined]
    flower_superexec()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    run_superexec()
