"""Bells: wake-up signals between the processes of a server, or of a node, so that a waiting process need not poll.

    messages   the server rings when it has sent messages; the gate listens, at which nodes wait for them
    answers    the gate rings when all parts of an answer have arrived, with the number of the message; the server listens
    work       a SuperNode rings when it has stored a message; its helper listens

A bell is a named pipe that only its owner can use, in a folder named by an environment variable. It is only a hint: without a bell, or if
the signal is missed, a waiting process polls at longer intervals.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

Bell: TypeAlias = Literal["messages", "answers", "work"]

FOLDER = "CWFED_BELLS"
"""The environment variable with the folder of the bells."""


def hang(which: Bell) -> int | None:
    """Create a bell to listen to: a file descriptor that is readable after a ring; None if that is not possible here."""
    if not (folder := os.environ.get(FOLDER)) or sys.platform == "win32":
        return None
    path = Path(folder) / which
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        return os.open(
            path, os.O_RDWR | os.O_NONBLOCK
        )  # also open for writing, so that reading never meets the end of the file
    except OSError:  # a file system without pipes
        return None


def ring(which: Bell, word: str = "!") -> None:
    """Ring a bell, without waiting and without errors: it does not matter if nothing listens, or if the pipe is full."""
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            bell = os.open(Path(folder) / which, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(bell, f"{word}\n".encode())
            finally:
                os.close(bell)


def heard(bell: int) -> set[str]:
    """The words of all rings since the last call."""
    with suppress(BlockingIOError):
        return set(os.read(bell, 65536).decode(errors="replace").split())
    return set()
