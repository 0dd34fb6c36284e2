from __future__ import annotations

import math

import pytest
import torch

from cwfed.algorithms import CwFedAvg
from cwfed.algorithms.feduv import FedUV
from cwfed.core import losses
from cwfed.core.errors import ConfigError
from cwfed.core.types import Output, Start
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small


def test_variance_by_hand():
    # K = 4. Column 0 is (1, 0): std = 1/sqrt(2) > 1/2 -> 0. Column 1 is (0, 1): 0. Columns 2, 3 never vary: 1/2 each.
    value = losses.variance(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]))
    assert value.item() == pytest.approx((0.5 + 0.5) / 4, abs=1e-5)


def test_uniformity_by_hand():
    # points 0, 1, 3 on a line: squared distances 1, 4, 9, median 4 -> mean of e^-1/4, e^-1, e^-9/4
    value = losses.uniformity(torch.tensor([[0.0], [1.0], [3.0]]))
    assert value.item() == pytest.approx((math.exp(-0.25) + math.exp(-1) + math.exp(-2.25)) / 3)


def test_uniformity_leaves_zero_distances_out_of_the_median():
    # points 0, 0, 2: squared distances 0, 4, 4; the median of the non-zero ones is 4
    value = losses.uniformity(torch.tensor([[0.0], [0.0], [2.0]]))
    assert value.item() == pytest.approx((1 + 2 * math.exp(-1)) / 3)


@pytest.mark.parametrize("times", [0.01, 3.0, 1000.0])
def test_uniformity_does_not_depend_on_the_scale_of_the_features(times):
    """exp(-d / s) with d and s both squared lengths: the value stays, the gradient has no part along h."""
    torch.manual_seed(0)
    h = torch.randn(10, 16, dtype=torch.float64)
    larger = (times * h).requires_grad_()
    value = losses.uniformity(larger)
    (gradient,) = torch.autograd.grad(value, larger)
    torch.testing.assert_close(value, losses.uniformity(h))
    assert abs((gradient * larger).sum().item()) < 1e-12  # -0.73 where the median is detached
    assert (gradient * times).norm() > 0.01


def test_uniformity_gradient_by_hand():
    # points 0, 1, 3 on a line, s = 4 the squared distance of 1 and 3, which itself moves with them.
    # value = (e^{-a^2/s} + e^{-1} + e^{-b^2/s}) / 3 with a = x1 - x0 = 1, b = x2 - x0 = 3, s = (x2 - x1)^2 = 4
    x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(losses.uniformity(x), x)
    near, far = math.exp(-1 / 4), math.exp(-9 / 4)
    by_a, by_b = -2 * 1 / 4 * near / 3, -2 * 3 / 4 * far / 3  # d value / da, d value / db
    by_s = (1 * near + 9 * far) / 4**2 / 3
    ds = 2 * 2 * by_s  # ds/dx2 = 2 (x2 - x1) = 4 = -ds/dx1
    expected = [-by_a - by_b, by_a - ds, by_b + ds]
    assert gradient.flatten().tolist() == pytest.approx(expected)


def test_uniformity_and_its_gradient_under_vmap():
    torch.manual_seed(0)
    h = torch.randn(5, 6, 3)
    h[0, 1] = h[0, 0]  # a distance of zero
    each = torch.func.grad(losses.uniformity)
    torch.testing.assert_close(torch.vmap(each)(h), torch.stack([each(one) for one in h]))


@pytest.mark.parametrize("batch", [torch.zeros(3, 2), torch.full((1, 4), 0.25), torch.ones(5, 1)])
def test_degenerate_batches_have_finite_values_and_gradients(batch):
    x = batch.clone().requires_grad_()
    value = losses.variance(x) + losses.uniformity(x) + 0 * x.sum()
    (gradient,) = torch.autograd.grad(value, x)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_both_terms_have_gradients():
    torch.manual_seed(0)
    p = torch.softmax(torch.randn(6, 4, dtype=torch.float64), 1).requires_grad_()
    h = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(losses.variance, (p,))
    assert torch.autograd.grad(losses.variance(p), p)[0].abs().sum() > 0
    assert torch.autograd.grad(losses.uniformity(h), h)[0].abs().sum() > 0


def test_the_penalty_is_their_weighted_sum():
    torch.manual_seed(0)
    output = Output(torch.randn(6, 4), torch.randn(6, 3), torch.zeros(4, 3))
    penalty = FedUV(mu=2.0, lambda_=3.0).penalty({}, output, torch.zeros(6), Start({}))
    expected = 2 * losses.variance(output.logits.softmax(1)) + 3 * losses.uniformity(output.features)
    torch.testing.assert_close(penalty, expected)


def test_without_its_terms_it_is_fedavg():
    fedavg, _ = finish(Simulation(small("algorithm.name=fedavg")))
    feduv, _ = finish(Simulation(small("algorithm.name=feduv", "algorithm.mu=0", "algorithm.lambda=0")))
    assert leaves(fedavg.server) == leaves(feduv.server)


@pytest.mark.parametrize("objective", ["fedprox", "feduv"])
def test_class_wise_aggregation_over_its_objective(objective):
    plain, _ = finish(Simulation(small("train.rounds=2")))
    combined, events = finish(Simulation(small("train.rounds=2", f"algorithm.objective={objective}")))
    assert leaves(plain.server) != leaves(combined.server)
    assert events[-1].received.accuracy > 0.2


@pytest.mark.parametrize("objective", ["fednh", "fedamp", "fedfomo", "cfl", "ifca", "local", "cwfedavg"])
def test_what_is_more_than_a_local_objective_cannot_be_combined(objective):
    with pytest.raises(ConfigError, match="is more than a local objective: it has its own"):
        small(f"algorithm.objective={objective}")


def test_a_combination_is_written_out_in_full():
    assert small("algorithm.objective=feduv").algorithm["objective"] == {"name": "feduv", "mu": 2.5, "lambda": 0.5}
    assert CwFedAvg(objective=FedUV()).objective == FedUV()


def test_impossible_settings():
    with pytest.raises(ConfigError, match="feduv"):
        FedUV(mu=-1.0)
