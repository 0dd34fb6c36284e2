"""Training images, changed at random: shifted by a few pixels, or mirrored. Never at evaluation.

What is drawn is a function of the keyed stream alone, so a client sees the same images in every engine.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Augment: TypeAlias = Literal["none", "crop", "flip", "crop-flip"]

PAD = 4
"""The most pixels by which an image is shifted; the new border is black, the least value of a pixel."""


def draw(kind: Augment, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.int64]:
    """Random changes for samples in an array of this shape; a last axis has (shift down, shift right, mirrored)."""
    crops = "crop" in kind
    shifts = rng.integers(0, 2 * PAD + 1, (*shape, 2)) if crops else np.full((*shape, 2), PAD)
    mirrored = rng.integers(0, 2, (*shape, 1)) if "flip" in kind else np.zeros((*shape, 1), np.int64)
    return np.concatenate([shifts, mirrored], -1).astype(np.int64)


def change(images: Tensor, drawn: Tensor, black: float = -1.0) -> Tensor:
    """Images (... x C x H x W) shifted and mirrored as drawn (... x 3)."""
    *lead, channels, height, width = images.shape
    flat = images.reshape(-1, channels, height, width)
    down, right, mirrored = drawn.reshape(-1, 3).unbind(1)
    padded = F.pad(flat, (PAD, PAD, PAD, PAD), value=black)
    rows = down[:, None] + torch.arange(height, device=flat.device)
    columns = torch.arange(width, device=flat.device).expand(len(flat), width)
    columns = right[:, None] + torch.where(mirrored[:, None] > 0, width - 1 - columns, columns)
    sample = torch.arange(len(flat), device=flat.device)[:, None, None]
    taken = padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]]  # N x H x W x C
    return taken.view(*lead, height, width, channels).movedim(-1, -3)
