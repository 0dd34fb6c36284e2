"""Clients side by side in worker processes, with one compute thread each: nobody waits for another's Python.

The workers are started once and stay. What they need for all rounds (algorithm, network, who holds what) is told once; the data are
in memory that all of them have, and so is the server's state, from which a worker makes a client's personal model itself. For each client only
what it keeps goes there, and what it trained comes back. Its arithmetic is that of the loop, so the bits are the same.

A worker is a Python process that imports cwfed, not a copy of this one: a script needs no `if __name__ == "__main__"`, and nothing of this
process's threads and devices is in it. It ends when its socket does, however this process has ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

import torch

from cwfed.core.errors import ConfigError, CwfedError, WorkerLost
from cwfed.data import Samples
from cwfed.engine.base import Call, Job
from cwfed.engine.loop import Distributor
from cwfed.engine.shared import Memory, pack, unpack
from cwfed.engine.tasks import ClientTasks, Outbox

START = (
    "import json, sys; sys.path[:], given = map(json.loads, sys.argv[1:]); "
    "from cwfed.engine.processes import work; work(*given)"
)
JOB, ITEM, READY, DONE, FAILED = b"j", b"i", b"r", b"d", b"f"
"""The first byte of what is said; the others say where in memory the rest is."""


class CannotShare(ConfigError):
    """Something of the experiment cannot be sent to another process."""


class Processes(Distributor):
    """The loop's work, spread over worker processes. Each has a device, in turn."""

    name = "processes"

    def __init__(self, job: Job, workers: int, devices: Sequence[torch.device] = ()) -> None:
        super().__init__(job, workers)
        given = devices or (job.samples.device,)
        self.devices = tuple(given[number % len(given)] for number in range(workers))
        """Of each worker."""
        self._library, self._board = Memory(), Memory()
        """What is true of all rounds; the server's state."""
        self._posted: tuple[Any, bytes] = None, b""
        """The state that is on the board, and where."""
        self._calls = 0
        self._crew: list[_Worker] = []
        self._release = weakref.finalize(self, _release, self._crew, self._library, self._board)
        about = job.algorithm, job.model, job.task, job.federation, job.how, job.metrics
        try:
            self._job = pack(about, self._library)
        except Exception as error:  # whatever the user's objects say to being pickled
            self._release()
            raise CannotShare(
                f'run.engine = "processes" cannot send this experiment to its workers, use "threads": {error}'
            ) from None

    def spread(self, call: Call, items: Sequence[Any]) -> list[Any]:
        if call.state is not None and call.state is not self._posted[0]:  # nobody reads it now
            self._posted = call.state, pack(call.state, self._board)
        self._calls += 1
        results: dict[int, Any] = {}
        left = deque(enumerate(items))
        try:
            if not self._crew:
                self._crew += (_Worker(self._job, self._library, self._board, device) for device in self.devices)
            while len(results) < len(items):
                for worker in self._crew:
                    if worker.is_free and left:
                        worker.take(call, self._calls, self._posted[1], *left.popleft())
                for ready in wait([worker.connection for worker in self._crew if not worker.is_free]):
                    worker = next(worker for worker in self._crew if worker.connection is ready)
                    results |= worker.answer()
        except BaseException:  # an error or Ctrl-C: all of them end; who asks again is given new ones
            _dismiss(self._crew)
            raise
        return [results[place] for place in range(len(items))]

    def close(self) -> None:
        self._release()


class _Worker:
    """A worker process as this process sees it."""

    def __init__(self, job: bytes, library: Memory, board: Memory, device: torch.device) -> None:
        self._inbox, self._outbox = Memory(), Memory()
        ours, its = socket.socketpair()
        files = [its.fileno(), *(memory.file for memory in (library, board, self._inbox, self._outbox))]
        told = [
            json.dumps([place for place in sys.path if isinstance(place, str)]),
            json.dumps([*files, str(device)]),
        ]
        with _deaf_to_ctrl_c():
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, *told], stdin=subprocess.DEVNULL, pass_fds=files
            )
        its.close()
        self.connection = Connection(ours.detach())
        self.is_free = False
        self._told: tuple[int, bytes] = 0, b""
        """The number of the last call, and where the last state was."""
        self._at: tuple[Call, int, Any] | None = None
        """What it does: an item of a call, and which."""
        self._send(JOB + job)

    def take(self, call: Call, number: int, state: bytes, place: int, item: Any) -> None:
        """Let it do an item of the call of this number; what it knows already is not said again."""
        self.is_free, self._at = False, (call, place, item)
        new_state = state if state is not self._told[1] else None  # two states may be at one place
        new_call = None
        if number != self._told[0]:
            rows = {name: stack.new_empty(0, *stack.shape[1:]) for name, stack in call.out.items()}
            new_call = replace(call, state=None, out=rows)
        self._told = number, state
        there = (0, item[1]) if call.task == "visit" else item  # it has a stack of one row
        self._send(ITEM + pack((new_state, new_call, there), self._inbox))

    def answer(self) -> dict[int, Any]:
        """What it says: by place, the result of what it was doing; nothing where it has only become ready."""
        try:
            said = self.connection.recv_bytes()
        except (EOFError, OSError):
            raise self._lost() from None
        self.is_free = True
        if said == READY:
            return {}
        found, model = unpack(said[1:], self._outbox, copy=True)
        if said[:1] == FAILED:
            self._raise(found, model)
        assert self._at is not None
        call, place, item = self._at
        self._at = None
        for name, row in model.items():
            call.out[name][item[0]] = row[0]
        return {place: found}

    def end(self) -> None:
        """At once: it has nothing that could be left half done."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._inbox.close()
        self._outbox.close()

    @staticmethod
    def _raise(error: BaseException, where: str) -> None:
        if not isinstance(error, CwfedError):
            error.add_note(f"In a worker process:\n{where}")
        raise error

    def _send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except OSError:
            raise self._lost() from None

    def _lost(self) -> WorkerLost:
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if code == -signal.SIGKILL:
            how += " (is the machine out of memory?)"
        doing = f" while it {_doing(self._at[0], self._at[2])}" if self._at else " before it was ready"
        return WorkerLost(
            f"a worker process {how}{doing}: --resume continues a run that has a folder; fewer run.workers need less memory"
        )


def _doing(call: Call, item: Any) -> str:
    """What a worker does, for people."""
    if call.task == "visit":
        return f"trained client {item[1].client} in round {call.round}"
    if call.task == "measure":
        clients = ", ".join(str(candidate.visit.client) for candidate in item)
        after = f" after round {call.round - 1}" if call.round else ""
        return f"measured the models of client{'s' * (len(item) > 1)} {clients}{after}"
    if call.task == "personal":
        return f"made the model of client {item.visit.client} after round {call.round - 1}"
    return "tried the experiment before round 1"


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """What is started in here does not hear Ctrl-C: this process does, and ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _dismiss(crew: list[_Worker]) -> None:
    while crew:
        crew.pop().end()


def _release(crew: list[_Worker], *memories: Memory) -> None:
    _dismiss(crew)
    for memory in memories:
        memory.close()


# --- in the worker


def work(connection: int, library: int, board: int, inbox: int, outbox: int, device: str) -> None:
    """What a worker process does until its socket ends."""
    torch.set_num_threads(1)
    ours = Connection(connection)
    heard: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(ours, heard), daemon=True).start()
    bench, answers = _Bench(Memory(library), Memory(board), Memory(inbox), torch.device(device)), Memory(outbox)
    while True:
        said = heard.get()
        try:
            if said[:1] == JOB:
                bench.learn(said[1:])
                answer = READY
            else:
                answer = DONE + pack(bench.do(said[1:]), answers)
        except BaseException as error:  # it is the other side's to decide what to make of it
            answer = FAILED + _packed(error, answers)
        ours.send_bytes(answer)


def _listen(connection: Connection, heard: SimpleQueue[bytes]) -> None:
    """Beside the work, so that the end of the other side is noticed in the middle of it."""
    try:
        while True:
            heard.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _packed(error: BaseException, memory: Memory) -> bytes:
    """An error with where it came from; in words, where it is of a kind that cannot travel."""
    where = traceback.format_exc()
    try:
        packed = pack((error, where), memory)
        unpack(packed, memory, copy=False)
        return packed
    except Exception:
        return pack((RuntimeError(f"{type(error).__name__}: {error}"), where), memory)


class _Bench:
    """What a worker knows, and does."""

    def __init__(self, library: Memory, board: Memory, inbox: Memory, device: torch.device) -> None:
        self._library, self._board, self._inbox, self._device = library, board, inbox, device
        self._state: Any = None

    def learn(self, where: bytes) -> None:
        """The job."""
        try:
            algorithm, model, task, federation, how, metrics = unpack(where, self._library, copy=False)
        except Exception as error:  # such as a module that cannot be imported here
            raise CannotShare(
                f'run.engine = "processes": a worker process cannot load the experiment, use "threads": {error!r}'
            ) from None
        samples = Samples(federation.data.inputs, federation.data.labels, self._device)
        job = Job(algorithm, model, task, federation, samples, how, metrics)
        self._tasks = ClientTasks(job, Outbox.of(job), threading.Event())

    def do(self, where: bytes) -> Any:
        """An item: its result, and the model that was trained."""
        state, call, item = unpack(where, self._inbox, copy=False)
        if state is not None:
            self._state = unpack(state, self._board, copy=False)
        if call is not None:
            row = {name: stack.new_empty(1, *stack.shape[1:]) for name, stack in call.out.items()}
            self._call = replace(call, state=self._state, out=row)
        return self._tasks.do(self._call, item), self._call.out
