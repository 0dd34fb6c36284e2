"""Engines whose workers take one client at a time (`Distributor`), and the plainest of them, with one worker on this thread (`Loop`)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from cwfed.core.types import Download, Params
from cwfed.engine.base import Call, Candidate, Job, Score, Visit, Visited
from cwfed.engine.tasks import ClientTasks, Outbox

MEASURE_TASKS = 32
"""Clients are measured in at most this many tasks: clients that share a model then share its batches."""


class Distributor(ABC):
    """An engine that deals tasks out to workers. A subclass has `spread` and `close`."""

    name: str
    is_here = False
    """Whether the workers are in this process and have one outbox with it."""
    compile = False
    note = ""

    def __init__(self, job: Job, workers: int) -> None:
        self.job, self.workers, self.why = job, workers, ""
        self._outbox = Outbox.of(job)

    @abstractmethod
    def spread(self, call: Call, items: Sequence[Any]) -> list[Any]:
        """Do a call's task for each item (`ClientTasks.do`); the results, in the order of the items."""

    @abstractmethod
    def close(self) -> None:
        """Stop training that is under way, and free the networks and the data."""

    def try_training(self) -> None:
        self.spread(Call("try_training"), [0])

    def rehearse(self, state: Any, visit: Visit) -> None:
        self.spread(Call("rehearse", state=state), [visit])

    def download(self, state: Any, visit: Visit) -> Download:
        return self._outbox.download(state, visit)

    def prepare(self, state: Any, visits: Iterable[Visit]) -> None:
        """Have what these clients are sent made, a share by each worker, where the workers have this engine's outbox."""
        asking = (visit.client for visit in visits if visit.got is None)
        clients = self._outbox.missing(state, asking) if self.is_here else []
        shares = [clients[at :: self.workers] for at in range(min(self.workers, len(clients)))]
        self.spread(Call("make", state=state), shares)

    def visit(self, round_: int, state: Any, visits: Sequence[Visit], out: Params) -> list[Visited]:
        self.prepare(state, visits)
        work = [len(self.job.federation.shards[visit.client].train) for visit in visits]
        return self._longest_first(Call("visit", round_, state, out), list(enumerate(visits)), work)

    def personal(self, round_: int, state: Any, visits: Sequence[Visit], is_tuned: bool = False) -> list[Params]:
        return self.spread(Call("personal", round_, state), [Candidate(v, is_tuned=is_tuned) for v in visits])

    def measure(self, candidates: Sequence[Candidate], round_: int = 0, state: Any = None) -> list[Score]:
        self.prepare(state, (candidate.visit for candidate in candidates if candidate.model is None))
        size = max(
            1, -(-len(candidates) // MEASURE_TASKS)
        )  # depends on the clients only: with the number of workers the last bits would change
        some = [candidates[at : at + size] for at in range(0, len(candidates), size)]
        shards = [[self.job.federation.shards[candidate.visit.client] for candidate in part] for part in some]
        work = [sum(len(shard.test) + len(shard.validation) for shard in part) for part in shards]
        return [
            score for scores in self._longest_first(Call("measure", round_, state), some, work) for score in scores
        ]

    def _longest_first(self, call: Call, items: Sequence[Any], work: Sequence[int]) -> list[Any]:
        """Like `spread`, longest items first (`work[i]` is how long item i is), so that all workers end at about the same time."""
        order = sorted(range(len(items)), key=lambda i: -work[i])
        found = dict(zip(order, self.spread(call, [items[i] for i in order]), strict=True))
        return [found[i] for i in range(len(items))]


class Loop(Distributor):
    """One client after the other, on one thread."""

    name = "loop"
    is_here = True

    def __init__(self, job: Job) -> None:
        super().__init__(job, 1)
        self._stop = threading.Event()
        self.tasks = ClientTasks(job, self._outbox, self._stop)

    def spread(self, call: Call, items: Sequence[Any]) -> list[Any]:
        return [self.tasks.do(call, item) for item in items]

    def close(self) -> None:
        self._stop.set()
        del self.tasks
