"""What rounds are made of, in a simulation as in a real federation: who is invited, how a round is closed, what is remembered, how
scores add up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cwfed.algorithms import FedAvg
from cwfed.core import metrics
from cwfed.core.errors import ConfigError, GivenUp
from cwfed.core.events import PerClass, PhaseResult
from cwfed.core.metrics import Tally, finite
from cwfed.core.rng import stream
from cwfed.core.types import Params, Uploads
from cwfed.engine.base import Score
from cwfed.federation.config import Config
from cwfed.federation.experiment import how_many
from cwfed.federation.guard import bounded, harmless, is_finite_state
from cwfed.federation.sections import GuardSection

FUTILE = 3
"""After so many rounds in a row in which every update was refused, a run is given up."""
SPOILS = "with its update the server's state is no longer made of finite numbers"


@dataclass(frozen=True)
class Progress:
    """All that a run must remember between two rounds; saved and loaded, the run goes on as if nothing was."""

    round: int
    server: Any
    """The algorithm's state."""
    kept: dict[int, Params] = field(default_factory=dict)
    """By client, what stays with it: its model if the algorithm keeps one, its running statistics."""
    trained: dict[int, Score] = field(default_factory=dict)
    """By client, how good the model it keeps is, where that was measured."""
    peers: dict[str, Any] = field(default_factory=dict)
    """In a real federation: who is who."""
    in_vain: tuple[str, ...] = ()
    """Of the last rounds in a row in which every update was refused, one reason each."""
    waited: int = 0
    """With `run.patience`: evaluated rounds since the best one on held-out data."""
    best: float | None = None
    """With `run.patience`: what that round is worth (`metrics.worth`)."""


@dataclass(frozen=True)
class FinalModels:
    """Every client's personal model, and how much that is."""

    clients: int
    nbytes: int
    models: Iterator[tuple[int, Params]]


def to_tree(progress: Progress) -> dict[str, Any]:
    """Progress as a tree for a checkpoint."""
    tree = {
        "round": progress.round,
        "server": progress.server,
        "kept": {str(client): params for client, params in progress.kept.items()},
        "trained": {
            str(c): {"test": s.test.to_tree(), "validation": s.validation.to_tree()}
            for c, s in progress.trained.items()
        },
        "in_vain": list(progress.in_vain),
    }
    if progress.best is not None:
        tree |= {"waited": progress.waited, "best": progress.best}
    return tree | ({"peers": progress.peers} if progress.peers else {})


def from_tree(tree: dict[str, Any]) -> Progress:
    """Progress from a checkpoint's tree."""
    return Progress(
        round=tree["round"],
        server=tree["server"],
        kept={int(client): params for client, params in tree["kept"].items()},
        trained={
            int(client): Score(Tally.from_tree(score["test"]), Tally.from_tree(score["validation"]))
            for client, score in tree["trained"].items()
            if not isinstance(score, list)  # of an earlier version, which counted less: it is measured again
        },
        peers=tree.get("peers", {}),
        in_vain=tuple(tree.get("in_vain", ())),  # checkpoints of earlier versions have none
        waited=tree.get("waited", 0),
        best=tree.get("best"),
    )


def invite(config: Config, clients: Sequence[int], number: int) -> list[int]:
    """Who is invited to a round."""
    count = how_many(config.train.participation, len(clients))
    if count >= len(clients):
        return list(clients)
    chosen = stream(config.run.seed, "participants", number).choice(clients, count, replace=False)
    return sorted(int(c) for c in chosen)


def is_lost(config: Config, number: int, client: int) -> bool:
    """Whether an invited client is lost on the way, where the experiment has that happen."""
    chance = config.train.client_dropout
    return chance > 0 and bool(stream(config.run.seed, "lost", number, client).random() < chance)


@dataclass(frozen=True)
class Closed:
    """What became of the updates of a round."""

    server: Any
    """The algorithm's state: the old one where nothing was aggregated."""
    uploads: Uploads | None = None
    """What was aggregated."""
    refused: dict[int, str] = field(default_factory=dict)
    """By client, why its update was left out although it looked fine by itself."""
    scaled_back: list[int] = field(default_factory=list)
    """Whose update was longer than `guard.norm_bound` allows."""
    skipped: str = ""
    """Why nothing was aggregated."""

    @property
    def participants(self) -> list[int]:
        """Whose update was aggregated."""
        return list(self.uploads.clients) if self.uploads else []


def close(
    algorithm: FedAvg,
    server: Any,
    up: Uploads | None,
    sent: Callable[[int], Params],
    rules: GuardSection,
    updates: Collection[str] = (),
) -> Closed:
    """Aggregate the updates that passed the guard; `sent(client)` is the model that a client was sent, `updates` names what comes beside a
    model and is an update itself.

    No state is taken over that has a number that is not finite: who made it so is refused. Too few good updates change
    nothing.
    """

    def attempt(some: Uploads) -> Closed:
        longer = list[int]()
        if rules.norm_bound:
            models, long = bounded(some.models, lambda row: sent(some.clients[row]), rules.norm_bound)
            beside = {name: some.extras[name] for name in updates}
            nothing = {name: torch.zeros_like(w[0]) for name, w in beside.items()}
            beside, too = bounded(beside, lambda row: nothing, rules.norm_bound)
            some, longer = replace(some, models=models, extras=some.extras | beside), sorted({*long, *too})
        scaled_back = [some.clients[row] for row in longer]
        state = algorithm.aggregate(server, some)
        if not isinstance(state, dict):
            name = type(algorithm).__name__
            raise ConfigError(f"{name}.aggregate must return the new state, a dict, not {type(state).__name__}")
        return Closed(state, some, scaled_back=scaled_back)

    refused = dict[int, str]()
    if up is not None and len(up.clients) >= rules.least:
        closed = attempt(up)
        if is_finite_state(closed.server):
            return closed
        everybody, whole = up.clients, up
        up = up.only(harmless(up, lambda rows: is_finite_state(attempt(whole.only(rows)).server)))
        refused = {client: SPOILS for client in everybody if client not in up.clients}
        if len(up.clients) >= rules.least:
            return replace(attempt(up), refused=refused)
    left = len(up.clients) if up else 0
    return Closed(server, refused=refused, skipped=f"{left} good updates, and guard.least = {rules.least}")


def give_up_in_vain(progress: Progress, rounds: int) -> None:
    """An error where every update was refused for a few rounds in a row: the run would learn nothing for ever."""
    if len(progress.in_vain) >= min(FUTILE, rounds):
        why = progress.in_vain[-1]
        raise GivenUp(f"every update of the last {len(progress.in_vain)} rounds was refused: {why}")


def is_over(config: Config, progress: Progress) -> bool:
    """Whether there is no round left, or `run.patience` is at its end."""
    patience = config.run.patience
    return progress.round >= config.train.rounds or 0 < patience <= progress.waited


def wait(
    progress: Progress, config: Config, result: PhaseResult | None, lower_is_better: Sequence[str]
) -> tuple[Progress, str]:
    """Progress with how long the best round is past after this evaluation, and why the run stops, where it does."""
    patience, name = config.run.patience, config.run.pick
    if not patience or result is None:
        return progress, ""
    now = metrics.worth(result.held_out(name), name in lower_is_better)
    if progress.best is None or now > progress.best:
        return replace(progress, waited=0, best=now), ""
    progress = replace(progress, waited=progress.waited + 1)
    if progress.waited < patience or progress.round >= config.train.rounds:
        return progress, ""
    since = f"{patience} evaluated rounds" if patience > 1 else "1 evaluated round"
    return progress, (
        f"stopped after round {progress.round} of {config.train.rounds}: the {metrics.words(name)} on held-out data has not "
        f"improved for {since} (run.patience)"
    )


def phase_result(
    scores: Sequence[Score], tests: Sequence[int], validations: Sequence[int], own: Sequence[metrics.Own] = ()
) -> PhaseResult:
    """The clients' scores in one: over all samples, so that a client counts by how many it has."""
    held_out = sum(validations)
    found = metrics.numbers([s.test for s in scores], tests, own)
    apart = metrics.numbers([s.validation for s in scores], validations, own, clients=False) if held_out else None
    return PhaseResult(
        metrics={name: value for name, value in found.over_all.items() if name != "loss"},
        validation_metrics=apart.over_all if apart else {},
        client_metrics=found.clients,
        classes=None if found.table is None else PerClass.of(found.table),
        accuracy=sum(s.test_right for s in scores) / sum(tests),
        validation=sum(s.validation_right for s in scores) / held_out if held_out else None,
        loss=finite(sum(s.test_loss for s in scores) / sum(tests)),
        right=[s.test_right for s in scores],
    )


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing, and where it is beyond all bounds."""
    with np.errstate(over="ignore"):  # of numbers that are fine one by one
        return finite(float(np.mean(values))) if values else None


def correlation(p: Tensor, estimate: Tensor) -> float | None:
    """Pearson, over all clients and classes; None where either does not vary."""
    if p.numel() < 2 or p.std() == 0 or estimate.std() == 0:
        return None
    return float(torch.corrcoef(torch.stack([p.flatten(), estimate.flatten()]))[0, 1])


@contextmanager
def one_compute_thread() -> Iterator[None]:
    """Sums split over threads differ in the last bits with their number; clients run side by side instead."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Clock:
    """How long the steps of a round take."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, step: str) -> None:
        """What took place since the last call was this step."""
        now = time.perf_counter()
        self._laps[step] = self._laps.get(step, 0.0) + now - self._last
        self._last = now

    def laps(self, step: str) -> dict[str, float]:
        """Seconds by step, this last one included."""
        self.lap(step)
        return {name: round(seconds, 6) for name, seconds in self._laps.items()}
