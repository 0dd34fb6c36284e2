"""A small multi-layer perceptron for vectors and tiny images."""

from __future__ import annotations

from math import prod

import torch.nn.functional as F
from torch import Tensor, nn

from cwfed.core.errors import ConfigError
from cwfed.core.shape import InputShape


class MLP(nn.Module):
    """`depth` hidden layers with ReLU, called fc, fc2, fc3 and so on; output."""

    output_layer = "output"

    def __init__(self, shape: InputShape, classes: int, hidden: int = 128, depth: int = 1) -> None:
        super().__init__()
        if shape.vocabulary:
            raise ConfigError("the model mlp needs vectors or images, these data are text")
        if depth < 1:
            raise ConfigError(f"mlp: depth must be positive, it is {depth}")
        self.fc = nn.Linear(prod(shape.dims), hidden)
        self.deeper = [f"fc{i}" for i in range(2, depth + 1)]
        for name in self.deeper:
            self.add_module(name, nn.Linear(hidden, hidden))
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.fc(x.flatten(1)))
        for name in self.deeper:
            x = F.relu(getattr(self, name)(x))
        out: Tensor = self.output(x)
        return out
