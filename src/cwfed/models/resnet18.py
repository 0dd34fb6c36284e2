"""ResNet-18. He et al., Deep Residual Learning for Image Recognition, 2016."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from cwfed.core.errors import ConfigError
from cwfed.core.shape import InputShape, image_size
from cwfed.models.conv import Conv2d


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv2d(before, after, 3, stride, padding=1)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = Conv2d(after, after, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            convolution = Conv2d(before, after, 1, stride)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """The original for ImageNet: 7x7 stem, max pooling, four stages of two blocks, 512 features.

    `width` is the number of channels of the first stage; each later stage has twice as many as the one before.
    """

    output_layer = "output"

    def __init__(self, shape: InputShape, classes: int, width: int = 64) -> None:
        super().__init__()
        if width < 1:
            raise ConfigError(f"resnet18: width must be positive, it is {width}")
        channels, _, _ = image_size(shape, "resnet18")
        self.conv1 = Conv2d(channels, width, 7, stride=2, padding=3)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.output = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.output(x.mean((2, 3)))
        return out
