"""MOON: the term and its gradient by hand, and where it is FedAvg."""

from __future__ import annotations

import math

import pytest
import torch

from cwfed.algorithms.moon import PREVIOUS, RECEIVED, Moon
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Output, Start
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import tiny
from tests.conftest import finish, leaves


def network(params, inputs, statistics=""):
    """Features are inputs times w, coordinate by coordinate; the logits are not looked at."""
    return Output(torch.zeros(len(inputs), 2), inputs * params["w"], torch.zeros(2, 2))


def loss_of(w, received, previous, **settings):
    params = {"w": torch.tensor(w, requires_grad=True)}
    anchor = {RECEIVED + "w": torch.tensor(received), PREVIOUS + "w": torch.tensor(previous)}
    batch = Batch(torch.tensor([[1.0, 1.0]]), torch.tensor([0]))
    return params["w"], Moon(**settings).loss(network, params, batch, Start({}, anchor), "")


def test_the_term_and_its_gradient_by_hand():
    """z = (1, 1), received (1, 0), previous (0, 2): both cosines are 1 / sqrt(2), so the term is log 2.

    d cos(z, a) / dz = (a / |a| - cos z / |z|) / |z| = ((1, 0) - (1/2, 1/2)) / sqrt(2), for the previous model the opposite; with
    softplus' = 1/2 and tau = 0.5 the gradient is 3 * 1/2 * 2 * (-1/2 - 1/2, 1/2 + 1/2) / sqrt(2) = 3 (-1, 1) / sqrt(2).
    """
    w, found = loss_of([1.0, 1.0], [1.0, 0.0], [0.0, 2.0], mu=3.0)
    assert found.loss.item() == pytest.approx(math.log(2))  # of two logits that are 0
    assert found.penalty.item() == pytest.approx(3 * math.log(2))
    (gradient,) = torch.autograd.grad(found.penalty, w)
    assert gradient.tolist() == pytest.approx([-3 / 2**0.5, 3 / 2**0.5])


def test_nearer_to_the_received_model_is_cheaper():
    """cos = 1 with the received, 0 with the previous: softplus(-1 / tau); the other way round softplus(1 / tau)."""
    for received, previous, sign in (([1.0, 0.0], [0.0, 1.0], -1), ([0.0, 1.0], [1.0, 0.0], 1)):
        _, found = loss_of([2.0, 0.0], received, previous, temperature=0.25)
        assert found.penalty.item() == pytest.approx(math.log1p(math.exp(sign / 0.25)), rel=1e-5)


def test_begin_takes_the_received_and_the_last_own_model():
    class Client:
        parameters = ("w",)

    got = Download(({"w": torch.ones(1), "running_mean": torch.ones(1)},))
    own = {"w": torch.zeros(1), "running_mean": torch.zeros(1)}
    start = Moon().begin(got, own, Client())
    assert {name: float(w) for name, w in start.anchor.items()} == {RECEIVED + "w": 1.0, PREVIOUS + "w": 0.0}
    assert start.params == got.model


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_weight_it_is_fedavg_bit_for_bit(engine):
    settings = (f"run.engine={engine}", "train.rounds=3", "train.participation=0.7", "train.client_dropout=0.2")
    plain, events = finish(Simulation(tiny("algorithm.name=fedavg", *settings)))
    ours, found = finish(Simulation(tiny("algorithm.name=moon", "algorithm.mu=0", *settings)))
    assert leaves(ours.server) == leaves(plain.server)
    assert [e.received for e in found] == [e.received for e in events]


def test_the_first_round_is_fedavg_and_the_second_is_not():
    ours, (first, second) = finish(Simulation(tiny("algorithm.name=moon", "run.engine=loop")))
    plain, (one, _) = finish(Simulation(tiny("algorithm.name=fedavg", "run.engine=loop")))
    assert first.received.loss == pytest.approx(one.received.loss, rel=1e-5)
    assert first.penalty == pytest.approx(math.log(2), abs=1e-5)  # both models are the same
    assert second.penalty != pytest.approx(math.log(2), abs=1e-3)
    assert leaves(ours.server) != leaves(plain.server)


@pytest.mark.parametrize("settings", [{"mu": -1.0}, {"temperature": 0.0}])
def test_impossible_settings_are_one_sentence(settings):
    with pytest.raises(ConfigError, match="mu must not be negative and temperature must be above 0"):
        Moon(**settings)
