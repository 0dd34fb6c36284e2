"""How clients are trained and measured: the engines' common interface, and the plain loop.

An engine has two verbs. `visit` lets participants begin, train and finish; `measure` says how good given models are
on given clients' data. `Loop` is the obvious oracle; every other engine must give what it gives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from cwfed.algorithms import FedAvg
from cwfed.data import Federation, Samples
from cwfed.engine.bench import Bench, ClientView, LocalTraining
from cwfed.engine.private import PrivateBench
from cwfed.errors import ConfigError
from cwfed.metrics import LOSS, PER_CLASS, RIGHT, Own, OwnSums, Places, Sums, Tally
from cwfed.types import Download, Params

Item = TypeVar("Item")
Result = TypeVar("Result")

MEASURE_TASKS = 32
"""Clients are measured in at most this many tasks: clients that share a model then share its batches."""


@dataclass(frozen=True)
class Visit:
    """A participant of a round, as the server sends it off."""

    client: int
    download: Callable[[], Download]
    """Made in the worker: personal models exist only while their client needs them."""
    own: Params | None = None
    """The model the client kept."""
    statistics: Params = field(default_factory=dict)
    """Running statistics that stay with the client."""


@dataclass(frozen=True)
class Visited:
    """A participant after its visit; its model is in its row of the stack."""

    client: int
    loss: float
    """Mean cross-entropy of its batches; not a finite number where the training diverged."""
    penalty: float
    downloaded: int
    extras: Params
    statistics: Params
    remembered: Params
    """What it keeps beside its model and its running statistics."""


@dataclass(frozen=True)
class Candidate:
    """A model to be measured on a client's data."""

    client: int
    model: Callable[[ClientView], Params]
    statistics: Params = field(default_factory=dict)


def as_it_is(model: Params, view: ClientView) -> Params:
    """For a candidate whose model is there already: partial(as_it_is, model)."""
    return model


@dataclass(frozen=True)
class Score:
    """How good a model is on one client: what was counted on its test and on its held-out data."""

    test: Tally
    validation: Tally

    @property
    def test_right(self) -> int:
        """Right answers on the test data."""
        return self.test.right

    @property
    def test_loss(self) -> float:
        """Summed cross-entropy on the test data."""
        return self.test.loss

    @property
    def validation_right(self) -> int:
        """Right answers on the held-out data."""
        return self.validation.right


def scores_of(tables: Sums, losses: Sequence[float], own: OwnSums) -> list[Score]:
    """Scores from the tables of each client's test and held-out data, in turn, and its summed test loss."""
    rights = tables[:, RIGHT].sum(1).astype(int).tolist()
    held_out = tables[1::2, LOSS].sum(1).tolist()
    found = []
    for i, (loss, held_out_loss) in enumerate(zip(losses, held_out, strict=True)):
        test, validation = ({PER_CLASS: tables[at]} | own.of(at) for at in (2 * i, 2 * i + 1))
        found.append(Score(Tally(rights[2 * i], loss, test), Tally(rights[2 * i + 1], held_out_loss, validation)))
    return found


class Loop:
    """One client after the other, on one thread."""

    name = "loop"

    def __init__(
        self,
        algorithm: FedAvg,
        model: nn.Module,
        federation: Federation,
        samples: Samples,
        how: LocalTraining,
        workers: int = 1,
        metrics: Sequence[Own] = (),
    ) -> None:
        self.algorithm, self.federation, self.how, self.workers = algorithm, federation, how, workers
        self.metrics = metrics
        """What is measured beside what always is."""
        self.why = ""
        """Why "auto" chose this engine."""
        self._stop = threading.Event()
        self._benches = [self._new_bench(model, samples) for _ in range(workers)]

    def _new_bench(self, model: nn.Module, samples: Samples) -> Bench:
        if self.how.privacy:
            return PrivateBench(model, self.federation, samples, self._stop, self.how)
        return Bench(model, self.federation, samples, self._stop, self.how.precision)

    def try_training(self) -> None:
        """One batch forward and backward: what does not work in this precision shows here."""
        bench = self._benches[0]
        try:
            inputs, labels = bench.samples.batch(self.federation.shards[0].train[:2])
            bench.model.eval()
            loss = nn.functional.cross_entropy(bench.forward(inputs).logits, labels)
            torch.autograd.grad(loss, [p for p in bench.model.parameters() if p.requires_grad], allow_unused=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f'train.precision = "{self.how.precision}" cannot be used with this model: {reason}'
            ) from None

    def rehearse(self, visit: Visit) -> None:
        """Before the first round: what differential privacy cannot be had for is an error here."""

        def one(bench: Bench, item: Visit) -> None:
            if isinstance(bench, PrivateBench):
                bench.rehearse(self.algorithm, item.download(), item.own, item.statistics, item.client)

        self.map(one, [visit])

    def map(self, function: Callable[[Bench, Item], Result], items: Iterable[Item]) -> list[Result]:
        """Results in the order of the items."""
        return [function(self._benches[0], item) for item in items]

    def visit(self, round_: int, visits: Sequence[Visit], out: Params) -> list[Visited]:
        """Train the participants; the model of the i-th goes into row i of `out`."""

        def one(bench: Bench, item: tuple[int, Visit]) -> Visited:
            row, visit = item
            view = bench.view(visit.client, visit.statistics)
            got = visit.download()
            start = self.algorithm.begin(got, visit.own, view)
            loss, penalty = bench.train(self.algorithm, start, visit.statistics, visit.client, round_, self.how)
            bench.save(out, row)
            kept = bench.copy_of(visit.statistics)
            trained = {name: stack[row] for name, stack in out.items()}
            extras = self.algorithm.finish(trained, start, bench.view(visit.client, kept))
            return Visited(visit.client, loss, penalty, got.nbytes, extras, kept, self.algorithm.remember(start))

        return self.map(one, list(enumerate(visits)))

    def measure(self, candidates: Sequence[Candidate]) -> list[Score]:
        """The score of each candidate."""
        size = -(-len(candidates) // MEASURE_TASKS)  # a function of the clients, not of the workers
        tasks = [candidates[at : at + size] for at in range(0, len(candidates), size)] if candidates else []
        return [score for task in self.map(self._measure, tasks) for score in task]

    def _measure(self, bench: Bench, candidates: Sequence[Candidate]) -> list[Score]:
        """Neighbours that share a model, as all clients of FedAvg do, are measured together."""
        scores: list[Score] = []
        group: list[int] = []
        shared: Params = {}
        for candidate in candidates:
            model = candidate.model(bench.view(candidate.client, candidate.statistics))
            if model is shared and not candidate.statistics:
                group.append(candidate.client)
                continue
            scores += self._score(bench, shared, group)
            group, shared = [candidate.client], model
            if candidate.statistics:
                scores += self._score(bench, model | candidate.statistics, group)
                group = []
        return scores + self._score(bench, shared, group)

    def _score(self, bench: Bench, model: Params, clients: Sequence[int]) -> list[Score]:
        """Scores of one model on several clients, measured in common batches."""
        if not clients:
            return []
        bench.load(model)
        shards = [self.federation.shards[c] for c in clients]
        parts = [part for shard in shards for part in (shard.test, shard.validation)]
        asked, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
        own = OwnSums(self.metrics, len(parts))

        def see(at: int, logits: Tensor, labels: Tensor) -> None:
            """A batch may be of several parts."""
            for part in range(int(np.searchsorted(ends, at, "right")), len(parts)):
                first, end = max(at, ends[part] - len(parts[part])) - at, min(ends[part] - at, len(labels))
                if first >= len(labels):
                    return
                if first < end:
                    own.add(part, logits[first:end], labels[first:end])

        answers = bench.answers(asked, see if self.metrics else None)
        part = np.repeat(np.arange(len(parts)), [len(one) for one in parts])
        places = Places(self.federation.data.labels[asked], part, len(parts), self.federation.data.classes)
        tables = places.count(*answers)
        losses = [float(part.sum()) for part in np.split(answers.loss, ends[:-1])]
        return scores_of(tables, losses[::2], own)

    def close(self) -> None:
        """Stop whoever is still training, and let go of the networks and the data."""
        self._stop.set()
        self._benches.clear()
