"""How clients are trained and measured: the engines' common interface, and the plain loop.

An engine has two verbs. `visit` lets participants begin, train and finish; `measure` says how good given models are
on given clients' data. `Loop` is the obvious oracle; every other engine must give what it gives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from cwfed.algorithms import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.metrics import LOSS, PER_CLASS, RIGHT, Own, OwnSums, Places, Sums, Tally
from cwfed.core.types import Download, Params, Start, Task
from cwfed.data import Federation, Samples
from cwfed.engine import rehearsal
from cwfed.engine.private import PrivateBench
from cwfed.engine.worker import Bench, LocalTraining

Item = TypeVar("Item")
Result = TypeVar("Result")

REMEMBERED = 2**28
"""Bytes of personal models that are kept from one round's evaluation to the next round's training."""
MEASURE_TASKS = 32
"""Clients are measured in at most this many tasks: clients that share a model then share its batches."""


def overrides(algorithm: FedAvg, *methods: str) -> bool:
    """Whether an algorithm does one of these in a way of its own; where it does not, there are shorter ways."""
    return any(getattr(type(algorithm), name) is not getattr(FedAvg, name) for name in methods)


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Visit:
    """A client, as the server sends it off: plain data, so that the worker may be anywhere."""

    client: int
    own: Params | None = None
    """The tensors that the client kept, and what it remembers beside them."""
    statistics: Params = field(default_factory=dict)
    """Running statistics that stay with the client."""
    optimizer: Params = field(default_factory=dict)
    """What it kept of its optimiser's state."""
    got: Download | None = None
    """What it was sent. None: the worker makes it from the server's state, so that personal models exist only while their
    client needs them."""


@dataclass(frozen=True)
class Visited:
    """A participant after its visit; its model is in its row of the stack."""

    client: int
    loss: float
    """Mean loss of its batches; not a finite number where the training diverged."""
    penalty: float
    downloaded: int
    head: tuple[Params, ...]
    """The output layers of the models that it was sent."""
    extras: Params
    statistics: Params
    remembered: Params
    """What it keeps beside the tensors of its model and its running statistics."""


class Trained(NamedTuple):
    """What is known of a participant's training beside its model."""

    loss: float
    penalty: float
    statistics: Params
    optimizer: Params


@dataclass(frozen=True)
class Candidate:
    """A model to be measured on a client's data."""

    visit: Visit
    model: Params | None = None
    """None: the model that the client has on receipt."""
    is_tuned: bool = False
    """Of a model on receipt: whether the client makes its passes before the test first."""


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


@dataclass(frozen=True)
class Job:
    """What an engine is to carry out: all that it must know of an experiment."""

    algorithm: FedAvg
    model: nn.Module
    task: Task
    federation: Federation
    samples: Samples
    how: LocalTraining
    metrics: Sequence[Own] = ()
    """What the user wants measured beside what always is."""


class Loop:
    """One client after the other, on one thread."""

    name = "loop"

    def __init__(self, job: Job, workers: int = 1) -> None:
        self.job, self.algorithm, self.federation, self.how = job, job.algorithm, job.federation, job.how
        self.workers = workers
        self.metrics = job.metrics
        """What is measured beside what always is."""
        self.why = ""
        """Why "auto" chose this engine."""
        self._sent: tuple[Any, dict[int, Download]] = (None, {})
        self._remembers = sum(map(nbytes_of, job.model.parameters())) * len(job.federation) <= REMEMBERED
        output = job.task.output
        self._head = tuple(n for n in job.task.layers[output] if n in (f"{output}.weight", f"{output}.bias"))
        self._stop = threading.Event()
        self._benches = [self._new_bench(job.model, job.samples) for _ in range(workers)]

    def _new_bench(self, model: nn.Module, samples: Samples) -> Bench:
        if self.how.privacy:
            return PrivateBench(model, self.federation, samples, self._stop, self.how)
        bench = Bench(model, self.federation, samples, self._stop, self.how.precision)
        if overrides(self.algorithm, "loss"):
            bench.make_dense()
        return bench

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

    def rehearse(self, state: Any, visit: Visit) -> None:
        """Before the first round: passes and objectives that cannot be, and what differential privacy cannot be had for."""

        def one(bench: Bench, item: Visit) -> None:
            got = self.download(state, item)
            if isinstance(bench, PrivateBench):
                bench.rehearse(self.algorithm, got, item.own, item.statistics, item.client)
            elif overrides(self.algorithm, "loss", "passes"):
                rehearsal.rehearse(bench, self.algorithm, self.job.task, got, item, self.how)

        self.map(one, [visit])

    def map(self, function: Callable[[Bench, Item], Result], items: Iterable[Item]) -> list[Result]:
        """Results in the order of the items."""
        return [function(self._benches[0], item) for item in items]

    # --- what a client is sent, and the model it has then

    def download(self, state: Any, visit: Visit) -> Download:
        """What a client is sent, made once where all of it is small: what was measured is what is trained next."""
        if visit.got is not None:
            return visit.got
        if not self._remembers:
            return self.algorithm.send(state, visit.client)
        if self._sent[0] is not state:
            self._sent = (state, {})
        sent = self._sent[1]
        if visit.client not in sent:
            sent[visit.client] = self.algorithm.send(state, visit.client)
        return sent[visit.client]

    def personal(self, round_: int, state: Any, visits: Sequence[Visit], is_tuned: bool = False) -> list[Params]:
        """The models that clients have on receipt, as they would begin a round with them."""

        def one(bench: Bench, visit: Visit) -> Params:
            return visit.statistics | self._candidate(bench, round_, state, Candidate(visit, is_tuned=is_tuned))

        return self.map(one, visits)

    def _received(self, bench: Bench, round_: int, visit: Visit, start: Start) -> Start:
        """Load a client's start and make its passes on receipt; the start that is left by them."""
        bench.load(start.params | visit.statistics)
        passes = self.algorithm.passes("receipt", self.job.task, start)
        if not passes:
            return start
        bench.train(self.algorithm, "receipt", passes, start, visit.client, round_, self.how)
        settled = self.algorithm.settle(bench.complete(), start)
        bench.load(settled)
        return replace(start, params={name: settled[name] for name in start.params})

    def _candidate(self, bench: Bench, round_: int, state: Any, candidate: Candidate) -> Params:
        """What a candidate predicts with; with its running statistics where passes over its data have moved them."""
        if candidate.model is not None:
            return candidate.model
        model = self._on_receipt(bench, round_, state, candidate)
        counts = self.federation.class_counts(candidate.visit.client).tolist()
        return self.algorithm.predictor(model, counts, self.job.task)

    def _on_receipt(self, bench: Bench, round_: int, state: Any, candidate: Candidate) -> Params:
        """The model that a client has on receipt."""
        visit, task = candidate.visit, self.job.task
        got, view = self.download(state, visit), bench.view(visit.client, visit.statistics)
        if not overrides(self.algorithm, "passes"):
            return self.algorithm.personal(got, visit.own, view)
        start = self.algorithm.begin(got, visit.own, view)
        if self.algorithm.passes("receipt", task, start):
            start = self._received(bench, round_, visit, start)
            model = bench.complete()
        else:
            model = self.algorithm.personal(got, visit.own, view)
        if candidate.is_tuned and (passes := self.algorithm.passes("test", task, start)):
            bench.load(visit.statistics | model)
            bench.train(self.algorithm, "test", passes, start, visit.client, round_, self.how)
            model = bench.complete()
        return model

    # --- the two verbs

    def visit(self, round_: int, state: Any, visits: Sequence[Visit], out: Params) -> list[Visited]:
        """Train the participants; the model of the i-th goes into row i of `out`."""

        def one(bench: Bench, item: tuple[int, Visit]) -> Visited:
            row, visit = item
            got = self.download(state, visit)
            start = self.algorithm.begin(got, visit.own, bench.view(visit.client, visit.statistics))
            start = self._received(bench, round_, visit, start)
            passes = self.algorithm.passes("training", self.job.task, start)
            loss, penalty, optimizer = bench.train(
                self.algorithm, "training", passes, start, visit.client, round_, self.how, visit.optimizer
            )
            bench.save(out, row)
            kept = bench.copy_of(visit.statistics)
            return self.visited(bench, visit, got, start, Trained(loss, penalty, kept, optimizer), out, row)

        return self.map(one, list(enumerate(visits)))

    def visited(
        self,
        bench: Bench,
        visit: Visit,
        got: Download,
        start: Start,
        trained: Trained,
        out: Params,
        row: int,
    ) -> Visited:
        """A participant whose model is trained: what else it sends and keeps."""
        model = {name: stack[row] for name, stack in out.items()}
        extras = self.algorithm.finish(model, start, bench.view(visit.client, trained.statistics))
        head = tuple({name: sent[name] for name in self._head if name in sent} for sent in got.models)
        remembered = self.algorithm.remember(start) | trained.optimizer
        return Visited(
            visit.client,
            trained.loss,
            trained.penalty,
            got.nbytes,
            head,
            extras,
            trained.statistics,
            remembered,
        )

    def measure(self, candidates: Sequence[Candidate], round_: int = 0, state: Any = None) -> list[Score]:
        """The score of each candidate, whose model is that of a client before a round where it does not bring one."""
        size = -(-len(candidates) // MEASURE_TASKS)  # a function of the clients, not of the workers
        tasks = [candidates[at : at + size] for at in range(0, len(candidates), size)] if candidates else []

        def one(bench: Bench, some: Sequence[Candidate]) -> list[Score]:
            return self._measure(bench, round_, state, some)

        return [score for task in self.map(one, tasks) for score in task]

    def _measure(self, bench: Bench, round_: int, state: Any, candidates: Sequence[Candidate]) -> list[Score]:
        """Neighbours that share a model, as all clients of FedAvg do, are measured together."""
        scores: list[Score] = []
        group: list[int] = []
        shared: Params = {}
        for candidate in candidates:
            model, visit = self._candidate(bench, round_, state, candidate), candidate.visit
            if model is shared and not visit.statistics:
                group.append(visit.client)
                continue
            scores += self._score(bench, shared, group)
            group, shared = [visit.client], model
            if visit.statistics:
                scores += self._score(bench, visit.statistics | model, group)
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
