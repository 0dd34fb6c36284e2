"""What a case must not do, seen by the interpreter itself: write outside its folder, start programs, connect, unpickle code."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import LIMIT

SECONDS = 120
"""A case that computes longer hangs: seconds of its own work, whatever else the machine does. One that waits has the suite's limit."""
MEMORY = 24 * 2**30
"""Address space, of which torch takes most: no case may fill the machine."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {"os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.symlink": 2, "os.link": 2, "os.truncate": 1,
          "os.chmod": 1, "os.chown": 1, "shutil.rmtree": 1, "shutil.move": 2, "shutil.copyfile": 2}  # fmt: skip
_NEVER = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.startfile",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "pickle.find_class",
}


class Hang(BaseException):
    """Not an Exception: nobody may swallow it."""


class _Watch:
    folder: str = ""
    seen: list[str]

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.folder:
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            self._path(event, arguments[0])
        elif event in _PATHS:
            for path in arguments[: _PATHS[event]]:
                self._path(event, path)
        elif event in _NEVER:
            self.seen.append(f"{event} {arguments!r}")

    def _path(self, event: str, path: object) -> None:
        if isinstance(path, int) or path in (os.devnull, os.fsencode(os.devnull), "/proc/self/clear_refs"):
            return
        full = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        if not f"{full}{os.sep}".startswith((self.folder, *_SCRATCH)):
            self.seen.append(f"{event} {full}")


_WATCH = _Watch()
_SCRATCH = [os.path.join(os.path.realpath(tempfile.gettempdir()), made) for made in ("tmp", "torchinductor_")]
"""What tempfile and torch make for themselves."""
sys.addaudithook(_WATCH)
sys.dont_write_bytecode = True


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Everything inside stays inside the folder, runs nothing, and ends."""
    hard = resource.getrlimit(resource.RLIMIT_AS)
    _WATCH.seen = []
    _WATCH.folder = os.path.realpath(folder) + os.sep
    before = signal.signal(signal.SIGPROF, _hang)
    faulthandler.dump_traceback_later(LIMIT, exit=True)  # for what waits, or hangs outside Python
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, hard)
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, before)
        _WATCH.folder = ""
    assert not _WATCH.seen, _WATCH.seen


def _hang(number: int, frame: object) -> None:
    raise Hang(f"a case took more than {SECONDS} seconds")
