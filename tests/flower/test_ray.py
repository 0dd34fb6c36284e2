"""What `cwfed run --backend flower` does to its messages, without Ray: they are pickled here as Ray pickles them."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")
pytest.importorskip("ray", reason="the extra flower is not installed")

from flwr.app import Context, MessageType, RecordDict
from flwr.server.superlink.fleet.vce.vce_api import _register_nodes
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.simulation.run_simulation import Task
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.inmemory_grid import InMemoryGrid
from ray import cloudpickle

from cwfed.algorithms import CwFedAvg
from cwfed.federation.guard import spec_of
from cwfed.federation.simulation import Simulation
from cwfed.flower import PersonalisedStrategy, Plan, ray_backend, replies, wire
from cwfed.flower.post import message_to
from cwfed.flower.ray_backend import SimulatedApp, pack
from tests.conftest import finish, leaves, small
from tests.flower.helpers import Loopback, carry_out


def through_ray(thing):
    """Pickled and back, with the numbers beside the pickle; how many bytes the pickle has."""
    beside: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(thing, protocol=5, buffer_callback=beside.append)
    in_store = [bytes(buffer.raw()) for buffer in beside]
    return pickle.loads(pickled, buffers=in_store), len(pickled)


class Actors(Loopback):
    """A simulation's virtual nodes, whose messages go through pickles."""

    largest = 0

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            sent, size = through_ray(message)
            numbers += super().push_messages([sent])
            message.metadata.__dict__["_message_id"] = numbers[-1]
            self.largest = max(self.largest, size)
        return numbers


def as_simulated(config, folder):
    simulation = Simulation(config)
    plan = Plan(config, ray_backend._section(simulation))
    app, _ = through_ray(SimulatedApp(config.model_dump_json(), None, str(folder / "state")))
    grid = Actors(plan, folder, app, lambda _, reply: through_ray(reply)[0])
    grid.nodes = {
        node + 1: Context(0, node + 1, {"partition-id": node}, RecordDict(), {}) for node in range(plan.clients)
    }
    strategy = PersonalisedStrategy(plan, trains=simulation.members, measured=simulation.evaluated, pack=pack)
    strategy.post.pull = replies.pull_all
    return simulation, strategy, grid


@pytest.mark.parametrize("name", ["cwfedavg", "ifca"])  # ifca sends several models
def test_through_pickles_with_the_numbers_beside_them_the_bits_are_the_simulators(name, tmp_path):
    config = small(
        f"algorithm.name={name}", "run.engine=loop", "train.rounds=2", "data.clients=4", "data.samples=300"
    )
    simulation, strategy, grid = as_simulated(config, tmp_path)
    reached, events = carry_out(strategy, grid)
    expected, rounds = finish(simulation)
    assert leaves(reached.server) == leaves(expected.server)
    assert [event.received.right for event in events[-2:]] == [event.received.right for event in rounds]
    assert grid.largest < 4 * simulation.parameters, "no model is in a pickle"


def test_a_model_is_made_once_for_the_evaluation_after_a_round_and_the_training_of_the_next(tmp_path, monkeypatch):
    config = small("run.engine=loop", "train.rounds=3", "data.clients=3", "data.samples=300")
    _, strategy, grid = as_simulated(config, tmp_path)
    made, send = Counter(), CwFedAvg.send

    def counted(self, state, client):
        made.update([client] if self is strategy.algorithm else [])
        return send(self, state, client)

    monkeypatch.setattr(CwFedAvg, "send", counted)
    carry_out(strategy, grid)
    assert made == dict.fromkeys(range(3), 1 + 3)  # before the first round and after each of the three


def test_an_app_goes_to_an_actor_as_the_texts_that_it_is_made_of():
    app, size = through_ray(SimulatedApp("c" * 1000, None, "state"))
    assert size < 1500
    assert isinstance(app, SimulatedApp)
    assert app._made_of == ("c" * 1000, None, "state")


def test_numbers_are_copied_by_ray_alone_and_arrive_as_flowers_arrays_do():
    params = {
        "weight": torch.randn(3, 4).T,
        "bias": torch.randn(4),
        "steps": torch.tensor(7),
        "none": torch.zeros(0, 2),
        "flags": torch.tensor([True, False]),
    }
    record = pack(params)
    assert np.shares_memory(record["bias"].numbers, params["bias"].numpy())
    arrived, _ = through_ray(record)
    assert {name: bytes(array.data) for name, array in arrived.items()} == {
        name: array.data for name, array in wire.to_record(params).items()
    }
    tensors = wire.from_record(arrived, "the model", spec_of(params))
    for name, tensor in params.items():
        assert torch.equal(tensors[name], tensor)
        tensors[name].zero_()  # their own memory


def test_numbers_in_a_message_that_was_not_pickled_are_no_model():
    """They would be read as empty: nothing is taken for a model that is none."""
    with pytest.raises(wire.BadMessage, match="not in numpy's format"):
        wire.from_record(pack({"bias": torch.ones(2)}), "the model")


def test_every_node_gets_its_message_once_and_is_only_looked_for_when_there_is_one(monkeypatch):
    """On the message store that Flower's engine has."""
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
    state, run = factory.state(), Run.create_empty(run_id=1)
    run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
    state.run_ids[1], state.task_store[1] = RunRecord(run=run), Task(task_id=1, run_id=1)
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # as in the server's process
    grid = InMemoryGrid(state_factory=factory)
    grid.set_run(run)
    a, b, c = _register_nodes(3, factory)
    looked = []
    look = state.get_message_ins
    monkeypatch.setattr(state, "get_message_ins", lambda node, *more: looked.append(node) or look(node, *more))
    ray_backend.look_where_something_is(grid)
    sent = list(grid.push_messages([message_to(node, MessageType.TRAIN, "1", RecordDict()) for node in (b, c)]))

    def sweep():
        return [m.metadata.message_id for node in (a, b, c) for m in state.get_message_ins(node_id=node, limit=1)]

    assert sweep() == sent
    assert sweep() == []
    assert looked == [b, c]
