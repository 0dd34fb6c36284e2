"""How much memory this process needed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def forget_peak() -> None:
    """Count the peak anew from here, where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak() -> int:
    """Bytes of main memory at the peak, since the last `forget_peak` where that works."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
