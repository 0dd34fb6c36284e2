"""What goes wrong in a federation, in this process: bad answers, lost ones, strangers, late comers."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode

from cwfed.errors import RunError
from cwfed.events import Note, Round
from cwfed.flower import PersonalisedStrategy, client_app, wire
from cwfed.flower import strategy as strategies
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
    monkeypatch.setattr(strategies, "time", Clock())


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


MISDEEDS = {
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
    "more samples than it has": (lambda r: with_metric(r, samples=10**7), "it said .* when it joined"),
    "a loss that is no number": (lambda r: with_metric(r, loss=float("nan")), "metric loss"),
    "too many right answers": (lambda r: with_metric(r, **{"trained-right": 10**6}), "more right answers"),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_bad_answer_is_refused_and_the_round_goes_on_as_if_it_were_lost(misdeed, tmp_path):
    change, reason = MISDEEDS[misdeed]
    strategy, grid = federation(tmp_path / "bad")
    grid.change = lambda node, reply: change(reply) if is_training(reply, grid) else reply
    reached, events = carry_out(strategy, grid)
    second = rounds(events)[1]
    assert list(second.refused) == [str(BAD)]
    assert re.search(reason, second.refused[str(BAD)])
    assert second.participants == [0, 1, 3]
    assert second.dropped == []

    strategy, grid = federation(tmp_path / "lost")
    grid.change = lambda node, reply: None if is_training(reply, grid) else reply
    lost, events = carry_out(strategy, grid)
    assert rounds(events)[1].dropped == [BAD]
    assert leaves(reached.server) == leaves(lost.server)


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
    assert "nobody answered round 1: it is tried again" in notes(events)
    assert [event.round for event in rounds(events)] == [1, 2, 3]

    strategy, grid = federation(tmp_path / "mute")
    grid.change = lambda node, reply: reply if "hello" in reply.content else None
    with pytest.raises(RunError, match=r"nobody answered round 1 in 3 tries of 5 seconds"):
        carry_out(strategy, grid)


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
    assert "nobody answered the last evaluation: it is tried again" in notes(events)
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
    strategy, grid = federation(tmp_path, config("train.rounds=4"), nodes=4)
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
    strategy, grid = federation(tmp_path, nodes=3, clients=8, pin=True)
    for progress, event in strategy.rounds(grid, strategy.first()):
        if isinstance(event, Round) and event.round == 1:
            grid.join(3, node=6666, name="client-001")  # while the first one is connected
    assert strategy.members.hellos[1].node != 6666
    grid.leave(strategy.members.hellos[1].node)
    grid.join(3, node=3333)
    strategy.gather(grid)
    assert strategy.members.refused[6666] == "the name belongs to a node with another key"


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

    told = {"name": "a", "version": "1", "protocol": "1.0", "classes": 2, "shape": "2", "vocabulary": 0, "model": "x"}
    sizes = {"samples": 3, "test": 1, "validation": 1}
    assert dataclasses.asdict(Hello.read(5, told, sizes))["samples"] == 3
    for wrong in (
        {"name": ""},
        {"name": "x" * 101},
        {"name": "a\nb"},
        {"classes": "2"},
        {"histogram": [0, 0]},
        {"histogram": [-1, 2]},
    ):
        with pytest.raises(wire.BadMessage):
            Hello.read(5, told | wrong, sizes)
