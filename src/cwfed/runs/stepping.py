"""The rounds of a run, one at a time: `for event in cwfed.rounds(config)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

from cwfed.core.errors import RunError, StopRun
from cwfed.core.events import Event, Round, Started
from cwfed.runs.result import Result
from cwfed.runs.session import Steps


class Rounds(Iterator[Round]):
    """An iterator over the rounds of a run: each is carried out on demand.

    `result()` gives the result of the rounds that are done, at the end or earlier. A run with a folder that is left early has a
    checkpoint: `cwfed.rounds(out=..., resume=True)` or `cwfed.run(out=..., resume=True)` continues it, to the same bits.

    Examples:
        >>> import cwfed
        >>> settings = {"train": {"rounds": 9, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}}
        >>> with cwfed.rounds(settings) as rounds:
        ...     first = next(rounds)
        >>> first.round
        1
    """

    def __init__(self, steps: Steps, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self._steps, self._on_event = steps, on_event
        self._result: Result | None = None
        self._started: Started | None = None
        self._last: Round | None = None
        # closes also when Python ends, while everything that closing needs still exists
        weakref.finalize(self, steps.close)

    def __next__(self) -> Round:
        while True:
            event = self._advance()
            if event is None:
                raise StopIteration
            if isinstance(event, Round):
                return event

    def result(self) -> Result:
        """The result of the rounds that are done; no more are carried out.

        Errors:
            CwfedError, one sentence: no round was carried out and evaluated yet.
        """
        if self._result is None and self._is_last():
            while self._advance() is not None:  # only the end is left: newcomers, models, the summary
                pass
        if self._result is None:
            if self._last is None:
                raise RunError("no round was carried out yet: take one with next(), or all of them in a loop")
            self._stop(StopRun(f"stopped after round {self._last.round}"))
        if self._result is None:
            raise RunError(
                "the rounds were closed before their result was asked for; with a folder, resume=True continues the run"
            )
        return self._result

    def close(self) -> None:
        """End workers and unlock the folder; a run with a folder has a checkpoint then."""
        self._steps.close()

    def __enter__(self) -> Rounds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self) -> Event | None:
        """The next event; None at the end."""
        try:
            event = next(self._steps)
        except StopIteration as end:
            self._result = self._result or end.value
            return None
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Round):
            self._last = event
        try:
            self._on_event(event)
        except StopRun as stop:
            self._stop(stop)
        return event

    def _stop(self, stop: StopRun) -> None:
        """End the run here."""
        try:
            self._steps.throw(stop)
        except StopIteration as end:
            self._result = end.value
        except StopRun:
            pass  # it was closed before

    def _is_last(self) -> bool:
        """Whether the last round carried out is the last of the run."""
        started, last = self._started, self._last
        return bool(started and last and (last.round >= started.rounds or last.stopped))
