"""Carries out a command and says at its end how it ended and what memory it needed; ends it when nobody waits for it any more.

    python -I -S measured.py COMMAND...

The last line on standard output is JSON. This is a program of its own that imports nothing of ours: Linux counts the memory of whoever
starts a process into that process's peak, so that must be somebody small.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading


def main() -> None:
    """Standard input is a pipe whose end is the end of whoever asked."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)

    def end_with_parent() -> None:
        os.read(0, 1)
        os.kill(process.pid, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    code = process.wait()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    print(f"\n{json.dumps({'exit_code': code, 'peak_memory_bytes': peak * unit})}", flush=True)


if __name__ == "__main__":
    main()
