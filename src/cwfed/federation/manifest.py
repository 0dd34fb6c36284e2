"""The manifest: the circumstances of a run (versions, hashes of data and split, the machine)."""

from __future__ import annotations

import platform
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from cwfed import __version__

PACKAGES = ("torch", "numpy", "scikit-learn", "datasets", "safetensors")


def instruction_set() -> str:
    """The CPU instructions torch uses here; the last bits of results depend on them."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def cpu_name() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


@cache
def _versions() -> dict[str, str]:
    return {"cwfed": __version__, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def manifest(**facts: Any) -> dict[str, Any]:
    """A manifest with these facts about the run."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": dict(_versions()),
        "machine": {
            "system": platform.system(),
            "cpu": cpu_name(),
            "instruction_set": instruction_set(),
        },
        **facts,
    }


class _Machine(BaseModel):
    cpu: str
    instruction_set: str


class _Model(BaseModel):
    name: str
    parameters: int


class _Data(BaseModel):
    digest: str
    classes: list[str | int]
    samples: int = 0
    shape: list[int] = []
    vocabulary: int = 0


class _Split(BaseModel):
    digest: str
    histogram: list[list[int]]
    dealt: str = ""
    """A hash that is the same for all methods on one split; empty in manifests of early runs."""


class _Engine(BaseModel):
    name: str = ""
    device: str = ""
    compiled: bool = False
    """Manifests of early runs do not have it."""

    def rounding(self) -> str:
        """Engines for which this text is equal give the same bits. A federation's server and early runs have no device."""
        how = "batched" if self.name == "vmap" else "one by one"
        kinds = {
            name.partition(":")[0] for name in (self.device or "cpu").split(",")
        }  # which device of a kind makes no difference
        return f"{how}{', compiled' * self.compiled} on {' and '.join(sorted(kinds))}"

    def words(self) -> str:
        """For people."""
        return f"{self.name}{', compiled,' * self.compiled} on {self.device}"


class Facts(BaseModel):
    """The parts of a manifest that every reader may rely on."""

    started: str
    versions: dict[str, str]
    machine: _Machine
    model: _Model
    data: _Data
    split: _Split
    seed: int
    algorithm: str
    engine: _Engine = _Engine()
    experiment: str = ""
    """A hash of the settings; empty in manifests of early runs."""
    code: dict[str, str] | None = None
    """By file, a hash of the user's code (`plugins.sources`); None in manifests of early runs."""


def changed(then: dict[str, str], now: dict[str, str]) -> str:
    """The first file of the user's code that has changed; "" if none has."""
    return next((name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)), "")
