"""Ditto: two streams, each bit for bit what it must be."""

from __future__ import annotations

import pytest
import torch

from cwfed.algorithms.ditto import Ditto
from cwfed.algorithms.twin import OWN, of_twin
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Output, Start
from cwfed.engine import Candidate, Visit
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small

SOME = ("train.participation=0.7", "train.client_dropout=0.2")


@pytest.mark.parametrize("engine", ["loop", "threads", "vmap"])
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_the_global_stream_is_fedavg_whatever_lambda_is(engine, strength):
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", f"run.engine={engine}", *SOME)))
    ditto, events = finish(
        Simulation(small("algorithm.name=ditto", f"algorithm.lambda={strength}", f"run.engine={engine}", *SOME))
    )
    assert leaves(ditto.server) == leaves(fedavg.server)
    assert [e.received.right for e in events] == [e.received.right for e in plain]
    if engine != "vmap":  # it measures a model that all share in other batches than models of their own
        assert [e.received for e in events] == [e.received for e in plain]
    assert [(e.up, e.down) for e in events] == [(e.up, e.down) for e in plain]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_a_pull_the_personal_model_is_local(engine):
    local, alone = finish(Simulation(small("algorithm.name=local", f"run.engine={engine}", *SOME)))
    ditto, events = finish(
        Simulation(small("algorithm.name=ditto", "algorithm.lambda=0", f"run.engine={engine}", *SOME))
    )
    own = {client: of_twin(kept) for client, kept in ditto.kept.items()}
    assert leaves(own) == leaves(local.kept)
    # a client that never took part has the received model here and the initial one there
    assert events[-1].trained.right != alone[-1].received.right or events[-1].trained == alone[-1].trained


def linear(params, inputs, statistics=""):
    """A network of one layer: logits = inputs W^T."""
    return Output(inputs @ params["w"].T, inputs, params["w"])


def test_the_loss_and_its_gradient_by_hand():
    """Two classes, logits (w0, w1) for the input 1: at w = 0 the gradient of CE for label 0 is (-1/2, 1/2)."""
    ditto = Ditto(lambda_=0.5)
    w = torch.zeros(2, 1, requires_grad=True)
    v = torch.tensor([[2.0], [2.0]], requires_grad=True)  # equal logits again: the same gradient of CE
    start = Start({}, anchor={"w": torch.tensor([[1.0], [0.0]])})
    found = ditto.loss(linear, {"w": w, OWN + "w": v}, Batch(torch.ones(1, 1), torch.tensor([0])), start, "")
    assert found.loss.item() == pytest.approx(0.6931472)
    # ln 2 + 0.5 / 2 * ((2 - 1)^2 + (2 - 0)^2)
    assert found.penalty.item() == pytest.approx(0.6931472 + 0.25 * 5)
    of_w, of_v = torch.autograd.grad(found.loss + found.penalty, (w, v))
    assert of_w.flatten().tolist() == [-0.5, 0.5]
    assert of_v.flatten().tolist() == [-0.5 + 0.5 * 1, 0.5 + 0.5 * 2]  # + lambda (v - w_received)


def test_a_pull_of_one_over_the_rate_forgets_where_it_was():
    """lr lambda = 1: v' = w_received - lr grad CE(v), whatever v was."""
    ditto, lr = Ditto(lambda_=10.0), 0.1
    received = torch.tensor([[1.0], [0.0]])
    v = torch.tensor([[5.0], [5.0]], requires_grad=True)
    params = {"w": torch.zeros(2, 1, requires_grad=True), OWN + "w": v}
    found = ditto.loss(linear, params, Batch(torch.ones(1, 1), torch.tensor([0])), Start({}, {"w": received}), "")
    (gradient,) = torch.autograd.grad(found.loss + found.penalty, v)
    torch.testing.assert_close(v - lr * gradient, received - lr * torch.tensor([[-0.5], [0.5]]))


def test_without_a_gradient_the_personal_model_comes_nearer_by_the_same_factor_each_step():
    """lr lambda = 1/2: v - w is halved, exactly, and w stays."""
    ditto, lr = Ditto(lambda_=2.0), 0.25
    received = torch.tensor([[1.0], [0.0]])
    v, w = torch.tensor([[5.0], [-8.0]], requires_grad=True), received.clone().requires_grad_()

    def constant(params, inputs, statistics=""):
        return Output(0 * inputs @ params["w"].T, inputs, params["w"])

    for factor in (0.5, 0.25, 0.125):
        batch = Batch(torch.ones(1, 1), torch.tensor([0]))
        found = ditto.loss(constant, {"w": w, OWN + "w": v}, batch, Start({}, {"w": received}), "")
        for p, gradient in zip((w, v), torch.autograd.grad(found.loss + found.penalty, (w, v)), strict=True):
            p.data -= lr * gradient
        assert (v - received).flatten().tolist() == [factor * 4, factor * -8]
    assert torch.equal(w, received)


def test_reported_is_the_personal_model_also_where_the_global_one_is_better():
    """A public version reports the better of both; among clients that are alike that is the global model."""
    simulation = Simulation(small("algorithm.name=ditto", "run.engine=loop", "train.rounds=2", "data.partition=iid"))
    *_, (progress, event) = simulation.rounds(simulation.start())
    own = [Candidate(Visit(c), of_twin(kept) | kept) for c, kept in sorted(progress.kept.items())]
    common = [Candidate(Visit(c), progress.server["model"] | kept) for c, kept in sorted(progress.kept.items())]
    found = [[s.test_right for s in simulation.engine.measure(models)] for models in (own, common)]
    simulation.close()
    assert [event.trained.right, event.received.right] == found
    assert sum(found[0]) < sum(found[1]), "a test that could see it"
    assert simulation.algorithm.phase == "trained"


def test_the_anchor_is_what_was_received_not_what_is_trained():
    """A strong pull: the personal model ends near the received model, which the common one has left."""
    held, _ = finish(Simulation(small("algorithm.name=ditto", "algorithm.lambda=15", "train.rounds=1")))
    simulation = Simulation(small("algorithm.name=ditto"))
    simulation.close()
    received, moved = simulation.initial, held.server["model"]
    far = sum(float((moved[n] - received[n]).norm()) for n in moved)
    for kept in held.kept.values():
        near = sum(float((w - received[n]).norm()) for n, w in of_twin(kept).items())
        assert near < far


def test_a_personal_model_is_saved_without_the_common_one():
    simulation = Simulation(small("algorithm.name=ditto"))
    progress, _ = finish(simulation)
    model = simulation.final_model(progress, 2)
    assert leaves(model) == leaves(of_twin(progress.kept[2]))


def test_running_statistics_of_both_models_are_their_own():
    batch_norm = (
        "model.name=tests.engine.test_engines:with_batch_norm",
        "model.options={}",
        "train.batch_norm=average",
    )
    for engine in ("loop", "vmap"):
        fedavg, _ = finish(Simulation(small("algorithm.name=fedavg", f"run.engine={engine}", *batch_norm)))
        ditto, _ = finish(Simulation(small("algorithm.name=ditto", f"run.engine={engine}", *batch_norm)))
        local, _ = finish(Simulation(small("algorithm.name=local", f"run.engine={engine}", *batch_norm)))
        alone, _ = finish(
            Simulation(small("algorithm.name=ditto", "algorithm.lambda=0", f"run.engine={engine}", *batch_norm))
        )
        assert leaves(ditto.server) == leaves(fedavg.server)
        assert leaves({c: of_twin(kept) for c, kept in alone.kept.items()}) == leaves(local.kept)


def test_impossible_settings():
    with pytest.raises(ConfigError, match="lambda must not be negative"):
        Ditto(lambda_=-1)
    with pytest.raises(ConfigError, match=r"train\.lr times lambda must be below 2.* it is 0\.05 \* 40: lower one"):
        Simulation(small("algorithm.name=ditto", "algorithm.lambda=40"))
    Simulation(small("algorithm.name=ditto", "algorithm.lambda=39")).close()


def test_the_personal_model_has_its_own_statistics_also_where_they_stay_with_the_client():
    batch_norm = (
        "model.name=tests.engine.test_engines:with_batch_norm",
        "model.options={}",
        "train.batch_norm=local",
    )
    simulation = Simulation(small("algorithm.name=ditto", "algorithm.lambda=0", "train.rounds=2", *batch_norm))
    progress, events = finish(simulation)
    _, alone = finish(Simulation(small("algorithm.name=local", "train.rounds=2", *batch_norm)))
    model = simulation.final_model(progress, 1)
    assert torch.equal(model["2.running_mean"], progress.kept[1]["own.2.running_mean"])
    assert not torch.equal(model["2.running_mean"], progress.kept[1]["2.running_mean"])
    assert [e.trained for e in events] == [e.trained for e in alone]
