"""Encoded images to one array of bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cwfed.core.errors import DataError

Picture = bytes | Path

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that are decoded. Pillow knows more, but passes some to other programs, which is not safe for files of unknown origin."""


def endings() -> tuple[str, ...]:
    """The file extensions of these formats."""
    return tuple(ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS)


def decode(pictures: Sequence[Picture], name: str, size: int = 0) -> NDArray[np.uint8]:
    """N x H x W x C: grey if every picture is grey, else RGB; resized to size x size where asked."""
    if not pictures:
        raise DataError(f"data set {name!r}: there are no images")
    decoded = [_decode(picture, name, size) for picture in pictures]
    if len({array.shape[:2] for array in decoded}) > 1:
        raise DataError(f"data set {name!r}: the images have different sizes; set data.image_size, for example to 64")
    channels = max(array.shape[2] for array in decoded)
    out = np.empty((len(decoded), *decoded[0].shape[:2], channels), dtype=np.uint8)
    for i, array in enumerate(decoded):
        out[i] = array  # a grey picture among coloured ones is repeated in every channel
    return out


def _decode(picture: Picture, name: str, size: int) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture, formats=FORMATS) as opened:
            if opened.mode in ("I", "F"):
                raise ValueError(f"its mode {opened.mode!r} has no fixed range of values; convert it to 8 or 16 bits")
            if opened.mode.startswith("I;16"):
                converted = Image.fromarray((np.asarray(opened) // 257).astype(np.uint8))
            else:
                converted = opened.convert("L" if opened.mode in ("1", "L") else "RGB")
            if size and converted.size != (size, size):
                converted = converted.resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(converted).reshape(converted.height, converted.width, len(converted.getbands()))
    except Exception as error:  # decoders of damaged files raise all kinds
        where = f" {picture}" if isinstance(picture, Path) else ""
        raise DataError(f"data set {name!r}: an image{where} cannot be decoded ({error})") from None
