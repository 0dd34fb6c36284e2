"""Checkpoints: nested dicts of tensors and JSON values as one safetensors file, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cwfed.core import files
from cwfed.core.errors import RunError

Tree = Any
"""A nested dict or list whose leaves are tensors, numbers, texts, booleans or None."""

_TREE, _DIGEST = "tree", "digest"
_EARLIER = "cwfed"
"""The key under which checkpoints of earlier versions have their tree, and a digest of the tensors only."""
_MISMATCH = "its contents do not match their checksum"
_NAME = re.compile(r"round-(\d+)\.safetensors")


def require_savable(tree: Tree, path: str = "") -> None:
    """RunError for anything that would be different when read back, such as keys that are not texts."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(tree, dict) and not isinstance(key, str):
                raise RunError(
                    f"{path[1:]} cannot be saved: its key {key!r} is not a text, and would come back as one"
                )
            require_savable(value, f"{path}/{key}")
    elif not isinstance(tree, Tensor | str | int | float | None):
        raise RunError(
            f"{path[1:]} cannot be saved: an algorithm's state is dicts and lists of tensors, numbers, texts, booleans and None, "
            f"and this is of the type {type(tree).__name__}"
        )


def save(path: Path, tree: Tree) -> None:
    """Write a tree. The file appears under its name only when it is complete and on disk."""
    require_savable(tree)
    tensors: dict[str, Tensor] = {}
    skeleton = json.dumps(_pack(tree, "", tensors, set()))
    scratch = path.with_name(f".{path.name}.new")
    try:
        write_tensors(scratch, tensors, {_TREE: skeleton})
        files.put_in_place(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def load(path: Path) -> Tree:
    """The tree in a file; RunError if the file is damaged."""
    tensors, metadata = read_tensors(path)
    try:
        if _EARLIER in metadata:
            metadata = json.loads(metadata[_EARLIER])
            if metadata[_DIGEST] != digest(tensors):
                raise ValueError(_MISMATCH)
            return _unpack(metadata[_TREE], tensors)
        if _DIGEST not in metadata:
            raise ValueError("it has no checksum")
        return _unpack(json.loads(metadata[_TREE]), tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error})") from None


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with a digest of its contents; OSError if the disk fails."""
    metadata = metadata or {}
    try:
        save_file(tensors, path, metadata=metadata | {_DIGEST: digest(tensors, metadata)})
    except SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file and its metadata; RunError if they do not match their digest."""
    try:
        files.check_regular(path)
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        texts = {key: text for key, text in metadata.items() if key != _DIGEST}
        if _DIGEST in metadata and metadata[_DIGEST] != digest(tensors, texts):  # earlier versions wrote none
            raise ValueError(_MISMATCH)
        return tensors, metadata
    except (OSError, SafetensorError, ValueError, TypeError, RuntimeError) as error:
        raise RunError(f"{path} is damaged ({error})") from None


def _pack(tree: Tree, path: str, tensors: dict[str, Tensor], seen: set[int]) -> Any:
    if isinstance(tree, Tensor):
        tensor = tree.detach().contiguous()
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        if is_view or tensor.data_ptr() in seen:
            tensor = tensor.clone()  # the file format knows no shared memory
        seen.add(tensor.data_ptr())
        tensors[path] = tensor
        return {"tensor": path}
    if isinstance(tree, dict):
        return {"dict": {key: _pack(value, f"{path}/{key}", tensors, seen) for key, value in tree.items()}}
    if isinstance(tree, list | tuple):
        return {"list": [_pack(value, f"{path}/{i}", tensors, seen) for i, value in enumerate(tree)]}
    return {"value": tree}


def _unpack(skeleton: Any, tensors: dict[str, Tensor]) -> Tree:
    ((kind, value),) = skeleton.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unpack(inner, tensors) for key, inner in value.items()}
    if kind == "list":
        return [_unpack(inner, tensors) for inner in value]
    return value


def digest(tensors: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """A hash of names, shapes and contents, and of the texts that go with them."""
    sha = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode() if metadata else b"")
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


class Checkpoints:
    """The newest checkpoints of a run. There are two, so that a damaged one costs a few rounds and not the run."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, newest first; OSError if the folder cannot be read."""
        names = os.listdir(self.folder) if self.folder.exists() else []
        return sorted((int(found[1]) for found in map(_NAME.fullmatch, names) if found), reverse=True)

    def path(self, round_: int) -> Path:
        """The file of a round's checkpoint."""
        return self.folder / f"round-{round_:06d}.safetensors"

    def save(self, round_: int, tree: Tree, after: int | None = None) -> None:
        """Write the checkpoint of a round and remove those that are no longer needed.

        Checkpoints of later rounds are removed: they are damaged, or the run would have been resumed from them. If it is known from which
        round the run was resumed (`after`), those of the rounds between are removed instead.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob(".round-*.new"):  # by a process that was killed while it wrote
            left_over.unlink(missing_ok=True)
        save(self.path(round_), tree)
        rounds = self.rounds()
        futile = [r for r in rounds if (r > round_ if after is None else after < r < round_)]
        good = [r for r in rounds if r <= round_ and r not in futile]
        for old in futile + good[self.keep :]:
            self.path(old).unlink(missing_ok=True)

    def thin(self, keep: int) -> None:
        """Keep only so many of the newest."""
        for old in self.rounds()[keep:]:
            self.path(old).unlink(missing_ok=True)

    def newest(
        self, check: Callable[[Tree], None] = lambda tree: None, before: float = inf
    ) -> tuple[Tree | None, list[str]]:
        """The newest intact checkpoint before a round (None if there is none), and what was wrong with newer ones.

        `check` raises RunError for a tree that does not fit what else is known.
        """
        complaints: list[str] = []
        for round_ in (r for r in self.rounds() if r < before):
            try:
                tree = load(self.path(round_))
                check(tree)
                return tree, complaints
            except RunError as error:
                complaints.append(str(error))
        return None, complaints
