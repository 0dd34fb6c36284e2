"""Messages of a federation: what a node may send to the server, and what a server may send to a node."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from cwfed.flower import PersonalisedStrategy, wire
from cwfed.flower.members import Hello
from cwfed.flower.replies import read_score
from cwfed.guard import is_finite
from tests.conftest import leaves, small
from tests.flower.helpers import Loopback, plan_of
from tests.fuzz.base import SMALLER, World, target
from tests.fuzz.cases import MUTATIONS, NAMES, mutate

NUMBERS = st.one_of(st.integers(-(2**62), 2**62), st.floats(allow_nan=True, allow_infinity=True))
VALUES = st.one_of(NUMBERS, st.lists(st.integers(-5, 5), max_size=3), st.lists(st.floats(-5, 5), max_size=3))
TEXTS = st.one_of(VALUES, st.booleans(), NAMES, st.binary(max_size=20))
SHAPES = st.lists(st.integers(-1, 10**9), max_size=4).map(tuple)

CHANGES = st.one_of(
    st.tuples(st.just("bytes"), st.sampled_from(["output.weight", "output.bias"]), MUTATIONS),
    st.tuples(
        st.just("metric"), st.sampled_from(["samples", "loss", "penalty", "trained-right", "trained-loss"]), VALUES
    ),
    st.tuples(st.just("tensor"), NAMES, st.tuples(NAMES, SHAPES, NAMES, st.binary(max_size=300))),
    st.tuples(st.just("record"), st.sampled_from(["model", "beside", "metrics", "problem", "hello"]), NAMES),
    st.tuples(st.just("text"), NAMES, TEXTS),
)


class Office:
    """A federation that waits for the answers of round 1."""

    def __init__(self, world: World) -> None:
        plan = plan_of(small("run.engine=loop", *SMALLER), 3)
        self.grid = Loopback(plan, world.folder / "office")
        for client in range(3):
            self.grid.join(client)
        self.strategy = PersonalisedStrategy(plan)
        self.strategy.gather(self.grid)
        self.sent = self.strategy.configure_train(1, ArrayRecord(), ConfigRecord(), self.grid)
        self.replies = self.grid.send_and_receive(self.sent)
        self.before, self.turn = self.strategy.progress, self.strategy.turn
        self.honest = self.answer(self.replies[1:])

    def answer(self, replies: list[Message]) -> dict[str, Any]:
        """The server's state after these answers."""
        self.strategy.progress, self.strategy.turn = self.before, deepcopy(self.turn)
        self.strategy.aggregate_train(1, replies)
        return leaves(self.strategy.progress.server)


_OFFICES: dict[int, Office] = {}


def office(world: World) -> Office:
    """One for all cases of a world."""
    if id(world) not in _OFFICES:
        _OFFICES[id(world)] = Office(world)
    return _OFFICES[id(world)]


def changed(content: RecordDict, changes: list[tuple[str, str, Any]], model: str) -> RecordDict:
    """A message's content with changes that Flower's own types allow."""
    records: dict[str, Any] = {
        name: type(record)(dict(record))
        for name, record in content.items()  # type: ignore[call-arg]
    }
    for kind, name, value in changes:
        try:
            if kind == "bytes":
                honest = records[model][name]
                records[model][name] = Array(honest.dtype, honest.shape, honest.stype, mutate(honest.data, value))
            elif kind == "metric":
                records["metrics"][name] = value
            elif kind == "tensor":
                dtype, shape, stype, data = value
                records[model][name] = Array(dtype, shape, stype, data)
            elif kind == "record":
                records[value or "x"] = records.pop(name)
            else:
                records.setdefault("told", ConfigRecord())[name] = value
        except (KeyError, TypeError, ValueError):
            continue  # Flower does not let such a message be made, or an earlier change took the place away
    return RecordDict(records)


@target(st.lists(CHANGES, min_size=1, max_size=4))
def uploads(world: World, changes: list[tuple[str, str, Any]]) -> None:
    """An answer that was changed on its way: the round goes on, with it if it is still a good one, else without."""
    here = office(world)
    first, *others = here.replies
    here.strategy.progress, here.strategy.turn = here.before, deepcopy(here.turn)
    content = changed(first.content, changes, "model")
    reply = Message(content, reply_to=here.grid.told[int(first.metadata.reply_to_message_id)])
    reply.metadata.__dict__["_src_node_id"] = first.metadata.src_node_id
    here.strategy.aggregate_train(1, [reply, *others])
    turn, server = here.strategy.turn, here.strategy.progress.server
    assert all(
        is_finite(tensor) for tensor in (*server["basis"].values(), *server["shared"].values(), server["prior"])
    )
    if turn.refused:
        assert leaves(server) == here.honest, "the round went on as if it were lost"
        raise wire.BadMessage(next(iter(turn.refused.values())))


@target(st.lists(CHANGES, min_size=1, max_size=4))
def downloads(world: World, changes: list[tuple[str, str, Any]]) -> None:
    """A server that sends nonsense: the node's app answers with a sentence, or with an honest model."""
    here = office(world)
    sent = here.sent[0]
    message = deepcopy(sent)
    message.content = changed(sent.content, changes, "model-0")
    reply = here.grid.app(message, here.grid.nodes[sent.metadata.dst_node_id])
    if "problem" in reply.content:
        raise wire.BadMessage(str(reply.content["problem"]["reason"]))
    assert "model" in reply.content


@target(
    st.dictionaries(
        st.sampled_from(["name", "version", "classes", "shape", "vocabulary", "model", "histogram"]), TEXTS
    )
)
def hellos(world: World, lies: dict[str, Any]) -> None:
    """What a node may say of itself."""
    here = office(world)
    honest = {"name": "a", "version": "1", "classes": 10, "shape": "1x8x8", "vocabulary": 0, "model": "x"}
    hello = Hello.read(99, honest | lies, {"samples": 3, "test": 1, "validation": 0})
    members = deepcopy(here.strategy.members)
    (said,) = members.welcome([hello], [])
    assert "was left out" in said or "joined" in said


@target(
    st.dictionaries(
        st.sampled_from(["trained-right", "trained-loss", "trained-validation", "samples"]) | NAMES, TEXTS
    )
)
def measurements(world: World, values: dict[str, Any]) -> None:
    """Metrics of an evaluation."""
    here = office(world)
    try:
        record = MetricRecord(values)
    except (TypeError, ValueError):
        return
    content = RecordDict({"metrics": MetricRecord({**here.replies[0].content["metrics"], **record})})
    read_score(here.strategy.members.hellos[0], "trained", content)
