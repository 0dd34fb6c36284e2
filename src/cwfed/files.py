"""Files that are whole or not at all, and sealed: each says its own checksum, so that a damaged one is noticed.

A seal finds damage, not forgery: whoever writes a file can seal it. Files of earlier versions have none and are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

SEAL = "sha256"
_LINE = "# sha256 of the lines below: "


def write_whole(path: Path, text: str) -> None:
    """A small text file: it appears under its name only when it is complete and on disk."""
    scratch = path.with_name(f".{path.name}.new")
    try:
        scratch.write_text(text, encoding="utf-8")
        put_in_place(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def put_in_place(scratch: Path, path: Path) -> None:
    """Give a complete file its name; neither its contents nor its name are lost when the power fails after this."""
    _to_disk(scratch)
    os.replace(scratch, path)
    _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def seal_table(table: dict[str, Any]) -> dict[str, Any]:
    """A JSON table with its checksum in it."""
    return table | {SEAL: _checksum(json.loads(json.dumps(table)))}


def open_table(table: dict[str, Any]) -> dict[str, Any]:
    """The table without its seal; ValueError where it is not what was sealed."""
    content = {key: value for key, value in table.items() if key != SEAL}
    if SEAL in table and table[SEAL] != _checksum(content):
        raise ValueError("its contents do not match their checksum")
    return content


def _checksum(table: dict[str, Any]) -> str:
    return sha256(json.dumps(table, sort_keys=True).encode())


def seal_text(text: str) -> str:
    """A text below a comment with its checksum: a text that was cut off is noticed too."""
    return f"{_LINE}{sha256(text.encode())}\n{text}"


def is_whole_text(text: str) -> bool:
    """Whether a text is what was sealed."""
    line, _, below = text.partition("\n")
    return not line.startswith(_LINE) or line.removeprefix(_LINE) == sha256(below.encode())


def sha256(content: bytes) -> str:
    """As hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
