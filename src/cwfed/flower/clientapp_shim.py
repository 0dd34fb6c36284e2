"""What a node finds first under the name `flwr-clientapp`: it has the node's fork server do the work (`fork_server.py`).

Started for every message, by a bare Python (`-I -S`): so it imports next to nothing, and nothing of cwfed. To whoever started
it, it is the program that works: same output, same exit code, signals reach the work, and it does not outlive it. Where no fork
server answers it becomes the real program.
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
    """To the fork server of this folder; relative, since the path of a socket has 107 bytes at most."""
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
    """All that a process gets from who starts it: arguments, environment, folder, open files."""
    asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(asked).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(text)


def exit_like(status: int) -> NoReturn:
    """End as the work ended: with its exit code, or killed by the same signal."""
    if status < 0:
        with suppress(OSError):  # what is to be done at SIGKILL cannot be chosen
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)


def main(folder: str, program: str, *arguments: str) -> NoReturn:
    """Have a child of the fork server work, or else work oneself."""
    try:
        connection = connect(folder)
        send_request(connection, list(arguments))
        if not connection.recv(1):  # said by the child itself: without it there is none, and there will be none
            raise ConnectionResetError
    except OSError:
        print(f"{FALLBACK}, which takes longer", file=sys.stderr, flush=True)
        os.execv(program, [program, *arguments])

    def forward(number: int, _: object) -> None:
        with suppress(OSError):  # it has just ended
            connection.send(bytes([number]))

    for number in FORWARDED:
        signal.signal(number, forward)
    said = connection.recv(2)
    if not said:  # the fork server was killed meanwhile, and nobody can say how the work ended
        os._exit(1)
    exit_like(int.from_bytes(said, "big", signed=True))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(*sys.argv[1:])
