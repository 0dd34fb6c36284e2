"""Runs a command and prints at the end how it ended and how much memory it needed; ends it if the process that asked for it ends.

    python -I -S measured.py COMMAND...

The last line on standard output is JSON. This is a separate program that imports nothing of cwfed: Linux counts the memory of a parent into the
peak of the processes that it starts, so the parent must be small.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading


def main() -> None:
    """Standard input is a pipe that is closed when the process that asked ends."""
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
