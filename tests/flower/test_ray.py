"""What `cwfed run --backend flower` does to its messages, without Ray: they are pickled here as Ray pickles them."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")
pytest.importorskip("ray", reason="the extra flower is not installed")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.server.superlink.fleet.vce.vce_api import _register_nodes
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.simulation.run_simulation import Task
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.inmemory_grid import InMemoryGrid
from ray import cloudpickle

from cwfed.algorithms import CwFedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.events import Round
from cwfed.federation.guard import spec_of
from cwfed.federation.open_round import OpenRound
from cwfed.federation.rounds import from_tree, to_tree
from cwfed.federation.simulation import Simulation
from cwfed.flower import PersonalisedStrategy, Plan, envelopes, ray_backend, wire
from cwfed.flower.envelopes import EnvelopePost, inside
from cwfed.flower.numbers import Packer, lend
from cwfed.flower.plan import FederationSection
from cwfed.flower.post import message_to
from cwfed.flower.ray_backend import SimulatedApp
from cwfed.flower.work import Worker
from tests.conftest import finish, leaves, small
from tests.flower.helpers import Loopback, carry_out
from tests.flower.test_parity import as_a_server_sees_it


def through_ray(thing):
    """Pickled and back, with the numbers beside the pickle, which cannot be written to; how many bytes each of the two has."""
    beside: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(thing, protocol=5, buffer_callback=beside.append)
    in_store = [bytes(buffer.raw()) for buffer in beside]
    return pickle.loads(pickled, buffers=in_store), len(pickled), sum(map(len, in_store))


class Actors(Loopback):
    """A simulation's virtual nodes, whose messages go through pickles."""

    largest = 0
    beside: dict[str, int]
    """By kind of message, bytes of numbers in all of them."""

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            sent, size, beside = through_ray(message)
            numbers += super().push_messages([sent])
            message.metadata.__dict__["_message_id"] = numbers[-1]
            self.largest = max(self.largest, size)
            self.beside[message.metadata.message_type] += beside
        return numbers

    def envelopes(self, kind):
        """How many messages of clients were in each envelope of a kind."""
        return [len(inside(m.content)) for m in self.told if m.metadata.message_type == kind]


def as_simulated(config, folder, workers=1):
    simulation = Simulation(config)
    plan = Plan(config, ray_backend._section(simulation))
    app, _, _ = through_ray(SimulatedApp(config.model_dump_json(), None, str(folder / "state")))
    grid = Actors(plan, folder, app, lambda _, reply: through_ray(reply)[0])
    grid.beside = Counter()
    grid.nodes = {
        node + 1: Context(0, node + 1, {"partition-id": node}, RecordDict(), {}) for node in range(plan.clients)
    }
    post = EnvelopePost(plan.federation, lambda: workers)
    strategy = PersonalisedStrategy(
        plan, trains=simulation.members, measured=simulation.evaluated, pack=post.pack, post=post
    )
    return simulation, strategy, grid


def rounds_of(events):
    plainly = [event for event in events if isinstance(event, Round)]
    return [as_a_server_sees_it(event, {}) for event in plainly]


@pytest.mark.parametrize("name", ["fedavg", "cwfedavg", "fedrep", "ifca"])  # ifca sends several models
def test_through_pickles_in_envelopes_the_bits_are_the_simulators(name, tmp_path):
    """With clients that sit out, are lost, and are measured in some rounds only."""
    config = small(
        f"algorithm.name={name}", "run.engine=loop", "train.rounds=4", "data.clients=8", "data.samples=400",
        "train.participation=0.7", "train.client_dropout=0.2", "run.evaluate_every=2",
    )  # fmt: skip
    simulation, strategy, grid = as_simulated(config, tmp_path)
    reached, events = carry_out(strategy, grid)
    expected, rounds = finish(simulation)
    assert leaves(reached.server) == leaves(expected.server)
    assert rounds_of(events) == rounds_of(rounds)
    assert any(event.dropped for event in rounds), "somebody was lost"
    assert grid.largest < 4 * simulation.parameters, "no model is in a pickle"
    assert grid.envelopes("evaluate") == [2, 2, 2, 2] * 2


def test_what_clients_share_is_in_an_envelope_once(tmp_path):
    config = small(
        "algorithm.name=fedavg", "run.engine=loop", "train.rounds=1", "data.clients=12", "data.samples=600"
    )
    simulation, strategy, grid = as_simulated(config, tmp_path)
    carry_out(strategy, grid)
    assert grid.envelopes("train") == [3, 3, 3, 3]
    assert grid.beside["train"] == 4 * 4 * simulation.parameters


def test_large_models_go_in_many_envelopes_and_most_work_goes_first(tmp_path, monkeypatch):
    config = small("run.engine=loop", "data.clients=9", "data.samples=500", "data.partition=dirichlet")
    simulation, strategy, grid = as_simulated(config, tmp_path)
    strategy.gather(grid)
    messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    monkeypatch.setattr(envelopes, "LARGEST", 2 * 4 * simulation.parameters)
    sealed = envelopes.seal(messages, workers=1)
    assert [len(inside(message.content)) for message in sealed] == [2, 2, 2, 2, 1]
    samples = [[m.content["told"]["samples"] for m in inside(message.content)] for message in sealed]
    assert [max(each) for each in samples] == sorted(h.samples for h in strategy.members.hellos.values())[:3:-1]
    monkeypatch.setattr(envelopes, "LARGEST", 1)
    assert len(envelopes.seal(messages, workers=1)) == 9
    assert envelopes.seal([], workers=1) == []


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), ConfigError("out of luck")])
def test_what_goes_wrong_with_a_client_costs_none_of_its_envelope(error, tmp_path, monkeypatch):
    config = small("algorithm.name=fedrep", "run.engine=loop", "train.rounds=3", "data.clients=6", "data.samples=300")
    simulation, strategy, grid = as_simulated(config, tmp_path)
    train = Worker.train

    def fails(self, client, round_, *more):
        if (client, round_) == (1, 2):
            raise error
        return train(self, client, round_, *more)

    monkeypatch.setattr(Worker, "train", fails)
    reached, events = carry_out(strategy, grid)
    assert [list(event.refused) for event in rounds_of(events)] == [[], ["1"], []]
    assert "out of luck" in rounds_of(events)[1].refused["1"]
    monkeypatch.setattr(OpenRound, "problems", lambda self, *_: {1: "as told"} if self.number == 2 else {})
    expected, rounds = finish(simulation)
    assert leaves(reached.server) == leaves(expected.server)
    assert [e.client_loss for e in rounds_of(events)] == [e.client_loss for e in rounds]


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_envelope_that_fails_is_an_error_of_each_in_it_and_one_that_is_lost_loses_them(is_gone, tmp_path):
    config = small("run.engine=loop", "train.rounds=2", "data.clients=8", "data.samples=400")
    _, strategy, grid = as_simulated(config, tmp_path)
    failed = []

    def change(node, reply):
        sent = grid.told[-1]
        if sent.metadata.message_type != "train" or failed:
            return through_ray(reply)[0]
        failed.extend(strategy.members.by_node[m.metadata.src_node_id] for m in inside(reply.content))
        code = ErrorCode.NODE_UNAVAILABLE if is_gone else ErrorCode.UNKNOWN
        return Message(Error(code, "the actor died"), reply_to=sent)

    grid.change = change
    _, events = carry_out(strategy, grid)
    first, second = rounds_of(events)
    assert len(failed) == 2
    assert first.dropped == (sorted(failed) if is_gone else [])
    assert sorted(map(int, first.refused)) == ([] if is_gone else sorted(failed))
    assert len(first.participants) == 6
    assert len(second.participants) == 8


@pytest.mark.parametrize("name", ["cwfedavg", "fedrep"])
def test_a_simulation_that_was_broken_off_goes_on_with_the_same_bits(name, tmp_path):
    config = small(
        f"algorithm.name={name}", "run.engine=loop", "train.rounds=4", "data.clients=5", "data.samples=300"
    )
    simulation, strategy, grid = as_simulated(config, tmp_path)
    for progress, event in strategy.rounds(grid, strategy.first()):
        if isinstance(event, Round) and event.round == 2:
            saved = to_tree(progress)
        if isinstance(event, Round) and event.round == 3:
            break  # before its checkpoint
    _, strategy, grid = as_simulated(config, tmp_path)
    resumed, _ = carry_out(strategy, grid, from_tree(saved))
    expected, _ = finish(simulation)
    assert leaves(resumed.server) == leaves(expected.server)


def test_a_model_is_made_once_for_the_evaluation_after_a_round_and_the_training_of_the_next(tmp_path, monkeypatch):
    config = small("run.engine=loop", "train.rounds=3", "data.clients=3", "data.samples=300")
    _, strategy, grid = as_simulated(config, tmp_path)
    made, send = Counter(), CwFedAvg.send_each

    def counted(self, state, clients):
        made.update(clients if self is strategy.algorithm else [])
        return send(self, state, clients)

    monkeypatch.setattr(CwFedAvg, "send_each", counted)
    carry_out(strategy, grid)
    assert made == dict.fromkeys(range(3), 1 + 3)  # before the first round and after each of the three


def test_an_app_goes_to_an_actor_as_the_texts_that_it_is_made_of():
    app, size, _ = through_ray(SimulatedApp("c" * 1000, None, "state"))
    assert size < 1500
    assert isinstance(app, SimulatedApp)
    assert app._made_of == ("c" * 1000, None, "state")


def test_numbers_are_copied_by_ray_and_once_by_who_keeps_them():
    params = {
        "weight": torch.randn(3, 4).T,
        "bias": torch.randn(4),
        "steps": torch.tensor(7),
        "none": torch.zeros(0, 2),
        "flags": torch.tensor([True, False]),
        "large": torch.randn(200, 100),
    }
    pack = Packer()
    packed = pack(params)
    assert np.shares_memory(packed["bias"].numbers, params["bias"].numpy())
    assert pack(params)["bias"] is packed["bias"]
    pack.forget()
    assert pack(params)["bias"] is not packed["bias"]
    for record in (packed, lend(params)):
        arrived, _, _ = through_ray(record)
        for there in (record, arrived):
            tensors = wire.from_record(there, "the model", spec_of(params))
            assert all(torch.equal(tensors[name], tensor) for name, tensor in params.items())
        is_own = {name: array.numbers.flags.writeable for name, array in arrived.items()}
        assert is_own == dict.fromkeys(params, True) | {"large": record is packed}


def test_numbers_of_another_form_are_refused_wherever_they_lie():
    forms = spec_of({"bias": torch.ones(3)})
    for wrong in (torch.ones(2), torch.ones(3, dtype=torch.float64)):
        with pytest.raises(wire.BadMessage, match="bias of the model has float"):
            wire.from_record(Packer()({"bias": wrong}), "the model", forms)


def test_every_node_gets_its_message_once_and_is_only_looked_for_when_there_is_one(monkeypatch):
    """On the message store that Flower's engine has."""
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
    state, run = factory.state(), Run.create_empty(run_id=1)
    run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
    state.run_ids[1], state.task_store[1] = RunRecord(run=run), Task(task_id=1, run_id=1)
    grid = InMemoryGrid(state_factory=factory)
    grid.set_run(run)
    a, b, c = _register_nodes(3, factory)
    looked = []
    look = state.get_message_ins
    monkeypatch.setattr(state, "get_message_ins", lambda node, *more: looked.append(node) or look(node, *more))
    post = EnvelopePost(FederationSection(shape="1", classes=2), lambda: 1)
    post.listen(grid)
    sent = list(post.push(grid, [message_to(node, MessageType.TRAIN, "1", RecordDict()) for node in (b, c)]))

    def sweep():
        return [m.metadata.message_id for node in (a, b, c) for m in state.get_message_ins(node_id=node, limit=1)]

    assert sweep() == sent
    assert sweep() == []
    assert looked == [b, c]
    message = state.message_ins_store[sent[0]]
    reply = Message(RecordDict(), reply_to=message)
    reply.metadata.__dict__["_message_id"] = "its own"
    state.store_message_res(reply)
    post.sleep(3600)  # which the answer has ended
    assert list(post.pull(grid, {sent[0]: message})) == sent[:1]
    post.stop.set()
    with pytest.raises(KeyboardInterrupt):
        post.sleep(3600)
