"""The client's maths: what algorithms add to the cross-entropy. Pure, differentiable, safe under vmap.

Examples:
    >>> import cwfed, torch
    >>> float(cwfed.losses.proximal({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}))
    4.0
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from cwfed.core.mixing import norm_distribution
from cwfed.core.types import Batch, Network, Params


def gradient(network: Network, params: Params, batch: Batch, moving: Collection[str]) -> Params:
    """The gradient of the cross-entropy by the parameters that move: numbers, through which nothing is differentiated.

    For steps inside a loss; running statistics of norm layers do not move.
    """

    def loss(some: Params) -> Tensor:
        return batch.cross_entropy(network(params | some, batch.inputs, None).logits)

    params = {name: w.detach() for name, w in params.items()}
    found: Params = torch.func.grad(loss)({name: params[name] for name in moving})
    return found


def moving(params: Params) -> list[str]:
    """The names of the parameters that a pass trains; the others are fixed."""
    return [name for name, w in params.items() if w.requires_grad]


def proximal(params: Params, anchor: Params) -> Tensor:
    """||w - anchor||^2 over the trained parameters."""
    # torch's own loss passes over the weights twice in each direction; a difference and its square take twice as much
    return torch.stack([F.mse_loss(w, anchor[name], reduction="sum") for name, w in params.items()]).sum()


def wdr(output_weight: Tensor, prior: Tensor) -> Tensor:
    """The paper's weight distribution regulariser, ||p - p~||_2, p~ from the output layer's row norms.

    torch's vector norm has the subgradient 0 at 0, so the gradient is finite when p~ has arrived at p.
    """
    distance: Tensor = torch.linalg.vector_norm(prior.to(output_weight.dtype) - norm_distribution(output_weight))
    return distance


def variance(probabilities: Tensor) -> Tensor:
    """FedUV: mean_j relu(1 / sqrt(K) - std_j), std_j over the batch. A single sample has no spread: 0.

    The tiny constant under the root keeps the gradient finite where an output does not vary at all.
    """
    samples, classes = probabilities.shape
    if samples < 2:
        return probabilities.new_zeros(())
    std = (probabilities.var(0) + 1e-12).sqrt()
    return torch.relu(classes**-0.5 - std).mean()


def uniformity(features: Tensor) -> Tensor:
    """FedUV: mean over pairs of exp(-||h_a - h_b||^2 / s), s the median of the non-zero squared distances.

    The gradient flows through s as well: the term does not depend on the scale of the features, so it cannot
    be lowered by inflating them (<gradient, h> = 0).
    """
    samples = len(features)
    if samples < 2:
        return features.new_zeros(())
    squared = (features[:, None] - features[None, :]).square().sum(-1)
    apart = ~torch.eye(samples, dtype=torch.bool, device=features.device)
    median = torch.nanmedian(torch.where(squared > 0, squared, torch.nan))
    scale = torch.nan_to_num(median, nan=1.0)  # all features equal: any scale gives 1
    return (torch.exp(-squared / scale) * apart).sum() / apart.sum()


WIDTHS = (10.0, 15.0, 20.0, 50.0)
"""The widths of FedCP's kernels."""


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """FedCP: the squared maximum mean discrepancy of two batches of features (both B x d).

    The mean over all pairs, the diagonal included, of k(a, a') + k(b, b') - 2 k(a, b), k the sum over the widths c of
    exp(-||x - y||^2 / 2c).
    """

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        squared = (x[:, None] - y[None, :]).square().sum(-1)
        return torch.stack([torch.exp(-squared / (2 * width)) for width in WIDTHS]).sum(0)

    return (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)).mean()


def pull(features: Tensor, targets: Tensor, labels: Tensor, known: Tensor) -> Tensor:
    """FedProto, FedPAC: the mean over batch and coordinates of (f - target of its class)^2; 0 for a class that has none."""
    apart = (features - targets[labels]) * known[labels][:, None]
    return apart.square().mean()
