"""The peak memory of this process."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

_since: Literal["run", "process"] = "process"


def forget_peak() -> None:
    """Measure the peak from now on, if the system can (Linux). Memory that earlier runs left behind is freed first."""
    global _since
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, which would count
    try:
        Path("/proc/self/clear_refs").write_text("5")
        _since = "run"
    except OSError:
        _since = "process"


def peak() -> int:
    """Bytes of main memory at the peak, since the last `forget_peak` if that works here."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def since() -> Literal["run", "process"]:
    """What `peak` covers: the run since `forget_peak`, or the whole process."""
    return _since
