"""Takes the place of Flower's program `flwr-clientapp` at a node: it lets the node's fork server do the work (`fork_server.py`).

It is started for every message, by a bare Python (`-I -S`), so it imports almost nothing, and nothing of cwfed. For the process that
started it, it behaves like the real program: same output, same exit code, signals are passed on, and it ends with the work. If no fork
server answers, it becomes the real program.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

FALLBACK = "this node's fork server does not answer: flwr-clientapp starts by itself"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def connect(folder: str) -> socket.socket:
    """A connection to the fork server of this folder. The path is relative, since that of a socket has at most 107 bytes."""
    here = os.open(".", os.O_RDONLY)
    connection = socket.socket(socket.AF_UNIX)
    try:
        os.chdir(folder)
        connection.connect("socket")
    except OSError:
        connection.close()
        raise
    finally:
        os.fchdir(here)
        os.close(here)
    return connection


def send_request(connection: socket.socket, arguments: list[str]) -> None:
    """Send everything that a process gets when it is started: arguments, environment, folder, open files."""
    asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(asked).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(text)


def exit_like(status: int) -> NoReturn:
    """End as the work ended: with its exit code, or killed by the same signal."""
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)


def main(folder: str, program: str, *arguments: str) -> NoReturn:
    """Let a child of the fork server do the work; without one, become the real program."""
    try:
        connection = connect(folder)
        send_request(connection, list(arguments))
        if not connection.recv(1):  # the child itself says that it works; without that there is no child
            raise ConnectionResetError
    except OSError:
        print(f"{FALLBACK}, which takes longer", file=sys.stderr, flush=True)
        os.execv(program, [program, *arguments])

    def forward(number: int, _: object) -> None:
        with suppress(OSError):  # the child has just ended
            connection.send(bytes([number]))

    for number in FORWARDED:
        signal.signal(number, forward)
    said = connection.recv(2)
    if not said:  # the fork server was killed meanwhile: how the work ended is unknown
        os._exit(1)
    exit_like(int.from_bytes(said, "big", signed=True))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(*sys.argv[1:])
