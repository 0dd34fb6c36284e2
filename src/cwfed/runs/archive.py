"""A run as one small file that can be shared: everything that reports need, without models and checkpoints.

It is a ZIP file with the run's config, manifest, events and summary, and `seals.json` with the checksum of each. The same run gives
the same bytes. An archive is not trusted when it is read: only these names, regular files, bounded sizes and matching checksums are
accepted, and its files are read as text, never as code.
"""

from __future__ import annotations

import json
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from cwfed.core import files
from cwfed.core.errors import CwfedError, RunError
from cwfed.federation.config import MOST_BYTES as MOST_CONFIG
from cwfed.runs.folder import RunFolder

ENDING = ".cwfed"
SEALS = "seals.json"
MOST = {
    SEALS: 2**16,
    "config.toml": MOST_CONFIG,
    "manifest.json": 2**26,
    "events.jsonl": 2**29,
    "summary.json": 2**26,
}
"""The files of an archive, and how many bytes each may have."""
MOST_ARCHIVE = 2**28
_END, _LARGE = b"PK\x05\x06", b"PK\x06\x07"
_END_BYTES, _LARGE_BYTES = 22, 20
_MOST_DIRECTORY = 4096
"""The most bytes of the list of files: zipfile makes an object of each entry before they can be counted."""


def write(run: str | Path, path: str | Path) -> None:
    """Write the archive of a finished run."""
    folder, path = RunFolder(run), Path(path)
    if not folder.exists:
        raise RunError(f"{folder.path} holds no run of cwfed: it has no config.toml")
    if not folder.finished:
        raise RunError(
            f"{folder.path} is not finished, and there is no result to share: cwfed run --resume continues it"
        )
    folder.result()  # it must be whole
    folder.facts()
    if folder.config().train.rounds != folder.config_of_result().train.rounds:
        raise RunError(
            f"{folder.path} is being given more rounds: cwfed run --resume --out {folder.path} ends that first"
        )
    contents = {name: _content(folder.path / name) for name in MOST if name != SEALS}
    seals = files.seal_table({name: files.sha256(content) for name, content in contents.items()})
    scratch = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in {SEALS: json.dumps(seals, indent=1).encode(), **contents}.items():
                archive.writestr(_entry(name), content)
        files.put_in_place(scratch, path)
    except OSError as error:
        raise RunError(f"the archive {path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def _content(path: Path) -> bytes:
    try:
        return files.read_bytes(path, MOST[path.name])
    except OSError as error:
        raise RunError(f"{path} cannot be put into an archive: {error.strerror or error}") from None


def _entry(name: str) -> zipfile.ZipInfo:
    """An entry without a time, so that the same run gives the same archive."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    return entry


@contextmanager
def opened(path: str | Path) -> Iterator[Path]:
    """An archive as a run folder, which is removed at the end of the block."""
    contents = read(path)
    with TemporaryDirectory(prefix="cwfed-") as scratch:
        for name, content in contents.items():
            (Path(scratch) / name).write_bytes(content)
        yield Path(scratch)


@contextmanager
def readable(path: str | Path) -> Iterator[Path]:
    """A run as a folder, whichever of the two it is; errors name the archive, not the scratch folder that it is unpacked to."""
    if not is_archive(path):
        yield Path(path)
        return
    with opened(path) as scratch:
        try:
            yield scratch
        except CwfedError as error:
            raise RunError(str(error).replace(str(scratch), str(path))) from None


def read(path: str | Path) -> dict[str, bytes]:
    """The contents of an archive, by file name; RunError for anything that is not an archive of a run."""
    path = Path(path)
    try:
        files.check_regular(path, MOST_ARCHIVE)
        _check_end(path)
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check(entries)
            contents = {entry.filename: _unpacked(archive, entry) for entry in entries}
        seals = files.open_table(json.loads(contents.pop(SEALS)))
    except FileNotFoundError:
        raise RunError(f"the archive {path} does not exist") from None
    except OSError as error:
        raise RunError(f"the archive {path} cannot be read: {error.strerror or error}") from None
    except (
        zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError, AttributeError, struct.error,
        NotImplementedError, RuntimeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise RunError(f"{path} is not an archive of a run, or is damaged ({error})") from None
    for name, content in contents.items():
        if seals.get(name) != files.sha256(content):
            raise RunError(f"{path} is damaged: {name} does not match its checksum")
    return contents


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Read no more than the entry claims: `archive.read` would unpack everything before cutting it off."""
    with archive.open(entry) as file:
        return file.read(entry.file_size)


def is_archive(path: str | Path) -> bool:
    """Whether a path is a file with the name of an archive."""
    return Path(path).suffix == ENDING and Path(path).is_file()


def _check_end(path: Path) -> None:
    """ValueError unless the end of the file is as in our archives: a short list of files, no comment, not the format of large archives."""
    with path.open("rb") as file:
        size = path.stat().st_size
        file.seek(max(0, size - _END_BYTES - _LARGE_BYTES))
        tail = file.read()
    large, end = tail[:-_END_BYTES], tail[-_END_BYTES:]
    if len(end) < _END_BYTES or not end.startswith(_END) or large.startswith(_LARGE):
        raise ValueError("cwfed export did not make it")
    directory, start = struct.unpack("<II", end[12:20])
    if directory > _MOST_DIRECTORY or start + directory + _END_BYTES != size:
        raise ValueError("its list of files is not one that cwfed export makes")


def _check(entries: list[zipfile.ZipInfo]) -> None:
    names = [entry.filename for entry in entries]
    if sorted(names) != sorted(MOST):
        strange = next((name for name in names if name not in MOST or names.count(name) > 1), "")
        raise ValueError(f"{strange!r} is not a file of it" if strange else "a file of it is missing")
    for entry in entries:
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if kind not in (0, stat.S_IFREG) or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename} is a link, a device or encrypted, not a plain file")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{entry.filename} is packed in another way than cwfed export does")
        if entry.file_size > MOST[entry.filename]:
            raise ValueError(f"{entry.filename} would have {entry.file_size:,} bytes")
