"""A small multi-layer perceptron for vectors and tiny images."""

from __future__ import annotations

from math import prod

import torch.nn.functional as F
from torch import Tensor, nn

from cwfed.errors import ConfigError
from cwfed.models.shape import InputShape


class MLP(nn.Module):
    """One hidden layer with ReLU, output."""

    output_layer = "output"

    def __init__(self, shape: InputShape, classes: int, hidden: int = 128) -> None:
        super().__init__()
        if shape.vocabulary:
            raise ConfigError("the model mlp needs vectors or images, these data are text")
        self.fc = nn.Linear(prod(shape.dims), hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.output(F.relu(self.fc(x.flatten(1))))
        return out
