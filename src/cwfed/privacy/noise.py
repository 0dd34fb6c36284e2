"""Where a client's noise comes from: a seed in a simulation, the operating system on a node.

Noise protects a client only if nobody else can reproduce it. A simulation draws it from `run.seed`, so that runs can be repeated and engines
compared to the bit; this protects nobody. The server of a real federation knows the plan, and with it the seed. So a node draws its noise
(DP-SGD's, which samples are in a batch, the histogram's, that of the row norms) from the operating system's generator, which is made for
secrets and cannot be repeated. numpy's and torch's own generators are not safe: from a few thousand of their numbers the rest can be
computed, and torch's has 2^32 starting points on a CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cwfed.core.rng import stream, torch_seed

Numbers: TypeAlias = NDArray[np.float64]
Normals: TypeAlias = Callable[[Tensor], Tensor]
"""A function that gives standard normal numbers, as many as a tensor has and on its device."""


class SystemDraws:
    """The few distributions that are needed, from the operating system's random bits; named as numpy's."""

    def random(self, size: int) -> Numbers:
        """Uniform numbers from 0 (included) to 1 (excluded)."""
        bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def standard_normal(self, size: int) -> Numbers:
        """Standard normal numbers by Box and Muller: two of two uniform ones. (By torch, which takes half of numpy's time.)"""
        half = -(-size // 2)
        uniform, turn = torch.from_numpy(self.random(2 * half)).view(2, half)
        radius, angle = (-2 * torch.log1p(-uniform)).sqrt(), 2 * math.pi * turn
        drawn: Numbers = torch.cat([radius * angle.cos(), radius * angle.sin()])[:size].numpy()
        return drawn

    def laplace(self, *, size: int) -> Numbers:
        """An exponential number with a random sign."""
        return np.where(self.random(size) < 0.5, -1.0, 1.0) * -np.log1p(-self.random(size))


Draws: TypeAlias = np.random.Generator | SystemDraws


class Noise(Protocol):
    """All the noise that a client adds."""

    def draws(self, purpose: str, round_: int, client: int) -> Draws:
        """Numbers for one purpose in a round."""

    def normals(self, device: torch.device, round_: int, client: int) -> Normals:
        """The noise of DP-SGD in a round."""

    def histogram(self, classes: int, client: int) -> Numbers:
        """Standard Laplace numbers for the class histogram; always the same ones, so that their epsilon is spent once."""


@dataclass(frozen=True)
class Seeded:
    """A simulation's noise: a function of (seed, purpose, round, client)."""

    seed: int

    def draws(self, purpose: str, round_: int, client: int) -> Draws:
        return stream(self.seed, purpose, round_, client)

    def normals(self, device: torch.device, round_: int, client: int) -> Normals:
        generator = torch.Generator(device)
        generator.manual_seed(torch_seed(self.seed, "dp noise", round_, client))
        return lambda like: torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

    def histogram(self, classes: int, client: int) -> Numbers:
        return stream(self.seed, "dp histogram", client=client).laplace(size=classes)


@dataclass(frozen=True)
class FromSystem:
    """A node's noise. The noise that must stay the same is drawn once and kept by `remembered`, on the node's disk."""

    remembered: Callable[[int], Numbers]
    """The histogram's noise, for so many classes."""

    def draws(self, purpose: str, round_: int, client: int) -> Draws:
        return SystemDraws()

    def normals(self, device: torch.device, round_: int, client: int) -> Normals:
        def drawn(like: Tensor) -> Tensor:
            numbers = SystemDraws().standard_normal(like.numel())
            return torch.from_numpy(numbers).view(like.shape).to(like)

        return drawn

    def histogram(self, classes: int, client: int) -> Numbers:
        return self.remembered(classes)
