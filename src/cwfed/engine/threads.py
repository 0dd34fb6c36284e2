"""Clients side by side on threads, with one compute thread each.

A batch of ten samples is no faster on two compute threads than on one, so it is better to train two clients at a time. Each
client's arithmetic is that of the loop, so the bits are the same for any number of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch

from cwfed.engine.base import Call, Job
from cwfed.engine.loop import Distributor
from cwfed.engine.tasks import ClientTasks


class Threads(Distributor):
    """The loop's work, spread over a pool of threads."""

    name = "threads"
    is_here = True

    def __init__(self, job: Job, workers: int) -> None:
        super().__init__(job, workers)
        self._stop = threading.Event()
        # torch keeps its number of compute threads per calling thread
        self._pool = ThreadPoolExecutor(self.workers, "cwfed", initializer=torch.set_num_threads, initargs=(1,))
        self._free: SimpleQueue[ClientTasks] = SimpleQueue()
        for _ in range(workers):
            self._free.put(ClientTasks(job, self._outbox, self._stop))

    def spread(self, call: Call, items: Sequence[Any]) -> list[Any]:
        futures = [self._pool.submit(self._do, call, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            # an error or Ctrl-C: clients in training stop at their next batch, queued ones never start
            self._stop.set()
            for future in futures:
                future.cancel()
            raise

    def _do(self, call: Call, item: Any) -> Any:
        """Do one item on this thread, with a worker that is free."""
        worker = self._free.get()
        try:
            return worker.do(call, item)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        self._free = SimpleQueue()
