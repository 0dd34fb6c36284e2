"""The shape of one sample, as a model builder sees it."""

from __future__ import annotations

from dataclasses import dataclass

from cwfed.core.errors import ConfigError


@dataclass(frozen=True)
class InputShape:
    """One sample: an image (channels, height, width), a vector (features,) or tokens (length,).

    Examples:
        >>> import cwfed
        >>> channels, height, width = cwfed.InputShape((3, 32, 32)).dims
    """

    dims: tuple[int, ...]
    vocabulary: int = 0
    """Number of tokens for text, where 0 is padding; 0 for everything else."""


def image_size(shape: InputShape, model: str) -> tuple[int, int, int]:
    """(channels, height, width), or a clear error for data that are not images."""
    if len(shape.dims) != 3:
        kind = "text" if shape.vocabulary else "vectors"
        raise ConfigError(f"the model {model} needs images, these data are {kind}")
    channels, height, width = shape.dims
    return channels, height, width
