"""Nested dicts of tensors and JSON values to one safetensors file and back, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cwfed.errors import RunError

Tree = Any
"""A nested dict or list whose leaves are tensors, numbers, texts, booleans or None."""

_KEY = "cwfed"
_NAME = re.compile(r"round-(\d+)\.safetensors")


def save(path: Path, tree: Tree) -> None:
    """Write a tree. The file appears under its name only when it is complete and on disk."""
    tensors: dict[str, Tensor] = {}
    skeleton = _pack(tree, "", tensors, set())
    meta = json.dumps({"tree": skeleton, "digest": digest(tensors)})
    scratch = path.with_name(f".{path.name}.new")
    try:
        write_tensors(scratch, tensors, {_KEY: meta})
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file; what goes wrong on the disk is an OSError, as everywhere."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from None


def load(path: Path) -> Tree:
    """The tree of a file; RunError where the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if meta["digest"] != digest(tensors):
            raise ValueError("its contents do not match their checksum")
        return _unpack(meta["tree"], tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
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


def digest(tensors: dict[str, Tensor]) -> str:
    """A hash of names, shapes and contents."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


class Checkpoints:
    """The newest checkpoints of a run: two, so that a damaged one loses a few rounds and not the run."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, newest first."""
        names = [_NAME.fullmatch(p.name) for p in self.folder.glob("round-*")]
        return sorted((int(found[1]) for found in names if found), reverse=True)

    def path(self, round_: int) -> Path:
        """Where the checkpoint of a round is."""
        return self.folder / f"round-{round_:06d}.safetensors"

    def save(self, round_: int, tree: Tree) -> None:
        """Write the checkpoint of a round and remove those that are no longer needed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob(".round-*.new"):  # by a process that was killed while it wrote
            left_over.unlink(missing_ok=True)
        save(self.path(round_), tree)
        for old in self.rounds()[self.keep :]:
            self.path(old).unlink(missing_ok=True)

    def newest(self, before: float = inf) -> tuple[Tree | None, list[str]]:
        """The newest whole checkpoint before a round (None where there is none), and what was wrong with newer ones."""
        complaints: list[str] = []
        for round_ in (r for r in self.rounds() if r < before):
            try:
                return load(self.path(round_)), complaints
            except RunError as error:
                complaints.append(str(error))
        return None, complaints
