"""A node's work without waiting for torch: a process that has imported everything forks one child for each message.

Flower's SuperNode starts a program, `flwr-clientapp`, for every message, and that imports torch before it can do anything. Here

    python -P -m cwfed.flower.fork_server FOLDER flower-supernode ...

is the same SuperNode (Flower's own function, with shorter waits: `waits.py`) with a folder of ours first on its PATH, in which `flwr-clientapp` is
`clientapp_shim.py`, and beside it the fork server, which the shim reaches through a socket in that folder. The folder is its owner's alone (mode 700). `flower-superexec`,
the helper that starts a program for a message, is found there too: Flower's own function, woken when there is a message.

One process for each message stays, as Flower has it: it begins where an interpreter stands after its imports, runs Flower's
own `flwr-clientapp`, and leaves nothing to the next one. Every process ends with the node, also where that is killed: the
SuperNode holds one end of a pipe, which closes with it (`life`), and the fork server looks at the other.
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
"""A module that imports Flower, which the shim's own process has no need of."""
PRELOADED = ("flwr.supernode.cli", "cwfed.flower.client", "threadpoolctl")
SOONEST, LATEST = 5.0, 600.0
"""Seconds until a fork server that has died is started again: twice as long every time, up to the latter."""
STAYS = 60.0
"""Seconds after which it counts as running."""
CANNOT = 3
"""The exit code of a fork server that will never do."""


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
    """What is found under this name in the folder: a program that becomes another one."""
    shim = folder / name
    shim.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    shim.chmod(0o700)


# --- the fork server


def keep(folder: str, life: int) -> None:
    """Have a fork server as long as the node lives; one that dies, as when memory is short, is started again."""
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
    """Be the fork server; comes back in a child only, when that has done its work."""
    os.environ["OPENBLAS_NUM_THREADS"] = (
        "1"  # numpy's library starts its threads when it is imported: a child's are its own
    )
    listener = listen(folder)  # shims wait there while this imports, which takes no longer than importing themselves
    preload()
    if len(os.listdir("/proc/self/task")) > 1:
        print("no fork server: a library has started threads when it was imported", file=sys.stderr, flush=True)
        sys.exit(CANNOT)
    gc.collect()
    gc.freeze()  # children do not look at, and so not copy, what was imported
    if request := requests(listener, life):
        answer(request)


def listen(folder: str) -> socket.socket:
    """The socket of this folder."""
    os.chdir(folder)  # and stay: a child goes where it is told
    Path("socket").unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    listener.listen()
    return listener


def preload() -> None:
    """Import what answering a message needs, and do nothing else: no thread, no open file, nothing random."""
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
        """None where who asked is gone."""
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
    """Fork for each request, and tell shims how children ended, until the node ends; what a child has to do."""
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
        if life in ready:  # nobody is left who could take an answer
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
    np.random.seed()  # all children would have the same numbers; torch's are the same in every new process
    sys.argv = [PROGRAM, *request.arguments]
    threading.Thread(target=heed, args=[request.connection], daemon=True).start()
    request.connection.send(b"!")
    flwr_clientapp()  # ends the process with its own exit code


def openblas_threads() -> int:
    """As many as numpy has in a process of its own: sums are made of as many parts."""
    said = [os.environ.get(f"{library}_NUM_THREADS", "") for library in ("OPENBLAS", "OMP")]
    return next((int(number) for number in said if number.isdecimal() and int(number)), len(os.sched_getaffinity(0)))


def heed(connection: socket.socket) -> None:
    """Pass on the signals that the shim gets; SIGKILL is the one that it cannot tell, but by being gone."""
    main = (
        threading.main_thread().ident or 0
    )  # which is where Python sees to signals: it may be waiting for something
    with suppress(OSError):
        while told := connection.recv(1):
            signal.pthread_kill(main, told[0])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
