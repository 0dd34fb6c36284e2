from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cwfed.algorithms.fedamp import FedAMP
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Download, Output
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import model, task, uploads
from tests.conftest import finish, leaves, small

OUTPUT = Output(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(2, 1))


def aggregated(algorithm, clients, models, count=3):
    return algorithm.aggregate(algorithm.init(lambda c: model(0.0, 0.0, 0.0), task(count)), uploads(clients, models))


def test_attention_by_hand():
    # ||w_0 - w_1||^2 = 1, the third is far away. xi_01 = alpha/sigma * exp(-1/sigma) = 2 * e^-2 with alpha 1, sigma 1/2
    state = aggregated(FedAMP(alpha=1.0, sigma=0.5), [0, 1, 2], [[0, 0, 0], [1, 0, 0], [100, 0, 0]])
    xi = 2 * math.exp(-2)
    expected = torch.tensor([[1 - xi, xi, 0], [xi, 1 - xi, 0], [0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(state["attention"], expected)
    torch.testing.assert_close(FedAMP().send(state, 0).model["w"], torch.tensor([xi, 0, 0], dtype=torch.float32))


def test_where_the_attention_passes_one_the_row_is_scaled_down():
    # alpha/sigma = 10,000: clients 0, 1, 2 at the same place see each other with far more than weight 1
    state = aggregated(FedAMP(), [0, 1, 2], [[1, 0, 0], [1, 0, 0], [1, 0, 0]])
    torch.testing.assert_close(state["attention"], (torch.ones(3, 3) - torch.eye(3)).double() / 2)


def test_the_pull_has_a_value_and_a_gradient():
    # lambda / (2 alpha) * ||w - u||^2 = 3/4 * (2^2 + 1^2), gradient 3/2 * (w - u)
    algorithm = FedAMP(alpha=2.0, lambda_=3.0)
    w = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
    start = algorithm.begin(Download((model(0.0, 0.0, 0.0),)), model(9.0, 9.0, 9.0), None)
    assert start.params["w"].tolist() == [9.0, 9.0, 9.0]  # it starts from its own model, not from u
    penalty = algorithm.penalty({"w": w}, OUTPUT, torch.tensor([0]), start)
    assert penalty.item() == 3.75
    (gradient,) = torch.autograd.grad(penalty, w)
    assert gradient.tolist() == [3.0, 1.5, 0.0]


def test_without_the_pull_it_is_local_training():
    local, _ = finish(Simulation(small("algorithm.name=local")))
    alone, _ = finish(Simulation(small("algorithm.name=fedamp", "algorithm.lambda=0")))
    assert leaves(local.kept) == leaves(alone.kept)


def test_the_pull_changes_training():
    """Fails where the penalty has no gradient."""
    alone, _ = finish(Simulation(small("algorithm.name=fedamp", "algorithm.lambda=0")))
    pulled, _ = finish(Simulation(small("algorithm.name=fedamp", "algorithm.lambda=1000")))
    assert leaves(alone.kept) != leaves(pulled.kept)


def test_attention_vanishes_with_alpha():
    state = aggregated(FedAMP(alpha=1e-12), [0, 1, 2], [[0, 0, 0], [1, 0, 0], [0, 1, 0]])
    torch.testing.assert_close(state["attention"], torch.eye(3, dtype=torch.float64), atol=1e-9, rtol=0)


def test_absent_clients_keep_their_model_and_newcomers_have_no_part():
    algorithm = FedAMP(alpha=0.05)
    state = aggregated(algorithm, [0, 1], [[1, 0, 0], [1.1, 0, 0]], count=4)
    later = algorithm.aggregate(state, uploads([2], [[1.05, 0, 0]]))
    assert later["known"].tolist() == [True, True, True, False]
    assert later["models"]["w"][0].tolist() == [1, 0, 0]
    assert later["attention"][0, 2] > 0
    assert later["attention"][0, 3] == 0
    assert algorithm.send(later, 3).model["w"].tolist() == [0, 0, 0]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(0, 10_000), st.floats(0.01, 1e4), st.floats(0.01, 10))
def test_rows_are_convex_combinations(clients, seed, alpha, sigma):
    generator = torch.Generator().manual_seed(seed)
    stack = {"w": torch.randn(clients, 5, generator=generator) * 0.3}
    xi = FedAMP(alpha=alpha, sigma=sigma).attention(
        mixing.squared_distances(stack), torch.ones(clients, dtype=torch.bool)
    )
    assert (xi >= 0).all()
    torch.testing.assert_close(xi.sum(1), torch.ones(clients, dtype=torch.float64))


def test_distances_from_one_gram_matrix_keep_their_digits():
    """Models far from the origin and close together: what float32 without centring would lose."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1, 20_000, generator=generator) * 10
    stack = {
        "a": base + 0.001 * torch.randn(4, 20_000, generator=generator),
        "b": torch.randn(4, 3, 2, generator=generator),
    }
    slow = sum(torch.cdist(w.flatten(1).double(), w.flatten(1).double()).square() for w in stack.values())
    torch.testing.assert_close(mixing.squared_distances(stack), slow, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bad", [{"alpha": 0.0}, {"sigma": -1.0}, {"lambda_": -1.0}])
def test_impossible_settings(bad):
    with pytest.raises(ConfigError, match="fedamp"):
        FedAMP(**bad)
