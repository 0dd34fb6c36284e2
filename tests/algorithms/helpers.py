"""Clients and uploads small enough to work out by hand."""

from __future__ import annotations

import torch

from cwfed.core.types import Task, Uploads
from cwfed.federation.config import Config
from tests.conftest import small


def tiny(*settings: str) -> Config:
    """Digits by the hundred, for methods that take long: two rounds of six clients."""
    return small("data.samples=400", "train.rounds=2", *settings)


def task(clients: int, classes: int = 2, parameters: tuple[str, ...] = ("w",)) -> Task:
    return Task(clients, classes, {"layer": parameters}, "layer")


def uploads(clients, models, counts=None, **extras) -> Uploads:
    """Uploads of models that are one tensor called w."""
    stack = {"w": torch.tensor(models, dtype=torch.float32)}
    return Uploads(tuple(clients), stack, torch.tensor(counts or [1] * len(models)), extras)


def model(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values)}


class Client:
    """A client whose loss of a model is what a function says."""

    output = "layer"

    def __init__(self, loss=None, counts=(1.0, 1.0), means=None, moments=None) -> None:
        self.class_counts = torch.tensor(counts)
        self._loss, self._means, self._moments = loss, means, moments

    def losses(self, models, part):
        return torch.tensor([float(self._loss(m["w"])) for m in models], dtype=torch.float64)

    def class_means(self, params):
        return self._means

    def class_moments(self, params):
        return self._moments(params)
