"""Messages of a federation: what a node may send to the server, and what a server may send to a node."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from cwfed.algorithms import ALGORITHMS
from cwfed.core.events import Round, Started
from cwfed.core.metrics import BUILT_IN, PER_CLASS
from cwfed.federation.guard import is_finite, is_finite_state
from cwfed.federation.open_round import OpenRound
from cwfed.federation.rounds import Progress
from cwfed.flower import PersonalisedStrategy, Plan, wire
from cwfed.flower.members import Hello
from cwfed.flower.replies import read_score
from cwfed.runs.folder import RunFolder
from tests.conftest import leaves, small
from tests.flower.helpers import Loopback, plan_of
from tests.fuzz.base import SMALLER, World, target
from tests.fuzz.cases import MUTATIONS, NAMES, Mutation, mutate

NUMBERS = st.one_of(st.integers(-(2**62), 2**62), st.floats(allow_nan=True, allow_infinity=True))
VALUES = st.one_of(NUMBERS, st.lists(st.integers(-5, 5), max_size=3), st.lists(st.floats(-5, 5), max_size=3))
TEXTS = st.one_of(VALUES, st.booleans(), NAMES, st.binary(max_size=20))
EXTREMES: st.SearchStrategy[Any] = st.sampled_from(
    [1.7e308, -1.7e308, 1e100, 3e38, 5e-324, float("nan"), float("inf"), 2**62, 2**63, 10**400, -1, 0, 1, 10**9, 10**15, True, "", "\u00b2", "\u0664", " \n", "0" * 99,
     "\x1b[2J", "\ud800", "x" * 5000, b"", b"\0" * 9, [], [1.5], [float("nan")], [1.7e308] * 10, [1e99] * 40, [0.0] * 40, [0] * 10, [1] * 10, [2**62] * 10, ["x"] * 10, [""], [True], [b"x"]]
)  # fmt: skip
FIELDS = {
    "text": ["name", "version", "classes", "shape", "vocabulary", "model", "words", "class_names", "histogram"],
    "metric": ["samples", "test", "validation", "loss", "penalty"]
    + [f"{phase}-{what}" for phase in ("received", "trained") for what in ("right", "loss", "validation")]
    + [
        f"{phase}-{part}-{what}"
        for phase in ("received", "trained")
        for part in ("test", "held-out")
        for what in (*BUILT_IN, f"sums-{PER_CLASS}")
    ],
}
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


NUMBERS_THAT_PASS = st.sampled_from([0.0, 1e-45, -1.0, 1.5, 100.0, 1e6, 1e12, 9e17, -9e17, 3e38])
LIES = st.one_of(
    CHANGES,
    st.tuples(
        st.sampled_from(["times", "all", "one"]),
        st.tuples(st.sampled_from(["model", "model", "beside"]), st.integers(0, 9)),
        NUMBERS_THAT_PASS,
    ),
    *(st.tuples(st.just(kind), st.sampled_from(names), EXTREMES | TEXTS) for kind, names in FIELDS.items()),
    st.tuples(st.just("error"), st.integers(-1, 9), NAMES | st.sampled_from([None, " ", "\n", "\0", "a\n \n"])),
    st.tuples(st.just("problem"), st.just("reason"), EXTREMES | TEXTS),
    st.tuples(st.sampled_from(["drop", "news"]), st.sampled_from(["hello", "metrics", "model"]), st.none()),
    st.tuples(st.sampled_from(["malformed", "forged"]), st.just(""), st.none()),
)
"""What a hostile node does to its answers."""


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
        self.before = self.strategy.progress
        self.honest = self.answer(self.replies[1:])

    def answer(self, replies: list[Message]) -> dict[str, Any]:
        """The server's state after these answers."""
        self.strategy.progress = self.before
        self.strategy.opened = OpenRound(self.strategy.blueprint, self.before, range(3))
        self.strategy.aggregate_train(1, replies)
        return leaves(self.strategy.progress.server)


_OFFICES: dict[int, Office] = {}


def office(world: World) -> Office:
    """One for all cases of a world."""
    if id(world) not in _OFFICES:
        _OFFICES[id(world)] = Office(world)
    return _OFFICES[id(world)]


def changed(content: RecordDict, changes: list[tuple[str, Any, Any]], model: str, texts: str = "told") -> RecordDict:
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
            elif kind in ("times", "all", "one"):
                record, at = name
                tensor = sorted(records[record])[at % len(records[record])]
                records[record][tensor] = Array(renumbered(records[record][tensor].numpy(), kind, value))
            elif kind == "metric":
                records["metrics"][name] = value
            elif kind == "tensor":
                dtype, shape, stype, data = value
                records[model][name] = Array(dtype, shape, stype, data)
            elif kind == "record":
                records[value or "x"] = records.pop(name)
            elif kind == "drop":
                del records[name]
            elif kind == "problem":
                records[kind] = ConfigRecord({name: value})
            elif kind == "text":
                records.setdefault(texts, ConfigRecord())[name] = value
        except (KeyError, TypeError, ValueError):
            continue  # Flower does not let such a message be made, or an earlier change took the place away
    return RecordDict(records)


def renumbered(numbers: np.ndarray, how: str, value: float) -> np.ndarray:
    """A tensor with other numbers, each of which may be one that an honest node could send."""
    if how == "times":
        with np.errstate(over="ignore"):
            return (numbers * value).astype(numbers.dtype)
    changed = numbers.copy()
    changed.flat[slice(None) if how == "all" else slice(1)] = value
    return changed


@target(st.lists(CHANGES, min_size=1, max_size=4))
def uploads(world: World, changes: list[tuple[str, str, Any]]) -> None:
    """An answer that was changed on its way: the round goes on, with it if it is still a good one, else without."""
    here = office(world)
    judged(here, changed(here.replies[0].content, changes, "model"))


@target(MUTATIONS)
def pieces(world: World, mutations: Mutation) -> None:
    """The same of an answer as it travels between processes."""
    here = office(world)
    data = wire.wrapped(here.replies[0].content)["piece-0"][""]
    judged(here, RecordDict({"piece-0": ConfigRecord({"": mutate(data, mutations)})}))


def judged(here: Office, content: RecordDict) -> None:
    """The server takes this for the first node's answer, or refuses it; the round goes on."""
    first, *others = here.replies
    reply = Message(content, reply_to=here.grid.told[int(first.metadata.reply_to_message_id)])
    reply.metadata.__dict__["_src_node_id"] = first.metadata.src_node_id
    state = here.answer([reply, *others])
    opened, server = here.strategy.opened, here.strategy.progress.server
    assert all(
        is_finite(tensor) for tensor in (*server["basis"].values(), *server["shared"].values(), server["prior"])
    )
    if opened.refused:
        assert state == here.honest, "the round went on as if it were lost"
        raise wire.BadMessage(next(iter(opened.refused.values())))


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


@target(st.dictionaries(st.sampled_from(FIELDS["text"]), EXTREMES | TEXTS))
def hellos(world: World, lies: dict[str, Any]) -> None:
    """What a node may say of itself."""
    here = office(world)
    honest = {
        "name": "a",
        "version": "1",
        "classes": 10,
        "shape": "1x8x8",
        "vocabulary": 0,
        "model": "x",
        "words": "",
    }
    honest["class_names"] = [str(k) for k in range(10)]
    hello = Hello.read(99, honest | lies, {"samples": 10, "test": 1, "validation": 0})
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


# --- the whole loop


class Named(PersonalisedStrategy):
    """A federation that is called the same every time, so that honest nodes answer the same and need not compute again."""

    def first(self) -> Progress:
        return replace(super().first(), peers={"run": "0" * 16})


class Hostile(Loopback):
    """Three honest nodes, and two that change whatever they send. What a node answers to the same message is the same."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.honest = self.app
        self.answers: dict[tuple[int, str, str], Message] = {}
        self.lies: dict[str, list[tuple[str, Any, Any]]] = {}
        nodes = [self.join(client, histogram=client == 4) for client in range(5)]
        self.bad = set(nodes[3:])
        self.app = self._answer

    def begin(self, lies: dict[str, list[tuple[str, Any, Any]]]) -> None:
        self.lies, self.told, self._answers = lies, [], {}

    def _answer(self, message: Message, context: Context) -> Message:
        kind, node = message.metadata.message_type, context.node_id
        asked = node, kind, message.content.object_id
        if asked not in self.answers:
            self.answers[asked] = self.honest(message, context)
        content = deepcopy(self.answers[asked].content)
        lies = self.lies.get(kind, []) if node in self.bad else []
        if any(lie == "news" for lie, *_ in lies):
            hello = self.answers[node, "query", RecordDict().object_id].content
            content["hello"] = deepcopy(hello["hello"])
            content["metrics"] = MetricRecord({**content["metrics"], **hello["metrics"]})
        for lie, code, reason in lies:
            if lie == "error":
                return Message(Error(code, reason), reply_to=message)
        return Message(changed(content, lies, "model", "hello"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        for reply in replies:
            node, kind = reply.metadata.src_node_id, self.told[int(reply.metadata.reply_to_message_id)].metadata
            for lie, *_ in self.lies.get(kind.message_type, []) if node in self.bad else []:
                if lie == "malformed":
                    raise ValueError("Flower cannot unpack it")
                if lie == "forged":
                    reply.metadata.__dict__["_src_node_id"] = next(iter(self.nodes.keys() - self.bad))
        return replies


@cache
def _hostile(folder: Path, algorithm: str) -> Hostile:
    """One for all cases of a world."""
    settings = ("run.engine=loop", f"algorithm.name={algorithm}", "data.clients=5", "data.samples=200")
    return Hostile(plan_of(small(*settings), 3, clients=6, keep="never").guarded(), folder)


@target(
    st.tuples(
        st.sampled_from(["cwfedavg", *ALGORITHMS]),
        st.dictionaries(st.sampled_from(["query", "train", "evaluate"]), st.lists(LIES, min_size=1, max_size=3)),
    ),
    cost=10,
)
def federations(world: World, case: tuple[str, dict[str, list[tuple[str, Any, Any]]]]) -> None:
    """Hello, training, evaluation, event, checkpoint, restart, summary: two liars do not stop three honest nodes."""
    algorithm, lies = case
    grid, out = _hostile(world.folder / f"hostile-{algorithm}", algorithm), world.fresh() / "server"
    grid.begin(lies)
    for rounds in (1, 3):  # the second run resumes from the first one's checkpoint
        train = grid.plan.config.train.model_copy(update={"rounds": rounds})
        plan = replace(grid.plan, config=grid.plan.config.model_copy(update={"train": train}))
        Named(plan).start(grid, out=out)
    events, tree = RunFolder(out).events(), RunFolder(out).checkpoints.newest()[0]
    rounds_done = [event for event in events if isinstance(event, Round)]
    assert [event.round for event in rounds_done] == [1, 2, 3]
    assert is_finite_state(tree["server"])
    names = tree["peers"]["names"]
    honest = {names.index(grid.nodes[node].node_config["name"]) for node in grid.nodes.keys() - grid.bad}
    for event in rounds_done:
        assert honest <= set(event.participants), "the honest ones are in, whatever the others send"
        assert event.received is not None
        assert 0 <= event.received.accuracy <= 1
        assert all(0 < len(reason) <= 350 and reason.isprintable() for reason in event.refused.values())
    assert all(isinstance(event, Round | Started) or event.message.isprintable() for event in events)
    assert RunFolder(out).summary()["rounds"] == 3
    if refused := [reason for event in rounds_done for reason in event.refused.values()]:
        raise wire.BadMessage(refused[0])
