"""pFedMe. T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, 2020.

    F_i(w) = min_theta CE_i(theta) + lambda/2 ||theta - w||^2

theta starts a round at the received w. On every batch, client i makes K steps on theta, then one on its w_i, which goes up:

    theta <- theta - rate (grad CE(theta) + lambda (theta - w_i) + decay theta)      K times on the same batch
    w_i   <- w_i - lr lambda (w_i - theta)                                           lr is train.lr
    w     <- (1 - beta) w + beta sum_i p_i w_i                                       at the server

With theta' what the K steps give, that is one step with the rate 1 on 1/2 ||theta - theta'||^2 + lr lambda/2 ||w_i - theta'||^2,
theta' fixed, which is shown as the penalty; the loss is CE(theta').

Limiting cases: beta = 0: the server never moves. lambda = 0: w_i is the received w, theta K steps of SGD per batch from it.
K = 1, lr lambda = 1, beta = 1: w_i = theta at every batch, and all is FedAvg with the learning rate `rate`. K = 0: nothing
moves. Needs rate (lambda + decay) < 2 and lr lambda <= 1. Reported is theta_i (phase `trained`); phase `received` is w.
Running statistics are those of theta, averaged with w.

(Public versions measure w_i, the received w or the initial model as "personalised"; pull theta towards itself; move w_i
once per epoch; have a server that never moves by default. A decay of 0.001 is in the published code, not in the paper.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.algorithms.twin import OWN, of_network, of_twin, with_second_parameters
from cwfed.core import losses, mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Loss, Network, Params, Pass, Phase, Start, Task, Uploads, When


@dataclass(frozen=True)
class PFedMe(FedAvg):
    """FedAvg of the Moreau envelopes: personal models near w are found in inner steps, and w_i follows them."""

    name: ClassVar[str] = "pfedme"
    phase: ClassVar[Phase] = "trained"
    work: ClassVar[str] = "client: K gradients and a forward pass per batch, keeps a second model; server: as FedAvg"

    lambda_: float = 15.0
    """Weight of the pull between theta and w_i."""
    steps: int = 5
    """K, inner steps per batch."""
    rate: float = 0.01
    """Learning rate of the inner steps."""
    beta: float = 1.0
    """How far the server goes to the mean of the w_i; the paper also takes 2 and 4."""
    decay: float = 0.0
    """Weight decay of the inner steps; 0.001 in the published code."""
    restart: bool = False
    """Whether theta starts from w_i at every batch, instead of where the last batch left it."""

    def __post_init__(self) -> None:
        if min(self.lambda_, self.steps, self.beta, self.decay) < 0 or self.rate <= 0:
            raise ConfigError("pfedme: lambda, steps, beta and decay must not be negative, rate must be above 0")
        if self.rate * (self.lambda_ + self.decay) >= 2:
            raise ConfigError(
                f"pfedme: rate times lambda must be below 2, or theta diverges from w; it is {self.rate:g} * "
                f"{self.lambda_ + self.decay:g}"
            )

    def check(self, task: Task) -> None:
        task.training.require_plain(
            self.name, "w_i moves by train.lr times lambda (w_i - theta) and theta by inner steps"
        )
        if task.training.lr * self.lambda_ > 1:
            raise ConfigError(
                f"pfedme: train.lr times lambda must be at most 1, or w_i overshoots theta; it is {task.training.lr:g} * "
                f"{self.lambda_:g}: lower one of them"
            )

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        return with_second_parameters(model)

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if not name.startswith(OWN))

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(
            name for name in names if name not in task.parameters
        )  # theta, and statistics to measure it with

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        return super().init(fresh, task) | {"parameters": list(task.parameters)}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        mean = mixing.average(up.models, mixing.sample_weights(up.counts))
        moved = {name: torch.lerp(state["model"][name], mean[name], self.beta) for name in state["parameters"]}
        return state | {"model": mean | moved}  # beyond the mean there is no variance: statistics are averaged

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        w = self.personal(got, own, data)
        return Start(w | {name: w[name.removeprefix(OWN)] for name in w if name.startswith(OWN)})

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        return (Pass(rate=1.0),) if when == "training" else ()

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        w, theta = of_network(params), of_twin(params)
        found = self.found(network, w if self.restart else theta, w, batch)
        output = network(found, batch.inputs)  # moves running statistics, which inner steps do not
        follow = batch.lr * self.lambda_ / 2 * losses.proximal(w, found)
        return Loss(batch.cross_entropy(output.logits).detach(), losses.proximal(theta, found) / 2 + follow)

    def found(self, network: Network, theta: Params, w: Params, batch: Batch) -> Params:
        """theta' on a batch: numbers, through which nothing is differentiated."""
        moving = losses.moving(theta)
        theta, w = ({name: t.detach() for name, t in model.items()} for model in (theta, w))
        for _ in range(self.steps):
            for n, g in losses.gradient(network, theta, batch, moving).items():
                t = theta[n]
                theta[n] = t - self.rate * (g + self.lambda_ * (t - w[n]) + self.decay * t)
        return theta

    def shown(self, params: Params) -> Params:
        return params | of_twin(params)
