"""The bell at a federation's gate: the server rings it when it has sent messages, and nodes that wait at the gate get them at once.

It is a named pipe in the server's folder, its owner's alone, whose path all processes of the server find in their environment. Where there is none, as with a SuperLink
without our gate, nobody hears it: nodes find their messages when they are looked for the next time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

PATH = "CWFED_BELL"
"""The environment variable that says where it is."""


def hang() -> int | None:
    """A file that can be read when the bell was rung; None where there is none, or can be none."""
    if not (path := os.environ.get(PATH)) or sys.platform == "win32":
        return None
    try:
        Path(path).unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a writer's end, too: it is never at its end
    except OSError:  # a disk that has no pipes
        return None


def ring() -> None:
    """Never waits: that a bell is not heard, or has been rung too often, is no reason to stop."""
    if path := os.environ.get(PATH):
        with suppress(OSError):
            bell = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(bell, b"!")
            finally:
                os.close(bell)
