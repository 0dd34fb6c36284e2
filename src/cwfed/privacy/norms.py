"""The privacy dial: a client blurs the row norms of its output layer before it uploads it.

cwFedAvg's server reads p~ from these norms (that is how it works), so they are what WDR makes the upload say about the client's
classes. Each row is rescaled and keeps its direction; all else in the upload stays as it is. With r_j the norm of row j:

    noise    r_j <- |r_j + strength * mean(r) * z_j|, z_j standard normal, drawn anew for every upload
    coarse   r_j <- the nearest of `levels` values from min(r) to max(r), equally apart; one level is mean(r)

and then all r_j times one factor, so that their sum stays: what is added in every round would grow without bound.
Additive noise, not relative: a class that the client lacks has a norm near 0, which any factor would leave there.
This bounds nothing. What it does to a server's estimates is measured (`cwfed privacy`, docs/privacy.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cwfed.core.types import Params, Task
from cwfed.privacy.noise import Noise

TINY = 1e-12
"""Rows shorter than this have no direction that could be kept."""


@dataclass(frozen=True)
class Dial:
    """How a client blurs its norms."""

    norms: Literal["exact", "noise", "coarse"] = "exact"
    noise: float = 0.5
    """Standard deviation of the noise, in mean norms."""
    levels: int = 2

    def turn(self, model: Params, task: Task, noise: Noise, round_: int, client: int) -> Params:
        """What this client uploads in place of its model; the model itself is not changed."""
        if self.norms == "exact":
            return model
        weight = model[task.output_weight]
        norms = torch.linalg.vector_norm(weight, dim=1)
        if self.norms == "noise":
            drawn = noise.draws("privacy", round_, client).standard_normal(len(norms))
            blurred = noisy(norms, self.noise, torch.from_numpy(drawn).to(norms))
        else:
            blurred = coarse(norms, self.levels)
        factors = torch.where(norms > TINY, blurred / norms.clamp_min(TINY), 0.0)
        factors = factors * (norms.sum() / (factors * norms).sum().clamp_min(TINY))
        return model | {task.output_weight: weight * factors[:, None]}


def noisy(norms: Tensor, strength: float, drawn: Tensor) -> Tensor:
    """|r_j + strength * mean(r) * z_j|."""
    return (norms + strength * norms.mean() * drawn).abs()


def coarse(norms: Tensor, levels: int) -> Tensor:
    """The nearest of so many values between the smallest and the largest norm."""
    if levels == 1:
        return norms.mean().expand_as(norms)
    least, most = norms.min(), norms.max()
    step = (most - least) / (levels - 1)
    return norms if step == 0 else least + ((norms - least) / step).round() * step
