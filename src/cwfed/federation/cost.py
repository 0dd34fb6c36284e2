"""What each method costs: numbers the server stores, and numbers that travel in a round (the paper's Section E)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from cwfed import models
from cwfed.algorithms import ALGORITHMS, FedAvg, build
from cwfed.core.types import Cost, Sizes, Start
from cwfed.models import InputShape


def costs(
    model: str,
    shape: InputShape,
    classes: int,
    clients: int,
    participants: int,
    options: dict[str, Any],
    names: Sequence[str | dict[str, Any]] = (),
) -> list[Cost]:
    """The table for a model, K classes and M clients of whom some take part: what each algorithm says of itself.

    `names` chooses some, such as "fedavg+owners" or a table with settings; without it, all are shown.
    """
    chosen = [build(name) for name in names or ALGORITHMS]
    network = without_numbers(model, shape, classes, options)
    return [
        row
        for algorithm in chosen
        for row in algorithm.costs(sizes(algorithm, network, classes, clients, participants))
    ]


def without_numbers(model: str, shape: InputShape, classes: int, options: dict[str, Any]) -> nn.Module:
    """A network that has shapes only: 1000-class models cost nothing."""
    with torch.device("meta"):
        return models.build(model, shape, classes, options)


def sizes(algorithm: FedAvg, plain: nn.Module, classes: int, clients: int, participants: int) -> Sizes:
    """How large the network is that an algorithm makes of a plain one and trains."""
    output = str(plain.output_layer)
    with torch.device("meta"):
        network = algorithm.adapt(copy.deepcopy(plain), output)
    task = models.task_of(network, clients, classes)
    numbers = {name: prod(p.shape) for name, p in network.named_parameters()}
    names = tuple(numbers)
    return Sizes(
        model=sum(numbers[name] for name in task.parameters),
        head=sum(numbers[name] for name in (f"{output}.weight", f"{output}.bias") if name in numbers),
        classes=classes,
        clients=clients,
        participants=participants,
        uploaded=sum(numbers[name] for name in algorithm.uploaded(names, task)),
        kept=sum(numbers[name] for name in algorithm.keeps(names, task))
        + sum(prod(w.shape) for w in algorithm.remember(Start(dict(network.named_parameters()))).values()),
        features=models.output_layer(network, classes).in_features,
    )
