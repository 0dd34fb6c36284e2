"""requirements.lock: the versions of constraints.txt with the hashes of their files.

    python tools/lock.py [a wheel of torch's CPU build]

Hashes come from the package index that uv is set up for. torch's CPU build for Linux is not there: where its wheel is given, its hash
is added, so that either build is accepted. Needs uv (part of the `dev` extra).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADER = """\
# Made by tools/lock.py from constraints.txt: every version with the hashes of its files. `make install-locked` installs exactly this.
# torch has several builds of one version: the hashes are those of the package index and of the CPU build for Linux x86-64.
"""


def main(wheels: list[str]) -> None:
    """Write the lock file."""
    uv = Path(sys.executable).with_name("uv")
    options = ["--generate-hashes", "--no-deps", "--no-header", "--no-annotate", "--python-version", "3.11"]
    command = [uv, "pip", "compile", *options, "constraints.txt"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for wheel in wheels:
        digest = hashlib.sha256(Path(wheel).read_bytes()).hexdigest()
        head, torch, tail = found.partition("\ntorch==")
        version, _, rest = tail.partition(" \\\n")
        found = f"{head}{torch}{version} \\\n    --hash=sha256:{digest} \\\n{rest}"
    (ROOT / "requirements.lock").write_text(HEADER + found)


if __name__ == "__main__":
    main(sys.argv[1:])
