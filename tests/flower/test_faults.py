"""What goes wrong in a federation, in this process: bad answers, lost ones, strangers, late comers."""

from __future__ import annotations

import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

import cwfed
from cwfed.algorithms import ALGORITHMS
from cwfed.core.errors import RunError
from cwfed.core.events import Note, Round
from cwfed.data import Dataset, SourceSpec, load
from cwfed.data.store import write
from cwfed.federation.rounds import Progress
from cwfed.flower import PersonalisedStrategy, client_app, post, wire
from cwfed.flower.members import Hello, Members
from cwfed.flower.plan import describe_model
from cwfed.flower.server import sentence
from cwfed.runs.folder import RunFolder
from tests.conftest import leaves, small
from tests.flower.helpers import Loopback, carry_out, plan_of

BAD = 2
"""The client that misbehaves in round 2."""


class Clock:
    """Time that passes only while the server waits: a lost answer costs no time, and no machine is too slow to answer."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(post, "time", Clock())


def config(*more):
    return small("run.engine=loop", "data.clients=4", "train.rounds=3", *more)


def federation(tmp_path, chosen=None, change=lambda node, message: message, nodes=4, app=None, **section):
    plan = plan_of(chosen or config(), nodes, **section)
    grid = Loopback(plan, tmp_path, app, change)
    for client in range(nodes):
        grid.join(client)
    return PersonalisedStrategy(plan), grid


def rounds(events):
    return [event for event in events if isinstance(event, Round)]


def notes(events):
    return [event.message for event in events if isinstance(event, Note)]


def is_training(reply, grid, round_=2):
    told = grid.told[int(reply.metadata.reply_to_message_id)]
    record = told.content.config_records.get("told")
    return told.metadata.message_type == "train" and record["round"] == round_ and record["client"] == BAD


def changed(array: Array, how) -> Array:
    values = np.array(array.numpy())
    return Array(how(values))


def with_output(reply, how):
    model = reply.content["model"]
    reply.content["model"] = ArrayRecord(
        {name: changed(array, how) if name == "output.weight" else array for name, array in model.items()}
    )
    return reply


def with_metric(reply, **values):
    reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **values})
    return reply


def without_a_tensor(reply):
    model = dict(reply.content["model"])
    del model["output.bias"]
    reply.content["model"] = ArrayRecord(model)
    return reply


def with_a_tensor_more(reply):
    reply.content["model"] = ArrayRecord({**reply.content["model"], "more": Array(np.zeros(10**6))})
    return reply


def with_a_lying_header(reply, lie_about_shape):
    model = dict(reply.content["model"])
    honest = model["output.weight"]
    lie = honest.data.replace(b"(10, 16)", lie_about_shape)
    model["output.weight"] = Array(honest.dtype, honest.shape, honest.stype, lie)
    reply.content["model"] = ArrayRecord(model)
    return reply


def of_objects(reply):
    model = dict(reply.content["model"])
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (10, 16), }".ljust(127) + b"\n"
    model["output.weight"] = Array("object", (10, 16), "numpy.ndarray", header + b"cos\nsystem\n(S'true'\ntR.")
    reply.content["model"] = ArrayRecord(model)
    return reply


def in_pieces(reply, how):
    pieces = wire.wrapped(reply.content)
    pieces["piece-0"][""] = how(pieces["piece-0"][""])
    reply.content = pieces
    return reply


MISDEEDS = {
    "half a piece": (lambda r: in_pieces(r, lambda data: data[:-100]), "cannot be unwrapped"),
    "a piece of something else": (lambda r: in_pieces(r, lambda data: "text"), "not bytes"),
    "NaN in a piece": (lambda r: in_pieces(with_output(r, lambda w: w * np.nan), bytes), "not finite"),
    "NaN": (lambda r: with_output(r, lambda w: w * np.nan), "not finite"),
    "infinity": (lambda r: with_output(r, lambda w: w + np.inf), "not finite"),
    "a wrong shape": (lambda r: with_output(r, lambda w: w[:, :-1]), r"\(10, 15\), not float32 of \(10, 16\)"),
    "a wrong type": (lambda r: with_output(r, lambda w: w.astype(np.float64)), "float64|bytes of numbers"),
    "a tensor less": (without_a_tensor, "lacks output.bias"),
    "an oversized message": (with_a_tensor_more, "bytes of numbers, more than"),
    "a lying header": (lambda r: with_a_lying_header(r, b"(99, 99)"), r"float32 of the shape \(99, 99\)"),
    "a broken header": (lambda r: with_a_lying_header(r, b"((((((()"), "not in numpy's format"),
    "Python objects": (of_objects, "not sent here|numpy's format"),
    "no samples": (lambda r: with_metric(r, samples=0), "0 training samples"),
    "more samples than it has": (lambda r: with_metric(r, samples=10**7), "it said .* before"),
    "a loss that is no number": (lambda r: with_metric(r, loss=float("nan")), "metric loss"),
    "too many right answers": (lambda r: with_metric(r, **{"trained-right": 10**6}), "more right answers"),
}


@pytest.fixture(scope="module")
def state_where_it_is_lost(tmp_path_factory):
    """The server's state of a federation in which the answer never comes."""
    strategy, grid = federation(tmp_path_factory.mktemp("lost"))
    grid.change = lambda node, reply: None if is_training(reply, grid) else reply
    lost, events = carry_out(strategy, grid)
    assert rounds(events)[1].dropped == [BAD]
    return leaves(lost.server)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_bad_answer_is_refused_and_the_round_goes_on_as_if_it_were_lost(misdeed, state_where_it_is_lost, tmp_path):
    change, reason = MISDEEDS[misdeed]
    strategy, grid = federation(tmp_path)
    grid.change = lambda node, reply: change(reply) if is_training(reply, grid) else reply
    reached, events = carry_out(strategy, grid)
    second = rounds(events)[1]
    assert list(second.refused) == [str(BAD)]
    assert re.search(reason, second.refused[str(BAD)])
    assert second.participants == [0, 1, 3]
    assert second.dropped == []
    assert leaves(reached.server) == state_where_it_is_lost


def test_a_round_that_nobody_answers_is_tried_again_and_then_given_up(tmp_path):
    strategy, grid = federation(tmp_path)
    silent = [True, False]  # the first try of round 1 only

    def lose(node, reply):
        told = grid.told[int(reply.metadata.reply_to_message_id)].content.config_records.get("told")
        return None if told and silent[0] else reply

    grid.change = lose
    events = []
    for progress, event in strategy.rounds(grid, strategy.first()):
        events.append(event)
        if isinstance(event, Note) and "tried again" in event.message:
            assert progress.round == 0, "nothing has happened yet"
            silent[0] = False
    assert "no node answered round 1: it is tried again" in notes(events)
    assert [event.round for event in rounds(events)] == [1, 2, 3]

    strategy, grid = federation(tmp_path / "mute")
    grid.change = lambda node, reply: reply if "hello" in reply.content else None
    with pytest.raises(RunError, match=r"no node answered round 1 in 3 tries of 5 seconds"):
        carry_out(strategy, grid)


class Many(Loopback):
    """A thousand nodes: one call for an answer takes 10 ms, and one node after the other answers, one a tenth of a second."""

    calls = 0

    def pull_messages(self, message_ids):
        self.calls += 1
        post.time.sleep(0.01)
        ready = [number for number in message_ids if int(number) <= 10 * post.time.monotonic()]
        return [Message(RecordDict(), reply_to=self.told[int(number)]) for number in ready]


def test_many_nodes_are_asked_for_answers_without_taking_the_server_s_time(tmp_path):
    """A look asks each that is waited for: looks with the same pause after each would be calls without a break."""
    plan = plan_of(config(), 2, timeout=600.0)
    grid = Many(plan, tmp_path)
    sent = [Message(RecordDict(), dst_node_id=node, message_type="train", group_id="1") for node in range(1, 1001)]
    assert len(list(post.Post(plan.federation).exchange(grid, sent))) == 1000
    passed = post.time.monotonic()
    assert 100 <= passed < 110, (
        "the last answer comes after 100 s; the fewer are waited for, the sooner is the next look"
    )
    assert grid.calls * 0.01 < 0.3 * passed, "the rest of the time is a break"


def test_the_last_evaluation_must_be_answered(tmp_path):
    strategy, grid = federation(tmp_path)
    tries = []

    def lose(node, reply):
        told = grid.told[int(reply.metadata.reply_to_message_id)]
        if told.metadata.message_type == "evaluate" and told.content["told"]["round"] == 3:
            tries.append(node)
            return None if len(tries) <= 4 else reply
        return reply

    grid.change = lose
    _, events = carry_out(strategy, grid)
    assert "no node answered the last evaluation: it is tried again" in notes(events)
    assert rounds(events)[-1].received.clients == [0, 1, 2, 3]


def test_who_does_not_answer_keeps_its_class_distribution(tmp_path):
    strategy, grid = federation(tmp_path)
    priors = []
    grid.change = lambda node, reply: None if is_training(reply, grid) else reply
    for progress, event in strategy.rounds(grid, strategy.first()):
        if isinstance(event, Round):
            priors.append(progress.server["prior"].clone())
    assert torch.equal(priors[0][BAD], priors[1][BAD])
    assert not torch.equal(priors[1][BAD], priors[2][BAD])
    assert not torch.equal(priors[0][0], priors[1][0])


def test_an_app_that_crashes_is_refused_by_its_last_line(tmp_path):
    strategy, grid = federation(tmp_path)

    def crash(node, reply):
        if not is_training(reply, grid):
            return reply
        told = grid.told[int(reply.metadata.reply_to_message_id)]
        return Message(Error(2, "Traceback ...\nValueError: the disk is on fire"), reply_to=told)

    grid.change = crash
    _, events = carry_out(strategy, grid)
    assert rounds(events)[1].refused == {str(BAD): "its app failed: ValueError: the disk is on fire"}


def test_too_few_good_answers_leave_everything_as_it_was(tmp_path):
    strategy, grid = federation(tmp_path, config("guard.least=4"))
    grid.change = lambda node, reply: without_a_tensor(reply) if is_training(reply, grid) else reply
    states = []
    for progress, event in strategy.rounds(grid, strategy.first()):
        if isinstance(event, Round):
            states.append(leaves(progress.server))
    assert states[0] == states[1] != states[2]


def test_a_node_that_comes_back_gets_its_personal_model(tmp_path):
    strategy, grid = federation(tmp_path, config("train.rounds=4"), nodes=4, pin=False)
    strategy.plan.federation.__dict__["nodes"] = 3
    told = []
    for progress, event in strategy.rounds(grid, strategy.first()):
        told.append(event)
        if isinstance(event, Round) and event.round == 1:
            grid.leave(strategy.members.hellos[BAD].node)
        if isinstance(event, Round) and event.round == 2:
            grid.join(BAD, node=4242)  # without a fixed key: another node id
            personal = strategy.algorithm.send(progress.server, BAD).model  # by the p~ that it had in round 1
    first, second, third, _ = rounds(told)
    assert (first.participants, second.participants, third.participants) == ([0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3])
    assert "client-002 (client 2) is not connected" in notes(told)
    assert "client-002 came back as client 2" in notes(told)
    sent = next(m for m in grid.told if m.metadata.dst_node_id == 4242 and m.metadata.message_type == "train")
    received = wire.from_record(sent.content["model-0"], "it")
    assert all(torch.equal(received[name], personal[name]) for name in personal)
    shared = strategy.algorithm.newcomer(strategy.progress.server)
    assert not torch.equal(received["output.weight"], shared["output.weight"])


@pytest.mark.parametrize("histogram", [False, True])
def test_a_late_comer_gets_a_model_from_its_histogram_or_the_mean_of_the_classes(histogram, tmp_path):
    strategy, grid = federation(tmp_path, nodes=3, clients=4)
    seen = {}
    for progress, event in strategy.rounds(grid, strategy.first()):
        if isinstance(event, Round) and event.round == 1:
            grid.join(3, histogram=histogram)
            seen["state"] = progress.server
    assert rounds([event])[0].participants == [0, 1, 2, 3]
    node = strategy.members.hellos[3].node
    sent = next(m for m in grid.told if m.metadata.dst_node_id == node and m.metadata.message_type == "train")
    counts = strategy.members.hellos[3].histogram if histogram else None
    assert bool(counts) == histogram
    expected = strategy.algorithm.newcomer(seen["state"], counts)
    received = wire.from_record(sent.content["model-0"], "it")
    assert all(torch.equal(received[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["cwfedavg", *ALGORITHMS])
def test_a_late_comer_with_a_histogram_takes_part_whatever_the_method(name, tmp_path):
    strategy, grid = federation(tmp_path, config(f"algorithm.name={name}", "train.rounds=2"), nodes=3, clients=4)
    for _, event in strategy.rounds(grid, strategy.first()):
        if isinstance(event, Round) and event.round == 1:
            grid.join(3, histogram=True)
    (last,) = rounds([event])
    assert (last.participants, last.refused) == ([0, 1, 2, 3], {})


def test_without_its_consent_nothing_says_how_many_samples_of_a_class_a_client_has(tmp_path):
    strategy, grid = federation(tmp_path)
    replies = []
    grid.change = lambda node, reply: replies.append(reply) or reply
    carry_out(strategy, grid)
    assert not any("histogram" in r.content.config_records.get("hello", {}) for r in replies)
    trained = next(r for r in replies if "model" in r.content)
    assert trained.content.keys() == {"model", "metrics"}
    assert "class_counts" not in trained.content["model"]


# --- who may take part


def test_a_node_that_is_gone_when_it_is_asked_who_it_is_may_come_back(tmp_path):
    """After a restart Flower takes nodes of before for connected, and answers for them a minute later."""
    strategy, grid = federation(tmp_path)
    stale = {grid.join(client) for client in range(4)}

    def gone(node, reply):
        told = grid.told[int(reply.metadata.reply_to_message_id)]
        if node in stale:
            stale.discard(node)
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable"), reply_to=told)
        return reply

    grid.change = gone
    _, events = carry_out(strategy, grid)
    assert not any("left out" in note for note in notes(events))
    assert [event.participants for event in rounds(events)] == [[0, 1, 2, 3]] * 3


def test_nodes_that_disagree_are_told_so_by_name_and_left_out(tmp_path):
    strategy, grid = federation(tmp_path, nodes=3, clients=8)
    strangers = {
        "classes": ({"classes": 7}, "it has classes: 7, the federation 10"),
        "shape": ({"shape": "3x32x32"}, "it has samples of shape 3x32x32, the federation 1x8x8"),
        "protocol": ({"protocol": "0.1"}, f"it has messages of protocol 0.1, the federation {wire.PROTOCOL}"),
        "model": ({"model": "abc"}, "it has a model of form abc"),
    }
    lies = {}
    for number, (lie, _) in enumerate(strangers.values()):
        lies[grid.join(3, node=5000 + number, name=f"stranger-{number}")] = lie

    def lie_about(node, reply):
        if node in lies and "hello" in reply.content:
            reply.content["hello"].update(lies[node])
        return reply

    grid.change = lie_about
    _, events = carry_out(strategy, grid)
    for number, (_, reason) in enumerate(strangers.values()):
        assert any(f"stranger-{number} was left out: {reason}" in note for note in notes(events))
        told = [m for m in grid.told if m.metadata.dst_node_id == 5000 + number]
        assert "refused" in told[-1].content["told"]
    assert all(event.participants == [0, 1, 2] for event in rounds(events))


def test_a_node_without_its_data_is_left_out_with_its_own_words(tmp_path):
    strategy, grid = federation(tmp_path, nodes=3, clients=8)
    grid.join(3, name="lost", path=str(tmp_path / "nowhere"))
    _, events = carry_out(strategy, grid)
    assert any("a node was left out: data.path" in note and "does not exist" in note for note in notes(events))


def test_a_name_belongs_to_the_node_that_had_it_first(tmp_path):
    strategy, grid = federation(tmp_path, nodes=3, clients=8)
    for progress, event in strategy.rounds(grid, strategy.first()):
        if isinstance(event, Round) and event.round == 1:
            grid.join(3, node=6666, name="client-001")  # while the first one is connected
    assert strategy.members.hellos[1].node != 6666
    grid.leave(strategy.members.hellos[1].node)
    grid.join(3, node=3333)
    strategy.gather(grid)
    assert strategy.members.refused[6666] == "the name belongs to a node with another key (federation.pin)"
    again = PersonalisedStrategy(strategy.plan)  # also when the server has been restarted
    again.resume(progress)
    again.gather(grid)
    assert 6666 in again.members.refused
    assert 1 not in again.members.hellos
    grid.keys[grid.join(1, node=7777)] = strategy.members.hellos[1].node  # the key of the first, under another id
    again.gather(grid)
    assert again.members.hellos[1].node == 7777


def test_where_nodes_have_no_keys_a_name_cannot_belong_to_one_and_it_is_said(tmp_path):
    strategy, grid = federation(tmp_path, nodes=3, clients=8)
    grid.has_keys = False
    said = strategy.gather(grid)
    assert sum("the nodes have no keys" in sentence for sentence in said) == 1
    reached = Progress(1, strategy.progress.server, peers=strategy._peers())
    grid.leave(strategy.members.hellos[1].node)
    grid.join(1, node=4242)  # virtual nodes have other numbers in every run
    again = PersonalisedStrategy(strategy.plan)
    again.resume(reached)
    again.gather(grid)
    assert again.members.hellos[1].node == 4242


def test_more_clients_than_the_plan_has_room_for_are_left_out(tmp_path):
    strategy, grid = federation(tmp_path, nodes=3, clients=3)
    grid.join(3)
    _, events = carry_out(strategy, grid)
    assert "client-003 was left out: federation.clients = 3 clients have joined already" in notes(events)


def test_too_few_nodes_are_waited_for_and_then_an_error(tmp_path):
    plan = plan_of(config(), 4)
    grid = Loopback(plan, tmp_path)
    grid.join(0)
    with pytest.raises(RunError, match=r"only 1 of the 4 nodes that the federation needs .* after 1 seconds"):
        carry_out(PersonalisedStrategy(plan), grid)


def test_numbers_stay_with_their_names_over_restarts(tmp_path):
    strategy, grid = federation(tmp_path, nodes=3, clients=6)
    reached, _ = carry_out(strategy, grid)
    again = PersonalisedStrategy(plan_of(config("train.rounds=4"), 3, clients=6))
    grid.join(3, name="a-name-that-sorts-first")
    carry_out(again, grid, reached)
    assert again.members.names == ["client-000", "client-001", "client-002", "a-name-that-sorts-first"]


# --- Flower's own mods


def test_updates_are_clipped_at_the_client_where_the_plan_says_so(tmp_path):
    """Flower's mod clips against what the client received, which for personal models is the right thing."""
    strategy, grid = federation(tmp_path, clip=0.05)
    lengths = []

    def measure(node, reply):
        told = grid.told[int(reply.metadata.reply_to_message_id)]
        if "model" in reply.content:
            before = wire.from_record(told.content["model-0"], "it")
            after = wire.from_record(reply.content["model"], "it")
            lengths.append(float(torch.stack([(after[n] - before[n]).square().sum() for n in after]).sum().sqrt()))
        return reply

    grid.change = measure
    carry_out(strategy, grid)
    assert lengths
    assert max(lengths) == pytest.approx(0.05, rel=1e-3)


def test_a_client_without_an_update_says_why_past_the_mods(tmp_path):
    """Flower's mods expect an update in every answer, and make an invalid message of one that has none."""
    strategy, grid = federation(tmp_path, config("train.lr=1e30", "train.rounds=1"), clip=0.05)
    with pytest.raises(RunError, match="every update of the last 1 rounds was refused: the training diverged"):
        carry_out(strategy, grid)


def test_a_mod_of_the_users_own_sees_the_training_messages(tmp_path):
    seen = []

    def mod(message, context, call_next):
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    strategy, grid = federation(tmp_path, app=client_app(mods=[mod]))
    carry_out(strategy, grid)
    assert seen == ["train"] * 12


def test_a_hello_has_only_possible_facts():
    from cwfed.flower.members import Hello

    told = {
        "name": "a",
        "version": "1",
        "protocol": "1.0",
        "classes": 2,
        "shape": "2",
        "vocabulary": 0,
        "model": "x",
        "words": "",
    }
    told["class_names"] = ["cat", "dog"]
    sizes = {"samples": 3, "test": 1, "validation": 1}
    assert dataclasses.asdict(Hello.read(5, told, sizes))["samples"] == 3
    for wrong in (
        {"name": ""},
        {"name": "x" * 101},
        {"name": "a\nb"},
        {"classes": "2"},
        {"histogram": [0, 0]},
        {"histogram": [-1, 4]},
        {"histogram": ["x", "y"]},
        {"histogram": [10**15, 3]},
        {"class_names": ["cat" * 50, "dog"]},
        {"class_names": [1, 2]},
    ):
        with pytest.raises(wire.BadMessage):
            Hello.read(5, told | wrong, sizes)


# --- whatever one node sends


def is_hello(reply):
    return not reply.has_error() and "hello" in reply.content


def with_hello(reply, **lies):
    if is_hello(reply):
        reply.content["hello"].update(lies)
    return reply


def with_sizes(reply, **lies):
    return with_metric(reply, **lies) if is_hello(reply) else reply


BLANK = "  \n "
HOSTILE = {
    "a blank reason": lambda grid, r: Message(Error(2, BLANK), reply_to=asked(grid, r)),
    "no reason": lambda grid, r: Message(Error(2), reply_to=asked(grid, r)),
    "a reason without end": lambda grid, r: (
        r if is_hello(r) else Message(Error(2, f"{BLANK}{'x' * 10**6}"), reply_to=asked(grid, r))
    ),
    "a problem without a reason": lambda grid, r: Message(
        RecordDict({"problem": ConfigRecord({"reason": BLANK})}), reply_to=asked(grid, r)
    ),
    "a histogram of words": lambda grid, r: with_hello(r, histogram=["x"] * 10),
    "a name that looks like a number": lambda grid, r: with_hello(r, name="²"),
    "a version that goes on for ever": lambda grid, r: with_hello(r, version="\x1b[2J" + "1" * 10**6),
    "a huge loss": lambda grid, r: with_metric(r, loss=1.7e308),
    "a huge penalty": lambda grid, r: with_metric(r, penalty=-1.7e308),
    "a loss that is nearly huge": lambda grid, r: with_metric(r, loss=1e100, **{"received-loss": 1e100}),
    "a held-out loss that is huge": lambda grid, r: with_metric(r, **{"received-held-out-loss": 1.7e308}),
    "test samples without end": lambda grid, r: with_sizes(r, test=10**15),
    "validation samples without end": lambda grid, r: with_sizes(r, validation=10**15),
    "nothing at all": lambda grid, r: Message(RecordDict(), reply_to=asked(grid, r)),
}


def asked(grid, reply):
    return grid.told[int(reply.metadata.reply_to_message_id)]


@pytest.mark.parametrize("deed", HOSTILE)
def test_whatever_two_nodes_send_the_others_go_on_also_after_a_restart(deed, tmp_path):
    """In every message, in every round: they are left out with a reason, the numbers of a round stay JSON."""
    chosen = config("train.rounds=2", "data.clients=5")
    strategy, grid = federation(tmp_path / "nodes", chosen, nodes=3, clients=8)
    bad = {grid.join(3), grid.join(4)}
    grid.change = lambda node, reply: HOSTILE[deed](grid, reply) if node in bad else reply
    strategy.start(grid, out=tmp_path / "server")
    longer = plan_of(config("train.rounds=3", "data.clients=5"), 3, clients=8)
    PersonalisedStrategy(longer).start(grid, out=tmp_path / "server")
    told = RunFolder(tmp_path / "server").events()
    assert [event.round for event in rounds(told)] == [1, 2, 3]
    for event in rounds(told):
        assert {0, 1, 2} <= set(event.participants)
        assert {0, 1, 2} <= set(event.received.clients)
        assert event.received.accuracy <= 1
        assert all(0 < len(reason) <= 350 for reason in event.refused.values()), "every refusal has a reason"
    everything = (tmp_path / "server" / "events.jsonl").read_text()
    assert "\\u001b" not in everything
    assert len(everything) < 30_000
    if deed not in ("a name that looks like a number", "a loss that is nearly huge"):
        assert all(event.refused.keys() == {"3", "4"} or 3 not in event.participants for event in rounds(told))


def test_an_answer_that_flower_cannot_unpack_is_its_nodes_fault_and_a_sender_cannot_be_forged(tmp_path):
    """Flower unpacks answers when they are pulled, and takes the sender from what the node wrote."""
    strategy, grid = federation(tmp_path)
    pull = grid.pull_messages

    def unpack(numbers):
        answers = pull(numbers)
        for reply in answers:
            if not is_training(reply, grid):
                continue
            reply.metadata.__dict__["_src_node_id"] = strategy.members.hellos[0].node
            if strategy.opened.number == 2:
                raise ValueError("Mismatch in children object IDs")
        return answers

    grid.pull_messages = unpack
    _, events = carry_out(strategy, grid)
    assert "malformed" in rounds(events)[1].refused[str(BAD)]
    assert [event.participants for event in rounds(events)] == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]]


def test_a_mute_node_costs_nobody_time_and_is_let_in_when_it_speaks(tmp_path):
    strategy, grid = federation(tmp_path, config("train.rounds=8"), nodes=3, clients=4, timeout=600.0, wait=60.0)
    mute = grid.join(3)
    is_mute = [True]
    grid.change = lambda node, reply: None if node == mute and is_mute[0] else reply
    clock, told = post.time, []
    for _, event in strategy.rounds(grid, strategy.first()):
        told.append(event)
        if isinstance(event, Round) and event.round == 5:
            assert clock.now < 60, "of the ten minutes that a round may take"
            clock.now += 601  # the rounds have taken as long as a node may take to say who it is
        if isinstance(event, Round) and event.round == 6:
            is_mute[0] = False
            clock.now += 601
    assert [len(event.participants) for event in rounds(told)] == [3] * 6 + [4] * 2
    assert sum("it did not say who it is within 600 seconds" in note for note in notes(told)) == 1


def test_a_node_that_was_left_out_is_asked_again_and_may_have_mended_it(tmp_path):
    strategy, grid = federation(tmp_path, nodes=3, clients=4)
    node = grid.join(3, path=str(tmp_path / "nowhere"))
    told = []
    for _, event in strategy.rounds(grid, strategy.first()):
        told.append(event)
        if isinstance(event, Round):
            post.time.now += 6  # longer than federation.timeout
        if isinstance(event, Round) and event.round == 2:
            grid.join(3, node=node)
    assert [event.participants for event in rounds(told)] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
    assert sum("does not exist" in note for note in notes(told)) == 1, "said once"


def test_who_says_it_has_most_test_samples_is_named_and_the_log_has_the_median(tmp_path):
    strategy, grid = federation(tmp_path, nodes=4)
    node = grid.join(3)

    def boast(who, reply):
        if who == node and is_hello(reply):
            return with_metric(reply, test=10**6)
        return (
            with_metric(reply, **{"received-right": 10**6}) if who == node and "metrics" in reply.content else reply
        )

    grid.change = boast
    _, events = carry_out(strategy, grid)
    assert (
        sum("client-003 (client 3) says that it has 100.0% of all test samples" in note for note in notes(events))
        == 1
    )
    last = rounds(events)[-1]
    own = sorted(right / n for right, n in zip(last.received.right, last.received.samples, strict=True))
    assert f"(median of the clients {(own[1] + own[2]) / 2:.1%})" in sentence(last, 3)


# --- what classes are called


def folders_of(tmp_path, known, each):
    """Folders of two-dimensional samples, as `cwfed data export` writes them, with the classes' own names."""
    rng = np.random.default_rng(0)
    for client, names in enumerate(each):
        labels = np.repeat(np.arange(len(names)), 20)
        corners = np.array([known.index(name) for name in names])[labels]
        inputs = (4 * np.eye(len(known))[corners] + 0.3 * rng.normal(size=(len(labels), len(known)))).astype("f4")
        write(Dataset("corners", inputs, labels, names), tmp_path / "data" / f"client-{client:03d}")


def of_corners(tmp_path, known, each, **section):
    chosen = config("train.rounds=5", "train.lr=0.3", "train.batch_size=5", "algorithm.name=fedavg")
    strategy, grid = federation(tmp_path, chosen, nodes=1, clients=4, shape=str(len(known)), **section)
    folders_of(tmp_path, known, each)
    for client in range(len(each)):
        grid.join(client)
    return strategy, grid


def test_nodes_with_other_classes_are_left_out_by_name(tmp_path):
    """Of three folders with five of ten classes each, only two name the same things."""
    digits = [f"digit{k}" for k in range(10)]
    each = [tuple(digits[:5]), tuple(digits[3:8]), tuple(digits[:5])]
    strategy, grid = of_corners(tmp_path, digits, each, classes=5)
    _, events = carry_out(strategy, grid)
    assert any(
        "client-001 was left out: its class 0 is 'digit3', the federation's 'digit0'" in note
        for note in notes(events)
    )
    assert rounds(events)[-1].received.clients == [0, 1]
    assert strategy.members.names == ["client-000", "client-002"]


def test_with_a_list_of_the_classes_a_node_may_have_some_of_them_in_any_order(tmp_path):
    digits = [f"digit{k}" for k in range(10)]
    each = [tuple(digits[:5]), tuple(digits[3:8]), tuple(reversed(digits[5:])), ("digit1", "other")]
    strategy, grid = of_corners(tmp_path, [*digits, "other"], each, classes=10, class_names=digits)
    reached, events = carry_out(strategy, grid)
    assert any("the class 'other', which is none of the federation's" in note for note in notes(events))
    last = rounds(events)[-1]
    assert last.received.clients == [0, 1, 2]
    assert last.received.accuracy > 0.9, "one model for all, and each output means the same everywhere"
    folder = tmp_path / "state" / "client-002" / reached.peers["run"]
    assert cwfed.load_model(folder, client=2).class_names == tuple(digits)


def test_words_that_are_numbered_otherwise_are_refused(tmp_path):
    strategy, grid = federation(tmp_path, nodes=3)
    node = grid.join(3)
    grid.change = lambda who, reply: with_hello(reply, words="abc") if who == node else reply
    said = strategy.gather(grid)
    assert "client-003 was left out: its words are others than the federation's, or in another order" in said


# --- data that change


def test_a_node_whose_data_grow_says_so_and_stays(tmp_path):
    strategy, grid = federation(tmp_path)
    told = []
    for _, event in strategy.rounds(grid, strategy.first()):
        told.append(event)
        if isinstance(event, Round) and event.round == 1:
            before = strategy.members.hellos[BAD]
            folder = tmp_path / "data" / f"client-{BAD:03d}"
            data = load(SourceSpec("arrays", str(folder)))
            shutil.rmtree(folder)
            more = np.concatenate([np.arange(len(data.labels)), np.arange(40)])
            write(Dataset(data.name, data.inputs[more], data.labels[more], data.class_names), folder)
    after = strategy.members.hellos[BAD]
    assert after.samples != before.samples
    assert all(event.participants == [0, 1, 2, 3] and not event.refused for event in rounds(told))
    assert rounds(told)[-1].received.samples[BAD] == after.test
    changed = f"the data of client-002 (client 2) have changed: {after.samples:,} samples"
    assert sum(changed in note for note in notes(told)) == 1


def test_what_a_node_says_of_changed_data_must_be_possible_as_well(tmp_path):
    strategy, grid = federation(tmp_path)

    def lie(node, reply):
        if not is_training(reply, grid):
            return reply
        hello = next(m for m in told if is_hello(m) and m.content["hello"]["name"] == f"client-{BAD:03d}")
        reply.content["hello"] = hello.content["hello"]
        return with_metric(reply, samples=10**12, test=1, validation=1)

    told = []
    grid.change = lambda node, reply: told.append(reply) or lie(node, reply)
    _, events = carry_out(strategy, grid)
    assert "guard.most_samples" in rounds(events)[1].refused[str(BAD)]
    assert strategy.members.hellos[BAD].samples < 1000


def test_who_is_on_which_node_is_looked_up_once_for_all_answers(monkeypatch, tmp_path):
    """It was for every answer: with 10,000 virtual nodes some 50 s when they join, and 5 s in every round."""
    looks, nodes, by_node = [], Members.nodes.fget, Members.by_node.fget
    monkeypatch.setattr(Members, "nodes", property(lambda self: (looks.append("nodes"), nodes(self))[1]))
    monkeypatch.setattr(Members, "by_node", property(lambda self: (looks.append("by_node"), by_node(self))[1]))
    strategy, grid = federation(tmp_path, config("train.rounds=1", "data.clients=8", "data.samples=400"), nodes=8)
    carry_out(strategy, grid)
    assert looks.count("by_node") == 2  # the answers of training, and those of measuring
    assert looks.count("nodes") <= 4


def test_a_name_is_compared_with_few_others(tmp_path):
    """Every name of 10,000 was looked for in the list of all."""

    class Name(str):
        times = 0
        __hash__ = str.__hash__

        def __eq__(self, other):
            Name.times += 1
            return str(self) == str(other)

    plan = plan_of(config(), 4, clients=200)
    facts = {"protocol": wire.PROTOCOL, "shape": "64", "words": "", "version": "1", "vocabulary": 0, "classes": 10}
    facts |= {"model": describe_model(plan.blueprint), "samples": 5, "test": 2, "validation": 1}
    facts |= {"shape": plan.federation.shape, "class_names": tuple("0123456789")}
    members = Members(plan)
    said = members.welcome([Hello(node=n, name=Name(n), **facts) for n in range(200)], range(200))
    assert said[7] == "7 joined as client 7"
    assert members.names == [str(n) for n in range(200)]
    assert Name.times < 10 * 200 + 200  # and 200 of this test's own
