"""FedFomo. Zhang et al., Personalized Federated Learning with First Order Model Optimization, 2021.

The client holds out part of its training data, downloads other clients' models w_n and weighs each by what it
would gain from it:

    weight_n = max(0, (L(w_ref) - L(w_n)) / ||w_n - w_ref||),   normalised to sum 1
    w        = w_ref + sum_n weight_n (w_n - w_ref),            then train

L is the loss on the held-out data. w_ref is the model from which the client's last local training started; the model
that this training ended in is one of the candidates w_n. So a client gives up what it has learnt itself only as
far as others' models improved on w_ref more.

Limiting case: where no model helps, its own included, all weights are zero and w = w_ref: the client takes its last
training back and tries again. (A widely used library keeps the trained model there.)

With fewer downloads than clients the server keeps an affinity matrix (summed weights) and sends each client
the models it gained most from, with epsilon-greedy exploration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.algorithms.own_models import EVERY_MODEL, no_models, server_numbers, with_uploads
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.rng import stream
from cwfed.core.types import Cost, Download, ExtraSpec, Params, Phase, Sizes, Start, Task, Uploads

REFERENCE = "reference."
"""Before the name of a tensor: what it was before the last local training."""


@dataclass(frozen=True)
class FedFomo(FedAvg):
    """Every client mixes in the models that lower its own validation loss."""

    name: ClassVar[str] = "fedfomo"
    phase: ClassVar[Phase] = "trained"
    keeps_model: ClassVar[bool] = True
    travels: ClassVar[str] = "1 + m models a participant (m = M by default): others' models down, its own up"
    work: ClassVar[str] = "client: m + 2 validation passes, keeps two models; server: keeps M models"

    downloads: int = 0
    """m, models a client downloads in a round; 0 is those of all clients, its own included."""
    holdout: float = 0.2
    """Share of the training data held out to weigh models; it is not trained on."""
    epsilon: float = 0.3
    """With fewer downloads than clients: probability of sending random models instead of the best."""

    def __post_init__(self) -> None:
        if self.downloads < 0 or not 0 < self.holdout < 1 or not 0 <= self.epsilon <= 1:
            raise ConfigError(
                "fedfomo: downloads must not be negative, holdout must lie between 0 and 1, epsilon from 0 to 1"
            )

    def costs(self, sizes: Sizes) -> list[Cost]:
        down = (self.downloads or sizes.clients) * sizes.once
        up = sizes.once + sizes.participants * self.downloads
        return [Cost(self.name, server_numbers(sizes), down, up, f"{EVERY_MODEL}, and the one before it")]

    def held_out(self) -> float:
        return self.holdout

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        if self.downloads > task.clients:
            raise ConfigError(f"fedfomo: downloads = {self.downloads}, but there are only {task.clients} clients")
        affinity = torch.zeros(task.clients, task.clients, dtype=torch.float64)
        return no_models(fresh(0), task) | {"affinity": affinity, "seed": task.seed, "round": 0}

    def chosen(self, state: Any, client: int) -> list[int]:
        """Whose models a client is sent: all, or those it gained most from, or now and then random ones."""
        there = torch.nonzero(state["known"]).flatten()
        known: list[int] = there.tolist()
        if not self.downloads or len(known) <= self.downloads:
            return known
        rng = stream(state["seed"], "fedfomo", state["round"], client)
        if rng.random() < self.epsilon:
            return sorted(int(i) for i in rng.choice(known, self.downloads, replace=False))
        ranked = state["affinity"][client, there].argsort(descending=True, stable=True)  # of equal ones the first
        best: list[int] = there[ranked[: self.downloads]].tolist()
        return sorted(best)

    def send(self, state: Any, client: int) -> Download:
        models = state["models"]
        return Download(tuple({n: w[i] for n, w in models.items()} for i in self.chosen(state, client)))

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        return {"weights": ExtraSpec(torch.float32, (self.downloads,), 0, 1.001)} if self.downloads else {}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        after = with_uploads(state, up)
        affinity = state["affinity"].clone()
        for row, client in enumerate(up.clients):
            if self.downloads and (sent := self.chosen(state, client)):
                affinity[client, sent] += up.extras["weights"][row][: len(sent)].double()
        return after | {"affinity": affinity, "round": state["round"] + 1}

    def newcomer(self, state: Any, class_counts: Any = None) -> Params:
        initial: Params = state["initial"]
        return initial

    def remember(self, start: Start) -> Params:
        return {REFERENCE + name: w for name, w in start.params.items()}

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        return self.mix(got, own, data)[0]

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        params, weights = self.mix(got, own, data)
        return Start(params=params, notes={"weights": weights})

    def mix(self, got: Download, own: Params | None, data: ClientData) -> tuple[Params, Tensor]:
        """The client's new start, and how much it took of each model that it was sent."""
        assert own is not None, "a client of a method that keeps models always has one"
        trained = {name: w for name, w in own.items() if not name.startswith(REFERENCE)}
        reference = {name: own.get(REFERENCE + name, w) for name, w in trained.items()}
        if not got.models:
            return trained, torch.zeros(0)
        # its own model is a candidate once, whether or not the server sent it back
        others = [n for n, model in enumerate(got.models) if not _equal(model, trained)]
        candidates = [trained, *(got.models[n] for n in others)]
        losses = data.losses((reference, *candidates), "holdout")
        distances = torch.stack([_distance(model, reference) for model in candidates])
        weights = fomo_weights(losses[0], losses[1:], distances)
        taken = torch.zeros(len(got.models), dtype=weights.dtype)
        taken[others] = weights[1:]
        if weights.sum() == 0:
            return reference, taken
        stack = {name: torch.stack([model[name] for model in candidates]) for name in trained}
        return mixing.average(stack, weights), taken  # weights sum to 1: the reference cancels

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        """Only a server that chooses which models to send needs to know the weights."""
        if not self.downloads:
            return {}
        weights = torch.zeros(self.downloads, dtype=torch.float32)
        given = start.notes["weights"]
        weights[: len(given)] = given
        return {"weights": weights}


def fomo_weights(reference_loss: Tensor, losses: Tensor, distances: Tensor) -> Tensor:
    """max(0, (L_ref - L_n) / ||w_n - w_ref||), normalised; all zero where no model helps."""
    better = reference_loss - losses
    if not reference_loss.isfinite():  # beyond all bounds: each that has a loss is better, by the same
        better = torch.ones_like(losses)
    gains = (better / distances.clamp_min(torch.finfo(distances.dtype).tiny)).clamp_min(0)
    # the reference itself is no gain, nor is a model whose answers are no numbers
    gains = torch.where((distances > 0) & losses.isfinite(), gains, torch.zeros_like(gains))
    return gains / gains.sum() if gains.sum() > 0 else torch.zeros_like(gains)


def _equal(a: Params, b: Params) -> bool:
    return all(torch.equal(a[name], w) for name, w in b.items())


def _distance(a: Params, b: Params) -> Tensor:
    return torch.stack([(a[name] - b[name]).double().square().sum() for name in b]).sum().sqrt()
