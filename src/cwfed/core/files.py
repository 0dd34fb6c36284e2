"""Files that are written whole or not at all, and that contain their own checksum (a seal), so that damage is noticed.

A seal shows damage, not forgery: anyone who can write a file can seal it. Files of earlier versions have no seal and are accepted as they are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from cwfed.core.errors import RunError

MOST_BYTES = 2**31
"""The most bytes of a file that is read as a whole: a larger one is a mistake, or an attack on our memory."""
MOST_TABLE = 2**28
"""The most bytes of a JSON table, which takes some ten times its size in memory."""
SEAL = "sha256"
_LINE = "# sha256 of the lines below: "


def write_whole(path: Path, text: str) -> None:
    """Write a small text file: it appears under its name only when it is complete and on disk."""
    scratch = path.with_name(f".{path.name}.new")
    try:
        scratch.write_text(text, encoding="utf-8")
        put_in_place(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def put_in_place(scratch: Path, path: Path) -> None:
    """Give a complete file its name. After this, a power failure loses neither its contents nor its name."""
    _to_disk(scratch)
    os.replace(scratch, path)
    _to_disk(path.parent)


def put_folder_in_place(scratch: Path, folder: Path) -> None:
    """The same for a folder that may replace an existing one. If the process is killed in between, the existing one is in `replaced(folder)`."""
    for path in sorted(scratch.rglob("*"), reverse=True):  # the contents of a folder come before the folder
        _to_disk(path)
    _to_disk(scratch)
    before = replaced(folder)
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    scratch.rename(folder)
    _to_disk(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def replaced(folder: Path) -> Path:
    """The name of a folder while another takes its place."""
    return folder.with_name(f".{folder.name}.old")


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_regular(path: str | Path, most: float = math.inf) -> None:
    """OSError unless the path is a regular file of at most so many bytes: reading a pipe could hang, and a device might never end."""
    found = Path(path).stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, not a file", str(path))
    if found.st_size > most:
        what = f"it has {found.st_size:,} bytes, more than the {most:,} that such a file may have"
        raise OSError(errno.EFBIG, what, str(path))


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file that may come from outside."""
    check_regular(path, most)
    return Path(path).read_bytes()


def read_text(path: str | Path, most: int = MOST_TABLE) -> str:
    """The same as text."""
    check_regular(path, most)
    return Path(path).read_text(encoding="utf-8")


def read_table(path: Path, missing: str = "") -> dict[str, Any]:
    """The JSON table in a file, without its seal; RunError if it is damaged, or (`missing`) if there is none."""
    try:
        found = json.loads(read_text(path))
        if isinstance(found, list):  # the vocabulary of an earlier version
            found = {"words": found}
        if not isinstance(found, dict):
            raise ValueError("it is not a table")
        return open_table(found)
    except FileNotFoundError as error:
        raise RunError(missing or f"{path} is missing ({error.strerror})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error})") from None


def seal_table(table: dict[str, Any]) -> dict[str, Any]:
    """A JSON table with its checksum in it."""
    return table | {SEAL: _checksum(json.loads(json.dumps(table)))}


def open_table(table: dict[str, Any]) -> dict[str, Any]:
    """The table without its seal; ValueError if the two do not match."""
    content = {key: value for key, value in table.items() if key != SEAL}
    if SEAL in table and table[SEAL] != _checksum(content):
        raise ValueError("its contents do not match their checksum")
    return content


def _checksum(table: dict[str, Any]) -> str:
    return sha256(json.dumps(table, sort_keys=True).encode())


def seal_text(text: str) -> str:
    """A text below a comment line with its checksum; a text that was cut off is noticed too."""
    return f"{_LINE}{sha256(text.encode())}\n{text}"


def has_seal(text: str) -> bool:
    """Whether a text begins with its checksum."""
    return text.startswith(_LINE)


def is_whole_text(text: str) -> bool:
    """Whether a text matches its checksum; true if it has none."""
    line, _, below = text.partition("\n")
    return not has_seal(line) or line.removeprefix(_LINE) == sha256(below.encode())


def sha256(content: bytes) -> str:
    """As hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
