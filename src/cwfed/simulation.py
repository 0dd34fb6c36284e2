"""The round loop: carries an experiment out in this process and says what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cwfed import engine, mixing
from cwfed.config import Config
from cwfed.engine import Candidate, Score, Visit, Visited
from cwfed.engine.base import as_it_is
from cwfed.engine.bench import ClientView, LocalTraining
from cwfed.engine.precision import require_bf16
from cwfed.errors import ConfigError, RunError
from cwfed.events import Newcomers, PhaseResult, Round, Started
from cwfed.experiment import Experiment
from cwfed.guard import bounded
from cwfed.portrait import portray
from cwfed.rng import stream
from cwfed.types import Download, Params, Uploads, nbytes

REMEMBERED = 2**28
"""Bytes of personal models that are kept from one round's evaluation to the next round's training."""
FUTILE = 3
"""After so many rounds in a row in which every update was refused, a run is given up."""


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
    in_vain: tuple[str, ...] = ()
    """Of the last rounds in a row in which every update was refused, one reason each."""


class Simulation(Experiment):
    """An experiment with an engine to carry it out."""

    def __init__(self, config: Config, data_dir: str | None = None) -> None:
        self.device = engine.find_device(config.run.device)
        self.notes: list[str] = []
        """What the user should know before the first round."""
        if config.train.precision == "bf16" and (note := require_bf16(self.device)):
            self.notes.append(note)
        super().__init__(config, data_dir)
        self._sent: tuple[Any, dict[int, Download]] = (None, {})
        train, run = config.train, config.run
        how = LocalTraining(run.seed, train.lr, train.batch_size, train.epochs, train.precision)
        self.engine = engine.choose(
            run.engine,
            run.workers,
            self.participants(),
            self.algorithm,
            self.template,
            self.federation,
            self.device,
            how,
            run.compile,
            train.rounds,
            steady=self.participants() == len(self.members) and train.dropout == 0,
        )

    def start(self) -> Progress:
        """Before round 1."""
        server = self.algorithm.init(self.fresh, self.task)
        if self.config.guard.norm_bound and len(self.algorithm.send(server, self.members[0]).models) != 1:
            raise ConfigError(
                "guard.norm_bound compares an upload with the one model that the client was sent, "
                f"and {self.config.algorithm_name} does not send one model: set it to 0"
            )
        return Progress(0, server)

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
        )

    # --- the rounds

    def rounds(self, progress: Progress) -> Iterator[tuple[Progress, Round]]:
        """Carry out the rounds that are left; after each, where the run is and what happened.

        A run in which every update is refused would go on for ever and learn nothing: it is an error after a few rounds.
        """
        with one_compute_thread():
            self._give_up_in_vain(progress)
            while progress.round < self.config.train.rounds:
                progress, event = self._round(progress)
                yield progress, event
                self._give_up_in_vain(progress)

    def _give_up_in_vain(self, progress: Progress) -> None:
        if len(progress.in_vain) >= min(FUTILE, self.config.train.rounds):
            why = progress.in_vain[-1]
            raise RunError(f"every update of the last {len(progress.in_vain)} rounds was refused: {why}")

    def _round(self, before: Progress) -> tuple[Progress, Round]:
        number = before.round + 1
        clock = _Clock()

        # 1. Choose who takes part, and who of them will be lost on the way.
        invited = self._sample(number)
        lost = [c for c in invited if self._is_lost(number, c)]
        participants = sorted(set(invited) - set(lost))
        down = sum(self.algorithm.send(before.server, c).nbytes for c in lost)
        clock.lap("send")

        # 2. Send each its model; it begins, trains and finishes. Row i of the stack is the i-th participant's.
        stack = {n: torch.empty(len(participants), *t.shape, dtype=t.dtype) for n, t in self.initial.items()}
        visited = self.engine.visit(number, [self._visit(before, c) for c in participants], stack)
        down += sum(v.downloaded for v in visited)
        keeps = {v.client: self._keep(v, stack, row) for row, v in enumerate(visited)}
        self._tamper(visited, stack)
        up = nbytes({name: stack[name] for name in self.guard.model}) + sum(nbytes(v.extras) for v in visited)
        clock.lap("train")

        # 3. Check what arrived. Who is refused is from here on like one who was lost: nothing of its round stays.
        refused = self._refused(number, visited, stack)
        good = [row for row, v in enumerate(visited) if v.client not in refused]
        skipped, in_vain = "", tuple[str, ...]()
        if refused and not good:
            in_vain = (*before.in_vain, next(iter(refused.values())))
        if len(good) < self.config.guard.least:
            skipped = f"{len(good)} good updates, and guard.least = {self.config.guard.least}"
            good = []
        if len(good) < len(visited):
            visited, stack = [visited[row] for row in good], {name: w[good] for name, w in stack.items()}
        participants = [v.client for v in visited]
        kept = before.kept | {client: keeps[client] for client in participants if keeps[client]}
        clock.lap("guard")

        # 4. Measure the trained models. A client that sat out has the model it keeps, if it keeps one.
        evaluate = number % self.config.run.evaluate_every == 0 or number == self.config.train.rounds
        took_part = set(participants)
        trained = {c: s for c, s in before.trained.items() if c not in took_part}
        if evaluate:
            trained = trained | self._measure_trained(participants, stack, kept, known=trained)
        clock.lap("evaluate")

        # 5. The server aggregates what is good; a round without any participant changes nothing.
        server, scaled_back = before.server, list[int]()
        if visited:
            uploads, scaled_back = self._uploads(before.server, visited, stack)
            server = self.algorithm.aggregate(before.server, uploads)
            stack = stack | uploads.models
        clock.lap("aggregate")

        # 6. Measure the models that the server hands out next.
        after = Progress(number, server, kept, trained if self.algorithm.keeps_model else {}, in_vain)
        received_result = trained_result = None
        if evaluate:
            received = self._measure_received(after)
            received_result = self._result(received)
            trained_result = self._result(received | trained)
        clock.lap("evaluate")

        # 7. Say what happened.
        p, estimate = self._distributions(participants, stack)
        is_last = number == self.config.train.rounds
        event = Round(
            round=number,
            participants=participants,
            dropped=lost,
            loss=_mean([v.loss for v in visited]),
            penalty=_mean([v.penalty for v in visited]),
            client_loss=[v.loss for v in visited],
            correlation=_correlation(p, estimate),
            distance=_mean((p - estimate).norm(dim=1).tolist()),
            received=received_result,
            trained=trained_result,
            down=down,
            up=up,
            refused={str(client): why for client, why in refused.items()},
            skipped=skipped,
            scaled_back=scaled_back,
            portrait=portray(self, after, participants, stack) if is_last else None,
            seconds=clock.laps("report"),
        )
        return after, event

    def _sample(self, number: int) -> list[int]:
        count = self.participants()
        if count >= len(self.members):
            return self.members
        chosen = stream(self.config.run.seed, "participants", number).choice(self.members, count, replace=False)
        return sorted(int(c) for c in chosen)

    def _is_lost(self, number: int, client: int) -> bool:
        chance = self.config.train.dropout
        return chance > 0 and bool(stream(self.config.run.seed, "lost", number, client).random() < chance)

    def _visit(self, progress: Progress, client: int) -> Visit:
        server = progress.server
        return Visit(
            client,
            lambda: self._send(server, client),
            self._own(progress, client),
            self.statistics(progress.kept, client),
        )

    def _send(self, server: Any, client: int) -> Download:
        """What a client is sent, made once where all of it is small: what was measured is what is trained next."""
        if nbytes(self.initial) * self.clients > REMEMBERED:
            return self.algorithm.send(server, client)
        if self._sent[0] is not server:
            self._sent = (server, {})
        sent = self._sent[1]
        if client not in sent:
            sent[client] = self.algorithm.send(server, client)
        return sent[client]

    def _keep(self, visited: Visited, stack: Params, row: int) -> Params:
        model = {n: w[row].clone() for n, w in stack.items()} if self.algorithm.keeps_model else {}
        return model | visited.statistics

    def _own(self, progress: Progress, client: int) -> Params | None:
        if not self.algorithm.keeps_model:
            return None
        kept = progress.kept.get(client)
        return {n: kept[n] for n in self.initial} if kept else self.initial

    def statistics(self, kept: dict[int, Params], client: int) -> Params:
        own = kept.get(client)
        return {n: own[n] if own else initial for n, initial in self.local_statistics.items()}

    def _tamper(self, visited: Sequence[Visited], stack: Params) -> None:
        """Adversaries send something else than what they trained; they keep that for themselves."""
        for row, client in enumerate(v.client for v in visited):
            if client in self.adversaries:
                trained = {name: w[row] for name, w in stack.items()}
                sent = self.adversaries[client].tamper(trained, self.task.output_weight)
                for name, w in sent.items():
                    stack[name][row] = w

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

    def _uploads(self, server: Any, visited: Sequence[Visited], stack: Params) -> tuple[Uploads, list[int]]:
        """What is aggregated, and whose update was scaled back for it."""
        clients = tuple(v.client for v in visited)
        models, longer = {name: stack[name] for name in self.guard.model}, list[int]()
        if bound := self.config.guard.norm_bound:
            models, longer = bounded(models, lambda row: self._send(server, clients[row]).model, bound)
        uploads = Uploads(
            clients=clients,
            models=models,
            counts=torch.tensor(self._samples(visited)),
            extras={name: torch.stack([v.extras[name].cpu() for v in visited]) for name in self.guard.beside},
        )
        return uploads, [clients[row] for row in longer]

    # --- measuring

    def personal(self, progress: Progress, client: int) -> Callable[[ClientView], Params]:
        """How a client gets the model it has on receipt."""
        own = self._own(progress, client)
        return lambda view: self.algorithm.personal(self._send(progress.server, client), own, view)

    def _measure_received(self, progress: Progress) -> dict[int, Score]:
        candidates = [
            Candidate(c, self.personal(progress, c), self.statistics(progress.kept, c)) for c in self.evaluated
        ]
        return dict(zip(self.evaluated, self.engine.measure(candidates), strict=True))

    def _measure_trained(
        self, participants: Sequence[int], stack: Params, kept: dict[int, Params], known: dict[int, Score]
    ) -> dict[int, Score]:
        """Scores of the models just trained, and of kept ones that were trained in a round without evaluation."""
        evaluated = set(self.evaluated)
        rows = {c: row for row, c in enumerate(participants) if c in evaluated}
        own: dict[int, Params] = {}
        if self.algorithm.keeps_model:
            stale = sorted((evaluated & kept.keys()) - rows.keys() - known.keys())
            own = {c: {n: kept[c][n] for n in self.initial} for c in stale}
        candidates = [Candidate(c, partial(_row, stack, row), self.statistics(kept, c)) for c, row in rows.items()]
        candidates += [Candidate(c, partial(as_it_is, model), self.statistics(kept, c)) for c, model in own.items()]
        return dict(zip([*rows, *own], self.engine.measure(candidates), strict=True))

    def _result(self, scores: dict[int, Score]) -> PhaseResult:
        shards = [self.federation.shards[c] for c in self.evaluated]
        ordered = [scores[c] for c in self.evaluated]
        tests = sum(len(s.test) for s in shards)
        validations = sum(len(s.validation) for s in shards)
        return PhaseResult(
            accuracy=sum(s.test_right for s in ordered) / tests,
            validation=sum(s.validation_right for s in ordered) / validations if validations else None,
            loss=_finite(sum(s.test_loss for s in ordered) / tests),
            right=[s.test_right for s in ordered],
        )

    def _distributions(self, participants: Sequence[int], stack: Params) -> tuple[Tensor, Tensor]:
        """The participants' true class distributions and those read from their uploaded output layers."""
        if not participants:
            return torch.empty(0, self.task.classes), torch.empty(0, self.task.classes)
        return self.true_distributions(participants), mixing.norm_distribution(
            stack[self.task.output_weight].double()
        )

    def true_distributions(self, clients: Sequence[int]) -> Tensor:
        """p: the clients' class distributions."""
        counts = np.stack([self.federation.class_counts(c) for c in clients])
        return torch.from_numpy(counts / counts.sum(1, keepdims=True))

    # --- after the last round

    def welcome(self, progress: Progress) -> Newcomers | None:
        """Measure the models that clients get which never took part."""
        if not self.newcomers:
            return None
        scores = {}
        for kind in ("histogram", "uniform"):
            candidates = []
            for c in self.newcomers:
                counts = self.federation.class_counts(c).tolist() if kind == "histogram" else None
                model = self.algorithm.newcomer(progress.server, counts)
                statistics = self.statistics(progress.kept, c)
                candidates.append(Candidate(c, partial(as_it_is, model), statistics))
            right = sum(score.test_right for score in self.engine.measure(candidates))
            scores[kind] = right / max(1, sum(len(self.federation.shards[c].test) for c in self.newcomers))
        return Newcomers(self.newcomers, scores["histogram"], scores["uniform"])

    def final_model(self, progress: Progress, client: int) -> Params:
        """A client's personal model, complete: of the phase on which the algorithm is reported."""
        kept = progress.kept.get(client, {})
        statistics = self.statistics(progress.kept, client)
        if self.algorithm.phase == "trained" and all(n in kept for n in self.initial):
            return {n: kept[n] for n in self.initial} | statistics
        (model,) = self.engine.map(lambda bench, c: self.personal(progress, c)(bench.view(c, statistics)), [client])
        return model | statistics

    def close(self) -> None:
        """End the engine's workers."""
        self.engine.close()


def to_tree(progress: Progress) -> dict[str, Any]:
    """Progress as a tree for a checkpoint."""
    return {
        "round": progress.round,
        "server": progress.server,
        "kept": {str(client): params for client, params in progress.kept.items()},
        "trained": {str(c): [s.test_right, s.test_loss, s.validation_right] for c, s in progress.trained.items()},
        "in_vain": list(progress.in_vain),
    }


def from_tree(tree: dict[str, Any]) -> Progress:
    """Progress from a checkpoint's tree."""
    return Progress(
        round=tree["round"],
        server=tree["server"],
        kept={int(client): params for client, params in tree["kept"].items()},
        trained={int(client): Score(*score) for client, score in tree["trained"].items()},
        in_vain=tuple(tree.get("in_vain", ())),  # checkpoints of earlier versions have none
    )


@contextmanager
def one_compute_thread() -> Iterator[None]:
    """Sums split over threads differ in the last bits with their number; clients run side by side instead."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self._laps[step] = self._laps.get(step, 0.0) + now - self._last
        self._last = now

    def laps(self, step: str) -> dict[str, float]:
        self.lap(step)
        return {name: round(seconds, 6) for name, seconds in self._laps.items()}


def _row(stack: Params, row: int, view: ClientView) -> Params:
    return {name: w[row] for name, w in stack.items()}


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _correlation(p: Tensor, estimate: Tensor) -> float | None:
    """Pearson, over all clients and classes; None where either does not vary."""
    if p.numel() < 2 or p.std() == 0 or estimate.std() == 0:
        return None
    return float(torch.corrcoef(torch.stack([p.flatten(), estimate.flatten()]))[0, 1])
