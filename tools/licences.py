"""docs/licences.md: the licence of every package in constraints.txt, as its own metadata says.

    python tools/licences.py

Reads the packages installed beside this interpreter (`make install-dev`); one that is not installed is named as such.
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADER = """\
# Licences of the dependencies

Made by `python tools/licences.py` from the metadata of the installed packages: every version that constraints.txt pins. cwfed itself is
Apache-2.0 and contains none of their code.

| package | version | licence |
|---|---|---|
"""


def pinned() -> dict[str, str]:
    """The versions of constraints.txt by package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def licence(found: Distribution) -> str:
    """The SPDX expression, else the classifiers, else the first line of the field `License`."""
    facts = found.metadata
    if expression := facts.get("License-Expression"):
        return expression
    classified = [c.split(" :: ")[-1] for c in facts.get_all("Classifier") or [] if c.startswith("License ::")]
    if names := [c for c in classified if c != "OSI Approved"]:
        return ", ".join(names)
    stated = (facts.get("License") or "").strip().splitlines()
    return stated[0] if stated else "not stated"


def rows() -> list[str]:
    """One line a package."""
    lines = []
    for name, version in sorted(pinned().items(), key=lambda item: re.sub(r"[-_.]+", "-", item[0].lower())):
        try:
            words = licence(distribution(name))
        except PackageNotFoundError:
            words = "not installed here"
        lines.append(f"| {name} | {version} | {words.replace('|', '/')} |")
    return lines


if __name__ == "__main__":
    (ROOT / "docs" / "licences.md").write_text(HEADER + "\n".join(rows()) + "\n")
