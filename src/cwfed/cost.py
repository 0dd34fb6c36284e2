"""What a method costs: numbers the server stores, and numbers that travel in a round (the paper's Section E)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from cwfed import models
from cwfed.models import InputShape


@dataclass(frozen=True)
class Cost:
    """One row: a method's needs in numbers (4 bytes each)."""

    method: str
    server: int
    """Numbers the server keeps between rounds."""
    down: int
    """Numbers sent to the participants in a round."""
    up: int
    """Numbers sent by the participants in a round."""
    note: str = ""


def costs(
    model: str, shape: InputShape, classes: int, clients: int, participants: int, options: dict[str, Any]
) -> list[Cost]:
    """The table for a model, K classes and M clients of whom some take part."""
    with torch.device("meta"):  # shapes only: 1000-class models cost nothing here
        network = models.build(model, shape, classes, options)
    task = models.task_of(network, clients, classes)
    sizes = {name: prod(p.shape) for name, p in network.named_parameters()}
    total = sum(sizes.values())
    head = sum(sizes[name] for name in task.select("output"))
    traffic = participants * total
    copies = min(classes, participants)
    distributions = clients * classes
    return [
        Cost("fedavg", total, traffic, traffic),
        Cost("cwfedavg (all), as published", classes * total, traffic, traffic, "K class models"),
        Cost(
            "cwfedavg (output), as published", total + classes * head, traffic, traffic, "a model and K output layers"
        ),
        Cost(
            "cwfedavg (all), lean",
            copies * total + distributions,
            traffic,
            traffic,
            f"min(K, participants) = {copies} copies, K numbers a client",
        ),
        Cost(
            "cwfedavg (output), lean",
            total - head + copies * head + distributions,
            traffic,
            traffic,
            f"a body, {copies} output layers, K numbers a client",
        ),
        Cost("local", 0, 0, 0, "every client keeps its own model"),
        Cost("fedavg-ft", total, traffic, traffic, "every client keeps its own model"),
    ]
