"""An own model: a function of (shape, classes) whose network names its output layer.

The same from the command line, in this folder: cwfed run --set model.name=own_model:wide --set model.options.width=64
"""

from torch import nn

import cwfed


def wide(shape: cwfed.InputShape, classes: int, width: int = 32) -> nn.Module:
    """Two convolutions with group norm; further arguments come from model.options."""
    channels, height, side = shape.dims
    network = nn.Sequential()
    network.add_module("conv1", nn.Conv2d(channels, width, 3, padding=1))
    network.add_module("norm", nn.GroupNorm(4, width))
    network.add_module("relu", nn.ReLU())
    network.add_module("conv2", nn.Conv2d(width, width, 3, stride=2, padding=1))
    network.add_module("flat", nn.Flatten())
    network.add_module("head", nn.Linear(width * -(-height // 2) * -(-side // 2), classes))
    network.output_layer = "head"  # the algorithm finds it by this name
    return network


def main() -> None:
    settings = ["model.name=own_model:wide", "model.options.width=16", "train.rounds=10", "train.lr=0.05"]
    summary = cwfed.run(cwfed.load_config(settings=settings))
    print(f"{summary.parameters:,} parameters, {summary.reported.accuracy:.1%}")


if __name__ == "__main__":
    main()
