"""Small data, partitions and networks that show what goes wrong."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn

from cwfed.core.shape import InputShape
from cwfed.data import Dataset


def blobs() -> Dataset:
    """A separable problem: Gaussian blobs around the corners of a simplex."""
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=400)
    inputs = 4 * np.eye(4)[labels] + rng.normal(size=(400, 4)) * 0.3
    return Dataset("blobs", inputs.astype(np.float32), labels.astype(np.int64), ("a", "b", "c", "d"))


def few_words() -> Dataset:
    """Short texts; every class has words of its own."""
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=240)
    tokens = 1 + 5 * labels[:, None] + rng.integers(5, size=(240, 8))
    words = tuple(f"w{i}" for i in range(16))
    return Dataset("words", tokens.astype(np.int32), labels.astype(np.int64), ("a", "b", "c"), words)


def one_class_each(
    labels: NDArray[np.int64], clients: int, classes: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """A partition: client k holds class k and nothing else; no client holds the classes from `clients` on."""
    return [np.flatnonzero(labels == client)[:60] for client in range(clients)]


def with_batch_norm(shape: InputShape, classes: int) -> nn.Module:
    """A network with running statistics."""
    features = int(np.prod(shape.dims))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(features, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes)
    )
    model.output_layer = "4"  # type: ignore[assignment]
    return model
