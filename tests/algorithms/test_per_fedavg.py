"""Per-FedAvg: the step in closed form, halves of a batch, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cwfed.algorithms import FedAvg
from cwfed.algorithms.per_fedavg import PerFedAvg, halves
from cwfed.core.errors import ConfigError
from cwfed.core.rng import stream
from cwfed.core.types import Batch, Loss, Output, Pass, Start
from cwfed.engine.worker import batches
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import tiny
from tests.conftest import finish, leaves, worker_of

SOME = ("train.participation=0.7", "train.client_dropout=0.2")
BATCH_NORM = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}")


def run(*settings: str):
    return finish(Simulation(tiny("algorithm.name=per-fedavg", *settings)))


class Quadratic(Batch):
    """A batch whose loss is 1/2 (w - c)^T H (w - c), H = diag(1, 3) and c the mean of its inputs."""

    def cross_entropy(self, logits):
        return 0.5 * (torch.tensor([1.0, 3.0]) * (logits - self.inputs.mean(0)).square()).sum()


def test_the_step_on_a_quadratic_loss_in_closed_form():
    """H = diag(1, 3), alpha = 0.1, w = (1, 1), c = (0, 0) on D and (1, 1) on D':

    w~ = w - 0.1 H w = (0.9, 0.7); the step's gradient is H (w~ - (1, 1)) = (-0.1, -0.9), at w~ and not through it.
    (Through it, as in MAML, it would be (I - alpha H) of that: (-0.09, -0.63). Without w~ it would be 0.)
    """
    w = torch.ones(2, requires_grad=True)
    batch = Quadratic(torch.tensor([[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2), torch.zeros(4))

    def network(params, inputs, statistics=""):
        return Output(params["w"], inputs, params["w"])

    found = PerFedAvg(alpha=0.1).loss(network, {"w": w}, batch, Start({}), "")
    assert found.loss.item() == pytest.approx(0.5 * (0.1**2 + 3 * 0.3**2))
    (gradient,) = torch.autograd.grad(found.loss + found.penalty, w)
    assert gradient.tolist() == pytest.approx([-0.1, -0.9])
    # the default of alpha is the learning rate of the round
    found = PerFedAvg().loss(network, {"w": w}, batch._replace(lr=0.1), Start({}), "")
    assert torch.autograd.grad(found.loss, w)[0].tolist() == pytest.approx([-0.1, -0.9])


@pytest.mark.parametrize(("samples", "first", "second"), [(20, 10, 10), (5, 2, 3), (4, 2, 2), (3, 3, 3), (1, 1, 1)])
def test_halves(samples, first, second):
    batch = Batch(torch.arange(samples), torch.arange(samples))
    d, e = halves(batch)
    assert (len(d.inputs), len(e.labels)) == (first, second)
    assert (set(d.inputs.tolist()) & set(e.inputs.tolist()) == set()) == (samples >= 4)
    assert set(d.labels.tolist()) | set(e.labels.tolist()) == set(range(samples))


@dataclass(frozen=True)
class OnSecondHalves(FedAvg):
    """FedAvg that takes twice as many samples, twice, and trains on the second half of them."""

    def passes(self, when, task, start):
        return (Pass(batch_size=20, epochs=2),) if when == "training" else ()

    def loss(self, network, params, batch, start, stage):
        loss = batch.cross_entropy(network(params, batch.inputs).logits) if len(batch.labels) < 4 else None
        if loss is None:
            half = batch._replace(
                inputs=batch.inputs[len(batch.labels) // 2 :], labels=batch.labels[len(batch.labels) // 2 :]
            )
            loss = half.cross_entropy(network(params, half.inputs).logits)
        return Loss(loss, torch.zeros_like(loss))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_an_inner_step_it_is_fedavg_on_the_second_halves(engine):
    plain, events = finish(
        Simulation(tiny(f"algorithm.name={__name__}:OnSecondHalves", f"run.engine={engine}", *SOME))
    )
    ours, other = run("algorithm.alpha=0", f"run.engine={engine}", *SOME)
    assert leaves(ours.server) == leaves(plain.server)
    assert [(e.loss, e.received) for e in other] == [(e.loss, e.received) for e in events]
    assert [e.trained.right for e in other] == [e.received.right for e in other], "a tuning step of rate 0"


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_with_an_inner_step_it_is_another_method(engine):
    """Two plain steps, or an inner step that is not used, would give the same server as without one."""
    without, _ = run("algorithm.alpha=0", f"run.engine={engine}", "train.rounds=1")
    with_it, _ = run(f"run.engine={engine}", "train.rounds=1")
    assert leaves(without.server) != leaves(with_it.server)


def test_as_many_steps_as_fedavg():
    simulation = Simulation(tiny("algorithm.name=per-fedavg", "train.epochs=3"))
    simulation.close()
    ((one,), how) = simulation.algorithm.passes("training", simulation.task, Start({})), simulation.engine.job.how
    assert (one.batch_size, one.epochs) == (20, 6)
    for samples in (40, 100):
        rng = stream(0, "shuffle")
        assert len(batches(samples, how, one, rng)) == len(batches(samples, how, Pass(), rng)) == 3 * samples // 10


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_client_with_fewer_samples_than_two_batches_trains(engine):
    """40 samples in batches of 30: a batch of 60 is all that they have."""
    settings = ("train.batch_size=30", "train.rounds=1", f"run.engine={engine}")
    simulation = Simulation(tiny("algorithm.name=per-fedavg", *settings))
    sizes = [len(shard.train) for shard in simulation.federation.shards.values()]
    assert min(sizes) < 60
    sent = simulation.initial
    progress, _ = finish(simulation)
    assert all(not torch.equal(w, sent[name]) for name, w in progress.server["model"].items())


def test_what_is_measured_is_one_step_on_a_batch_of_training_data_from_what_was_received():
    """w - alpha grad CE(w; one batch of B), the batch drawn from the client's training data; never from its test data."""
    simulation = Simulation(tiny("algorithm.name=per-fedavg", "algorithm.alpha=0.3", "run.engine=loop"))
    for progress, _ in simulation.rounds(simulation.start()):
        pass
    model = simulation.final_model(progress, 2)
    (one,), how = simulation.algorithm.passes("test", simulation.task, Start({})), simulation.engine.job.how
    own = simulation.federation.shards[2].train
    (chosen,) = batches(len(own), how, one, stream(how.seed, "shuffle, test 0", 3, 2))
    assert len(chosen) == 10
    worker, received = worker_of(simulation), progress.server["model"]
    at = {name: w.clone().requires_grad_() for name, w in received.items()}
    inputs, labels = worker.samples.batch(own[chosen])
    loss = torch.nn.functional.cross_entropy(worker.network(at, inputs).logits, labels)
    for name, gradient in zip(at, torch.autograd.grad(loss, list(at.values())), strict=True):
        torch.testing.assert_close(model[name], received[name] - 0.3 * gradient)
    simulation.close()


def test_both_phases_are_recorded_and_no_tuning_step_is_the_received_model():
    _, none = run("algorithm.tuning_steps=0", "run.engine=loop")
    assert [e.trained for e in none] == [e.received for e in none]
    _, tuned = run("run.engine=loop", "algorithm.alpha=0.3")
    assert tuned[-1].trained.accuracy > tuned[-1].received.accuracy


def test_more_tuning_steps_than_batches():
    simulation = Simulation(tiny("algorithm.name=per-fedavg", "algorithm.tuning_steps=100"))
    simulation.close()
    (one,) = simulation.algorithm.passes("test", simulation.task, Start({}))
    assert len(batches(40, simulation.engine.job.how, one, stream(0, "shuffle"))) == 100


@pytest.mark.parametrize("policy", ["average", "local"])
def test_the_tuning_leaves_nothing_behind_and_inner_steps_move_no_statistics(policy):
    norm = (*BATCH_NORM, f"train.batch_norm={policy}", "run.engine=loop")
    often, _ = run(*norm)
    rarely, _ = run(*norm, "run.evaluate_every=2")
    assert leaves(to_tree(often)) == leaves(to_tree(rarely))
    simulation = Simulation(tiny("algorithm.name=per-fedavg", *norm))
    worker = worker_of(simulation)
    worker.load(simulation.initial | simulation.local_statistics)
    worker.model.train()
    batch = Batch(*worker.samples.batch(simulation.federation.shards[0].train[:20]), lr=0.05)
    simulation.algorithm.loss(worker.network, worker.params, batch, Start({}), "")
    assert int(worker.buffers["2.num_batches_tracked"]) == 1, "the forward pass at w~ alone"
    simulation.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["algorithm.alpha=-1"], "alpha and tuning_steps must not be negative"),
        (["algorithm.tuning_steps=-1"], "alpha and tuning_steps must not be negative"),
        (["train.momentum=0.9"], "one of plain SGD: set train.optimizer"),
        (["train.optimizer=adamw"], "one of plain SGD"),
    ],
)
def test_impossible_settings_are_one_sentence_before_round_1(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Simulation(tiny("algorithm.name=per-fedavg", *settings))
