"""What each method costs: numbers the server stores, and numbers that travel in a round (the paper's Section E)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from cwfed import models
from cwfed.algorithms import ALGORITHMS, FedAvg, build
from cwfed.core.types import Cost, Sizes
from cwfed.models import InputShape


def costs(
    model: str,
    shape: InputShape,
    classes: int,
    clients: int,
    participants: int,
    options: dict[str, Any],
    names: Sequence[str] = (),
) -> list[Cost]:
    """The table for a model, K classes and M clients of whom some take part: what each algorithm says of itself.

    `names` chooses some, such as "fedavg+owners"; without it, all are shown.
    """
    chosen = [build(name) for name in names or ALGORITHMS]
    return [
        row
        for algorithm in chosen
        for row in algorithm.costs(sizes(algorithm, model, shape, classes, clients, participants, options))
    ]


def sizes(
    algorithm: FedAvg,
    model: str,
    shape: InputShape,
    classes: int,
    clients: int,
    participants: int,
    options: dict[str, Any],
) -> Sizes:
    """How large the network is that an algorithm trains."""
    with torch.device("meta"):  # shapes only: 1000-class models cost nothing here
        network = models.build(model, shape, classes, options)
        output = str(network.output_layer)
        network = algorithm.adapt(network, output)
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
        kept=sum(numbers[name] for name in algorithm.keeps(names, task)),
        features=models.output_layer(network, classes).in_features,
    )
