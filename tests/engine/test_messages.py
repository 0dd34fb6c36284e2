"""What engines and workers tell each other is plain data: a worker behind pickle gives the loop's bits."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass, replace

import pytest
import torch

from cwfed.algorithms import CwFedAvg, build
from cwfed.engine import Loop, Threads, Vmap
from cwfed.engine.base import sends_each
from cwfed.engine.loop import Distributor
from cwfed.engine.tasks import ClientTasks, Outbox
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small, without_seconds


def posted(message):
    return pickle.loads(pickle.dumps(message))


class Posted(Distributor):
    """An engine as one with worker processes would be: the job goes there once, a call once, then items and results."""

    name = "posted"

    def __init__(self, job):
        super().__init__(job, 1)
        there = posted(job)
        self.worker = ClientTasks(there, Outbox.of(there), threading.Event())

    def spread(self, call, items):
        row_of_its_own = {name: torch.empty(1, *w.shape[1:], dtype=w.dtype) for name, w in call.out.items()}
        there, results = posted(replace(call, out=row_of_its_own)), []
        for item in items:
            if call.task != "visit":
                results.append(posted(self.worker.do(there, posted(item))))
                continue
            row, visit = item
            result, model = posted((self.worker.do(there, posted((0, visit))), there.out))
            for name, w in model.items():
                call.out[name][row] = w[0]
            results.append(result)
        return results

    def close(self):
        del self.worker


CASES = {
    "class-wise": ["algorithm.name=cwfedavg", "train.client_dropout=0.2"],
    "kept models": ["algorithm.name=fedfomo"],
    "passes on receipt": ["algorithm.name=fedala"],
    "running statistics": [
        "model.name=tests.engine.test_engines:with_batch_norm",
        "model.options={}",
        "train.batch_norm=local",
        "algorithm.name=fedrep",
    ],
    "optimisers": ["train.optimizer=adam", "train.keep_optimizer=true", "algorithm.name=ditto"],
    "private": ["privacy.dp=sample", "algorithm.name=fedavg"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_behind_pickle_gives_the_loops_bits(case):
    config = small(*CASES[case], "run.engine=loop", "train.participation=0.7", "data.samples=200", "data.clients=4")
    progress, events = finish(Simulation(config))
    simulation = Simulation(config)
    simulation.engine = Posted(simulation.engine.job)
    simulation.engine.rehearse(simulation.first_state(), simulation.visit(0, {}))
    behind, told = finish(simulation)
    assert leaves(to_tree(behind)) == leaves(to_tree(progress))
    assert [without_seconds(event) for event in told] == [without_seconds(event) for event in events]


def test_no_engine_but_the_loop_is_a_loop():
    assert not issubclass(Threads, Loop)
    assert not issubclass(Vmap, Loop)


@dataclass(frozen=True)
class Greeting(CwFedAvg):
    """Says something with every model."""

    def send(self, state, client):
        return replace(super().send(state, client), notes={"hello": torch.ones(1)})


def test_who_has_only_send_of_its_own_is_asked_one_by_one():
    assert sends_each(CwFedAvg())
    assert sends_each(build({"name": "cwfedavg+programme"}))
    assert not sends_each(Greeting())
    assert not sends_each(build({"name": "cwfedavg+dbe"}))
    outbox = Outbox(Greeting(), {}, 2)
    assert outbox.missing({}, [0, 1]) == []


@pytest.mark.parametrize("engine", ["loop", "threads", "vmap"])
def test_what_clients_are_sent_is_made_together_and_once(engine, monkeypatch):
    made = []

    def send_each(self, state, clients):
        made.append(list(clients))
        return together(self, state, clients)

    together = CwFedAvg.send_each
    monkeypatch.setattr(CwFedAvg, "send_each", send_each)
    simulation = Simulation(small(f"run.engine={engine}", "run.workers=2", "train.rounds=1", "data.clients=4"))
    monkeypatch.setattr(CwFedAvg, "send", None)
    finish(simulation)
    shares = [[0, 2], [1, 3]] if engine == "threads" else [[0, 1, 2, 3]]
    assert sorted(made) == sorted(2 * shares)  # of the state before the round, and of that after it


class Doubled(CwFedAvg):
    def personal_model(self, state, prior):
        return {name: 2 * w for name, w in super().personal_model(state, prior).items()}


def test_a_personal_model_of_ones_own_is_also_made_for_several():
    simulation = Simulation(small("data.clients=4"))
    state = simulation.first_state()
    simulation.close()
    for client, sent in enumerate(Doubled().send_each(state, range(4))):
        alone = Doubled().send(state, client).model
        assert all(torch.equal(w, alone[name]) for name, w in sent.model.items())
        assert not torch.equal(sent.model["output.weight"], CwFedAvg().send(state, client).model["output.weight"])
