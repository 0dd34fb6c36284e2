"""Optimisers: pairs of pure functions over one client's tensors by name.

    state = optimizer.init(params)
    params, state = optimizer.update(params, gradients, state, lr)

Plain SGD (`SGD()`) has no state; engines have a shorter way for it. The formulas are those of torch.optim, which the tests
compare them with. The learning rate is a function of the round (`Schedule`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from cwfed.core.types import Params

Name: TypeAlias = Literal["sgd", "adam", "adamw"]


class Optimizer(Protocol):
    """A rule for steps. Its state is tensors by name, so that it can be kept like any other tensor of a client."""

    @property
    def is_plain(self) -> bool:
        """Whether a step is lr times the gradient, and nothing else."""

    def init(self, params: Params) -> Params:
        """The state before the first step."""

    def update(self, params: Params, gradients: Params, state: Params, lr: float | Tensor) -> tuple[Params, Params]:
        """The parameters and the state after a step; the arguments are not changed."""


@dataclass(frozen=True)
class SGD:
    """w <- w - lr g; with momentum u <- m u + g, w <- w - lr u (Nesterov: w <- w - lr (g + m u))."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def is_plain(self) -> bool:
        return not self.momentum and not self.weight_decay

    def init(self, params: Params) -> Params:
        # from zero the first step is the gradient itself, as in torch.optim
        return {f"momentum.{name}": torch.zeros_like(w) for name, w in params.items()} if self.momentum else {}

    def update(self, params: Params, gradients: Params, state: Params, lr: float | Tensor) -> tuple[Params, Params]:
        after, kept = {}, {}
        for name, w in params.items():
            step = gradients[name] + self.weight_decay * w if self.weight_decay else gradients[name]
            if self.momentum:
                velocity = self.momentum * state[f"momentum.{name}"] + step
                kept[f"momentum.{name}"] = velocity
                step = step + self.momentum * velocity if self.nesterov else velocity
            after[name] = w - lr * step
        return after, kept


@dataclass(frozen=True)
class Adam:
    """Adam; `decoupled` takes the weight decay out of the gradient, which is AdamW."""

    weight_decay: float = 0.0
    decoupled: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    @property
    def is_plain(self) -> bool:
        return False

    def init(self, params: Params) -> Params:
        device = next(iter(params.values())).device
        steps = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        moments = {f"{moment}.{name}": torch.zeros_like(w) for name, w in params.items() for moment in ("m", "v")}
        return {"steps": steps} | moments

    def update(self, params: Params, gradients: Params, state: Params, lr: float | Tensor) -> tuple[Params, Params]:
        steps = state["steps"] + 1
        after, kept = {}, {"steps": steps}
        # both moments start from zero, and are too small by these factors
        of_m, of_v = 1 - self.beta1**steps, (1 - self.beta2**steps).sqrt()
        for name, w in params.items():
            gradient = gradients[name]
            if self.weight_decay and not self.decoupled:
                gradient = gradient + self.weight_decay * w
            m = self.beta1 * state[f"m.{name}"] + (1 - self.beta1) * gradient
            v = self.beta2 * state[f"v.{name}"] + (1 - self.beta2) * gradient.square()
            kept |= {f"m.{name}": m, f"v.{name}": v}
            decayed = w * (1 - lr * self.weight_decay) if self.weight_decay and self.decoupled else w
            after[name] = decayed - lr * (m / of_m.to(w.dtype)) / (v.sqrt() / of_v.to(w.dtype) + self.epsilon)
        return after, kept


def first_state(optimizer: Optimizer, params: Params, kept: Params) -> Params:
    """The state that a pass begins with: what was kept of the last one, if that moved the same tensors; else a fresh one."""
    fresh = optimizer.init(params)
    return kept if kept.keys() == fresh.keys() else fresh


def clipped(gradients: Params, most: float) -> Params:
    """The gradients, scaled back where together they are longer than `most`."""
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    factor = (most / (norm + 1e-6)).clamp_max(1.0)
    return {name: g * factor for name, g in gradients.items()}


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a round, as a factor of `train.lr`."""

    kind: Literal["constant", "step", "cosine"] = "constant"
    rounds: int = 1
    """Rounds of the whole run, after which cosine is 0."""
    every: int = 100
    """step: after so many rounds ..."""
    factor: float = 0.1
    """... the rate is multiplied by this."""
    warm_up: int = 0
    """Rounds in which the rate rises linearly from 0."""

    def rate(self, lr: float, round_: int) -> float:
        """The learning rate in a round, counted from 1."""
        if round_ <= self.warm_up:
            return lr * round_ / self.warm_up
        if self.kind == "step":
            return lr * self.factor ** ((round_ - 1 - self.warm_up) // self.every)
        if self.kind == "cosine":
            last = min(
                round_, self.rounds
            )  # models that are trained only to be measured after the last round use its rate
            share = max(0, last - 1 - self.warm_up) / max(1, self.rounds - self.warm_up)
            return lr * 0.5 * (1 + math.cos(math.pi * share))
        return lr
