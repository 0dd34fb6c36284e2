"""A client as an algorithm sees it: its data are asked about, never handed out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cwfed.core.types import Params

if TYPE_CHECKING:
    from cwfed.engine.worker import ClientWorker


class ClientView:
    """What an algorithm may ask of a client (`algorithms.ClientData`); the worker's network computes the answers."""

    def __init__(self, worker: ClientWorker, client: int, statistics: Params) -> None:
        self._worker, self._client, self._statistics = worker, client, statistics
        self._shard = worker.federation.shards[client]

    @property
    def output(self) -> str:
        """The name of the network's output layer."""
        return str(self._worker.model.output_layer)

    @cached_property
    def class_counts(self) -> Tensor:
        """n_ij: how many training samples of each class the client has."""
        return torch.from_numpy(self._worker.federation.class_counts(self._client)).float()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the network's parameters."""
        return tuple(self._worker.params)

    @property
    def statistics(self) -> Params:
        """The client's running statistics where they stay with it."""
        return self._statistics

    def squared_gradients(self, params: Params, batch_size: int) -> Tensor:
        """The squared length of the gradient of each batch of the client's training data."""
        self._worker.load(params | self._statistics)
        return self._worker.squared_gradients(self._shard.train, batch_size)

    def losses(self, models: Sequence[Params], part: Literal["train", "holdout"]) -> Tensor:
        """The mean cross-entropy of each model on a part of the client's training data."""
        indices = self._shard.train if part == "train" else self._shard.holdout
        means = []
        for model in models:
            self._worker.load(model | self._statistics)
            means.append(self._worker.measure(indices)[1].mean())
        return torch.tensor(np.array(means))

    def class_means(self, params: Params) -> Tensor:
        """The mean normalised feature of each class; zero where the client has no sample."""
        self._worker.load(params | self._statistics)
        return self._worker.class_means(self._shard.train, lambda features: F.normalize(features, dim=1))

    def class_moments(self, params: Params) -> tuple[Tensor, Tensor, Tensor]:
        """Of the features of each class: their mean, their mean squared norm, and how many samples the client has."""
        self._worker.load(params | self._statistics)
        found = self._worker.class_means(
            self._shard.train, lambda features: torch.cat([features, features.square().sum(1, keepdim=True)], 1)
        )
        return found[:, :-1].contiguous(), found[:, -1].contiguous(), self.class_counts
