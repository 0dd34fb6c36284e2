"""The paper's 4-layer CNN (McMahan et al., 2017): two 5x5 convolutions with pooling, 512 units, output."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from cwfed.core.errors import ConfigError
from cwfed.core.shape import InputShape, image_size


class CNN(nn.Module):
    """conv1 (32) - pool - conv2 (64) - pool - fc (512) - output, for images of any size from 4x4.

    The paper's convolutions have no padding. Images under 16 pixels a side, which that would use up,
    are padded by 2, so that a convolution keeps their size.
    """

    output_layer = "output"

    def __init__(self, shape: InputShape, classes: int, hidden: int = 512) -> None:
        super().__init__()
        channels, height, width = image_size(shape, "cnn")
        if min(height, width) < 4:
            raise ConfigError(f"the cnn needs images of at least 4x4 pixels, these have {height}x{width}")
        padding = 0 if min(height, width) >= 16 else 2
        shrink = 4 - 2 * padding
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=padding)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=padding)
        left = [((side - shrink) // 2 - shrink) // 2 for side in (height, width)]
        self.fc = nn.Linear(64 * left[0] * left[1], hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits. Pooling before the ReLU gives the same numbers for a quarter of the work."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc(x.flatten(1)))
        out: Tensor = self.output(x)
        return out
