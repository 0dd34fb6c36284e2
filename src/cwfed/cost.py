"""What a method costs: numbers the server stores, and numbers that travel in a round (the paper's Section E)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from cwfed import models
from cwfed.algorithms import IFCA
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
    copies = min(classes, participants)
    body, distributions = total - head, clients * classes
    once = participants * total
    clusters = min(IFCA().k, clients)
    every = "the server keeps every client's model"
    own = "every client keeps its own model"
    return [
        Cost("fedavg", total, once, once),
        Cost("fedprox", total, once, once),
        Cost("cwfedavg (all), as published", classes * total, once, once, "K class models"),
        Cost("cwfedavg (output), as published", total + classes * head, once, once, "a model and K output layers"),
        Cost(
            "cwfedavg (all), lean",
            copies * total + distributions,
            once,
            once,
            f"min(K, participants) = {copies} copies",
        ),
        Cost("cwfedavg (output), lean", body + copies * head + distributions, once, once, f"{copies} output layers"),
        Cost("fedamp", (clients + 1) * total + clients**2, once, once, f"{every}; {own}"),
        Cost("fedfomo", (clients + 1) * total + clients**2, clients * once, once, f"{every}; {own}"),
        Cost("cfl", total, once, once, "one model a cluster: up to M after splits"),
        Cost(f"ifca, k = {clusters}", clusters * total, clusters * once, once, "k models"),
        Cost("fednh", total, once, once + participants * classes, "and K counts up"),
        Cost("feduv", total, once, once, own),
        Cost("fedavg-ft", total, once, once, own),
        Cost("local", 0, 0, 0, own),
    ]
