"""The client's maths: hand-worked values, and gradients that are really there."""

from __future__ import annotations

import math

import torch

from cwfed.core import losses


def test_proximal_by_hand():
    # (1-0)^2 + (2-0)^2 + (3-1)^2 = 9
    params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    anchor = {"a": torch.zeros(2), "b": torch.ones(1), "running_mean": torch.ones(7)}
    assert losses.proximal(params, anchor).item() == 9.0


def test_proximal_pulls_towards_the_anchor():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(losses.proximal({"w": w}, {"w": torch.zeros(2)}), w)
    assert gradient.tolist() == [2.0, 4.0]  # 2 (w - anchor)


def test_wdr_has_the_type_of_the_weights():
    """A float64 distribution must not make a float32 training step a float64 one."""
    assert losses.wdr(torch.ones(2, 2), torch.tensor([0.5, 0.5], dtype=torch.float64)).dtype == torch.float32


def test_variance_of_small_batches():
    assert losses.variance(torch.tensor([[0.9, 0.1]])).item() == 0  # one sample has no spread
    # two samples: column std sqrt(0.02) each, 1/sqrt(2) - sqrt(0.02)
    value = losses.variance(torch.tensor([[0.9, 0.1], [0.7, 0.3]]))
    assert math.isclose(value.item(), math.sqrt(0.5) - math.sqrt(0.02), rel_tol=1e-5)


def test_uniformity_of_small_batches():
    assert losses.uniformity(torch.ones(1, 3)).item() == 0.0
    pair = losses.uniformity(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))  # one distance, which is its own median
    torch.testing.assert_close(pair, torch.tensor(-1.0).exp())
    assert losses.uniformity(torch.ones(2, 3)).item() == 1.0


def test_wdr_by_hand():
    # row norms 5 and 15 -> p~ = (1/4, 3/4); p = (1, 0): the distance is sqrt(2) * 3/4
    weight = torch.tensor([[3.0, 4.0], [9.0, 12.0]])
    value = losses.wdr(weight, torch.tensor([1.0, 0.0]))
    assert math.isclose(value.item(), math.sqrt(2) * 0.75, rel_tol=1e-6)


def test_wdr_gradient_against_finite_differences():
    torch.manual_seed(0)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    prior = torch.tensor([0.7, 0.3, 0.0, 0.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda w: losses.wdr(w, prior), (weight,))
    (gradient,) = torch.autograd.grad(losses.wdr(weight, prior), weight)
    assert gradient.abs().sum() > 0


def test_wdr_gradient_is_finite_when_the_distance_is_zero():
    weight = torch.tensor([[3.0, 4.0], [9.0, 12.0]], requires_grad=True)
    value = losses.wdr(weight, torch.tensor([0.25, 0.75]))
    (gradient,) = torch.autograd.grad(value, weight)
    assert value.item() == 0
    assert gradient.isfinite().all()


def test_wdr_gradient_is_finite_when_a_row_is_zero():
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(losses.wdr(weight, torch.tensor([0.5, 0.5])), weight)
    assert gradient.isfinite().all()


def test_following_wdr_alone_makes_the_norms_follow_the_distribution():
    torch.manual_seed(0)
    weight = torch.randn(3, 8, requires_grad=True)
    prior = torch.tensor([0.6, 0.4, 0.0])
    for _ in range(3000):
        (gradient,) = torch.autograd.grad(losses.wdr(weight, prior), weight)
        weight = (weight - 0.02 * gradient).detach().requires_grad_()
    assert losses.wdr(weight, prior).item() < 0.02


def test_wdr_is_safe_under_vmap():
    torch.manual_seed(0)
    weights, priors = torch.randn(5, 4, 3), torch.softmax(torch.randn(5, 4), 1)
    batched = torch.vmap(losses.wdr)(weights, priors)
    each = torch.stack([losses.wdr(w, p) for w, p in zip(weights, priors, strict=True)])
    torch.testing.assert_close(batched, each)
