"""A round that is under way, whatever carries its messages: it invites, takes answers, guards, closes and says what happened.

The simulator feeds it from an engine, the Flower strategy from messages; neither decides anything of its own.

    opened = OpenRound(blueprint, before, clients)    `asked` are to train, `lost` are sent a model and never answer
    opened.refuse(client, why)                        an answer that cannot be read
    opened.take(updates, models)                      those that can; what the guard refuses is left out
    opened.close(sent)                                the algorithm aggregates the good ones
    opened.measured(phase, scores)                    from here on `progress` has what the server hands out next
    after, event = opened.finish(sizes), opened.event()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TypeAlias

import torch

from cwfed.core.events import PhaseResult, Round
from cwfed.core.types import PHASES, Params, Phase, Uploads, nbytes
from cwfed.engine.base import Score
from cwfed.federation.experiment import Blueprint
from cwfed.federation.rounds import Clock, Closed, Progress, close, invite, is_lost, mean, phase_result, wait

Sizes: TypeAlias = Mapping[int, tuple[int, int]]
"""By client, its test samples and its held-out samples."""


@dataclass(frozen=True)
class Update:
    """What a participant's answer is beside the model, which is a row of the round's stack."""

    client: int
    samples: int
    penalty: float
    loss: float | None = None
    """None where it is not told: a node that trains with differential privacy does not."""
    extras: Params = field(default_factory=dict)
    keeps: Params = field(default_factory=dict)
    """What the client keeps until its next round, where that is kept for it: in a simulation."""
    score: Score | None = None
    """How good the trained model is, where the client has measured it already."""


class OpenRound:
    """One round, from the invitation to its event."""

    def __init__(self, blueprint: Blueprint, before: Progress, clients: Sequence[int]) -> None:
        self.blueprint, self.config, self.before = blueprint, blueprint.config, before
        self.number = before.round + 1
        self.clock = Clock()
        self.invited = invite(self.config, clients, self.number)
        lost = {c: is_lost(self.config, self.number, c) for c in self.invited}
        self.lost = [c for c in self.invited if lost[c]]
        """Of the invited: who never answers; once the answers are in, who never did."""
        self.asked = [c for c in self.invited if not lost[c]]
        self.refused: dict[int, str] = {}
        """By client, why its answer is left out: from there on it is like one that was lost, nothing of its round stays."""
        self.updates: list[Update] = []
        """Of those whose update is good; once the round is closed, of its participants."""
        self.closed = Closed(before.server)
        self.in_vain: tuple[str, ...] = ()
        self.kept = before.kept
        self.trained: dict[int, Score] = dict(before.trained) if blueprint.has_own_models else {}
        """How good clients' trained models are: of this round, and of the models that others keep."""
        self.received: dict[int, Score] = {}
        """How good the models are that the server hands out after this round."""
        self.results: dict[Phase, PhaseResult | None] = dict.fromkeys(PHASES)
        self.stopped = ""
        self.down = self.up = self.down_to_measure = 0
        """Bytes. Who carries the messages counts those that go down."""
        self._uploads: Uploads | None = None

    @property
    def is_evaluated(self) -> bool:
        """Whether models are measured in this round."""
        return self.number % self.config.run.evaluate_every == 0 or self.number == self.config.train.rounds

    # --- answers

    def refuse(self, client: int, why: str) -> None:
        """Leave a client's answer out; the first reason stays."""
        self.refused.setdefault(client, why)

    def take(self, updates: Sequence[Update], models: Params) -> None:
        """The answers that could be read, sorted by client; row i of the uploaded models is the i-th's. Who is missing is lost."""
        self.clock.lap("train")
        self.up = nbytes(models) + sum(nbytes(update.extras) for update in updates)
        self.refused = dict(sorted((self.refused | self.problems(updates, models)).items()))
        answered = {update.client for update in updates} | self.refused.keys()
        self.lost = sorted(set(self.invited) - answered)
        good = [row for row, update in enumerate(updates) if update.client not in self.refused]
        self.updates = [updates[row] for row in good]
        if len(good) < len(updates):
            models = {name: w[good] for name, w in models.items()}
        self._uploads = self._stacked(models) if good else None
        self.clock.lap("guard")

    def problems(self, updates: Sequence[Update], models: Params) -> dict[int, str]:
        """By client, why its update is left out of the round."""
        guard = self.blueprint.guard
        found = guard.problems(models, [u.extras for u in updates], [u.samples for u in updates])
        for row, update in enumerate(updates):
            if not isfinite((update.loss or 0.0) + update.penalty):
                found[row] = (
                    f"the loss of client {update.client} in round {self.number} is not a finite number: "
                    "the training diverged; lower train.lr (or the weight of the penalty)"
                )
        return {updates[row].client: why for row, why in found.items()}

    def _stacked(self, models: Params) -> Uploads:
        """What the good ones uploaded, for the algorithm."""
        return Uploads(
            clients=tuple(update.client for update in self.updates),
            models=models,
            counts=torch.tensor([update.samples for update in self.updates]),
            extras={
                name: torch.stack([update.extras[name].cpu() for update in self.updates])
                for name in self.blueprint.guard.extras_spec
            },
        )

    def close(self, sent: Callable[[int], Params]) -> None:
        """Let the algorithm aggregate what is good (`sent(client)` is the model that a client was sent). A round without any good
        update changes nothing."""
        uploads, self._uploads = self._uploads, None
        updates = [name for name, form in self.blueprint.guard.extras_spec.items() if form.is_update]
        self.closed = close(self.blueprint.algorithm, self.before.server, uploads, sent, self.config.guard, updates)
        self.refused |= self.closed.refused
        if self.refused and len(self.refused) == len(self.invited) - len(self.lost):
            self.in_vain = (*self.before.in_vain, next(iter(self.refused.values())))
        took_part = set(self.closed.participants)
        self.updates = [update for update in self.updates if update.client in took_part]
        self.kept = self.before.kept | {update.client: update.keeps for update in self.updates if update.keeps}
        self.trained = {client: score for client, score in self.trained.items() if client not in took_part}
        self.trained |= {update.client: update.score for update in self.updates if update.score}
        self.clock.lap("aggregate")

    # --- scores

    def forget(self, client: int) -> None:
        """A client's data have changed: what was measured on the former ones is no longer known."""
        self.trained.pop(client, None)

    def measured(self, phase: Phase, scores: Mapping[int, Score]) -> None:
        """How good clients' models are in a phase."""
        (self.received if phase == "received" else self.trained).update(scores)

    def result(self, phase: Phase, sizes: Sizes) -> PhaseResult | None:
        """The clients' scores in one; None where nobody with test samples was measured.

        A client that did not train has the model that it received, or the one it keeps.
        """
        scores = dict(self.received)
        if phase == "trained":
            scores |= {c: s for c, s in self.trained.items() if c in scores and is_possible(s, *sizes[c])}
        clients = sorted(scores)
        tests, held_out = ([sizes[client][part] for client in clients] for part in (0, 1))
        if not any(tests):
            return None
        return phase_result([scores[client] for client in clients], tests, held_out, self.blueprint.metrics)

    # --- the end

    @property
    def progress(self) -> Progress:
        """Where the run is, once the round is closed."""
        return replace(
            self.before,
            round=self.number,
            server=self.closed.server,
            kept=self.kept,
            trained=self.trained if self.blueprint.has_own_models else {},
            in_vain=self.in_vain,
        )

    def finish(self, sizes: Sizes) -> Progress:
        """When all is measured: both phases' results, and whether the run's patience is at its end. Where the run is then."""
        self.results = {phase: self.result(phase, sizes) for phase in PHASES}
        result, lower_is_better = self.results[self.blueprint.algorithm.phase], self.blueprint.lower_is_better
        after, self.stopped = wait(self.progress, self.config, result, lower_is_better)
        self.clock.lap("evaluate")
        return after

    @property
    def losses(self) -> list[float]:
        """The participants' training losses; none where one of them does not tell it."""
        told = [update.loss for update in self.updates if update.loss is not None]
        return told if len(told) == len(self.updates) else []

    def event(self) -> Round:
        """What happened, as far as a server can see it."""
        return Round(
            round=self.number,
            participants=self.closed.participants,
            dropped=self.lost,
            loss=mean(self.losses),
            penalty=mean([update.penalty for update in self.updates]),
            client_loss=self.losses,
            correlation=None,
            distance=None,
            received=self.results["received"],
            trained=self.results["trained"],
            down=self.down,
            up=self.up,
            refused={str(client): why for client, why in self.refused.items()},
            skipped=self.closed.skipped,
            scaled_back=self.closed.scaled_back,
            down_to_measure=self.down_to_measure,
            stopped=self.stopped,
            seconds=self.clock.laps("report"),
        )


def is_possible(score: Score, tests: int, held_out: int) -> bool:
    """Whether a score, which may be of an earlier round, can be one of the data that the client has now."""
    return score.test_right <= tests and score.validation_right <= held_out
