"""The round loop: carries an experiment out in this process and says what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cwfed import data, engine, models
from cwfed.core import mixing
from cwfed.core.errors import RunError
from cwfed.core.events import Leak, Newcomers, PhaseResult, Round, Spent, Started
from cwfed.core.types import Download, Params, Phase, Start, Uploads, nbytes
from cwfed.engine import Candidate, Choice, Score, Visit, Visited
from cwfed.engine.precision import require_bf16
from cwfed.engine.worker import OPTIMIZER
from cwfed.federation import manifest
from cwfed.federation.config import Config
from cwfed.federation.experiment import Experiment
from cwfed.federation.portrait import portray
from cwfed.federation.rounds import (
    Clock,
    FinalModels,
    Progress,
    close,
    correlation,
    give_up_in_vain,
    invite,
    is_lost,
    is_over,
    mean,
    one_compute_thread,
    phase_result,
    wait,
)
from cwfed.privacy import dp, leak
from cwfed.privacy.noise import Seeded

TRIED = 16
"""So many clients try a state that was read from a checkpoint."""


class Simulation(Experiment):
    """An experiment with an engine to carry it out."""

    def __init__(self, config: Config, data_dir: str | None = None) -> None:
        self.device = engine.find_device(config.run.device)
        self.notes: list[str] = []
        """What the user should know before the first round."""
        if config.train.precision == "bf16" and (note := require_bf16(self.device)):
            self.notes.append(note)
        super().__init__(config, data_dir)
        self.notes += self._who_holds_nothing()
        self._output = tuple(n for n in (self.task.output_weight, f"{self.task.output}.bias") if n in self.initial)
        train, run = config.train, config.run
        choice = Choice(
            name=run.engine,
            workers=run.workers,
            participants=self.participants(),
            compile=run.compile,
            rounds=train.rounds,
            is_steady=self.participants() == len(self.members) and train.dropout == 0,
        )
        self.engine = engine.choose(self.job(self.federation, self.device), choice)
        before = self.start()
        self.engine.rehearse(before.server, self.visit(self.members[0], {}))
        if spent := self.spent(train.rounds):
            dp.require_budget(spent, config.privacy.dp_budget)
            self.notes.append(dp.promise(spent, train.rounds))

    def _who_holds_nothing(self) -> list[str]:
        chosen = self.config.data
        samples = chosen.samples or len(self.federation.data.labels)
        return data.who_holds_nothing(self.federation, self.members, samples, chosen.room, chosen.validation)

    def start(self) -> Progress:
        """Before round 1."""
        return Progress(0, self.first_state())

    def started(self) -> Started:
        """The first event of the run."""
        return Started(
            algorithm=self.config.algorithm_name,
            dataset=self.federation.data.name,
            seed=self.config.run.seed,
            rounds=self.config.train.rounds,
            clients=self.clients,
            classes=self.task.classes,
            parameters=self.parameters,
            phase=self.algorithm.phase,
            evaluated=self.evaluated,
            test_samples=[len(self.federation.shards[c].test) for c in self.evaluated],
            engine=self.engine.name + (f": {self.engine.why}" if self.engine.why else ""),
            pick=self.config.run.pick,
            lower_is_better=self.lower_is_better,
        )

    def check_progress(self, progress: Progress) -> None:
        """RunError for progress that these rounds cannot go on from: a few clients get their model and try it."""
        remembered = self.algorithm.remember(Start(self.initial))
        shapes = {n: t.shape for n, t in (self.initial | remembered | self.local_statistics).items()}
        needed = {*self.kept_names, *self.local_statistics}
        try:
            self.engine.measure(
                [Candidate(self.visit(c, progress.kept.get(c, {}))) for c in self.members[:3]],
                progress.round + 1,
                progress.server,
            )
            self.try_state(progress.server, self.members[:TRIED])
            kept = list(progress.kept.values())
            fits = all(
                needed <= own.keys()
                and all(shapes[n] == t.shape for n, t in own.items() if not n.startswith(OPTIMIZER))
                for own in kept
            )
            tallies = [tally for score in progress.trained.values() for tally in (score.test, score.validation)]
            fits = fits and all(tally.fits(self.metrics, self.task.classes) for tally in tallies)
            fits = fits and type(progress.waited) is int and isinstance(progress.best, float | None)
        except Exception as error:  # whatever an algorithm says to a state that is none of its own
            raise RunError(
                f"the checkpoint of round {progress.round} does not fit the experiment ({error!r})"
            ) from None
        if not fits:
            raise RunError(
                f"the checkpoint of round {progress.round} holds something else than this experiment's models"
            )

    # --- the rounds

    def rounds(self, progress: Progress) -> Iterator[tuple[Progress, Round]]:
        """Carry out the rounds that are left; after each, where the run is and what happened.

        A run in which every update is refused would go on for ever and learn nothing: it is an error after a few rounds.
        """
        with one_compute_thread():
            give_up_in_vain(progress, self.config.train.rounds)
            while not is_over(self.config, progress):
                progress, event = self._round(progress)
                yield progress, event
                give_up_in_vain(progress, self.config.train.rounds)

    def _round(self, before: Progress) -> tuple[Progress, Round]:
        number = before.round + 1
        clock = Clock()

        # 1. Choose who takes part, and who of them will be lost on the way.
        invited = invite(self.config, self.members, number)
        lost = [c for c in invited if is_lost(self.config, number, c)]
        participants = sorted(set(invited) - set(lost))
        down = sum(self.algorithm.send(before.server, c).nbytes for c in lost)
        clock.lap("send")

        # 2. Send each its model; it begins, trains and finishes. Row i of the stack is the i-th participant's.
        stack = {n: torch.empty(len(participants), *t.shape, dtype=t.dtype) for n, t in self.initial.items()}
        visits = [self.visit(c, before.kept.get(c, {})) for c in participants]
        visited = self.engine.visit(number, before.server, visits, stack)
        sent = {v.client: Download(v.head) for v in visited}
        down += sum(v.downloaded for v in visited)
        keeps = {v.client: self._keep(v, stack, row) for row, v in enumerate(visited)}
        self._tamper(visited, stack)
        up = nbytes({name: stack[name] for name in self.guard.model}) + sum(nbytes(v.extras) for v in visited)
        clock.lap("train")

        # 3. Check what arrived. Who is refused is from here on like one who was lost: nothing of its round stays.
        refused = self._refused(number, visited, stack)
        good = [row for row, v in enumerate(visited) if v.client not in refused]
        clock.lap("guard")

        # 4. The server aggregates what is good, as clients upload it: blurred, where they are told to. A round without any
        #    participant changes nothing.
        uploads = self._uploads(number, visited, stack, good) if good else None
        closed = close(
            self.algorithm,
            before.server,
            uploads,
            lambda c: self.engine.download(before.server, Visit(c)).model,
            self.config.guard,
        )
        refused |= closed.refused
        in_vain = tuple[str, ...]()
        if refused and len(refused) == len(visited):
            in_vain = (*before.in_vain, next(iter(refused.values())))
        participants, took_part = closed.participants, set(closed.participants)
        rows = [row for row, v in enumerate(visited) if v.client in took_part]
        if len(rows) < len(visited):
            visited, stack = [visited[row] for row in rows], {name: w[rows] for name, w in stack.items()}
        kept = before.kept | {client: keeps[client] for client in participants if keeps[client]}
        clock.lap("aggregate")

        # 5. Measure the trained models. A client that sat out has the model it keeps, if it keeps one.
        evaluate = number % self.config.run.evaluate_every == 0 or number == self.config.train.rounds
        trained = {c: s for c, s in before.trained.items() if c not in took_part}
        if evaluate and not self.is_tuned:
            trained = trained | self._measure_trained(participants, stack, kept, known=trained)
        if closed.uploads:
            stack = stack | closed.uploads.models
        clock.lap("evaluate")

        # 6. Measure the models that the server hands out next.
        own_scores = trained if self.has_own_models else {}
        waited, best = before.waited, before.best
        after = Progress(number, closed.server, kept, own_scores, in_vain=in_vain, waited=waited, best=best)
        results: dict[Phase, PhaseResult | None] = {"received": None, "trained": None}
        if evaluate:
            received = self._measure_received(after)
            if self.is_tuned:
                trained = self._measure_received(after, is_tuned=True)
            results = {"received": self._result(received), "trained": self._result(received | trained)}
        after, stopped = wait(after, self.config, results[self.algorithm.phase], self.lower_is_better)
        clock.lap("evaluate")

        # 7. Say what happened.
        p, estimate = self.distributions(participants, stack)
        is_last = is_over(self.config, after)
        event = Round(
            round=number,
            participants=participants,
            dropped=lost,
            loss=mean([v.loss for v in visited]),
            penalty=mean([v.penalty for v in visited]),
            client_loss=[v.loss for v in visited],
            correlation=correlation(p, estimate),
            distance=mean((p - estimate).norm(dim=1).tolist()),
            received=results["received"],
            trained=results["trained"],
            down=down,
            up=up,
            refused={str(client): why for client, why in refused.items()},
            skipped=closed.skipped,
            scaled_back=closed.scaled_back,
            portrait=portray(self, after, participants, stack) if is_last else None,
            leaks=self.leaks(closed.uploads, sent) if closed.uploads else {},
            spent=self.spent(number) if is_last else None,
            stopped=stopped,
            seconds=clock.laps("report"),
        )
        return after, event

    def _keep(self, visited: Visited, stack: Params, row: int) -> Params:
        own = {n: stack[n][row].clone() for n in self.kept_names}
        return own | visited.remembered | visited.statistics

    def statistics(self, kept: dict[int, Params], client: int) -> Params:
        own = kept.get(client)
        return {n: own[n] if own else initial for n, initial in self.local_statistics.items()}

    def _tamper(self, visited: list[Visited], stack: Params) -> None:
        """Adversaries send something else than what they trained; they keep that for themselves."""
        for row, client in enumerate(v.client for v in visited):
            if client in self.adversaries:
                trained = {name: w[row] for name, w in stack.items()}
                sent = self.adversaries[client].tamper(trained, self.task.output_weight)
                for name, w in sent.items():
                    stack[name][row] = w
                visited[row] = replace(visited[row], extras=self.adversaries[client].claim(visited[row].extras))

    def _refused(self, number: int, visited: Sequence[Visited], stack: Params) -> dict[int, str]:
        """By client, why its update is left out of the round."""
        models = {name: stack[name] for name in self.guard.model}
        problems = self.guard.problems(models, [v.extras for v in visited], self._samples(visited))
        for row, v in enumerate(visited):
            if not np.isfinite(v.loss + v.penalty):
                problems[row] = (
                    f"the loss of client {v.client} in round {number} is not a finite number: "
                    "the training diverged; lower train.lr (or the weight of the penalty)"
                )
        return {visited[row].client: why for row, why in sorted(problems.items())}

    def _samples(self, visited: Sequence[Visited]) -> list[int]:
        return [len(self.federation.shards[v.client].train) for v in visited]

    def _blurred(self, number: int, participants: Sequence[int], stack: Params) -> Params:
        """The participants' models as they upload them: those that stay with the clients are not changed."""
        dial, weight = self.config.privacy.dial(), self.task.output_weight
        if dial.norms == "exact":
            return stack
        noise = Seeded(self.config.run.seed)
        rows = [
            dial.turn({weight: stack[weight][row]}, self.task, noise, number, client)[weight]
            for row, client in enumerate(participants)
        ]
        return stack | {weight: torch.stack(rows)}

    def _uploads(self, number: int, visited: Sequence[Visited], stack: Params, rows: Sequence[int]) -> Uploads:
        """What these rows of a round's stack upload."""
        some, models = [visited[row] for row in rows], {name: stack[name] for name in self.guard.model}
        if len(rows) < len(visited):
            models = {name: w[rows] for name, w in models.items()}
        clients = tuple(v.client for v in some)
        return Uploads(
            clients=clients,
            models=self._blurred(number, clients, models),
            counts=torch.tensor(self._samples(some)),
            extras={name: torch.stack([v.extras[name].cpu() for v in some]) for name in self.guard.beside},
        )

    # --- measuring

    def _measure_received(self, progress: Progress, is_tuned: bool = False) -> dict[int, Score]:
        """Scores of the models that clients have on receipt; tuned, after their passes before the test."""
        candidates = [Candidate(self.visit(c, progress.kept.get(c, {})), is_tuned=is_tuned) for c in self.evaluated]
        scores = self.engine.measure(candidates, progress.round + 1, progress.server)
        return dict(zip(self.evaluated, scores, strict=True))

    def _measure_trained(
        self, participants: Sequence[int], stack: Params, kept: dict[int, Params], known: dict[int, Score]
    ) -> dict[int, Score]:
        """Scores of the models just trained, and of kept ones that were trained in a round without evaluation."""
        evaluated = set(self.evaluated)
        rows = {c: {n: w[row] for n, w in stack.items()} for row, c in enumerate(participants) if c in evaluated}
        own: dict[int, Params] = {}
        if self.has_own_models:
            stale = sorted((evaluated & kept.keys()) - rows.keys() - known.keys())
            own = {c: {n: kept[c][n] for n in self.kept_names} for c in stale}
        candidates = []
        for c, model in (rows | own).items():
            statistics = self.statistics(kept, c)
            shown = self.after_training(model | statistics, self._counts(c))
            candidates.append(Candidate(Visit(c, statistics=statistics), shown))
        return dict(zip([*rows, *own], self.engine.measure(candidates), strict=True))

    def _counts(self, client: int) -> list[float]:
        """n_ij: a client's training samples by class."""
        counts: list[float] = self.federation.class_counts(client).tolist()
        return counts

    def _result(self, scores: dict[int, Score]) -> PhaseResult:
        shards = [self.federation.shards[c] for c in self.evaluated]
        return phase_result(
            [scores[c] for c in self.evaluated],
            [len(s.test) for s in shards],
            [len(s.validation) for s in shards],
            self.metrics,
        )

    def distributions(self, participants: Sequence[int], stack: Params) -> tuple[Tensor, Tensor]:
        """The participants' true class distributions and those read from their uploaded output layers."""
        name = self.task.output_weight
        stays = bool(self.guard.model) and name in self.kept_names and name not in self.guard.model
        if not participants or stays:
            return torch.empty(0, self.task.classes), torch.empty(0, self.task.classes)
        return self.true_distributions(participants), mixing.norm_distribution(
            stack[self.task.output_weight].double()
        )

    def leaks(self, up: Uploads, sent: Mapping[int, Download]) -> dict[str, Leak]:
        """How near a server's estimates from these uploads come to the participants' class counts."""
        counts = np.stack([self.federation.class_counts(c) for c in up.clients])
        got = [sent[c].models[0] for c in up.clients if len(sent[c].models) == 1]
        whole = len(got) == len(up.clients) and all(
            name in model for model in (*got, up.models) for name in self._output
        )
        given = {name: torch.stack([model[name] for model in got]) for name in self._output} if whole else None
        found = leak.estimates(up.models, given, up.extras, self.task)
        return {name: leak.measure(counts, estimate.numpy()) for name, estimate in found.items()}

    def true_distributions(self, clients: Sequence[int]) -> Tensor:
        """p: the clients' class distributions."""
        counts = np.stack([self.federation.class_counts(c) for c in clients])
        return torch.from_numpy(counts / counts.sum(1, keepdims=True))

    # --- after the last round

    def spent(self, rounds: int) -> Spent | None:
        """What the first rounds cost each client; who takes part when is a function of the seed alone."""
        privacy = self.config.privacy.samples()
        if privacy is None:
            return None
        config, members = self.config, self.members
        took_part = Counter(
            c for r in range(1, rounds + 1) for c in invite(config, members, r) if not is_lost(config, r, c)
        )
        train, shards = config.train, self.federation.shards
        visits = {c: (times, len(shards[c].train)) for c, times in sorted(took_part.items())}
        return dp.spent(privacy, visits, train.batch_size, train.epochs)

    def complete(self, progress: Progress) -> Progress:
        """In a simulation progress has what the clients keep."""
        return progress

    def welcome(self, progress: Progress) -> Newcomers | None:
        """Measure the models that clients get which never took part."""
        if not self.newcomers:
            return None
        scores = {}
        for kind in ("histogram", "uniform"):
            candidates = []
            for c in self.newcomers:
                counts = self._counts(c) if kind == "histogram" else None
                model = self.completed(self.algorithm.newcomer(progress.server, counts))
                if counts:
                    model = self.algorithm.predictor(model, counts, self.task)
                candidates.append(Candidate(Visit(c, statistics=self.statistics(progress.kept, c)), model))
            right = sum(score.test_right for score in self.engine.measure(candidates))
            scores[kind] = right / max(1, sum(len(self.federation.shards[c].test) for c in self.newcomers))
        return Newcomers(self.newcomers, scores["histogram"], scores["uniform"])

    def final_model(self, progress: Progress, client: int) -> Params:
        """A client's personal model, complete: of the phase on which the algorithm is reported."""
        kept = progress.kept.get(client, {})
        model = self.own_model(kept, self._counts(client))
        if model is None:
            visits, number = [self.visit(client, kept)], progress.round + 1
            (model,) = self.engine.personal(number, progress.server, visits, is_tuned=self.is_tuned)
        return {name: w for name, w in model.items() if not models.attached(self.template, name)}

    def final_models(self, progress: Progress) -> FinalModels:
        """Every client's personal model, each made when its turn comes."""
        models = ((client, self.final_model(progress, client)) for client in range(self.clients))
        return FinalModels(self.clients, nbytes(self.initial) * self.clients, models)

    def manifest(self) -> dict[str, Any]:
        """Under what circumstances the run is made."""
        about, shape = self.federation.data, self.federation.shape
        return manifest.manifest(
            seed=self.config.run.seed,
            algorithm=self.config.algorithm_name,
            model={"name": self.model_name, "parameters": self.parameters},
            data={
                "name": about.name,
                "digest": about.digest,
                "samples": len(about.labels),
                "shape": list(shape.dims),
                "vocabulary": shape.vocabulary,
                "classes": about.class_names,
            },
            split={"digest": self.federation.digest(), "histogram": self.federation.histogram().tolist()},
            batch_norm=self.config.train.batch_norm,
            engine={
                "name": self.engine.name,
                "workers": self.engine.workers,
                "why": self.engine.why,
                "device": str(self.device),
                "precision": self.config.train.precision,
            },
            words=about.words,
        )

    def close(self) -> None:
        """End the engine's workers."""
        self.engine.close()
