"""The privacy dial: a client blurs the row norms of its output layer before the upload.

cwFedAvg's server needs these norms, from which it reads p~; with WDR they reveal the client's class distribution. Each row is rescaled and
keeps its direction, and nothing else in the upload changes. With r_j the norm of row j:

    noise    r_j <- |r_j + strength * mean(r) * z_j|, z_j standard normal, drawn anew for every upload
    coarse   r_j <- the nearest of `levels` values from min(r) to max(r), equally apart; one level is mean(r)

and then all r_j times one factor that keeps their sum, because what is added in every round would otherwise grow without bound. The noise is
additive, not relative: a class that the client lacks has a norm near 0, and a factor would leave it there. This gives no guarantee; its effect
on a server's estimates is measured (`cwfed privacy`, docs/privacy.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cwfed.core.types import Params, Task
from cwfed.privacy.noise import Noise

TINY = 1e-12
"""Rows shorter than this have no direction."""


@dataclass(frozen=True)
class Dial:
    """How a client blurs its norms."""

    norms: Literal["exact", "noise", "coarse"] = "exact"
    noise: float = 0.5
    """Standard deviation of the noise, in mean norms."""
    levels: int = 2

    def turn(self, model: Params, task: Task, noise: Noise, round_: int, client: int) -> Params:
        """The model that a client uploads in place of its own, which is not changed."""
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
