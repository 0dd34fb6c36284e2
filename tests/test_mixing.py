"""The server's maths against hand-worked numbers and a slow, obvious twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cwfed import mixing


def two_step(models, shares, prior, personal):
    """The paper's two aggregations, written as its sums: the oracle of the lean form."""
    participants, classes = prior.shape
    class_models = []
    for j in range(classes):
        weights = [float(shares[i] * prior[i, j]) for i in range(participants)]
        if sum(weights) == 0:
            weights = [float(shares[i]) for i in range(participants)]
        class_models.append(sum(w / sum(weights) * models[i] for i, w in enumerate(weights)))
    return [sum(float(row[j]) * class_models[j] for j in range(classes)) for row in personal]


@st.composite
def problems(draw):
    """Shapes from hypothesis, numbers from a seed; some classes that nobody has."""
    participants, classes, clients, size = (draw(st.integers(1, n)) for n in (7, 6, 5, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prior = rng.dirichlet(np.full(classes, draw(st.sampled_from([0.05, 0.5, 5.0]))), participants)
    if classes > 1 and draw(st.booleans()):
        prior[:, 0] = 0
        prior[:, -1] += 1e-3
        prior /= prior.sum(1, keepdims=True)
    personal = rng.dirichlet(np.ones(classes), clients)
    counts = rng.integers(1, 1000, participants)
    models = rng.normal(size=(participants, size))
    return tuple(map(torch.from_numpy, (models, counts, prior, personal)))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_lean_form_is_the_two_step_form(problem):
    models, counts, prior, personal = problem
    shares = mixing.sample_weights(counts)
    q = mixing.class_weights(shares, prior)
    lean = mixing.mix(personal @ q.T, {"w": models})["w"]
    slow = two_step(models, shares, prior, personal)
    for row, expected in zip(lean, slow, strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_all_weights_sum_to_one(problem):
    _, counts, prior, personal = problem
    shares = mixing.sample_weights(counts)
    q = mixing.class_weights(shares, prior)
    a = personal @ q.T
    for sums in (shares.sum()[None], q.sum(0), a.sum(1)):
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-12, atol=1e-12)
    assert (q >= 0).all()
    assert (a >= 0).all()


def test_class_weights_by_hand():
    # n = 30, 10 -> p = 3/4, 1/4. Class 0: 3/4*1/2 = 3/8 and 1/4*1 = 2/8 -> 3/5, 2/5. Class 1: only client 0.
    shares = mixing.sample_weights(torch.tensor([30, 10]))
    q = mixing.class_weights(shares, torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64))
    expected = torch.tensor([[0.6, 1.0], [0.4, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(q, expected)


def test_with_true_distributions_the_weights_are_the_counts_of_the_class():
    # q_ij = n_ij / sum_i n_ij, as the paper says below its Equation 6
    counts = torch.tensor([[2.0, 8.0], [6.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    q = mixing.class_weights(mixing.sample_weights(counts.sum(1)), counts / counts.sum(1, keepdim=True))
    torch.testing.assert_close(q, counts / counts.sum(0))


def test_a_class_that_nobody_has_is_made_by_everybody():
    shares = torch.tensor([0.25, 0.75], dtype=torch.float64)
    q = mixing.class_weights(shares, torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(q[:, 1], shares)


def test_average_by_hand():
    # 1/4 * (2, 4) + 3/4 * (6, 0) = (5, 1)
    stack = {"w": torch.tensor([[2.0, 4.0], [6.0, 0.0]])}
    out = mixing.average(stack, mixing.sample_weights(torch.tensor([1, 3])))
    assert out["w"].tolist() == [5.0, 1.0]


def test_mix_keeps_names_shapes_and_dtypes():
    stack = {"a": torch.ones(3, 2, 2), "b": torch.ones(3, 4, dtype=torch.float64)}
    out = mixing.mix(torch.full((5, 3), 1 / 3, dtype=torch.float64), stack)
    assert {n: (tuple(t.shape), t.dtype) for n, t in out.items()} == {
        "a": ((5, 2, 2), torch.float32),
        "b": ((5, 4), torch.float64),
    }


def test_norm_distribution_by_hand():
    # norms 5, 0, 15 -> 1/4, 0, 3/4
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0], [9.0, 12.0]])
    assert mixing.norm_distribution(weight).tolist() == [0.25, 0.0, 0.75]


def test_an_output_layer_of_zeros_says_nothing():
    weight = torch.zeros(4, 3, requires_grad=True)
    p = mixing.norm_distribution(weight)
    assert p.tolist() == [0.25] * 4
    (gradient,) = torch.autograd.grad(p[0], weight)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_norm_distribution_does_not_depend_on_scale(scale):
    weight = torch.tensor([[3.0, 4.0], [6.0, 8.0]]) * scale
    torch.testing.assert_close(mixing.norm_distribution(weight), torch.tensor([1 / 3, 2 / 3]))


def test_unmix_finds_the_shares_by_hand():
    parts = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]], dtype=torch.float64)
    mixed = torch.tensor([[[0.25, 1.5], [0.0, 0.0]], [[3.0, 0.0], [4.0, 0.0]]], dtype=torch.float64)
    shares, is_mixture = mixing.unmix(mixed, parts)
    torch.testing.assert_close(shares, torch.tensor([[0.25, 0.75], [3.0, 0.0]], dtype=torch.float64))
    assert is_mixture.tolist() == [True, False]  # of the second, 4 of a length of 5 are left over


def test_unmix_is_not_taken_in_by_what_is_merely_near():
    start, noise = torch.randn(50, dtype=torch.float64), torch.randn(4, 50, dtype=torch.float64)
    parts = start + 1e-3 * noise[:3]
    near = (start + 1e-3 * noise[3])[None]
    assert mixing.unmix(near, parts)[1].tolist() == [False]
    true = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64) @ parts
    shares, is_mixture = mixing.unmix(true.float().double(), parts)  # a model is float32
    assert is_mixture.tolist() == [True]
    torch.testing.assert_close(shares, torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64), atol=1e-3, rtol=0)
    assert mixing.unmix(true, start.expand(3, -1))[1].tolist() == [False]  # equal parts say nothing


def test_unmix_has_no_answer_where_many_would_do():
    assert mixing.unmix(torch.ones(1, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)) is None
