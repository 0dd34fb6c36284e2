"""The round loop: carries an experiment out in this process and says what happened."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cwfed import dp, engine, leak, mixing
from cwfed.config import Config
from cwfed.dp import SamplePrivacy
from cwfed.engine import Candidate, Score, Visit, Visited
from cwfed.engine.base import as_it_is
from cwfed.engine.bench import Bench, ClientView, LocalTraining
from cwfed.engine.precision import require_bf16
from cwfed.events import Leak, Newcomers, PhaseResult, Portrait, Round, Spent, Started
from cwfed.experiment import Experiment
from cwfed.rng import stream
from cwfed.types import Download, Params, Uploads, nbytes

REMEMBERED = 2**28
"""Bytes of personal models that are kept from one round's evaluation to the next round's training."""
PORTRAYED = 200
"""At most this many clients are portrayed after the last round, fewer where their output layers are large."""


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


class Simulation(Experiment):
    """An experiment with an engine to carry it out."""

    def __init__(self, config: Config, data_dir: str | None = None) -> None:
        self.device = engine.find_device(config.run.device)
        self.notes: list[str] = []
        """What the user should know before the first round."""
        if config.train.precision == "bf16" and (note := require_bf16(self.device)):
            self.notes.append(note)
        super().__init__(config, data_dir)
        self._output = tuple(n for n in (self.task.output_weight, f"{self.task.output}.bias") if n in self.initial)
        self._sent: tuple[Any, dict[int, Download]] = (None, {})
        train, run = config.train, config.run
        self._privacy = config.privacy.samples()
        how = LocalTraining(run.seed, train.lr, train.batch_size, train.epochs, train.precision, self._privacy)
        self.engine = engine.choose(
            run.engine,
            run.workers,
            self._participants(),
            self.algorithm,
            self.template,
            self.federation,
            self.device,
            how,
            run.compile,
            train.rounds,
            steady=self._participants() == len(self.members) and train.dropout == 0,
        )
        if self._privacy:
            self.engine.rehearse(self._visit(self.start(), self.members[0], {}))
            self.notes.append(dp.promise(self._spent(self._privacy, train.rounds), train.rounds))

    def start(self) -> Progress:
        """Before round 1."""
        return Progress(0, self.algorithm.init(self.fresh, self.task))

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
        """Carry out the rounds that are left; after each, where the run is and what happened."""
        with one_compute_thread():
            while progress.round < self.config.train.rounds:
                progress, event = self._round(progress)
                yield progress, event

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
        sent: dict[int, Params] = {}
        visited = self.engine.visit(number, [self._visit(before, c, sent) for c in participants], stack)
        down += sum(v.downloaded for v in visited)
        keeps = {v.client: self._keep(v, stack, row) for row, v in enumerate(visited)}
        kept = before.kept | {client: what for client, what in keeps.items() if what}
        clock.lap("train")

        # 3. Measure the trained models. A client that sat out has the model it keeps, if it keeps one.
        evaluate = number % self.config.run.evaluate_every == 0 or number == self.config.train.rounds
        took_part = set(participants)
        trained = {c: s for c, s in before.trained.items() if c not in took_part}
        if evaluate:
            trained = trained | self._measure_trained(participants, stack, kept, known=trained)
        clock.lap("evaluate")

        # 4. Clients blur what they upload, where they are told to. The server aggregates what arrived;
        #    a round without any participant changes nothing.
        stack = self._blurred(number, participants, stack)
        uploads = self._uploads(visited, stack) if visited else None
        server = self.algorithm.aggregate(before.server, uploads) if uploads else before.server
        clock.lap("aggregate")

        # 5. Measure the models that the server hands out next.
        after = Progress(number, server, kept, trained if self.algorithm.keeps_model else {})
        received_result = trained_result = None
        if evaluate:
            received = self._measure_received(after)
            received_result = self._result(received)
            trained_result = self._result(received | trained)
        clock.lap("evaluate")

        # 6. Say what happened.
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
            up=uploads.nbytes if uploads else 0,
            portrait=self._portray(after, participants, stack) if is_last else None,
            leaks=self._leaks(uploads, sent) if uploads else {},
            spent=self._spent(self._privacy, number) if is_last and self._privacy else None,
            seconds=clock.laps("report"),
        )
        return after, event

    def _participants(self) -> int:
        """How many clients a round invites."""
        share = self.config.train.participation
        return min(len(self.members), int(share) if share > 1 else max(1, round(share * len(self.members))))

    def _sample(self, number: int) -> list[int]:
        count = self._participants()
        if count >= len(self.members):
            return self.members
        chosen = stream(self.config.run.seed, "participants", number).choice(self.members, count, replace=False)
        return sorted(int(c) for c in chosen)

    def _is_lost(self, number: int, client: int) -> bool:
        chance = self.config.train.dropout
        return chance > 0 and bool(stream(self.config.run.seed, "lost", number, client).random() < chance)

    def _visit(self, progress: Progress, client: int, sent: dict[int, Params]) -> Visit:
        """A visit that leaves in `sent` the output layer the client was given, where that was one model's."""

        def download() -> Download:
            got = self._send(progress.server, client)
            if len(got.models) == 1:
                sent[client] = {name: got.model[name] for name in self._output if name in got.model}
            return got

        return Visit(client, download, self._own(progress, client), self._statistics(progress.kept, client))

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

    def _statistics(self, kept: dict[int, Params], client: int) -> Params:
        own = kept.get(client)
        return {n: own[n] if own else initial for n, initial in self.local_statistics.items()}

    def _blurred(self, number: int, participants: Sequence[int], stack: Params) -> Params:
        """The participants' models as they upload them: those that stay with the clients are not changed."""
        dial, weight = self.config.privacy.dial(), self.task.output_weight
        if dial.norms == "exact" or not participants:
            return stack
        rows = [
            dial.turn({weight: stack[weight][row]}, self.task, self.config.run.seed, number, client)[weight]
            for row, client in enumerate(participants)
        ]
        return stack | {weight: torch.stack(rows)}

    def _uploads(self, visited: Sequence[Visited], stack: Params) -> Uploads:
        names = visited[0].extras
        return Uploads(
            clients=tuple(v.client for v in visited),
            models={name: stack[name] for name in self.algorithm.uploaded(tuple(stack), self.task)},
            counts=torch.tensor([len(self.federation.shards[v.client].train) for v in visited]),
            extras={name: torch.stack([v.extras[name].cpu() for v in visited]) for name in names},
        )

    # --- measuring

    def personal(self, progress: Progress, client: int) -> Callable[[ClientView], Params]:
        """How a client gets the model it has on receipt."""
        own = self._own(progress, client)
        return lambda view: self.algorithm.personal(self._send(progress.server, client), own, view)

    def _measure_received(self, progress: Progress) -> dict[int, Score]:
        candidates = [
            Candidate(c, self.personal(progress, c), self._statistics(progress.kept, c)) for c in self.evaluated
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
        candidates = [Candidate(c, partial(_row, stack, row), self._statistics(kept, c)) for c, row in rows.items()]
        candidates += [Candidate(c, partial(as_it_is, model), self._statistics(kept, c)) for c, model in own.items()]
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
        return self._true(participants), mixing.norm_distribution(stack[self.task.output_weight].double())

    def _leaks(self, up: Uploads, sent: dict[int, Params]) -> dict[str, Leak]:
        """How near a server's estimates from these uploads come to the participants' class counts."""
        counts = np.stack([self.federation.class_counts(c) for c in up.clients])
        whole = len(sent) == len(up.clients) and self.task.output_weight in up.models
        given = {name: torch.stack([sent[c][name] for c in up.clients]) for name in self._output} if whole else None
        found = leak.estimates(up.models, given, up.extras, self.task)
        return {name: leak.measure(counts, estimate.numpy()) for name, estimate in found.items()}

    def _true(self, clients: Sequence[int]) -> Tensor:
        """p: the clients' class distributions."""
        counts = np.stack([self.federation.class_counts(c) for c in clients])
        return torch.from_numpy(counts / counts.sum(1, keepdims=True))

    # --- after the last round

    def _spent(self, privacy: SamplePrivacy, rounds: int) -> Spent:
        """What the first rounds cost each client; who takes part when is a function of the seed alone."""
        took_part = Counter(c for r in range(1, rounds + 1) for c in self._sample(r) if not self._is_lost(r, c))
        train, shards = self.config.train, self.federation.shards
        visits = {c: (times, len(shards[c].train)) for c, times in sorted(took_part.items())}
        return dp.spent(privacy, visits, train.batch_size, train.epochs)

    def _portray(self, after: Progress, participants: Sequence[int], stack: Params) -> Portrait | None:
        """The output layers of the models as they are now; none where a mixture has overflowed."""
        name = self.task.output_weight
        most = max(1, min(PORTRAYED, REMEMBERED // (8 * self.initial[name].numel())))
        clients = self.evaluated[:most]
        rows = {c: row for row, c in enumerate(participants)}

        def received(bench: Bench, client: int) -> Tensor:
            view = bench.view(client, self._statistics(after.kept, client))
            return self.personal(after, client)(view)[name].to("cpu", torch.float64)

        def trained(client: int) -> list[float] | None:
            own = stack[name][rows[client]] if client in rows else after.kept.get(client, {}).get(name)
            return None if own is None else _digits(own.double().norm(dim=1))

        handed_out = torch.stack(self.engine.map(received, clients))
        if not handed_out.isfinite().all():
            return None
        classes = self.algorithm.class_models(after.server).get(name)
        mixture: list[list[float] | None] | None = None
        is_uploaded = name in self.algorithm.uploaded(tuple(stack), self.task)
        found = is_uploaded and 0 < len(participants) <= most and mixing.unmix(handed_out, stack[name].double())
        if found:
            mixture = [_digits(row) if is_one else None for row, is_one in zip(*found, strict=True)]
        return Portrait(
            clients=clients,
            distribution=[_digits(row) for row in self._true(clients)],
            received=[_digits(norms) for norms in handed_out.norm(dim=2)],
            trained=[trained(client) for client in clients],
            mixture=mixture,
            classes=None if classes is None else [_digits(norms) for norms in classes.double().norm(dim=2)],
        )

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
                statistics = self._statistics(progress.kept, c)
                candidates.append(Candidate(c, partial(as_it_is, model), statistics))
            right = sum(score.test_right for score in self.engine.measure(candidates))
            scores[kind] = right / max(1, sum(len(self.federation.shards[c].test) for c in self.newcomers))
        return Newcomers(self.newcomers, scores["histogram"], scores["uniform"])

    def final_model(self, progress: Progress, client: int) -> Params:
        """A client's personal model, complete: of the phase on which the algorithm is reported."""
        kept = progress.kept.get(client, {})
        statistics = self._statistics(progress.kept, client)
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
    }


def from_tree(tree: dict[str, Any]) -> Progress:
    """Progress from a checkpoint's tree."""
    return Progress(
        round=tree["round"],
        server=tree["server"],
        kept={int(client): params for client, params in tree["kept"].items()},
        trained={int(client): Score(*score) for client, score in tree["trained"].items()},
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


def _digits(values: Tensor) -> list[float]:
    """Five digits are enough for a picture."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _correlation(p: Tensor, estimate: Tensor) -> float | None:
    """Pearson, over all clients and classes; None where either does not vary."""
    if p.numel() < 2 or p.std() == 0 or estimate.std() == 0:
        return None
    return float(torch.corrcoef(torch.stack([p.flatten(), estimate.flatten()]))[0, 1])
