"""requirements.lock: the versions of constraints.txt with the hashes of their files.

    python tools/lock.py [a wheel of torch's CPU build]

Hashes come from the package index that uv is set up for. There, torch for Linux x86-64 is the CUDA build, with gigabytes of libraries: where a
wheel of the CPU build is given, that is locked for such machines instead. Needs uv (part of the `dev` extra).
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADER = """\
# Made by tools/lock.py from constraints.txt: every version with the hashes of its files. `make install-locked` installs exactly this.
# torch has several builds of one version: on Linux x86-64 it is the CPU build, which pip must be told where to find; elsewhere the package index's.
"""
CPU_BUILD = 'sys_platform == "linux" and platform_machine == "x86_64"'
ELSEWHERE = 'sys_platform != "linux" or platform_machine != "x86_64"'


def main(wheel: Path | None = None) -> None:
    """Write the lock file."""
    uv = Path(sys.executable).with_name("uv")
    options = ["--generate-hashes", "--no-deps", "--no-header", "--no-annotate", "--python-version", "3.11"]
    command = [uv, "pip", "compile", *options, "constraints.txt"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if wheel:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        here = f"torch=={wheel.name.split('-')[1]} ; {CPU_BUILD} \\\n    --hash=sha256:{digest}\n"
        found = re.sub(r"^(torch==\S+) \\", lambda index: f"{here}{index[1]} ; {ELSEWHERE} \\", found, flags=re.M)
    (ROOT / "requirements.lock").write_text(HEADER + found)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
