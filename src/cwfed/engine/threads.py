"""Clients side by side on threads, with one compute thread each.

A batch of ten samples takes as long on two compute threads as on one, so two clients at a time take the
time of one. Each client's arithmetic is that of the loop, so the bits are the same for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch

from cwfed.engine.base import Item, Job, Loop, Result
from cwfed.engine.worker import Bench


class Threads(Loop):
    """The loop's work, spread over a pool of threads."""

    name = "threads"

    def __init__(self, job: Job, workers: int) -> None:
        super().__init__(job, workers)
        # torch keeps its number of compute threads per calling thread
        self._pool = ThreadPoolExecutor(self.workers, "cwfed", initializer=torch.set_num_threads, initargs=(1,))
        self._free: SimpleQueue[Bench] = SimpleQueue()
        for bench in self._benches:
            self._free.put(bench)

    def map(self, function: Callable[[Bench, Item], Result], items: Iterable[Item]) -> list[Result]:
        def on_a_bench(item: Item) -> Result:
            bench = self._free.get()
            try:
                return function(bench, item)
            finally:
                self._free.put(bench)

        futures = [self._pool.submit(on_a_bench, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            # an error or Ctrl-C: the others give up at their next batch, the queued ones never start
            self._stop.set()
            for future in futures:
                future.cancel()
            raise

    def close(self) -> None:
        super().close()
        self._pool.shutdown(cancel_futures=True)
        self._free = SimpleQueue()
