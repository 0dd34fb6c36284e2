"""Bells between the processes of a server, and of a node: who waits for another one is woken, and need not ask again and again.

`messages` is rung by the server when it has sent messages, and heard by the gate, where nodes wait for them; `answers` by the gate when all of an answer has come
in, with the number of the message that it answers, and heard by the server. At a node `work` is rung by the SuperNode when it has stored a message, and heard by its helper.

A bell is a named pipe, its owner's alone, in a folder that the processes find in their environment. That one was rung is a hint and nothing more: where there is no
bell, or nobody hears it, who waits looks now and then.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

Bell: TypeAlias = Literal["messages", "answers", "work"]

FOLDER = "CWFED_BELLS"
"""The environment variable that says where they are."""


def hang(which: Bell) -> int | None:
    """A file that can be read when the bell was rung; None where there is none, or can be none."""
    if not (folder := os.environ.get(FOLDER)) or sys.platform == "win32":
        return None
    path = Path(folder) / which
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a writer's end, too: it is never at its end
    except OSError:  # a disk that has no pipes
        return None


def ring(which: Bell, word: str = "!") -> None:
    """Never waits: that a bell is not heard, or has been rung too often, is no reason to stop."""
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            bell = os.open(Path(folder) / which, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(bell, f"{word}\n".encode())
            finally:
                os.close(bell)


def heard(bell: int) -> set[str]:
    """What was said since the last time."""
    with suppress(BlockingIOError):
        return set(os.read(bell, 65536).decode(errors="replace").split())
    return set()
