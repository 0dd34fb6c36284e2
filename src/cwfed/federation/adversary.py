"""Malicious clients, for experiments: what they do to the model that they trained before they send it. Pure functions.

Class capture attacks class-wise averaging, which reads p~ from the row norms of the output layer. A client that makes one row long claims
to hold mostly that class: it becomes the largest part of the class model, in which its long row outweighs all honest rows. Where rows
are averaged over the owners of their class (`owners`), the long row is a long update; where clients send label counts, the client claims
to hold nothing but that class.
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
        """The extras that are uploaded: class-capture claims that all samples belong to the captured class; at strength 1 they are honest."""
        if self.attack != "class-capture" or self.strength == 1 or "class_counts" not in extras:
            return extras
        counts = extras["class_counts"]
        claimed = torch.zeros_like(counts)
        claimed[self.target] = counts.sum()
        return extras | {"class_counts": claimed}
