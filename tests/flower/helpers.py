"""A federation in this process: Flower's messages and our apps, without the network between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from cwfed import data
from cwfed.core.events import Event
from cwfed.federation.config import Config
from cwfed.federation.experiment import deal
from cwfed.federation.rounds import Progress
from cwfed.flower import Plan, client_app
from cwfed.flower.plan import FederationSection
from cwfed.flower.strategy import PersonalisedStrategy

Change = Callable[[int, Message], Message | None]
"""(node, reply) -> the reply as it arrives; None loses it."""


def plan_of(config: Config, nodes: int, **federation: object) -> Plan:
    shares = deal(config)
    section = {"shape": "x".join(map(str, shares.shape.dims)), "classes": shares.data.classes, "nodes": nodes}
    return Plan(config, FederationSection.model_validate(section | {"timeout": 5.0, "wait": 1.0} | federation))


class Loopback(Grid):
    """Nodes with their own data folders; every message is answered at once."""

    def __init__(
        self, plan: Plan, folder: Path, app: ClientApp | None = None, change: Change = lambda _, m: m
    ) -> None:
        self.plan, self.folder, self.app, self.change = plan, folder, app or client_app(), change
        self.has_keys = True
        self.keys: dict[int, int] = {}
        """By node, another one whose key it has: a SuperLink that has lost its database gives keys other ids."""
        self.nodes: dict[int, Context] = {}
        self.told: list[Message] = []
        self._answers: dict[str, Message] = {}
        data.export(deal(plan.config), folder / "data")

    def join(self, client: int, node: int = 0, **more: str | int | bool) -> int:
        """Connect the node of a client; its Flower id is random-looking, as ids are."""
        name = f"client-{client:03d}"
        node = node or 7919 * (client + 1) % 1000 + 1
        config = {
            "name": name,
            "path": str(self.folder / "data" / name),
            "state": str(self.folder / "state" / name),
            **more,
        }
        self.nodes[node] = Context(0, node, config, RecordDict(), self.plan.table())
        return node

    def leave(self, node: int) -> None:
        del self.nodes[node]

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[NodeInfo]:
        kind = "-----BEGIN PUBLIC KEY-----" if self.has_keys else "random"
        key = {node: f"{kind} {self.keys.get(node, node)}".encode() for node in self.nodes}
        return [NodeInfo(node_id=node, public_key=key[node]) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number = str(len(self.told))
            message.metadata.__dict__["_message_id"] = number
            numbers.append(number)
            self.told.append(message)
            node = message.metadata.dst_node_id
            if node in self.nodes:
                answer = self.change(node, self.app(message, self.nodes[node]))
                if answer is not None:
                    answer.metadata.__dict__["_src_node_id"] = node
                    self._answers[number] = answer
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._answers.pop(number) for number in sorted(message_ids, reverse=True) if number in self._answers]

    # what this grid does not need
    def set_run(self, run) -> None: ...

    run = None  # type: ignore[assignment]

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id)

    def send_and_receive(self, messages, *, timeout=None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))


def carry_out(
    strategy: PersonalisedStrategy, grid: Grid, progress: Progress | None = None
) -> tuple[Progress, list[Event]]:
    progress, events = progress or strategy.first(), []
    for progress, event in strategy.rounds(grid, progress):
        events.append(event)
    return progress, events


def clients_of(config: Config) -> Sequence[int]:
    return range(config.data.clients)
