"""A client's work: train, measure, keep. A node has one client, a simulation on Flower many; the app in client.py uses it to answer messages."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict

from cwfed import models
from cwfed.core.errors import ConfigError
from cwfed.core.metrics import PER_CLASS, SAMPLES, Own, everything
from cwfed.core.types import Download, Params
from cwfed.data import Federation
from cwfed.engine import Candidate, Loop, Score, find_devices
from cwfed.federation import guard, manifest
from cwfed.federation.experiment import Blueprint
from cwfed.flower import wire
from cwfed.flower.account import Account
from cwfed.privacy import dp
from cwfed.privacy.noise import Noise, Seeded
from cwfed.runs.checkpoint import Checkpoints
from cwfed.runs.folder import RunFolder

log = logging.getLogger("cwfed.flower")

KEPT = 4
"""The number of rounds of which a client keeps its state: the last, of which it does not know yet whether the server accepted it, and a few before
it, which a restarted server may ask for again."""


class Worker:
    """Does the work of the clients whose data are here: one on a node, many in a simulation.

    What a client has trained counts only if the server accepted its update. Otherwise the next round begins where the last accepted one
    (`accepted`, 0 before the first) ended, as in the simulator for a client that is refused or lost.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        federation: Federation,
        state: Callable[[int], Path | None],
        tell_sums: bool,
        noise: Noise | None = None,
        account: Account | None = None,
        pack: wire.Pack = wire.to_record,
    ) -> None:
        self.blueprint, self.algorithm, self.federation = blueprint, blueprint.algorithm, federation
        self._tell_sums = tell_sums
        self._noise = noise or Seeded(blueprint.config.run.seed)
        self._account, self._pack = account, pack
        self.forms = blueprint.sent_forms()
        self._state = state
        self._loop = Loop(
            blueprint.job(federation, find_devices(blueprint.config.run.device, "loop")[0], self._noise)
        )

    def train(self, client: int, round_: int, accepted: int, got: Download, measure: bool) -> RecordDict:
        """One visit (begin, train, finish); returns the upload."""
        visit = self.blueprint.visit(client, self._kept(client, accepted), got)
        self._loop.rehearse(None, visit)  # before the privacy account is charged: an error here must cost nothing
        epsilon = self._charge(client, round_)
        out = {n: torch.empty(1, *t.shape, dtype=t.dtype) for n, t in self.blueprint.initial.items()}
        (visited,) = self._loop.visit(round_, None, [visit], out)
        trained = {name: stack[0] for name, stack in out.items()}
        own = {name: trained[name] for name in self.blueprint.kept_names}
        keep = own | visited.remembered | visited.statistics
        is_finite = math.isfinite(visited.loss + visited.penalty) and all(map(guard.is_finite, trained.values()))
        if not is_finite:
            raise ConfigError(
                f"the training diverged in round {round_}: lower train.lr (or the weight of the penalty)"
            )
        if keep:
            self._checkpoints(client).save(round_, {"round": round_, "kept": keep}, after=accepted)
        metrics: dict[str, Any] = {"samples": len(self.federation.shards[client].train)}
        metrics["penalty"] = visited.penalty
        if self.blueprint.config.privacy.dp == "off":  # with DP the loss would reveal what no noise covers
            metrics["loss"] = visited.loss
        if epsilon is not None:
            metrics["epsilon"] = epsilon
        if measure and not self.blueprint.is_tuned:
            now = replace(visit, statistics=visited.statistics)
            whole = self.blueprint.after_training(trained | visited.statistics, self._counts(client))
            metrics |= self._measure("trained", Candidate(now, whole))
        names = self.algorithm.uploaded(tuple(trained), self.blueprint.task)
        content = RecordDict({"metrics": MetricRecord(metrics)})
        sent = self._blurred(client, round_, {name: trained[name] for name in names})
        wire.upload_to(content, sent, visited.extras, self._pack)
        return content

    def _charge(self, client: int, round_: int) -> float | None:
        """Enter the training that is about to begin in the privacy account, if there is one; returns epsilon after it."""
        if self._account is None:
            return None
        train, samples = self.blueprint.config.train, len(self.federation.shards[client].train)
        rate, steps = dp.rate(samples, train.batch_size), dp.steps_of_a_round(samples, train.batch_size, train.epochs)
        epsilon = self._account.charge(rate, steps, data_key(self.federation), self.blueprint.classes)
        # a warning, so that a node's operator sees it without setting anything up
        log.warning("round %d: %s", round_, self._account.sentence(epsilon))
        return epsilon

    def _blurred(self, client: int, round_: int, model: Params) -> Params:
        """The model as it is sent; the one that is kept is not changed."""
        dial = self.blueprint.config.privacy.dial()
        return model if dial.norms == "exact" else dial.turn(model, self.blueprint.task, self._noise, round_, client)

    def evaluate(
        self, client: int, round_: int, accepted: int, got: Download, kept_too: bool, keep: bool
    ) -> RecordDict:
        """Measure the model that the server handed out after a round, and the client's own if the server asks for that."""
        kept, number = self._kept(client, accepted), round_ + 1
        visit = self.blueprint.visit(client, kept, got)
        metrics = self._measure("received", Candidate(visit), number)
        trained = self.blueprint.own_model(kept, self._counts(client))
        if self.blueprint.is_tuned:
            metrics |= self._measure("trained", Candidate(visit, is_tuned=True), number)
        elif kept_too and trained is not None:
            metrics |= self._measure("trained", Candidate(visit, trained))
        if keep:
            model = trained
            if model is None:
                (model,) = self._loop.personal(number, None, [visit], is_tuned=self.blueprint.is_tuned)
            network = self.blueprint.template
            self._write_model(client, {n: w for n, w in model.items() if not models.attached(network, n)})
        return RecordDict({"metrics": MetricRecord(metrics)})

    def _measure(self, phase: str, candidate: Candidate, round_: int = 0) -> dict[str, Any]:
        (score,) = self._loop.measure([candidate], round_)
        return score_to(phase, score, self.blueprint.metrics, self._tell_sums)

    # --- what is kept here

    def _counts(self, client: int) -> list[float]:
        """n_ij: how many training samples of each class the client has."""
        counts: list[float] = self.federation.class_counts(client).tolist()
        return counts

    def folder(self, client: int) -> Path | None:
        """The folder of a client's state and model; None if nothing is kept."""
        return self._state(client)

    def _checkpoints(self, client: int) -> Checkpoints:
        folder = self._state(client)
        if folder is None:
            raise ConfigError(
                "this algorithm keeps something at the client: give its node a folder for that (node config: state)"
            )
        return Checkpoints(folder, KEPT)

    def _kept(self, client: int, accepted: int) -> Params:
        """What the client kept after the last round in which its update was good."""
        if not self.blueprint.keeps_any:
            return {}
        tree, complaints = self._checkpoints(client).newest(before=accepted + 1)
        for complaint in complaints:
            log.warning("%s: an older state is used", complaint)
        kept: Params = tree["kept"] if tree else {}
        return kept

    def _write_model(self, client: int, model: Params) -> None:
        """Write the personal model to the client's disk; `cwfed.load_model(folder, client)` reads it."""
        place = self._state(client)
        if place is None:
            return
        place.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(place)
        config, about, shape = self.blueprint.config, self.federation.data, self.federation.shape
        facts = manifest.manifest(
            seed=config.run.seed,
            algorithm=config.algorithm_name,
            model={"name": self.blueprint.model_name, "parameters": self.blueprint.parameters},
            data={
                "digest": about.digest,
                "shape": list(shape.dims),
                "vocabulary": shape.vocabulary,
                "classes": list(about.class_names),
            },
            split={"digest": self.federation.digest(), "histogram": []},
        )
        folder.write_config(config)
        folder.write_json("manifest.json", facts)
        if about.words:
            folder.write_json("vocabulary.json", {"words": about.words})
        folder.save_models(iter([(client, model)]))


def score_to(phase: str, score: Score, own: Sequence[Own], tell_sums: bool) -> dict[str, Any]:
    """A score as metrics of a message: with all its sums, which reveal how many samples of each class were tested, or with the metrics only.
    A number that is not finite is sent as -1, which no loss can be.
    """
    loss = score.test_loss if math.isfinite(score.test_loss) else -1.0
    told: dict[str, Any] = {
        f"{phase}-right": score.test_right,
        f"{phase}-loss": loss,
        f"{phase}-validation": score.validation_right,
    }
    for part, tally in (("test", score.test), ("held-out", score.validation)):
        if tell_sums and all(np.isfinite(tally.sums[name]).all() for name, _, _ in own):
            for name, sums in tally.sums.items():
                told[f"{phase}-{part}-sums-{name}"] = np.where(np.isfinite(sums), sums, -1.0).ravel().tolist()
            continue
        for name, key, metric in everything(own):
            value = tally.value(name, key, metric) if tally.sums[PER_CLASS][SAMPLES].any() else None
            if value is not None:
                told[f"{phase}-{part}-{name}"] = value
    return told


def data_key(federation: Federation) -> str:
    """A text that differs if the data or their split differ."""
    return f"{federation.data.digest} {federation.digest()}"
