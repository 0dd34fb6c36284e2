"""Saves a node the time to import torch for every message: a process that has imported everything forks a child for each message.

Flower's SuperNode starts a program, `flwr-clientapp`, for every message, and that imports torch before it can do anything. Here

    python -P -m cwfed.flower.fork_server FOLDER flower-supernode ...

runs the same SuperNode (Flower's own function, with shorter waits: `waits.py`), with a folder first on its PATH that only its owner may use (mode
700). In it `flwr-clientapp` is `clientapp_shim.py`, which reaches the fork server through a socket there. `flower-superexec`, the helper that starts
a program for each message, is in it too: Flower's own function, which is woken when there is a message.

There is still one process per message, as in Flower: it starts with the imports done, runs Flower's own `flwr-clientapp`, and leaves nothing to the
next one. Every process ends with the node, even if that is killed: the SuperNode holds one end of a pipe (`life`), and the fork server
notices when it is closed.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from cwfed.core.errors import CwfedError
from cwfed.flower import bell, clientapp_shim

PROGRAM, SUPERNODE, HELPER = "flwr-clientapp", "flower-supernode", "flower-superexec"
WAITS = "cwfed.flower.waits"
"""The module `waits.py`, by name: it imports Flower, which the shim's own process does not need."""
PRELOADED = ("flwr.supernode.cli", "cwfed.flower.client", "threadpoolctl")
SOONEST, LATEST = 5.0, 600.0
"""Seconds until a fork server that has ended is started again: the first time, and the most; they double every time."""
STAYS = 60.0
"""Seconds after which a fork server counts as running, so that the waits begin anew."""
CANNOT = 3
"""The exit code of a fork server that cannot work on this machine."""


def main(folder: Path, *supernode: str) -> NoReturn:
    """Become a SuperNode that has a fork server beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    os.environ[bell.FOLDER] = str(folder)
    install(folder, HELPER, sys.executable, "-P", "-m", WAITS, HELPER)
    if sys.platform == "linux" and (program := shutil.which(PROGRAM)):  # elsewhere forking is not safe after imports
        install(folder, PROGRAM, sys.executable, "-I", "-S", clientapp_shim.__file__, str(folder), program)
        ends, life = os.pipe()
        serve = f"from cwfed.flower import fork_server; fork_server.keep({str(folder)!r}, {ends})"
        subprocess.Popen([sys.executable, "-P", "-c", serve], pass_fds=[ends], start_new_session=True)
        os.set_inheritable(life, True)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    if supernode[0] == SUPERNODE:
        sys.argv = list(supernode)
        import_module(WAITS).run_supernode()
        sys.exit()
    try:
        os.execvp(supernode[0], supernode)
    except OSError as error:
        raise CwfedError(f"{supernode[0]} cannot be started: {error.strerror}") from None


def install(folder: Path, name: str, *words: str) -> None:
    """Put a program of this name into the folder that becomes the program `words`."""
    shim = folder / name
    shim.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    shim.chmod(0o700)


# --- the fork server


def keep(folder: str, life: int) -> None:
    """Run a fork server for as long as the node lives; one that dies, for example when memory is short, is started again."""
    pause = SOONEST
    while True:
        began = time.monotonic()
        if not (server := os.fork()):
            work(folder, life)
            return
        _, status = os.waitpid(server, 0)
        pause = SOONEST if time.monotonic() - began > STAYS else pause
        if os.waitstatus_to_exitcode(status) == CANNOT or select.select([life], [], [], pause)[0]:
            return
        pause = min(2 * pause, LATEST)


def work(folder: str, life: int) -> None:
    """Be the fork server. Returns only in a child, when that has done its work."""
    os.environ["OPENBLAS_NUM_THREADS"] = (
        "1"  # numpy's library starts its threads when it is imported: a child's are its own
    )
    listener = listen(folder)  # shims wait there while this imports, which takes no longer than importing themselves
    preload()
    if len(os.listdir("/proc/self/task")) > 1:
        print("no fork server: a library has started threads when it was imported", file=sys.stderr, flush=True)
        sys.exit(CANNOT)
    gc.collect()
    gc.freeze()  # so that the garbage collector of a child does not touch, and copy, imported memory
    if request := requests(listener, life):
        answer(request)


def listen(folder: str) -> socket.socket:
    """The socket of this folder."""
    os.chdir(folder)  # for good; a child changes to its own folder
    Path("socket").unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    listener.listen()
    return listener


def preload() -> None:
    """Import what answering a message needs, and nothing else: no thread, no open file, no random numbers."""
    for name in PRELOADED:
        import_module(name)
    import_module(WAITS).ask_sooner()


@dataclass
class Request:
    """What a shim asks for."""

    connection: socket.socket
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    """stdin, stdout and stderr."""

    @classmethod
    def read(cls, connection: socket.socket) -> Request | None:
        """Read a request; None if its sender has ended."""
        text, files = b"", list[int]()
        with suppress(OSError):
            head, files, _, _ = socket.recv_fds(connection, 8, 3)
            length = int.from_bytes(head, "big")
            while len(text) < length and (more := connection.recv(length - len(text))):
                text += more
            if text and len(text) == length:
                asked: dict[str, Any] = json.loads(text)
                return cls(connection, asked["arguments"], asked["environment"], asked["folder"], files)
        for file in files:
            os.close(file)
        connection.close()
        return None


def requests(listener: socket.socket, life: int) -> Request | None:
    """Fork for each request, and tell shims how children end, until the node ends. In a child it returns the request."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener.fileno(), life, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with children.pop(ended[0]) as connection, suppress(OSError):
                connection.send(os.waitstatus_to_exitcode(ended[1]).to_bytes(2, "big", signed=True))
        if life in ready:  # the node has ended
            for child in children:
                os.kill(child, signal.SIGKILL)
            return None
        if listener.fileno() in ready:
            request = Request.read(listener.accept()[0])
            if request is None:
                continue
            if child := os.fork():
                children[child] = request.connection
                for file in request.files:
                    os.close(file)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (listener, *children.values()):
                other.close()
            for file in (life, woken, wake):
                os.close(file)
            return request


# --- a child


def answer(request: Request) -> None:
    """Be `flwr-clientapp`, as the shim was started."""
    import numpy as np
    from flwr.supernode.cli import flwr_clientapp
    from threadpoolctl import ThreadpoolController

    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    ThreadpoolController().select(internal_api="openblas").limit(limits=openblas_threads())
    np.random.seed()  # children must not share random numbers; torch's are the same in every new process anyway
    sys.argv = [PROGRAM, *request.arguments]
    threading.Thread(target=heed, args=[request.connection], daemon=True).start()
    request.connection.send(b"!")
    flwr_clientapp()  # ends the process with its own exit code


def openblas_threads() -> int:
    """As many threads as numpy would have in a new process, so that sums are split in the same way."""
    said = [os.environ.get(f"{library}_NUM_THREADS", "") for library in ("OPENBLAS", "OMP")]
    return next((int(number) for number in said if number.isdecimal() and int(number)), len(os.sched_getaffinity(0)))


def heed(connection: socket.socket) -> None:
    """Raise the signals that the shim passes on; if the shim is gone, it was killed, and so this process ends."""
    main = (
        threading.main_thread().ident or 0
    )  # which is where Python sees to signals: it may be waiting for something
    with suppress(OSError):
        while told := connection.recv(1):
            signal.pthread_kill(main, told[0])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
