"""APFL: a mix of parameters, three gradients by hand, and two streams that are FedAvg and Local bit for bit."""

from __future__ import annotations

import pytest
import torch

from cwfed.algorithms.apfl import ALPHA, APFL, MIX
from cwfed.algorithms.twin import OWN, of_twin
from cwfed.core.errors import ConfigError
from cwfed.core.rng import stream
from cwfed.core.types import Batch, Output, Start
from cwfed.engine.worker import batches
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import tiny
from tests.conftest import finish, leaves, worker_of

SOME = ("train.participation=0.7", "train.client_dropout=0.2")
BATCH_NORM = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}")


def run(*settings: str):
    return finish(Simulation(tiny("algorithm.name=apfl", *settings)))


def linear(params, inputs, statistics=""):
    return Output(inputs @ params["w"].T, inputs, params["w"])


def parts(w, v, alpha):
    w, v = (torch.tensor(values).reshape(2, 1).requires_grad_() for values in (w, v))
    alpha = torch.tensor(alpha, requires_grad=True)
    return {"w": w, OWN + "w": v, ALPHA: alpha}


def test_the_three_gradients_by_hand():
    """w = 0, v = (2, 0), alpha = 1/2: u = (1, 0), softmax 0.7310586, so g = grad CE(u) = (-0.2689414, 0.2689414).

    v gets alpha g, alpha gets <v - w, g> = -2 * 0.2689414, w the gradient of CE(w) alone: (-1/2, 1/2).
    """
    params = parts([0.0, 0.0], [2.0, 0.0], 0.5)
    found = APFL().loss(linear, params, Batch(torch.ones(1, 1), torch.tensor([0])), Start({}), "")
    assert (found.loss.item(), found.penalty.item()) == pytest.approx((0.6931472, 0.3132617))
    of_w, of_v, of_alpha = torch.autograd.grad(found.loss + found.penalty, list(params.values()))
    assert of_w.flatten().tolist() == [-0.5, 0.5]
    assert of_v.flatten().tolist() == pytest.approx([-0.1344707, 0.1344707])
    assert of_alpha.item() == pytest.approx(-0.5378828)


def test_parameters_are_mixed_not_logits():
    """A network of two layers, z = b a x: with a, b from 0 and 2 the mix is 1 * 1 = 1; mixed logits would be (0 + 4) / 2 = 2."""

    def product(params, inputs, statistics=""):
        logits = torch.cat([inputs * params["a"] * params["b"], torch.zeros_like(inputs)], 1)
        return Output(logits, inputs, params["b"])

    zero, two = torch.zeros(1), torch.full((1,), 2.0)
    params = {"a": zero, "b": zero, OWN + "a": two, OWN + "b": two, ALPHA: torch.tensor(0.5)}
    found = APFL().loss(product, params, Batch(torch.ones(1, 1), torch.tensor([0])), Start({}), "")
    assert found.penalty.item() == pytest.approx(
        0.3132617
    )  # log(1 + e^-1); of mixed logits log(1 + e^-2) = 0.1269280
    assert APFL().shown(params)["a"].tolist() == [1.0]


@pytest.mark.parametrize("engine", ["loop", "threads", "vmap"])
@pytest.mark.parametrize("chosen", ["algorithm.alpha=0.9", "algorithm.adaptive=false"])
def test_the_w_stream_is_fedavg_whatever_alpha_is(engine, chosen):
    fedavg, plain = finish(Simulation(tiny("algorithm.name=fedavg", f"run.engine={engine}", *SOME)))
    apfl, events = run(chosen, f"run.engine={engine}", *SOME)
    assert leaves(apfl.server) == leaves(fedavg.server)
    assert [(e.loss, e.up, e.down) for e in events] == [(e.loss, e.up, e.down) for e in plain]


@pytest.mark.parametrize("policy", ["average", "local"])
def test_the_w_stream_has_statistics_of_its_own(policy):
    norm = (*BATCH_NORM, f"train.batch_norm={policy}", "run.engine=loop", "train.rounds=2")
    fedavg, _ = finish(Simulation(tiny("algorithm.name=fedavg", *norm)))
    apfl, _ = run(*norm)
    assert leaves(apfl.server) == leaves(fedavg.server)
    kept = apfl.kept[0]
    assert kept[f"{MIX}2.running_mean"].abs().sum() > 0
    if policy == "local":
        assert leaves({n: kept[n] for n in fedavg.kept[0]}) == leaves(fedavg.kept[0])


FIXED = "algorithm.adaptive=false"


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_alpha_of_one_is_local(engine):
    local, alone = finish(Simulation(tiny("algorithm.name=local", f"run.engine={engine}")))
    apfl, events = run("algorithm.alpha=1", FIXED, f"run.engine={engine}")
    assert leaves({c: of_twin(kept) for c, kept in apfl.kept.items()}) == leaves(local.kept)
    assert [e.trained for e in events] == [e.trained for e in alone]
    assert [e.received for e in events] == [e.trained for e in events], "w has no part in either phase"


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_alpha_of_zero_is_fedavg_in_both_phases(engine):
    _, plain = finish(Simulation(tiny("algorithm.name=fedavg", f"run.engine={engine}", *SOME)))
    simulation = Simulation(tiny("algorithm.name=apfl", "algorithm.alpha=0", FIXED, f"run.engine={engine}", *SOME))
    apfl, events = finish(simulation)
    for ours, theirs in zip(events, plain, strict=True):
        assert (ours.received.right, ours.trained.right) == (theirs.received.right, theirs.trained.right)
        # vmap measures a model that all share in other batches than models of their own
        assert engine == "vmap" or (ours.received, ours.trained) == (theirs.received, theirs.trained)
    for kept in apfl.kept.values():
        assert all(torch.equal(w, simulation.initial[n]) for n, w in kept.items()), "v never moves"


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_alpha_moves_in_the_first_batch_of_a_round_and_not_where_v_is_w(engine):
    """Round 1: v = w, no gradient. Round 2: alpha - lr d CE(u) / d alpha at the first batch, before anything else has moved."""
    simulation = Simulation(tiny("algorithm.name=apfl", f"run.engine={engine}", "train.rounds=2"))
    rounds = simulation.rounds(simulation.start())
    before, _ = next(rounds)
    assert all(float(kept[ALPHA]) == 0.5 for kept in before.kept.values())
    expected = {}
    worker, how = worker_of(simulation), simulation.engine.job.how
    for client in (0, 3):
        visit = simulation.visit(client, before.kept[client])
        start = simulation.algorithm.begin(
            simulation.engine.download(before.server, visit), visit.own, worker.view(client, {})
        )
        (one,) = simulation.algorithm.passes("training", simulation.task, start)
        own = simulation.federation.shards[client].train
        first = batches(len(own), how, one, stream(how.seed, "shuffle", 2, client))[0]
        params = {n: w.clone().requires_grad_() for n, w in start.params.items()}
        found = simulation.algorithm.loss(worker.network, params, Batch(*worker.samples.batch(own[first])), start, "")
        (gradient,) = torch.autograd.grad(found.penalty, params[ALPHA])
        expected[client] = 0.5 - 0.05 * float(gradient)
        assert abs(0.05 * float(gradient)) > 1e-6
    after, _ = next(rounds)
    simulation.close()
    for client, alpha in expected.items():
        assert float(after.kept[client][ALPHA]) == pytest.approx(alpha, rel=1e-6)


def test_alpha_is_between_zero_and_one_wherever_it_is_used():
    """alpha = 1.3 after a step is 1: in the rest of the round, in the model that is shown, and where the next round begins."""
    apfl, w, v = APFL(), torch.zeros(2, 1), torch.tensor([[3.0], [1.0]])
    params = {"w": w, OWN + "w": v, ALPHA: torch.tensor(1.3)}
    assert torch.equal(apfl.shown(params)["w"], v)
    assert torch.equal(apfl.mixed(params | {ALPHA: torch.tensor(-0.2)})["w"], w)
    simulation = Simulation(tiny("algorithm.name=apfl", "run.engine=loop"))
    own = {n: simulation.initial[n] for n in simulation.kept_names} | {ALPHA: torch.tensor(1.3)}
    got = simulation.algorithm.send(simulation.start().server, 0)
    assert float(simulation.algorithm.begin(got, own, None).params[ALPHA]) == 1.0
    simulation.close()
    alpha = torch.tensor(1.0, requires_grad=True)  # at the bound it still has a gradient, so it can come back
    found = apfl.loss(
        linear, {"w": w, OWN + "w": v, ALPHA: alpha}, Batch(torch.ones(1, 1), torch.tensor([1])), Start({}), ""
    )
    assert torch.autograd.grad(found.penalty, alpha)[0].item() > 0.1


def test_received_is_the_mix_with_the_received_w_and_v_is_not_overwritten():
    simulation = Simulation(tiny("algorithm.name=apfl", "run.engine=loop", "train.participation=0.5"))
    for progress, event in simulation.rounds(simulation.start()):
        pass
    out = next(c for c in progress.kept if c not in event.participants)
    w = progress.server["model"]
    for client in (out, event.participants[0]):
        kept = progress.kept[client]
        model, alpha = simulation.final_model(progress, client), float(kept[ALPHA])
        for name, v in of_twin({n: t for n, t in kept.items() if n != ALPHA}).items():
            torch.testing.assert_close(model[name], alpha * v + (1 - alpha) * w[name])
            assert not torch.equal(v, model[name])
    simulation.close()


def test_the_mix_is_measured_with_statistics_of_its_own():
    simulation = Simulation(
        tiny("algorithm.name=apfl", "run.engine=loop", "train.rounds=1", *BATCH_NORM, "train.batch_norm=local")
    )
    progress, _ = finish(simulation)
    again = Simulation(tiny("algorithm.name=apfl", "run.engine=loop", *BATCH_NORM, "train.batch_norm=local"))
    model = again.final_model(progress, 1)
    again.close()
    assert torch.equal(model["2.running_mean"], progress.kept[1][f"{MIX}2.running_mean"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["algorithm.alpha=1.5"], "alpha must be from 0 to 1, it is 1.5"),
        (["algorithm.alpha=-0.1"], "alpha must be from 0 to 1"),
        (["train.momentum=0.5"], "alpha moves by its gradient alone"),
        (["train.clip=1"], "without momentum, weight decay and clipping"),
    ],
)
def test_impossible_settings_are_one_sentence_before_round_1(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Simulation(tiny("algorithm.name=apfl", *settings))
    if settings[0].startswith("train."):
        Simulation(tiny("algorithm.name=apfl", FIXED, *settings)).close()
