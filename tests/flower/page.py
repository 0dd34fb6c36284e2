"""docs/flower.md as its reader uses it: the commands, as they are printed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "flower.md").read_text(encoding="utf-8")
NAME = re.compile(r"(cwfed|flwr)((?: [a-z]+)*)((?: --?[a-z-]+)?)")
"""A command that is only spoken of, perhaps with an option; what has anything besides is to be carried out."""


def section(title: str) -> str:
    """What stands below a heading, up to the next of its kind."""
    assert f"\n## {title}\n" in TEXT
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str = TEXT) -> list[str]:
    """What is printed to be carried out."""
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


def lines(text: str = TEXT) -> list[str]:
    """The same, command by command."""
    found = "".join(blocks(text)).replace("\\\n", " ").splitlines()
    return [line for line in found if line.strip() and not line.startswith("#")]


def spoken() -> list[str]:
    """Commands in the text."""
    return re.findall(r"(?<!`)`((?:cwfed|flwr|pip) [^`\n]*)`(?!`)", TEXT)


def environment(home: Path) -> dict[str, str]:
    """Of a reader with this home, where nothing is set but what the tests need."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
