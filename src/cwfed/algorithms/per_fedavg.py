"""Per-FedAvg, first order. Fallah et al., Personalized Federated Learning: A Meta-Learning Approach, 2020.

What is averaged is a start from which one step gives a good model, min_w sum_i p_i CE_i(w - alpha grad CE_i(w)). A local
step takes two batches D and D':

    w~ = w - alpha grad CE(w; D)
    w <- w - lr grad CE(w~; D')                 lr is train.lr; first order: the gradient is not taken through w~

which is the gradient of CE(w - alpha sg(grad CE(w; D)); D'). A batch of 2 B samples is split in halves, and two epochs are
made for one of FedAvg, so that there are as many steps. (Fewer than four samples are not split: they are both D and D'.)
The server is FedAvg's.

Limiting cases: alpha = 0 is FedAvg on the halves D'. No tuning step: phase `trained` is the received model. Reported (phase
`trained`) is the received w after `tuning_steps` steps with the rate alpha on batches of the client's training data, on a
copy that is thrown away; phase `received` is w as it is. Running statistics move with the network at w~ only.

(Public versions tune on labelled test data; never go back to w, so that both steps are plain SGD; compute w~ and do not use
it; train nothing at a client with fewer than 2 B samples; leave the statistics that the tuning has moved.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import losses
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Loss, Network, Params, Pass, Phase, Start, Task, When

LEAST_SPLIT = 4
"""Samples of a batch that is split: halves of one sample would be nothing for a norm layer."""


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """FedAvg of models that are good after one more step."""

    name: ClassVar[str] = "per-fedavg"
    phase: ClassVar[Phase] = "trained"
    work: ClassVar[str] = "client: two gradients per step, and a tuning step before it is tested; server: as FedAvg"

    alpha: float | None = None
    """Rate of the inner and of the tuning step; default: train.lr, as in public code."""
    tuning_steps: int = 1
    """Steps on training data before the test."""

    def __post_init__(self) -> None:
        if self.tuning_steps < 0 or (self.alpha is not None and self.alpha < 0):
            raise ConfigError("per-fedavg: alpha and tuning_steps must not be negative")

    def check(self, task: Task) -> None:
        task.training.require_plain(
            self.name, "the step that is learnt for and made before the test is one of plain SGD"
        )

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        how, steps = task.training, self.tuning_steps
        if when == "training":
            return (Pass(batch_size=2 * how.batch_size, epochs=2 * how.epochs),)
        tuning = Pass(epochs=max(1, steps), steps=steps, rate=self.alpha, stage="tuning")
        return (tuning,) if when == "test" else ()

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        if stage == "tuning":
            return super().loss(network, params, batch, start, stage)
        first, second = halves(batch)
        alpha = batch.lr if self.alpha is None else self.alpha
        inner = losses.gradient(network, params, first, losses.moving(params))
        stepped = params | {name: params[name] - alpha * g for name, g in inner.items()}
        loss = second.cross_entropy(network(stepped, second.inputs).logits)
        return Loss(loss, torch.zeros_like(loss))


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """D and D'; a batch that is too small to be split is both."""
    samples = len(batch.labels)
    half = samples // 2 if samples >= LEAST_SPLIT else 0
    end = half or samples
    first = batch._replace(inputs=batch.inputs[:end], labels=batch.labels[:end])
    return first, batch._replace(inputs=batch.inputs[half:], labels=batch.labels[half:])
