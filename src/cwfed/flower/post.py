"""Sends messages over a Flower grid, and gathers the answers that arrive in time."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.superlink.grid.http_grid import HttpGrid

from cwfed.flower import bell, wire
from cwfed.flower import replies as replies_of
from cwfed.flower.plan import FederationSection

LEAST_PAUSE, MOST_PAUSE = 0.01, 0.5
"""Seconds between two checks for answers: short while answers arrive, longer when nothing happens."""
WITH_A_BELL = 2.0
"""Seconds until all answers are checked if the gate rings for those that arrive."""
RESTS = 3
"""A check asks once for every awaited node, so it takes long with many of them. The pause after it is at least so many times as long, which
leaves the SuperLink time for the nodes."""


def message_to(node: int, kind: str, group: str, content: RecordDict) -> Message:
    """A message to a node."""
    return Message(content, dst_node_id=node, message_type=kind, group_id=group)


class Post:
    """Sends the server's messages and waits for the answers."""

    def __init__(self, federation: FederationSection) -> None:
        self._federation = federation
        self.stop = threading.Event()
        """Set to end the federation at the next check for answers."""
        self.pull = replies_of.pull
        """The function that gets the answers that have arrived."""
        self._bell: int | None = None

    def now(self) -> float:
        """Seconds on a clock that starts anywhere."""
        return time.monotonic()

    def push(self, grid: Grid, messages: list[Message]) -> dict[str, Message]:
        """Send messages; returns those that were sent, by their number."""
        if isinstance(grid, HttpGrid):
            for message in messages:
                message.content = wire.wrapped(message.content)
        numbers = set(grid.push_messages(messages))
        bell.ring("messages")
        sent = {message.metadata.message_id: message for message in messages}
        return {number: message for number, message in sent.items() if number in numbers}

    def exchange(self, grid: Grid, messages: list[Message]) -> Iterator[Message]:
        """Send messages and yield the answers that arrive in time, each as it arrives. `stop` ends it."""
        waiting = self.push(grid, messages)
        del messages  # so that a message can be freed when it is answered
        until = self.now() + self._federation.timeout
        pause = LEAST_PAUSE
        expected = set(waiting)
        while waiting and self.now() < until:
            began = self.now()
            found = self.pull(grid, {number: message for number, message in waiting.items() if number in expected})
            rest = RESTS * (self.now() - began)
            waiting = {number: message for number, message in waiting.items() if number not in found}
            pause = LEAST_PAUSE if found else min(2 * pause, MOST_PAUSE)
            while found:
                yield found.pop(next(iter(found)))
            expected = self._rest(max(pause, rest) if waiting else 0, set(waiting))

    def _rest(self, seconds: float, waiting: set[str]) -> set[str]:
        """Wait until the next check for answers; returns which to check: those for which the gate has rung, or after a while all."""
        if self._bell is None and (hung := bell.hang("answers")) is not None:
            self._bell = hung
        if self._bell is None or not waiting:
            self.sleep(seconds)
            return waiting
        until = time.monotonic() + max(WITH_A_BELL, seconds)
        while (left := until - time.monotonic()) > 0:
            self.sleep(0)  # checks `stop`
            select.select([self._bell], [], [], left)
            if come := bell.heard(self._bell) & waiting:
                return come
        return waiting

    def sleep(self, seconds: float) -> None:
        """Wait, unless the federation is to end."""
        if self.stop.is_set():
            raise KeyboardInterrupt
        time.sleep(seconds)
