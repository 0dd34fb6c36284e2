"""Asks new nodes who they are, and admits or refuses them, while the rounds go on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from cwfed.core.errors import RunError
from cwfed.flower import replies as replies_of
from cwfed.flower import wire
from cwfed.flower.members import Hello, Members
from cwfed.flower.plan import short_hash
from cwfed.flower.post import MOST_PAUSE, Post, message_to

ASK_EVERY = 1.0
"""Seconds between two checks of which nodes are connected."""
PATIENCE = 10.0
"""The least seconds that further nodes get to say who they are once enough nodes have, because the first clients are numbered by name."""
LEFT_OUT_FOR = 60.0
"""Seconds after which a node that was left out is asked again, as it may have been corrected."""


@dataclass(frozen=True)
class Question:
    """A question to a node who it is; the rounds do not wait for the answer."""

    message: Message
    until: float
    """When it is asked again; an answer to this question still counts."""

    @property
    def node(self) -> int:
        """The node that was asked."""
        return self.message.metadata.dst_node_id


class Lobby:
    """Nodes that are not members yet: they are asked who they are."""

    def __init__(self, members: Members, post: Post) -> None:
        self.plan, self.members, self._post = members.plan, members, post
        self._questions: dict[str, Question] = {}
        self._heard: list[Hello] = []
        self._absent: set[int] = set()
        self._again: dict[int, float] = {}
        """By node that was left out or did not answer: when it is asked again."""

    def gather(self, grid: Grid) -> list[str]:
        """Wait until there are enough nodes, and ask new ones who they are; returns what changed, in sentences.

        Once there are enough, it does not wait: nodes that have not answered yet may do so while the others work.
        """
        federation = self.plan.federation
        began = self._post.now()
        enough_after = 0.0
        said: list[str] = []
        while True:
            connected = list(grid.get_node_ids())
            self._ask(grid, connected)
            said += self._listen(grid)
            passed = self._post.now() - began
            is_late = passed > (max(federation.wait, federation.timeout) if self._asked else federation.wait)
            if not enough_after and self._is_enough():
                enough_after = passed
            if self.members.hellos or is_late or self._have_all_spoken(passed, enough_after):
                said += self._welcome(grid, connected)
            here = self.members.here(connected)
            if len(here) >= federation.nodes:
                break
            if is_late:
                left_out = "".join(f"; {reason}" for reason in said if "left out" in reason)
                raise RunError(
                    f"only {len(here)} of the {federation.nodes} nodes that the federation needs (federation.nodes) are "
                    f"connected after {federation.wait:g} seconds (federation.wait){left_out}"
                )
            self._post.sleep(MOST_PAUSE if self._asked else ASK_EVERY)
        absent = self.members.hellos.keys() - set(here)
        said += [f"{self.members.names[c]} (client {c}) is not connected" for c in sorted(absent - self._absent)]
        said += [f"{self.members.names[c]} (client {c}) is connected again" for c in sorted(self._absent & set(here))]
        self._absent = set(absent)
        return said

    @property
    def _asked(self) -> set[int]:
        """Nodes that may still answer in time."""
        now = self._post.now()
        return {question.node for question in self._questions.values() if now < question.until}

    def _is_enough(self) -> bool:
        return len({h.name for h in self._heard if not h.misfit(self.plan)}) >= self.plan.federation.nodes

    def _have_all_spoken(self, passed: float, enough_after: float) -> bool:
        """Whether the first clients can be numbered. Once there are enough, the other nodes get as much time again as these took."""
        patience = enough_after + max(PATIENCE, enough_after)
        return self._is_enough() and (not self._asked or passed > patience)

    def _ask(self, grid: Grid, connected: Iterable[int]) -> None:
        """Ask the connected nodes that have not said who they are."""
        now = self._post.now()
        known = self.members.nodes | self._asked | {hello.node for hello in self._heard}
        known |= {node for node, then in self._again.items() if now < then}
        messages = [
            message_to(node, MessageType.QUERY, "hello", RecordDict()) for node in connected if node not in known
        ]
        until = now + self.plan.federation.timeout
        self._questions |= {
            number: Question(message, until) for number, message in self._post.push(grid, messages).items()
        }

    def _listen(self, grid: Grid) -> list[str]:
        """Read the answers that have arrived."""
        said, silent = [], f"it did not say who it is within {self.plan.federation.timeout:g} seconds"
        found = replies_of.pull(grid, {number: question.message for number, question in self._questions.items()})
        asked = {number: question.node for number, question in self._questions.items()}
        members, answered = self.members.nodes, set[int]()
        for number, reply in found.items():
            node = asked[number]
            if node in answered:
                continue  # it was asked twice and answered twice
            answered.add(node)
            if node in members or replies_of.is_gone(reply):
                continue
            try:
                self._heard.append(replies_of.read(reply, partial(replies_of.read_hello, node)))
            except wire.BadMessage as error:
                said += self._leave_out(node, str(error), self._pause)
        self._questions = {number: q for number, q in self._questions.items() if q.node not in answered}
        late = {question.node for question in self._questions.values() if question.until <= self._post.now()}
        return said + [sentence for node in sorted(late) for sentence in self._leave_out(node, silent, 0.0)]

    @property
    def _pause(self) -> float:
        return min(LEFT_OUT_FOR, self.plan.federation.timeout)

    def _leave_out(self, node: int, reason: str, pause: float) -> list[str]:
        """Leave a node out until it is asked again; the reason is reported once."""
        is_new = self.members.refused.get(node) != reason
        self.members.refused[node] = reason
        self._again[node] = self._post.now() + pause
        return [f"a node was left out: {reason}"] if is_new else []

    def _welcome(self, grid: Grid, connected: list[int]) -> list[str]:
        """Admit the nodes that said who they are, and tell those that are left out why."""
        if not self._heard:
            return []
        hellos, self._heard = self._heard, []
        before = dict(self.members.refused)
        said = self._about_keys(grid) + self.members.welcome(hellos, connected)
        refused = {h.node: h.name for h in hellos if h.node in self.members.refused}
        self._again |= dict.fromkeys(refused, self._post.now() + self._pause)
        old = {node for node in refused if before.get(node) == self.members.refused[node]}
        grid.push_messages(  # the answer does not matter
            [
                message_to(
                    node,
                    MessageType.QUERY,
                    "refused",
                    RecordDict({"told": ConfigRecord({"refused": self.members.refused[node]})}),
                )
                for node in refused
                if node not in old
            ]
        )
        repeated = {f"{refused[node]} was left out: {before[node]}" for node in old}
        return [sentence for sentence in said if sentence not in repeated]

    def _about_keys(self, grid: Grid) -> list[str]:
        """Note the nodes' keys; a sentence if they have none, so that names cannot belong to keys."""
        is_first = not self.members.hellos
        keys = {node.node_id: node.public_key for node in grid.get_nodes()}
        is_key = b"BEGIN PUBLIC KEY"  # virtual nodes have random bytes instead
        self.members.public_keys |= {node: short_hash(key.hex()) for node, key in keys.items() if is_key in key}
        if not self.plan.federation.pin or self.members.public_keys or not is_first:
            return []
        return ["the nodes have no keys: any node can use a client's name (federation.pin has no effect)"]
