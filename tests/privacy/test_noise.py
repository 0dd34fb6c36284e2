"""A node's noise: of the right kind, and never the same twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from cwfed.privacy.noise import FromSystem, Seeded, SystemDraws

MANY = 200_000
UNLIKELY = 1e-9
"""An honest generator fails such a test once in a billion runs."""


@pytest.mark.parametrize(
    ("drawn", "distribution"),
    [
        (SystemDraws().random(MANY), "uniform"),
        (SystemDraws().standard_normal(MANY), "norm"),
        (SystemDraws().standard_normal(2 * MANY + 1)[MANY:], "norm"),
        (SystemDraws().laplace(size=MANY), "laplace"),
    ],
)
def test_numbers_have_their_distribution(drawn, distribution):
    assert stats.kstest(drawn, distribution).pvalue > UNLIKELY
    pairs = stats.spearmanr(drawn[:-1], drawn[1:])
    assert pairs.pvalue > UNLIKELY


def test_a_node_never_draws_the_same_again_and_a_simulation_always_does():
    node, simulation = FromSystem(np.ones), Seeded(3)
    like, cpu = torch.zeros(5, 7), torch.device("cpu")

    def drawn(noise):
        return [
            *noise.draws("poisson", 1, 2).random(4),
            *noise.draws("privacy", 1, 2).standard_normal(4),
            *noise.normals(cpu, 1, 2)(like).flatten().tolist(),
        ]

    assert not set(drawn(node)) & set(drawn(node))
    assert drawn(simulation) == drawn(simulation)
    assert not set(drawn(node)) & set(drawn(simulation))
    noise = node.normals(cpu, 1, 2)(like.double())
    assert (noise.shape, noise.dtype) == (like.shape, torch.float64)


def test_a_nodes_noise_does_not_listen_to_seeds():
    def seeded():
        np.random.seed(0)
        torch.manual_seed(0)
        return FromSystem(np.ones).normals(torch.device("cpu"), 1, 2)(torch.zeros(10)).tolist()

    assert seeded() != seeded()
