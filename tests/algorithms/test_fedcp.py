"""FedCP: the policy and both heads by hand, what is fixed and what travels, and FedPer as its limiting case."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import nn

from cwfed.algorithms.fedcp import FedCP, PolicyHead, context_of
from cwfed.core import losses
from cwfed.core.errors import ConfigError
from cwfed.core.types import Start
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import Client
from tests.conftest import finish, leaves, small, use_algorithm

SOME = ("train.participation=0.7", "train.client_dropout=0.2")


def set_to(parameter, values):
    with torch.no_grad():
        parameter.copy_(torch.tensor(values))


def test_the_forward_pass_by_hand():
    """A policy that always says (log 3, 0 | 0, 0): r = (3/4, 1/2), s = (1/4, 1/2). For f = (4, 2): P sees (3, 1), G sees (1, 1)."""
    head = PolicyHead(nn.Linear(2, 2))
    set_to(head.policy[0].weight, [[0.0] * 2] * 4)
    set_to(head.policy[0].bias, [0.0] * 4)
    set_to(head.policy[1].bias, [log(3), 0.0, 0.0, 0.0])
    set_to(head.weight, [[1.0, 0.0], [0.0, 1.0]])
    set_to(head.bias, [0.0, 0.0])
    set_to(head.generic.weight, [[1.0, 1.0], [2.0, 0.0]])
    set_to(head.generic.bias, [1.0, 0.0])
    torch.testing.assert_close(head(torch.tensor([[4.0, 2.0]])), torch.tensor([[3.0 + 3.0, 1.0 + 2.0]]))


def test_the_policy_sees_features_times_the_context():
    """u = (3, 4) / 5 from rows (3, 0) and (0, 4)."""
    layer = nn.Linear(2, 2)
    set_to(layer.weight, [[3.0, 0.0], [0.0, 4.0]])
    head = PolicyHead(layer)
    torch.testing.assert_close(head.context.detach(), torch.tensor([0.6, 0.8]))
    f = torch.randn(5, 2)
    both = head.policy(f * torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(head.shares(f)[0], torch.sigmoid(both[:, :2] - both[:, 2:]))


def test_shares_add_up_to_one():
    r, s = PolicyHead(nn.Linear(7, 3)).shares(torch.randn(20, 7))
    torch.testing.assert_close(r + s, torch.ones(20, 7))
    assert r.std() > 0


def test_both_heads_start_as_the_output_layer():
    layer = nn.Linear(4, 3)
    weight = layer.weight.detach().clone()
    head = PolicyHead(layer)
    assert torch.equal(head.weight, weight)
    assert torch.equal(head.generic.weight, weight)
    assert not any(p.requires_grad for p in (*head.generic.parameters(), head.context))


def test_mmd_by_hand():
    """One sample each, 20 log 2 apart (squared): k(a, a) = k(b, b) = 4, k(a, b) = 2^-1 + 2^-2/3 + 2^-1/2 + 2^-1/5."""
    a, b = torch.zeros(1, 1), torch.full((1, 1), (20 * log(2)) ** 0.5)
    assert losses.mmd(a, b).item() == pytest.approx(8 - 2 * sum(2**-x for x in (1, 2 / 3, 1 / 2, 1 / 5)), rel=1e-5)
    # two samples: the mean is over all four pairs, those of a sample with itself included
    a, b = torch.tensor([[0.0], [1e6]]), torch.tensor([[0.0], [-1e6]])
    assert losses.mmd(a, b).item() == pytest.approx((8 + 8 - 2 * 4) / 4)


def test_mmd_of_equal_features_is_nothing_and_pulls_nowhere():
    torch.manual_seed(0)
    features = torch.randn(10, 6, requires_grad=True)
    found = losses.mmd(features, features.detach())
    assert found.item() == 0
    (gradient,) = torch.autograd.grad(found, features)
    assert gradient.abs().max() < 1e-7


class Watched(FedCP):
    """FedCP that notes what its clients begin, minimise and end with."""

    name = "watched"

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        object.__setattr__(self, "seen", {"start": [], "penalty": [], "end": []})

    def begin(self, got, own, data):
        start = super().begin(got, own, data)
        self.seen["start"].append(start)
        return start

    def loss(self, network, params, batch, start, stage):
        found = super().loss(network, params, batch, start, stage)
        self.seen["penalty"].append(found.penalty.item())
        return found

    def finish(self, params, start, data):
        extras = super().finish(params, start, data)
        self.seen["end"].append(({n: w.clone() for n, w in params.items()}, extras))
        return extras


def test_what_is_fixed_what_moves_and_what_goes_up():
    simulation = Simulation(small("algorithm.name=fedcp", "run.engine=loop", "data.clients=1", "train.rounds=2"))
    watched = Watched()
    use_algorithm(simulation, watched)
    rounds = []
    for progress, _ in simulation.rounds(simulation.start()):
        rounds.append(progress)
    simulation.close()
    assert watched.seen["penalty"][0] == 0 < max(watched.seen["penalty"]), "the bodies are equal at the first batch"
    first = rounds[0]
    start, (params, extras) = watched.seen["start"][-1], watched.seen["end"][-1]  # of round 2
    received = first.server["model"]
    fixed = [name for name in params if name.startswith("output.generic.")]
    assert fixed == ["output.generic.weight", "output.generic.bias"]
    assert all(torch.equal(params[name], received[name]) for name in fixed)
    assert start.anchor.keys() == {"fc.weight", "fc.bias"}
    assert all(torch.equal(start.anchor[name], received[name]) for name in start.anchor)
    assert torch.equal(start.params["output.weight"], first.kept[0]["output.weight"])
    for name in ("fc.weight", "output.weight", "output.policy.0.weight", "output.policy.1.bias"):
        assert not torch.equal(params[name], start.params[name]), name
    # the context is that of the head on receipt, also after the training
    assert torch.equal(params["output.context"], context_of(first.kept[0]["output.weight"]))
    assert not torch.equal(params["output.context"], context_of(params["output.weight"]))
    # up goes the mean of both heads; of one client it is the next G
    for kind in ("weight", "bias"):
        mean = (params[f"output.{kind}"] + received[f"output.generic.{kind}"]) / 2
        assert torch.equal(extras[f"output.generic.{kind}"], mean)
        torch.testing.assert_close(rounds[1].server["model"][f"output.generic.{kind}"], mean)


def test_the_head_and_its_context_stay():
    simulation = Simulation(small("algorithm.name=fedcp"))
    simulation.close()
    own = {"output.weight", "output.bias", "output.context"}
    assert set(simulation.kept_names) == own
    assert not own & set(simulation.guard.model)
    assert set(simulation.guard.extras_spec) == {"output.generic.weight", "output.generic.bias"}
    assert simulation.first_state()["model"].keys() == simulation.initial.keys() - own


def without_bias(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes, bias=False))
    model.output_layer = "3"
    return model


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_with_all_features_for_the_own_head_it_is_fedper(engine, monkeypatch):
    settings = (f"model.name={__name__}:without_bias", "model.options={}", f"run.engine={engine}", *SOME)
    fedper, plain = finish(Simulation(small("algorithm.name=fedper", *settings)))
    monkeypatch.setattr(PolicyHead, "shares", lambda self, f: (torch.ones_like(f), torch.zeros_like(f)))
    fedcp, events = finish(Simulation(small("algorithm.name=fedcp", "algorithm.lambda=0", *settings)))
    body = fedper.server["model"]
    assert leaves({n: fedcp.server["model"][n] for n in body}) == leaves(body)
    for client, head in fedper.kept.items():
        assert leaves({n: fedcp.kept[client][n] for n in head}) == leaves(head)
    assert [(e.received, e.loss) for e in events] == [(e.received, e.loss) for e in plain]


def test_nothing_is_drawn_at_the_test_or_in_training():
    """With a Gumbel softmax the same model would have another accuracy each time."""
    head, f = PolicyHead(nn.Linear(6, 4)), torch.randn(8, 6)
    drawn = torch.get_rng_state()
    for mode in (True, False):
        head.train(mode)
        assert torch.equal(head(f), head(f))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_who_sat_out_has_the_new_body_policy_and_head_together():
    simulation = Simulation(small("algorithm.name=fedcp", "run.engine=loop", "train.participation=0.5"))
    *_, (after, event) = simulation.rounds(simulation.start())
    absent = next(c for c in after.kept if c not in event.participants)
    (model,) = simulation.engine.personal(4, after.server, [simulation.visit(absent, after.kept[absent])])
    simulation.close()
    assert all(torch.equal(model[name], w) for name, w in after.server["model"].items())
    assert torch.equal(model["output.weight"], after.kept[absent]["output.weight"])
    assert torch.equal(model["output.context"], context_of(model["output.weight"]))


def test_the_upload_by_hand():
    params = {"layer.weight": torch.tensor([[1.0]]), "layer.generic.weight": torch.tensor([[4.0]])}
    assert FedCP().finish(params, Start({}), Client())["layer.generic.weight"].tolist() == [[2.5]]


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="lambda must not be negative"):
        FedCP(lambda_=-1.0)
    with pytest.raises(ConfigError, match="fedcp has a loss of its own"):
        Simulation(small("algorithm.name=fedcp", "privacy.dp=sample"))
