"""The client's maths: what algorithms add to the cross-entropy. Pure, differentiable, safe under vmap."""

from __future__ import annotations

import torch
from torch import Tensor

from cwfed.mixing import norm_distribution
from cwfed.types import Params


def proximal(params: Params, anchor: Params) -> Tensor:
    """||w - anchor||^2 over the trained parameters."""
    return torch.stack([(w - anchor[name]).square().sum() for name, w in params.items()]).sum()


def wdr(output_weight: Tensor, prior: Tensor) -> Tensor:
    """The paper's weight distribution regulariser, ||p - p~||_2, p~ from the output layer's row norms.

    torch's vector norm has the subgradient 0 at 0, so the gradient is finite when p~ has arrived at p.
    """
    distance: Tensor = torch.linalg.vector_norm(prior.to(output_weight.dtype) - norm_distribution(output_weight))
    return distance
