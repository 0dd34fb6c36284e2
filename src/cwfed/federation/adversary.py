"""Clients that mean harm: what they do to the model they trained before they send it. Pure.

Class capture is aimed at class-wise averaging, which reads p~ off the row norms of the output layer: whoever makes one
row long claims to hold little but that class, becomes the largest part of its class model, and the long row itself outweighs
all honest rows in it. Where rows are averaged over the owners of their class (`owners`), the long row is a long update, and who is asked for label counts
claims to hold nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from cwfed.core.types import Params

Attack: TypeAlias = Literal["class-capture", "not-a-number"]


@dataclass(frozen=True)
class Adversary:
    """What a bad client does with its model, in every round it takes part in."""

    attack: Attack = "class-capture"
    strength: float = 100.0
    target: int = 0
    """The class that is captured."""

    def tamper(self, trained: Params, output_weight: str) -> Params:
        """The upload in place of an honestly trained model.

        class-capture: row `target` of the output layer times `strength`, which at 1 is honest.
        not-a-number: NaN everywhere.
        """
        if self.attack == "not-a-number":
            return {name: torch.full_like(w, torch.nan) for name, w in trained.items()}
        factors = torch.ones(len(trained[output_weight]), 1)
        factors[self.target] = self.strength
        return trained | {output_weight: trained[output_weight] * factors}

    def claim(self, extras: Params) -> Params:
        """What goes up beside the model: class-capture claims that all samples are of the captured class; honest at strength 1."""
        if self.attack != "class-capture" or self.strength == 1 or "class_counts" not in extras:
            return extras
        counts = extras["class_counts"]
        claimed = torch.zeros_like(counts)
        claimed[self.target] = counts.sum()
        return extras | {"class_counts": claimed}
