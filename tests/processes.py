"""Real processes in tests: waited for by what they do and not by the clock, and never left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.warm import Warm

WARM = Warm()
PROGRAM = str(Path(sys.executable).with_name("cwfed"))
LIMIT = float(os.environ.get("CWFED_TEST_LIMIT", "3600"))
"""Seconds after which whatever is waited for counts as hanging: the only limit in the suite, far beyond any slow machine."""


def until(
    found: Callable[[], Any],
    alive: Callable[[], bool] = lambda: True,
    said: Callable[[], str] = lambda: "",
    pause: float = 0.01,
) -> Any:
    """Wait until something is found, while what makes it is alive; `said` tells what it said if it comes to nothing."""
    end = time.monotonic() + LIMIT
    while True:
        lives = alive()  # asked first: what is waited for may be the last thing that it does
        if result := found():
            return result
        assert lives, f"it ended before what was waited for\n{said()}"
        assert time.monotonic() < end, f"it hangs: nothing came in {LIMIT:g} seconds\n{said()}"
        time.sleep(pause)


def lines(path: Path) -> int:
    """Whole lines of a file that somebody may be writing, or about to write."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def die_after_lines(path: Path, count: int, seconds: float) -> None:
    """SIGKILL for this process so long after a file has so many lines, wherever the process is then.

    A thread of the process itself watches: one in another process might, on a busy machine, look too late.
    """

    def watch() -> None:
        until(lambda: lines(path) >= count, pause=0.003)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def until_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until a process has written so many lines to a file."""

    def said() -> str:
        end(process)
        return process.stderr.read() if process.stderr else ""

    until(lambda: lines(path) >= count, lambda: process.poll() is None, said, pause=0.001)


def heed_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C; the suite itself may be run so, its processes not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def running(command: list[Any], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with its output in pipes and a group of its own, of which nothing is left afterwards."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    own = {"text": True, "start_new_session": True, "preexec_fn": heed_ctrl_c}
    with subprocess.Popen(command, **(own | pipes | options)) as process:
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all of its group, also where it has ended itself and left others behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(
    command: list[Any], check: bool = False, warm: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Carry out a command to its end; with `check` it must succeed.

    With `warm`, and for cwfed's own command, Python and its imports are there already: see `tests.warm`.
    """
    words = [str(word) for word in command]
    if words[0] == PROGRAM:
        words[:1] = [sys.executable, "-m", "cwfed"]
    if warm or (words[:3] == [sys.executable, "-m", "cwfed"] and options.keys() <= {"cwd", "env"}):
        code, *said = _run_warm(words[1:], **options)
    else:
        with running(command, **options) as process:
            said = list(process.communicate(timeout=LIMIT))
        code = process.returncode
    assert not check or code == 0, f"{command} ended with {code}\n{said[0]}{said[1]}"
    return subprocess.CompletedProcess(command, code, *said)


def _run_warm(arguments: list[str], cwd: Any = None, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = WARM.run(arguments, cwd, dict(os.environ if env is None else env), out.fileno(), err.fileno(), LIMIT)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()
