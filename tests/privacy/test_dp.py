"""Differential privacy: clipping, noise, sampling and accounting against slow twins; and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from torch import nn

from cwfed.algorithms import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.rng import stream
from cwfed.core.types import Batch, Start
from cwfed.engine.private import PrivateWorker
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from cwfed.privacy import dp
from cwfed.privacy.dp import SamplePrivacy
from cwfed.privacy.noise import FromSystem, Seeded
from cwfed.runs import session
from tests.conftest import finish, leaves, small, worker_of

INFINITE = float("inf")


def how(clip=1.0, noise=0.0, delta=1e-5, histogram=0.0):
    return SamplePrivacy(clip, noise, delta, histogram)


def private(*settings):
    return Simulation(small("privacy.dp=sample", "algorithm.name=fedavg", *settings))


# --- the mathematics


def test_clipping_by_hand():
    """Sample 0 has the gradient (3; 0, 4) of norm 5, sample 1 (0; 0.3, 0.4) of norm 0.5; clipped at 1, over both tensors together."""
    gradients = [torch.tensor([[3.0], [0.0]]), torch.tensor([[0.0, 4.0], [0.3, 0.4]])]
    first, second = dp.private_sum(gradients, how(1.0), torch.zeros_like)
    assert first.tolist() == pytest.approx([0.6])
    assert second.tolist() == pytest.approx([0.3, 0.8 + 0.4])


@pytest.mark.parametrize("source", [Seeded(0), FromSystem(np.zeros)], ids=["seed", "system"])
def test_noise_has_the_deviation_clip_times_multiplier(source):
    normals = source.normals(torch.device("cpu"), 1, 2)
    (drawn,) = dp.private_sum([torch.zeros(0, 200, 500)], how(clip=0.5, noise=3.0), normals)
    assert float(drawn.std()) == pytest.approx(1.5, rel=0.01)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02)


@pytest.fixture
def worker():
    simulation = private("model.name=cnn", "model.options={hidden=16}", "run.engine=loop")
    worker = worker_of(simulation)
    worker.load(simulation.initial)
    worker.model.train()
    yield worker
    simulation.close()


def a_batch(worker, size=7):
    return worker.samples.batch(worker.federation.shards[0].train[:size])


def test_per_sample_gradients_are_those_of_each_sample_alone(worker):
    inputs, labels = a_batch(worker)
    each, losses = worker.per_sample(inputs, labels)
    for i in range(len(labels)):
        loss = F.cross_entropy(worker.model(inputs[i : i + 1]), labels[i : i + 1])
        slow = torch.autograd.grad(loss, list(worker.params.values()))
        torch.testing.assert_close([g[i] for g in each], list(slow))
        torch.testing.assert_close(losses[i], loss.detach())


def test_without_noise_and_bounds_it_is_plain_sgd(worker):
    worker.privacy = how(INFINITE, 0.0)
    inputs, labels = a_batch(worker)
    leaves_ = list(worker.params.values())
    loss, _, gradients = worker.gradients(FedAvg(), Batch(inputs, labels), Start({}), "", len(labels), leaves_)
    plain = F.cross_entropy(worker.model(inputs), labels)
    torch.testing.assert_close(list(gradients), list(torch.autograd.grad(plain, leaves_)))
    torch.testing.assert_close(loss, plain.detach())


def test_one_sample_moves_the_sum_by_at_most_the_clip(worker):
    """The sensitivity that the accountant assumes, on a real network."""
    worker.privacy = how(0.01, 0.0)
    inputs, labels = a_batch(worker, 8)
    whole, without = (
        dp.private_sum(worker.per_sample(inputs[:n], labels[:n])[0], worker.privacy, torch.zeros_like) for n in (8, 7)
    )
    moved = torch.stack([(a - b).square().sum() for a, b in zip(whole, without, strict=True)]).sum().sqrt()
    assert 0.0099 < float(moved) < 0.0101  # its gradient is longer than the clip


def test_poisson_batches():
    drawn = dp.poisson_batches(100, 10, 300, stream(0, "poisson"))
    assert len(drawn) == 300 * 10
    sizes = np.array([len(batch) for batch in drawn])
    assert sizes.mean() == pytest.approx(10, rel=0.03)
    assert sizes.var() == pytest.approx(100 * 0.1 * 0.9, rel=0.1)  # of a binomial distribution: not of fixed batches
    assert [len(batch) for batch in dp.poisson_batches(5, 10, 2, stream(0, "poisson"))] == [5, 5]


def test_an_empty_batch_is_noise_alone(worker):
    each, losses = worker.per_sample(*a_batch(worker, 0))
    assert [tuple(g.shape) for g in each] == [(0, *p.shape) for p in worker.params.values()]
    assert float(losses.sum()) == 0


def test_epsilon_is_opacus_own():
    """60 samples in batches of 6, 2 epochs, 7 rounds: rate 0.1, 7 * 2 * 10 steps."""
    accountant = RDPAccountant()
    for _ in range(140):
        accountant.step(noise_multiplier=1.1, sample_rate=0.1)
    spent = dp.spent(how(noise=1.1, histogram=0.5), {3: (7, 60)}, batch_size=6, epochs=2)
    assert spent.epsilon == {"3": pytest.approx(accountant.get_epsilon(1e-5) + 0.5)}
    assert dp.spent(how(noise=0.0), {3: (7, 60)}, 6, 2).epsilon == {"3": None}
    assert "nothing is guaranteed" in dp.promise(dp.spent(how(noise=0.0), {3: (7, 60)}, 6, 2), 7)


def test_histogram_by_hand():
    counts = np.array([5, 1, 0])
    noisy = dp.noisy_histogram(counts, np.array([1.0, -3.0, 0.5]), how(histogram=0.5))
    assert noisy.tolist() == [7, 0, 1]  # noise of scale 1 / 0.5; nothing below 0
    assert dp.noisy_histogram(counts, np.array([-3.0, -1, 0]), how(histogram=0.5)).tolist() == [1, 1, 1]
    once = how(histogram=1.0).class_counts(counts, Seeded(0), 4)
    assert torch.equal(
        once, how(histogram=1.0).class_counts(counts, Seeded(0), 4)
    )  # the same in every round: spent once
    assert not torch.equal(once, how(histogram=1.0).class_counts(counts, Seeded(0), 5))


def test_trainings_of_different_kinds_add_up_in_the_accountant():
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.1, 20), (2.0, 0.5, 10)]
    both = dp.dp_sgd_epsilon(((1.0, 0.1, 20), (2.0, 0.5, 10)), 1e-5)
    assert both == pytest.approx(accountant.get_epsilon(1e-5))
    assert both > dp.dp_sgd_epsilon(((1.0, 0.1, 20),), 1e-5)
    assert dp.dp_sgd_epsilon(((1.0, 0.1, 20), (0.0, 0.1, 1)), 1e-5) is None


def test_a_simulation_that_would_pass_the_budget_does_not_begin():
    within = private("privacy.dp_budget=1000").spent(3)
    largest = max(within.epsilon.values())
    with pytest.raises(
        ConfigError, match=r"privacy.dp_budget = 1, but epsilon of client \d would be \d+\.\d\d after"
    ):
        private("privacy.dp_budget=1")
    private(f"privacy.dp_budget={largest + 0.001}").close()
    with pytest.raises(ConfigError, match="would be without bound"):
        private("privacy.dp_budget=1000", "privacy.dp_noise=0")


# --- runs


def test_same_bits_for_any_number_of_workers_and_other_bits_for_another_seed():
    def outcome(*settings):
        progress, events = finish(private(*settings))
        return leaves(to_tree(progress)), [e.loss for e in events]

    loop = outcome("run.engine=loop")
    assert outcome("run.engine=threads", "run.workers=3") == loop
    assert outcome("run.engine=loop", "run.seed=1") != loop


def test_summary_has_epsilon_for_who_took_part(tmp_path):
    settings = ["privacy.dp=sample", "privacy.dp_histogram=0.5", "train.participation=0.5", "train.rounds=2"]
    summary = session.run(small(*settings), tmp_path / "run")
    spent = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert spent == summary["privacy"]
    assert spent["epsilon"] == max(spent["per_client"].values())
    assert (spent["delta"], spent["histogram_epsilon"]) == (1e-5, 0.5)
    took_part = {str(c) for e in finish(Simulation(small(*settings)))[1] for c in e.participants}
    assert spent["per_client"].keys() == took_part
    assert "differential privacy of every sample: epsilon" in summary["notes"][0]
    assert "a simulation: its noise comes from run.seed" in summary["notes"][0]
    assert summary["privacy"]["known"] == dp.SIMULATED
    more = session.run(small(*settings[:3], "train.rounds=4"), tmp_path / "run", resume=True)
    assert more["privacy"]["epsilon"] > spent["epsilon"]
    assert "privacy" not in session.run(small())


def test_auto_picks_an_engine_that_can(tmp_path):
    simulation = private()
    assert simulation.engine.name == "loop"  # without dp it is vmap
    assert isinstance(worker_of(simulation), PrivateWorker)
    simulation.close()
    with pytest.raises(ConfigError, match=r"vmap.*has no gradients sample by sample"):
        private("run.engine=vmap")


def with_dropout(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, classes))
    model.output_layer = "3"
    return model


@dataclass(frozen=True)
class CountsLabels(FedAvg):
    """A user's algorithm that would leak labels past the clipping."""

    def penalty(self, params, output, labels, start):
        return output.weight.sum() * labels.float().mean()


@dataclass(frozen=True)
class PicksLogits(FedAvg):
    def penalty(self, params, output, labels, start):
        return output.weight[labels].sum()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([f"algorithm.name={__name__}:CountsLabels"], "the penalty of CountsLabels looks at whole batches"),
        ([f"algorithm.name={__name__}:PicksLogits"], "the penalty of PicksLogits looks at whole batches"),
        (["algorithm.name=cwfedavg"], "set privacy.dp_histogram"),
        (
            ["algorithm.name=cwfedavg", "algorithm.wdr=0", "algorithm.distribution=empirical"],
            "set privacy.dp_histogram",
        ),
        (["algorithm.name=feduv"], "the penalty of FedUV looks at whole batches"),
        (["algorithm.name=cwfedavg", "algorithm.wdr=0", "algorithm.objective.name=feduv"], "looks at whole batches"),
        (["algorithm.name=ifca"], "asks its clients for losses"),
        (["algorithm.name=fedfomo"], "asks its clients for losses"),
        (["algorithm.name=fednh"], "asks its clients for mean features"),
        (["model.name=resnet18", "model.options={}"], "BatchNorm"),
        ([f"model.name={__name__}:with_dropout", "model.options={}"], "has no gradient sample by sample"),
        (["train.precision=bf16"], "fp32 only"),
    ],
)
def test_what_would_break_the_promise_is_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        private(*settings)


def test_embeddings_are_refused():
    with pytest.raises(ConfigError, match="embeddings"):
        dp.check_model(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)))


@pytest.mark.parametrize("name", ["fedprox", "fedamp", "cfl", "local", "fedavg-ft", "cwfedavg"])
def test_methods_that_only_train_can_be_private(name):
    _, events = finish(private(f"algorithm.name={name}", "privacy.dp_histogram=1", "train.rounds=1"))
    assert events[-1].spent is not None
    assert all(epsilon > 1 for epsilon in events[-1].spent.epsilon.values())
