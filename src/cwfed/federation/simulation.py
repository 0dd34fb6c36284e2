"""The simulator: carries an experiment out in this process, round by round, and yields events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cwfed import data, engine, models
from cwfed.core import mixing
from cwfed.core.errors import RunError
from cwfed.core.events import Leak, Newcomers, Round, Spent, Started
from cwfed.core.memory import Shelf
from cwfed.core.types import Download, Params, Start, Uploads, nbytes
from cwfed.engine import Candidate, Choice, Score, Visit, Visited
from cwfed.engine.precision import require_bf16
from cwfed.engine.worker import OPTIMIZER
from cwfed.federation import manifest
from cwfed.federation.config import Config
from cwfed.federation.experiment import Experiment
from cwfed.federation.open_round import OpenRound, Sizes, Update
from cwfed.federation.portrait import portray
from cwfed.federation.rounds import (
    FinalModels,
    Progress,
    correlation,
    give_up_in_vain,
    invite,
    is_lost,
    is_over,
    mean,
    one_compute_thread,
)
from cwfed.privacy import dp, leak
from cwfed.privacy.noise import Seeded

TRIED = 16
"""The number of clients with which a state from a checkpoint is tried."""


class Simulation(Experiment):
    """An experiment with the engine that carries it out.

    Examples:
        >>> import cwfed
        >>> simulation = cwfed.Simulation(cwfed.load_config(settings=["data.clients=5", "model.name=mlp"]))
        >>> simulation.clients, simulation.started().algorithm
        (5, 'cwfedavg')
    """

    def __init__(self, config: Config, data_dir: str | None = None, given: data.Dataset | None = None) -> None:
        self.devices = engine.find_devices(config.run.device, config.run.engine)
        self.notes: list[str] = []
        """What the user should know before the first round."""
        if config.train.precision == "bf16" and (note := require_bf16(self.devices[0])):
            self.notes.append(note)
        super().__init__(config, data_dir, given)
        self.notes += self._notes_on_data()
        self._output = tuple(n for n in (self.task.output_weight, f"{self.task.output}.bias") if n in self.initial)
        self._shelf = Shelf()
        """The memory of the stacks of trained models."""
        train, run = config.train, config.run
        choice = Choice(
            name=run.engine,
            workers=run.workers,
            devices=self.devices,
            participants=self.participants(),
            compile=run.compile,
            rounds=train.rounds,
            is_steady=self.participants() == len(self.members) and train.client_dropout == 0,
        )
        # worker processes have the data on their devices, this one in main memory
        is_elsewhere = len(self.devices) > 1 or run.engine == "processes"
        home = torch.device("cpu") if is_elsewhere else self.devices[0]
        self.engine = engine.choose(self.job(self.federation, home), choice)
        if self.engine.name == "vmap" and run.compile == "auto":  # the choice is written into the run's config
            self.config = config = config.but(compile="always" if self.engine.compile else "never")
        self.notes += filter(None, [self.engine.note])
        before = self.start()
        self.engine.rehearse(before.server, self.visit(self.members[0], {}))
        if spent := self.spent(train.rounds):
            dp.require_budget(spent, config.privacy.dp_budget)
            self.notes.append(dp.promise(spent, train.rounds))

    def _notes_on_data(self) -> list[str]:
        chosen = self.config.data
        whole = self.federation.data
        samples = chosen.samples or len(whole.labels)
        room = None if whole.fixed_split else chosen.room
        return data.missing_data(self.federation, self.members, samples, room, chosen.validation)

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
            names=[self.federation.names[c] for c in self.evaluated] if self.federation.names else [],
        )

    def check_progress(self, progress: Progress) -> None:
        """RunError for progress that cannot be continued from. A few clients get their model and measure it."""
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
                f"the checkpoint of round {progress.round} holds something other than this experiment's models"
            )

    # --- the rounds

    def rounds(self, progress: Progress) -> Iterator[tuple[Progress, Round]]:
        """Carry out the rounds that are left; yields the progress and the event of each.

        RunError (`GivenUp`) if every update was refused for a few rounds: such a run learns nothing.
        """
        give_up_in_vain(progress, self.config.train.rounds)
        while not is_over(self.config, progress):
            progress, event = self._round(progress)
            yield progress, event
            give_up_in_vain(progress, self.config.train.rounds)

    @one_compute_thread()
    def _round(self, before: Progress) -> tuple[Progress, Round]:
        # 1. Choose who takes part, and who of them will be lost on the way.
        opened = OpenRound(self, before, self.members)
        opened.down = sum(self.algorithm.send(before.server, c).nbytes for c in opened.lost)
        opened.clock.lap("send")

        # 2. Send each its model; it begins, trains and finishes. Row i of the stack is the i-th one's.
        asked = len(opened.asked)
        stack = {n: self._shelf.empty(n, (asked, *t.shape), t.dtype) for n, t in self.initial.items()}
        visits = [self.visit(c, before.kept.get(c, {})) for c in opened.asked]
        visited = self.engine.visit(opened.number, before.server, visits, stack)
        opened.down += sum(v.downloaded for v in visited)
        updates = [self._update(v, stack, row) for row, v in enumerate(visited)]
        self._tamper(updates, stack)

        # 3. Check what arrived, as clients upload it. The server aggregates what is good.
        opened.take(updates, self._uploaded(opened, stack))
        opened.close(lambda c: self.engine.download(before.server, Visit(c)).model)

        # 4. Measure the trained models, and those that the server hands out next.
        took_part = set(opened.closed.participants)
        rows = {client: row for row, client in enumerate(opened.asked) if client in took_part}
        if opened.is_evaluated:
            trained = mixing.unstacked(stack)
            self._measure(opened, {c: trained[row] for c, row in rows.items()})
        after = opened.finish(self._sizes)

        # 5. Say what happened.
        uploaded = opened.closed.uploads.models if opened.closed.uploads else {}
        if len(rows) < len(visited):
            stack = {n: w[list(rows.values())] for n, w in stack.items() if n not in uploaded}
        sent = {v.client: Download(v.head) for v in visited}
        event = self.with_all_data(opened.event(), after, opened.closed.uploads, stack | uploaded, sent)
        return after, replace(event, seconds=opened.clock.laps("report"))

    def with_all_data(
        self, event: Round, after: Progress, up: Uploads | None, models: Params, sent: Mapping[int, Download]
    ) -> Round:
        """An event completed by what needs all data; `models` are the participants' models, `sent` is what they were sent."""
        is_last = is_over(self.config, after)
        p, estimate = self.distributions(event.participants, models)
        return replace(
            event,
            correlation=correlation(p, estimate),
            distance=mean((p - estimate).norm(dim=1).tolist()),
            portrait=portray(self, after, event.participants, models) if is_last else None,
            leaks=self.leaks(up, sent) if up else {},
            spent=self.spent(event.round) if is_last else None,
        )

    def _update(self, visited: Visited, stack: Params, row: int) -> Update:
        """What a client sends besides its model, and what it keeps: its model as trained, even if it sends another."""
        own = {n: stack[n][row].clone() for n in self.kept_names}
        return Update(
            client=visited.client,
            samples=len(self.federation.shards[visited.client].train),
            penalty=visited.penalty,
            loss=visited.loss,
            extras=visited.extras,
            keeps=own | visited.remembered | visited.statistics,
        )

    def statistics(self, kept: dict[int, Params], client: int) -> Params:
        """The running statistics that stay with a client: its own, or the initial ones."""
        own = kept.get(client)
        return {n: own[n] if own else initial for n, initial in self.local_statistics.items()}

    def _tamper(self, updates: list[Update], stack: Params) -> None:
        """Replace the models that adversaries send; they keep the ones that they trained."""
        for row, client in enumerate(update.client for update in updates):
            if client in self.adversaries:
                trained = {name: w[row] for name, w in stack.items()}
                sent = self.adversaries[client].tamper(trained, self.task.output_weight)
                for name, w in sent.items():
                    stack[name][row] = w
                updates[row] = replace(updates[row], extras=self.adversaries[client].claim(updates[row].extras))

    def _uploaded(self, opened: OpenRound, stack: Params) -> Params:
        """The clients' models as they upload them, blurred if `privacy.norms` says so; what clients keep is not blurred."""
        models = {name: stack[name] for name in self.guard.model}
        dial, weight = self.config.privacy.dial(), self.task.output_weight
        if dial.norms == "exact" or not opened.asked:
            return models
        noise = Seeded(self.config.run.seed)
        rows = [
            dial.turn({weight: stack[weight][row]}, self.task, noise, opened.number, client)[weight]
            for row, client in enumerate(opened.asked)
        ]
        return models | {weight: torch.stack(rows)}

    # --- measuring

    def _measure_received(self, progress: Progress, is_tuned: bool = False) -> dict[int, Score]:
        """Scores of the models that clients have on receipt; `is_tuned`: after their passes before the test."""
        candidates = [Candidate(self.visit(c, progress.kept.get(c, {})), is_tuned=is_tuned) for c in self.evaluated]
        scores = self.engine.measure(candidates, progress.round + 1, progress.server)
        return dict(zip(self.evaluated, scores, strict=True))

    def _measure(self, opened: OpenRound, trained: Mapping[int, Params]) -> None:
        """Measure the models just trained, and those that clients receive from now on."""
        if not self.is_tuned:
            opened.measured("trained", self._measure_trained(opened, trained))
        after = opened.progress
        opened.measured("received", self._measure_received(after))
        if self.is_tuned:
            opened.measured("trained", self._measure_received(after, is_tuned=True))

    def _measure_trained(self, opened: OpenRound, trained: Mapping[int, Params]) -> dict[int, Score]:
        """Scores of the models just trained, and of models that clients keep from a round without evaluation."""
        evaluated, kept, known = set(self.evaluated), opened.kept, opened.trained
        models = {client: model for client, model in trained.items() if client in evaluated}
        if self.has_own_models:
            stale = sorted((evaluated & kept.keys()) - models.keys() - known.keys())
            models |= {c: {n: kept[c][n] for n in self.kept_names} for c in stale}
        candidates = []
        for c, model in models.items():
            statistics = self.statistics(kept, c)
            shown = self.after_training(model | statistics, self._counts(c))
            candidates.append(Candidate(Visit(c, statistics=statistics), shown))
        return dict(zip(models, self.engine.measure(candidates, opened.number + 1), strict=True))

    def _counts(self, client: int) -> list[float]:
        """n_ij: a client's training samples by class."""
        counts: list[float] = self.federation.class_counts(client).tolist()
        return counts

    @cached_property
    def _sizes(self) -> Sizes:
        """By evaluated client, its test samples and its held-out ones."""
        shards = {c: self.federation.shards[c] for c in self.evaluated}
        return {c: (len(shard.test), len(shard.validation)) for c, shard in shards.items()}

    def distributions(self, participants: Sequence[int], stack: Params) -> tuple[Tensor, Tensor]:
        """The participants' true class distributions, and those read from their uploaded output layers."""
        name = self.task.output_weight
        stays = bool(self.guard.model) and name in self.kept_names and name not in self.guard.model
        if not participants or stays:
            return torch.empty(0, self.task.classes), torch.empty(0, self.task.classes)
        return self.true_distributions(participants), mixing.norm_distribution(
            stack[self.task.output_weight].double()
        )

    def leaks(self, up: Uploads, sent: Mapping[int, Download]) -> dict[str, Leak]:
        """How close a server's estimates from these uploads are to the participants' class counts."""
        counts = np.stack([self.federation.class_counts(c) for c in up.clients])
        got = [sent[c].models[0] for c in up.clients if len(sent[c].models) == 1]
        whole = len(got) == len(up.clients) and all(
            name in model for model in (*got, up.models) for name in self._output
        )
        given = {name: torch.stack([model[name] for model in got]) for name in self._output} if whole else None
        found = leak.estimates(up.models, given, up.extras, self.task)
        return leak.measure(counts, {name: estimate.numpy() for name, estimate in found.items()})

    def true_distributions(self, clients: Sequence[int]) -> Tensor:
        """p: the clients' class distributions."""
        counts = np.stack([self.federation.class_counts(c) for c in clients])
        return torch.from_numpy(counts / counts.sum(1, keepdims=True))

    # --- after the last round

    def spent(self, rounds: int) -> Spent | None:
        """The privacy cost of the first rounds for each client; who takes part depends on the seed alone."""
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
        """The same: in a simulation, progress has everything that clients keep."""
        return progress

    @one_compute_thread()
    def welcome(self, progress: Progress) -> Newcomers | None:
        """Measure the models of clients that never took part."""
        if not self.newcomers:
            return None
        scores = {}
        for kind in ("histogram", "uniform"):
            candidates = []
            for c in self.newcomers:
                model = self.newcomer_model(progress, self._counts(c) if kind == "histogram" else None)
                candidates.append(Candidate(Visit(c, statistics=self.statistics(progress.kept, c)), model))
            right = sum(score.test_right for score in self.engine.measure(candidates))
            scores[kind] = right / max(1, sum(len(self.federation.shards[c].test) for c in self.newcomers))
        return Newcomers(self.newcomers, scores["histogram"], scores["uniform"])

    @one_compute_thread()
    def newcomer_model(self, progress: Progress, class_counts: Sequence[float] | None) -> Params:
        """The model of a client that never took part, made with or without its label histogram."""
        counts = None if class_counts is None else mixing.histogram(class_counts, self.task.classes).tolist()
        model = self.completed(self.algorithm.newcomer(progress.server, counts))
        return model if counts is None else self.algorithm.predictor(model, counts, self.task)

    @one_compute_thread()
    def final_model(self, progress: Progress, client: int) -> Params:
        """A client's complete personal model, of the phase on which the algorithm is reported."""
        kept = progress.kept.get(client, {})
        model = self.own_model(kept, self._counts(client))
        if model is None:
            visits, number = [self.visit(client, kept)], progress.round + 1
            (model,) = self.engine.personal(number, progress.server, visits, is_tuned=self.is_tuned)
        return {name: w for name, w in model.items() if not models.attached(self.template, name)}

    def final_models(self, progress: Progress) -> FinalModels:
        """Every client's personal model; each is made when it is needed."""
        models = ((client, self.final_model(progress, client)) for client in range(self.clients))
        return FinalModels(self.clients, nbytes(self.initial) * self.clients, models)

    def manifest(self) -> dict[str, Any]:
        """The circumstances of the run."""
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
            split={
                "digest": self.federation.digest(),
                "dealt": self.federation.dealt(),
                "histogram": self.federation.histogram().tolist(),
                **({"clients": list(self.federation.names)} if self.federation.names else {}),
            },
            batch_norm=self.config.train.batch_norm,
            engine={
                "name": self.engine.name,
                "workers": self.engine.workers,
                "why": self.engine.why,
                "device": ",".join(map(str, self.devices)),
                "compiled": self.engine.compile,
                "precision": self.config.train.precision,
            },
            words=about.words,
        )

    def close(self) -> None:
        """End the engine's workers."""
        self.engine.close()
        self._shelf.clear()

    def reopen(self) -> None:
        """After `close`: start an engine again, to make models."""
        self.engine = engine.choose(self.job(self.federation, self.devices[0]), Choice("loop"))
