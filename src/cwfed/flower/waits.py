"""How long Flower's own programs wait before they look again, where nobody can set it.

A message is announced before its numbers have arrived. Flower (1.41) asks for those, waits a second, then two, then four: what comes after 1.1 s is
taken after 3, what comes after 3.1 s after 7. A SuperNode looks twice a second whether an answer is there, and as often for each part of it; one that asks for
messages and gets none sleeps for three seconds, also where the gate has kept it waiting for twenty. Its helper, the SuperExec, asks it once a second whether there
is work, and sooner only by asking more often. In the processes that cwfed starts, those of messages, the server's, the SuperNode and its helper, they look sooner.
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
"""Seconds: the first wait, and the longest of those that double."""
TRIES = 7200
"""For as long as Flower tries."""
FOR_AN_ANSWER, AT_A_TIME = 0.5, 0.05
"""Seconds between a SuperNode's looks, in its own memory, for the answer of the process that it has started: Flower's and ours."""


def ask_sooner() -> None:
    """From now on, in this process and those that are forked from it."""
    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        sooner = {"initial_backoff": FIRST, "backoff_cap": LONGEST, "max_tries_per_object": TRIES}
        function.__kwdefaults__ = (function.__kwdefaults__ or {}) | sooner


class Clock:
    """Stands for the module `time` where a SuperNode waits."""

    def __init__(self) -> None:
        self._rested = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Shorter for an answer; for a message, what is left since the last time: nobody is asked more often than Flower does."""
        if seconds == FOR_AN_ANSWER:
            time.sleep(AT_A_TIME)
            return
        time.sleep(max(0.0, self._rested + seconds - time.monotonic()))
        self._rested = time.monotonic()


class AlarmClock:
    """The same where a SuperNode's helper waits for work: the bell wakes it."""

    def __init__(self, hung: int) -> None:
        self._bell = hung

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Until there is work, or for so long."""
        select.select([self._bell], [], [], seconds)
        bell.heard(self._bell)


def run_supernode() -> None:
    """Flower's own program `flower-supernode`, with these waits, that rings when there is work; what it is told is in `sys.argv`."""
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    store_message = InMemoryNodeState.store_message

    def rung(state: InMemoryNodeState, message: Message) -> str | None:
        stored = store_message(state, message)  # its task is there before it is
        if not message.metadata.reply_to_message_id:
            bell.ring("work")
        return stored

    ask_sooner()
    start_client_internal.time = Clock()  # type: ignore[assignment, attr-defined]
    InMemoryNodeState.store_message = rung  # type: ignore[assignment, method-assign]
    flower_supernode()


def run_superexec() -> None:
    """Flower's own program `flower-superexec`, which hears that."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec import run_superexec

    if (hung := bell.hang("work")) is not None:
        run_superexec.time = AlarmClock(hung)  # type: ignore[assignment, attr-defined]
    flower_superexec()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    run_superexec()
