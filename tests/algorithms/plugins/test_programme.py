"""cwFedAvg's mixing by a programme: by hand, its limits, and what it is asked to minimise."""

from __future__ import annotations

import pytest
import torch

from cwfed.algorithms import build
from cwfed.core import mixing
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, small

HALVES = torch.tensor([0.5, 0.5], dtype=torch.float64)
UNITS = torch.eye(2, dtype=torch.float64)


@pytest.mark.parametrize("rho", [0.0, 0.5, 3.0])
def test_two_clients_by_hand(rho):
    """p~ = (1, 0) from (1, 0) and (0, 1): 2 (1 - a)^2 + 2 rho (a^2 + (1 - a)^2) is least at a = (1 + rho) / (1 + 2 rho)."""
    mixture = build({"name": "cwfedavg+programme", "rho": rho}).mixture(UNITS[0], UNITS, HALVES)
    first = (1 + rho) / (1 + 2 * rho)
    torch.testing.assert_close(mixture, torch.tensor([first, 1 - first], dtype=torch.float64))


def test_it_minimises_over_the_simplex():
    """No step towards another client lowers what is minimised."""
    generator = torch.Generator().manual_seed(0)
    sources = torch.rand(7, 5, generator=generator, dtype=torch.float64).pow(4)
    sources, shares = sources / sources.sum(1, keepdim=True), torch.full((7,), 1 / 7, dtype=torch.float64)
    algorithm = build({"name": "cwfedavg+programme", "rho": 0.01})

    def value(a, target):
        return (target - a @ sources).square().sum() + 0.01 * (a.square() / shares).sum()

    for target in sources:
        found = algorithm.mixture(target, sources, shares)
        assert found.min() >= 0
        assert float(found.sum()) == pytest.approx(1)
        for unit in torch.eye(7, dtype=torch.float64):
            assert value(0.999 * found + 0.001 * unit, target) >= value(found, target)


def test_much_spread_is_fedavg_and_none_takes_clients_of_the_same_distribution():
    sources = torch.tensor([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    much, none = (build({"name": "cwfedavg+programme", "rho": rho}) for rho in (1e9, 1e-9))
    torch.testing.assert_close(much.mixture(sources[2], sources, shares), shares)
    alike = none.mixture(sources[0], sources, shares)
    torch.testing.assert_close(alike, torch.tensor([0.2, 0.5, 0], dtype=torch.float64) / 0.7, atol=1e-6, rtol=0)


def test_a_run_with_much_spread_is_fedavg_but_for_rounding():
    tiny = ["data.clients=4", "data.samples=200", "train.rounds=2", "model.options.hidden=4", "data.newcomers=1"]
    flat = ["algorithm.rho=1e9", "algorithm.wdr=0"]
    simulation = Simulation(small("algorithm.name=cwfedavg+programme", *flat, *tiny))
    progress, _ = finish(simulation)
    fedavg, _ = finish(Simulation(small("algorithm.name=fedavg", *tiny)))
    for client in range(4):
        model = simulation.algorithm.send(progress.server, client).model
        for name, w in fedavg.server["model"].items():
            torch.testing.assert_close(model[name], w, atol=1e-5, rtol=1e-4)


def test_the_cap_bounds_what_one_client_has_of_a_personal_layer():
    free, capped = (build({"name": "cwfedavg+programme", "rho": 0.1, "class_cap": cap}) for cap in (1.0, 0.6))
    assert free.mixture(UNITS[0], UNITS, HALVES).max() > 0.9
    assert float(capped.mixture(UNITS[0], UNITS, HALVES).max()) == pytest.approx(0.6)


def test_before_the_first_upload_everybody_has_the_initial_model():
    simulation = Simulation(small("algorithm.name=cwfedavg+programme", "data.clients=3"))
    state = simulation.first_state()
    sent = simulation.algorithm.send(state, 1).model
    simulation.close()
    assert all(torch.equal(sent[name], w) for name, w in simulation.initial.items())
    assert mixing.nearest_to_origin(torch.ones(1, 1, dtype=torch.float64)).tolist() == [1.0]
