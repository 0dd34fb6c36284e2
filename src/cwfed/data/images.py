"""Encoded images to one array of bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from cwfed.errors import DataError

Picture = bytes | Path

A = TypeVar("A")
B = TypeVar("B")


def decode(pictures: Sequence[Picture], name: str, size: int = 0) -> NDArray[np.uint8]:
    """N x H x W x C: grey if every picture is grey, else RGB; resized to size x size where asked."""
    if not pictures:
        raise DataError(f"data set {name!r}: there are no images")
    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter lock
        heads = set(pool.map(_guarded(_head, name), pictures, chunksize=512))
        if len({shape for shape, _ in heads}) > 1 and not size:
            raise DataError(
                f"data set {name!r}: the images have different sizes; set data.image_size, for example to 64"
            )
        width, height = (size, size) if size else next(iter(heads))[0]
        mode = "L" if all(grey for _, grey in heads) else "RGB"
        out = np.empty((len(pictures), height, width, len(mode)), dtype=np.uint8)

        def fill(i: int) -> None:
            with _open(pictures[i]) as picture:
                picture = picture.convert(mode)
                if picture.size != (width, height):
                    picture = picture.resize((width, height), Image.Resampling.BILINEAR)
                out[i] = np.asarray(picture).reshape(height, width, len(mode))

        list(pool.map(_guarded(fill, name), range(len(pictures)), chunksize=512))
    return out


def _open(picture: Picture) -> Image.Image:
    return Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture)


def _head(picture: Picture) -> tuple[tuple[int, int], bool]:
    with _open(picture) as opened:
        return opened.size, opened.mode in ("1", "L")


def _guarded(function: Callable[[A], B], name: str) -> Callable[[A], B]:
    def guarded(item: A) -> B:
        try:
            return function(item)
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
            where = f" {item}" if isinstance(item, Path) else ""
            raise DataError(f"data set {name!r}: an image{where} cannot be decoded ({error})") from None

    return guarded
