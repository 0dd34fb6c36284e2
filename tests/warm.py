"""A process that has imported everything and forks one child per command: starting Python and torch costs seconds.

Each command still has a process of its own, with its own folder, environment, output and end.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from cwfed.core import terminal

COLD = ("cwfed.__main__", "cwfed.flower", "cwfed.benchmark", "cwfed.testing")
"""Not imported beforehand: few commands need them."""
LATE = ("matplotlib.pyplot", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")
"""Imported only by what is drawn or trained: torch's own on the first gradient under vmap, two seconds of every run."""


class Warm:
    """The client's side; the process is started by the first command."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def run(self, arguments: list[str], cwd: Any, env: dict[str, str], out: int, err: int, limit: float) -> int:
        """The exit code of `python ARGUMENTS`, whose output goes to two files; minus the signal that ended it."""
        if self._socket is None:
            self._socket = self._start()
        self._socket.settimeout(limit)
        request = {"arguments": arguments, "cwd": os.fspath(cwd or "."), "env": env}
        message = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(message).to_bytes(8, "big")], [out, err])
        self._socket.sendall(message)
        pid = int.from_bytes(self._receive(8), "big")
        try:
            return int.from_bytes(self._receive(8), "big", signed=True)
        except TimeoutError:
            self._socket = None  # its answer would be taken for that of the next command
            raise subprocess.TimeoutExpired(arguments, limit) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # whoever it has left behind

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[1],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

        def end() -> None:
            """Also without being asked it ends when our side of the socket is closed, however we end."""
            ours.close()
            process.wait()

        atexit.register(end)
        return ours

    def _receive(self, size: int) -> bytes:
        assert self._socket is not None
        found = b""
        while len(found) < size:
            more = self._socket.recv(size - len(found))
            assert more, "the process that forks has ended"
            found += more
        return found


def serve(connection: socket.socket) -> None:
    """Fork a child per request until the other side is gone; returns in a child that is to become its command."""
    while True:
        size, (out, err) = _request(connection)
        if not size:
            sys.exit()
        message = b""
        while len(message) < size:
            message += connection.recv(size - len(message))
        request = json.loads(message)
        if pid := os.fork():
            os.close(out)
            os.close(err)
            connection.sendall(pid.to_bytes(8, "big"))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            connection.sendall(code.to_bytes(8, "big", signed=True))
            continue
        connection.close()
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        # they were made in another environment
        terminal.out.__init__(width=None if "COLUMNS" in os.environ else 120)
        terminal.err.__init__(stderr=True)
        sys.argv = request["arguments"]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:1] = [os.getcwd(), *filter(None, paths)]
        return


def _request(connection: socket.socket) -> tuple[int, list[int]]:
    header, fds, _, _ = socket.recv_fds(connection, 8, 2)
    return int.from_bytes(header, "big"), fds or [-1, -1]


def become() -> None:
    """What `python ARGUMENTS` does: a module (-m), a text (-c) or a file."""
    what, *rest = sys.argv
    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        runpy.run_path(what, run_name="__main__")


def leave(do: Callable[[], None]) -> None:
    """Do it and end as Python would, but for taking everything imported apart: that takes longer than most commands."""
    code: Any = 0
    try:
        do()
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            raise
    threading._shutdown()  # waits for threads, as Python does before all else
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def warm_up() -> None:
    """Import what commands need; nothing is computed, so there are no threads that a fork would lose."""
    import cwfed

    for module in pkgutil.walk_packages(cwfed.__path__, "cwfed."):
        if not module.name.startswith(COLD):
            import_module(module.name)
    for name in LATE:
        import_module(name)


if __name__ == "__main__":
    warm_up()
    gc.freeze()  # a child that collects garbage would copy all of it
    serve(socket.socket(fileno=int(sys.argv[1])))
    leave(become)
