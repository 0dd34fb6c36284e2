"""The tasks of a worker: plain arguments, plain results. A worker knows the job beforehand, and nothing else.

An engine only decides which worker does which task, and where that worker is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cwfed.algorithms import FedAvg
from cwfed.core import memory
from cwfed.core.errors import ConfigError
from cwfed.core.metrics import OwnSums, Places
from cwfed.core.types import Download, Params, Start, nbytes
from cwfed.engine import rehearsal
from cwfed.engine.base import Call, Candidate, Job, Score, Trained, Visit, Visited, overrides, scores_of, sends_each
from cwfed.engine.private import PrivateWorker
from cwfed.engine.worker import ClientWorker

REMEMBERED = 2**28
"""Bytes of personal models up to which they are kept from one round's evaluation to the next round's training."""


class Outbox:
    """Makes what clients are sent from the server's state. All workers of a process share one.

    If all personal models together are small it remembers them: the model that was measured after a round is trained in the next.
    """

    def __init__(self, algorithm: FedAvg, model: Params, clients: int) -> None:
        self._algorithm = algorithm
        self._remembers = nbytes(model) * clients <= REMEMBERED
        self._makes = self._remembers and sends_each(algorithm)
        self._sent: tuple[Any, dict[int, Download]] = (None, {})

    @classmethod
    def of(cls, job: Job) -> Outbox:
        """The outbox for a job."""
        return cls(job.algorithm, dict(job.model.named_parameters()), len(job.federation))

    def download(self, state: Any, visit: Visit) -> Download:
        """What a client gets: what its visit brought, or else what the state gives."""
        return self.send(state, visit.client) if visit.got is None else visit.got

    def send(self, state: Any, client: int) -> Download:
        """What the server's state gives a client."""
        if not self._remembers:
            return self._algorithm.send(state, client)
        sent = self._sent_from(state)
        if client not in sent:
            sent[client] = self._algorithm.send(state, client)
        return sent[client]

    def _sent_from(self, state: Any) -> dict[int, Download]:
        """By client, what was made from this state; what was made from another one is forgotten."""
        if self._sent[0] is not state:
            self._sent = (state, {})
        return self._sent[1]

    def missing(self, state: Any, clients: Iterable[int]) -> list[int]:
        """For which of these clients it pays to `make` what they are sent."""
        if not self._makes or state is None:
            return []
        sent = self._sent_from(state)
        return [client for client in clients if client not in sent]

    def make(self, state: Any, clients: Sequence[int]) -> None:
        """What these clients are sent, together, before they ask for it."""
        self._sent_from(state).update(zip(clients, self._algorithm.send_each(state, clients), strict=True))


class ClientTasks:
    """Does the tasks of one worker, one after the other."""

    def __init__(self, job: Job, outbox: Outbox, stop: threading.Event) -> None:
        memory.keep_freed()
        self.job, self.outbox = job, outbox
        self.worker = _client_worker(job, stop)
        output = job.task.output
        self._head = tuple(n for n in job.task.layers[output] if n in (f"{output}.weight", f"{output}.bias"))

    def do(self, call: Call, item: Any) -> Any:
        """Do a call's task for one item."""
        return getattr(self, call.task)(call, item)

    # --- before the first round

    def try_training(self, call: Call, client: int) -> None:
        """One batch forward and backward."""
        worker = self.worker
        try:
            inputs, labels = worker.samples.batch(self.job.federation.shards[client].train[:2])
            worker.model.eval()
            loss = nn.functional.cross_entropy(worker.forward(inputs).logits, labels)
            torch.autograd.grad(loss, [p for p in worker.model.parameters() if p.requires_grad], allow_unused=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f'train.precision = "{self.job.how.precision}" cannot be used with this model: {reason}'
            ) from None

    def rehearse(self, call: Call, visit: Visit) -> None:
        """A visit without training."""
        got, algorithm = self.outbox.download(call.state, visit), self.job.algorithm
        if isinstance(self.worker, PrivateWorker):
            self.worker.rehearse(algorithm, got, visit.own, visit.statistics, visit.client)
        elif overrides(algorithm, "send", "personal", "begin", "passes", "loss", "penalty"):
            rehearsal.rehearse(self.worker, algorithm, self.job.task, got, visit, self.job.how)

    def make(self, call: Call, clients: Sequence[int]) -> None:
        """What these clients are sent."""
        self.outbox.make(call.state, clients)

    # --- training

    def visit(self, call: Call, item: tuple[int, Visit]) -> Visited:
        """Let a client begin, train and finish; its model goes into its row of the stack `call.out`."""
        row, visit = item
        worker, algorithm = self.worker, self.job.algorithm
        got = self.outbox.download(call.state, visit)
        start = algorithm.begin(got, visit.own, worker.view(visit.client, visit.statistics))
        start = self.received(call.round, visit, start)
        passes = algorithm.passes("training", self.job.task, start)
        loss, penalty, optimizer = worker.train(
            algorithm, "training", passes, start, visit.client, call.round, self.job.how, visit.optimizer
        )
        worker.save(call.out, row)
        trained = Trained(loss, penalty, worker.copy_of(visit.statistics), optimizer)
        return self.visited(visit, got, start, trained, {name: stack[row] for name, stack in call.out.items()})

    def received(self, round_: int, visit: Visit, start: Start) -> Start:
        """Load a client's start and make its passes on receipt; the start as these passes leave it."""
        worker, algorithm = self.worker, self.job.algorithm
        worker.load(start.params | visit.statistics)
        passes = algorithm.passes("receipt", self.job.task, start)
        if not passes:
            return start
        worker.train(algorithm, "receipt", passes, start, visit.client, round_, self.job.how)
        settled = algorithm.settle(worker.complete(), start)
        worker.load(settled)
        return replace(start, params={name: settled[name] for name in start.params})

    def visited(self, visit: Visit, got: Download, start: Start, trained: Trained, model: Params) -> Visited:
        """Finish a visit: what a participant sends and keeps besides its trained model."""
        algorithm = self.job.algorithm
        extras = algorithm.finish(model, start, self.worker.view(visit.client, trained.statistics))
        rehearsal.check_type(extras, dict, f"{type(algorithm).__name__}.finish", "a dict of tensors by name")
        return Visited(
            client=visit.client,
            loss=trained.loss,
            penalty=trained.penalty,
            downloaded=got.nbytes,
            head=tuple({name: sent[name] for name in self._head if name in sent} for sent in got.models),
            extras=extras,
            statistics=trained.statistics,
            remembered=algorithm.remember(start) | trained.optimizer,
        )

    # --- the models that clients have on receipt, and how good models are

    def personal(self, call: Call, candidate: Candidate) -> Params:
        """The model of a candidate, complete."""
        return candidate.visit.statistics | self.candidate(call, candidate)

    def candidate(self, call: Call, candidate: Candidate) -> Params:
        """The model that a candidate is measured with; it has running statistics only where passes have moved them."""
        if candidate.model is not None:
            return candidate.model
        counts = self.job.federation.class_counts(candidate.visit.client).tolist()
        return self.job.algorithm.predictor(self.on_receipt(call, candidate), counts, self.job.task)

    def on_receipt(self, call: Call, candidate: Candidate) -> Params:
        """The model that a client has on receipt."""
        visit, task, algorithm, worker = candidate.visit, self.job.task, self.job.algorithm, self.worker
        got, view = self.outbox.download(call.state, visit), worker.view(visit.client, visit.statistics)
        if not overrides(algorithm, "passes"):
            return algorithm.personal(got, visit.own, view)
        start = algorithm.begin(got, visit.own, view)
        if algorithm.passes("receipt", task, start):
            start = self.received(call.round, visit, start)
            model = worker.complete()
        else:
            model = algorithm.personal(got, visit.own, view)
        if candidate.is_tuned and (passes := algorithm.passes("test", task, start)):
            worker.load(visit.statistics | model)
            worker.train(algorithm, "test", passes, start, visit.client, call.round, self.job.how)
            model = worker.complete()
        return model

    def measure(self, call: Call, candidates: Sequence[Candidate]) -> list[Score]:
        """Scores in the order of the candidates. Neighbours that share a model, as all clients of FedAvg do, are measured together."""
        scores: list[Score] = []
        group: list[int] = []
        shared: Params = {}
        for candidate in candidates:
            model, visit = self.candidate(call, candidate), candidate.visit
            if model is shared and not visit.statistics:
                group.append(visit.client)
                continue
            scores += self._score(shared, group)
            group, shared = [visit.client], model
            if visit.statistics:
                scores += self._score(visit.statistics | model, group)
                group = []
        return scores + self._score(shared, group)

    def _score(self, model: Params, clients: Sequence[int]) -> list[Score]:
        """Scores of one model on several clients, measured in common batches."""
        if not clients:
            return []
        self.worker.load(model)
        shards = [self.job.federation.shards[c] for c in clients]
        parts = [part for shard in shards for part in (shard.test, shard.validation)]
        asked, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
        own = OwnSums(self.job.metrics, len(parts))

        def see(at: int, logits: Tensor, labels: Tensor) -> None:
            """Add a batch, which may span several parts, to the sums of the user's own metrics."""
            for part in range(int(np.searchsorted(ends, at, "right")), len(parts)):
                first, end = max(at, ends[part] - len(parts[part])) - at, min(ends[part] - at, len(labels))
                if first >= len(labels):
                    return
                if first < end:
                    own.add(part, logits[first:end], labels[first:end])

        answers = self.worker.answers(asked, see if self.job.metrics else None)
        part = np.repeat(np.arange(len(parts)), [len(one) for one in parts])
        places = Places(self.job.federation.data.labels[asked], part, len(parts), self.job.federation.data.classes)
        tables = places.count(*answers)
        losses = [float(part.sum()) for part in np.split(answers.loss, ends[:-1])]
        return scores_of(tables, losses[::2], own)


def _client_worker(job: Job, stop: threading.Event) -> ClientWorker:
    if job.how.privacy:
        return PrivateWorker(job.model, job.federation, job.samples, stop, job.how)
    worker = ClientWorker(job.model, job.federation, job.samples, stop, job.how.precision)
    if overrides(job.algorithm, "loss"):
        worker.make_dense()
    return worker
