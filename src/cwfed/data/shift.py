"""Feature shift: the images of different clients look different, whatever their classes.

Clients are in G groups of equal size, drawn from the seed. A group g has its own rotation, or its own colour:

    rotation    the image turned by 360 g / G degrees about its centre (to the nearest pixel, edges repeated)
    colour      x -> low + w_c (x - low) in channel c, with w_c = (1 + cos 2 pi (g / G - c / 3)) / 2: a hue of its own

`low` is the darkest value of the data. Grey images become coloured ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cwfed.core.errors import ConfigError
from cwfed.core.rng import stream
from cwfed.data.clients import Federation

Shift = Literal["none", "rotation", "colour"]


def groups(clients: int, number: int, seed: int) -> NDArray[np.int64]:
    """The group of each client; the sizes of groups differ by at most one client."""
    return stream(seed, "shift").permutation(np.arange(clients) % number)


def describe(kind: Shift, group: int, number: int) -> str:
    """A group's shift in words."""
    degrees = f"{360 * group / number:g}°"
    return degrees if kind == "rotation" else f"hue {degrees}"


def shifted(federation: Federation, kind: Shift, number: int, seed: int) -> Federation:
    """The same clients, with each client's images shifted as its group says."""
    data = federation.data
    if data.inputs.ndim != 4:
        raise ConfigError(
            f'data.shift = "{kind}" is for images, and these samples have the shape {data.inputs.shape[1:]}: set it to none'
        )
    held = [np.concatenate([s.train, s.holdout, s.validation, s.test]) for s in federation.shards.values()]
    every = np.concatenate(held)
    if len(np.unique(every)) < len(every):
        raise ConfigError(
            f'data.shift = "{kind}" is not possible: some samples of {data.name} belong to several clients'
        )
    of_client = groups(len(held), number, seed)
    colours = 3 if kind == "colour" else data.inputs.shape[3]
    if data.inputs.shape[3] not in (1, colours):
        raise ConfigError(
            f'data.shift = "colour" is for grey or RGB images, and these have {data.inputs.shape[3]} channels'
        )
    inputs = np.array(np.broadcast_to(data.inputs, (*data.inputs.shape[:3], colours)))
    low = float(data.inputs.min())
    for group in np.unique(of_client):
        own = np.concatenate([share for share, g in zip(held, of_client, strict=True) if g == group])
        changed = inputs[own]
        inputs[own] = rotated(changed, group / number) if kind == "rotation" else tinted(changed, group / number, low)
    words = {c: describe(kind, int(g), number) for c, g in zip(federation.shards, of_client, strict=True)}
    changed_data = replace(data, inputs=inputs, digest="")
    return Federation(changed_data, federation.shards, federation.names, federation.notes, words)


def rotated(images: NDArray[Any], turn: float) -> NDArray[Any]:
    """Images (N x H x W x C) turned counter-clockwise by this part of a full turn.

    Every pixel takes the value of the pixel nearest to the place that it is turned from. For quarter turns of square images this is np.rot90.
    """
    height, width = images.shape[1:3]
    cos, sin = np.cos(2 * np.pi * turn), np.sin(2 * np.pi * turn)
    y, x = np.mgrid[:height, :width].astype(float)
    y, x = y - (height - 1) / 2, x - (width - 1) / 2
    from_y = np.rint(cos * y + sin * x + (height - 1) / 2).clip(0, height - 1).astype(int)
    from_x = np.rint(cos * x - sin * y + (width - 1) / 2).clip(0, width - 1).astype(int)
    return images[:, from_y, from_x]


def tinted(images: NDArray[Any], hue: float, low: float) -> NDArray[Any]:
    """RGB images (N x H x W x 3) with the channels darkened so that white has this hue, a part of the colour circle."""
    weights = (1 + np.cos(2 * np.pi * (hue - np.arange(3) / 3))) / 2
    changed = low + weights * (images.astype(float) - low)
    return np.rint(changed).astype(images.dtype) if images.dtype == np.uint8 else changed.astype(images.dtype)
