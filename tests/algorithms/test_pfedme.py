"""pFedMe: inner steps and the step of w by hand, what is measured, and its limiting cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from cwfed.algorithms.pfedme import PFedMe
from cwfed.algorithms.twin import OWN, of_twin
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Output, Start, Uploads
from cwfed.engine import Candidate, Visit
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import model, task, tiny, uploads
from tests.conftest import finish, leaves, worker_of

SOME = ("train.participation=0.7", "train.client_dropout=0.2")
BATCH_NORM = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}")


def run(*settings: str):
    return finish(Simulation(tiny("algorithm.name=pfedme", *settings)))


def linear(params, inputs, statistics=""):
    """A network of one layer: logits = inputs W^T."""
    return Output(inputs @ params["w"].T, inputs, params["w"])


def step(pfedme: PFedMe, w, theta, lr):
    """w and theta after the step of one batch: a sample 1 of class 0."""
    w, theta = (torch.tensor(values).reshape(2, 1).requires_grad_() for values in (w, theta))
    batch = Batch(torch.ones(1, 1), torch.tensor([0]), lr=lr)
    found = pfedme.loss(linear, {"w": w, OWN + "w": theta}, batch, Start({}), "")
    gradients = torch.autograd.grad(found.loss + found.penalty, (w, theta))
    return *(
        torch.round(p.detach() - g, decimals=6).flatten().tolist() for p, g in zip((w, theta), gradients, strict=True)
    ), found


def test_one_inner_step_by_hand():
    """At theta = (1, 1) logits are equal: the gradient of CE is (-0.5, 0.5), the pull lambda (theta - w) is (2, 2).

    theta' = 1 - 0.1 (-0.5 + 2) = 0.85 and 1 - 0.1 (0.5 + 2) = 0.75; w' = 0 + 0.1 * 2 * theta' = 0.17 and 0.15.
    """
    w, theta, found = step(PFedMe(lambda_=2.0, steps=1, rate=0.1), [0.0, 0.0], [1.0, 1.0], lr=0.1)
    assert theta == pytest.approx([0.85, 0.75])
    assert w == pytest.approx([0.17, 0.15])
    # 1/2 (0.15^2 + 0.25^2) + lr lambda / 2 (0.85^2 + 0.75^2); the loss is CE(theta') = log(1 + e^-0.1)
    assert found.penalty.item() == pytest.approx(0.5 * (0.0225 + 0.0625) + 0.1 * (0.7225 + 0.5625))
    assert found.loss.item() == pytest.approx(0.6443967)


def test_two_inner_steps_on_the_same_batch_by_hand():
    """The second: softmax of (0.85, 0.75) is 0.5249792, so CE's gradient is (-0.4750208, 0.4750208); the pull 2 theta."""
    w, theta, _ = step(PFedMe(lambda_=2.0, steps=2, rate=0.1), [0.0, 0.0], [1.0, 1.0], lr=0.1)
    expected = [0.85 - 0.1 * (-0.4750208 + 1.7), 0.75 - 0.1 * (0.4750208 + 1.5)]
    assert theta == pytest.approx(expected, abs=1e-6)
    assert w == pytest.approx([0.2 * t for t in expected], abs=1e-6)


def test_decay_and_restart_by_hand():
    """decay 0.5 adds 0.5 theta = 0.5 to the gradient; restarted at w = 0, theta' = -0.1 (-0.5, 0.5)."""
    _, theta, _ = step(PFedMe(lambda_=2.0, steps=1, rate=0.1, decay=0.5), [0.0, 0.0], [1.0, 1.0], lr=0.1)
    assert theta == pytest.approx([0.80, 0.70])
    _, theta, _ = step(PFedMe(lambda_=2.0, steps=1, rate=0.1, restart=True), [0.0, 0.0], [1.0, 1.0], lr=0.1)
    assert theta == pytest.approx([0.05, -0.05])


def test_the_server_goes_beyond_the_mean_but_not_with_running_statistics():
    """beta = 2: (1 - 2) w + 2 mean. A variance beyond the mean could be negative."""
    up = uploads([0, 1], [[1.0], [3.0]], counts=[1, 3])  # mean 2.5
    state = {"model": model(1.0), "parameters": ["w"]}
    assert PFedMe(beta=2.0).aggregate(state, up)["model"]["w"].tolist() == [2 * 2.5 - 1.0]
    assert PFedMe(beta=0.5).aggregate(state, up)["model"]["w"].tolist() == [1.75]
    assert PFedMe(beta=2.0).aggregate(state | {"parameters": []}, up)["model"]["w"].tolist() == [2.5]
    initial = PFedMe().init(lambda _: model(1.0) | {"mean": torch.zeros(1), OWN + "w": torch.ones(1)}, task(2))
    assert (list(initial["model"]), initial["parameters"]) == (["w", "mean"], ["w"])


@dataclass(frozen=True)
class Watching(PFedMe):
    """pFedMe that shows what its server was sent."""

    sent: ClassVar[list[Uploads]] = []

    def aggregate(self, state, up):
        self.sent.append(up)
        return super().aggregate(state, up)


def watched(*settings: str):
    """Initial model, progress, events and uploads of a run."""
    Watching.sent.clear()
    simulation = Simulation(tiny(f"algorithm.name={__name__}:Watching", *settings))
    return simulation.initial, *finish(simulation), list(Watching.sent)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("off", ["algorithm.beta=0", "algorithm.steps=0", "algorithm.lambda=0"])
def test_what_leaves_w_where_it_is(off, engine):
    """beta = 0: the server never moves. K = 0: nothing moves. lambda = 0: w_i is the received w."""
    initial, progress, _, (up,) = watched(off, f"run.engine={engine}", "train.rounds=1")
    for name, w in up.models.items():
        assert all(torch.equal(one, initial[name]) for one in w) == (off != "algorithm.beta=0")
    if off == "algorithm.beta=0":
        assert all(torch.equal(w, initial[name]) for name, w in progress.server["model"].items())
    stayed = all(torch.equal(w, initial[name]) for kept in progress.kept.values() for name, w in kept.items())
    assert stayed == (off == "algorithm.steps=0")


@pytest.mark.parametrize("engine", ["loop", "threads", "vmap"])
def test_one_inner_step_and_a_pull_of_one_over_the_rate_is_fedavg(engine):
    """K = 1, lr lambda = 1, beta = 1: w_i = theta at every batch, and theta takes FedAvg's steps.

    (With w_i moved once per epoch, or theta pulled towards itself, or w_i left behind, it is not.)
    """
    one = ("algorithm.steps=1", "algorithm.lambda=20", "algorithm.rate=0.04")
    pfedme, _ = run(*one, "train.lr=0.05", f"run.engine={engine}", *SOME)
    fedavg, _ = finish(Simulation(tiny("algorithm.name=fedavg", "train.lr=0.04", f"run.engine={engine}", *SOME)))
    for name, w in fedavg.server["model"].items():
        torch.testing.assert_close(pfedme.server["model"][name], w, rtol=1e-4, atol=1e-5)


def test_without_a_pull_theta_is_plain_sgd_from_what_was_received():
    """lambda = 0, K = 1: after one round theta_i is the model that FedAvg's client trains with that rate."""
    pfedme, _ = run(
        "algorithm.steps=1", "algorithm.lambda=0", "algorithm.rate=0.04", "train.rounds=1", "run.engine=loop"
    )
    tuned, _ = finish(
        Simulation(tiny("algorithm.name=fedavg-ft", "train.lr=0.04", "train.rounds=1", "run.engine=loop"))
    )
    for client, kept in tuned.kept.items():
        for name, w in kept.items():
            torch.testing.assert_close(pfedme.kept[client][OWN + name], w, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_of_w_follows_the_schedule():
    """A rate that falls to (nearly) nothing in round 2 leaves w where round 1 put it; theta trains on."""
    falls = (
        "train.schedule=step",
        "train.decay_every=1",
        "train.decay=1e-12",
        "run.engine=vmap",
        "algorithm.steps=2",
    )
    once, _ = run("train.rounds=1", *falls)
    twice, _ = run("train.rounds=2", *falls)
    for name, w in once.server["model"].items():
        torch.testing.assert_close(twice.server["model"][name], w, rtol=1e-5, atol=1e-6)
    assert not torch.equal(once.kept[0][OWN + "output.weight"], twice.kept[0][OWN + "output.weight"])


def test_theta_is_measured_not_w_nor_what_was_received_nor_the_initial_model():
    rate = "algorithm.rate=0.05"
    initial, progress, events, (*_, up) = watched("run.engine=loop", rate)
    simulation = Simulation(tiny("algorithm.name=pfedme", "run.engine=loop", rate))
    theta = simulation.final_model(progress, 2)
    assert leaves(theta) == leaves(of_twin(progress.kept[2]))
    for other in (initial, {n: w[2] for n, w in up.models.items()}, progress.server["model"]):
        assert not torch.allclose(theta["output.weight"], other["output.weight"], atol=1e-4)
    candidates = [Candidate(Visit(c), initial | of_twin(kept)) for c, kept in sorted(progress.kept.items())]
    scores = simulation.engine.measure(candidates)
    simulation.close()
    assert events[-1].trained.right == [score.test_right for score in scores]
    assert events[-1].trained.accuracy > events[-1].received.accuracy + 0.1


@pytest.mark.parametrize("policy", ["average", "local"])
def test_running_statistics_move_once_a_batch(policy):
    """K inner steps do not move them: after a batch the count of batches is 1."""
    simulation = Simulation(
        tiny("algorithm.name=pfedme", "run.engine=loop", *BATCH_NORM, f"train.batch_norm={policy}")
    )
    worker, algorithm = worker_of(simulation), simulation.algorithm
    worker.load(simulation.initial | simulation.local_statistics)
    worker.model.train()
    batch = Batch(*worker.samples.batch(simulation.federation.shards[0].train[:10]), lr=0.05)
    algorithm.loss(worker.network, worker.params, batch, Start({}), "")
    assert int(worker.buffers["2.num_batches_tracked"]) == 1
    assert not [name for name in worker.buffers if name.startswith(OWN)], "w and theta share them"
    simulation.close()
    few = ("train.rounds=1", "algorithm.steps=2", "algorithm.rate=0.05")
    progress, events = run("run.engine=loop", *BATCH_NORM, f"train.batch_norm={policy}", *few)
    assert not torch.equal(progress.kept[0]["2.running_mean"], torch.zeros_like(progress.kept[0]["2.running_mean"]))
    assert events[-1].trained.accuracy > 0.5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["algorithm.rate=0.2", "algorithm.lambda=10"], r"rate times lambda must be below 2.* it is 0\.2 \* 10"),
        (["train.lr=0.1", "algorithm.lambda=11"], r"train\.lr times lambda must be at most 1.* it is 0\.1 \* 11"),
        (["algorithm.steps=-1"], "must not be negative"),
        (["algorithm.rate=0"], "rate must be above 0"),
        (["algorithm.beta=-1"], "must not be negative"),
        (["train.momentum=0.9"], 'pfedme: .*set train.optimizer = "sgd" without momentum'),
        (["train.weight_decay=0.1"], "without momentum, weight decay and clipping"),
        (["train.optimizer=adam"], 'set train.optimizer = "sgd"'),
        (["train.clip=1"], "weight decay and clipping"),
        (["privacy.dp=sample"], "has a loss of its own"),
    ],
)
def test_impossible_settings_are_one_sentence_before_round_1(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Simulation(tiny("algorithm.name=pfedme", *settings))
