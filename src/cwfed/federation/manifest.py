"""Under what circumstances a run was made: versions, hashes of data and split, the machine."""

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
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


@cache
def _versions() -> dict[str, str]:
    return {"cwfed": __version__, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def manifest(**facts: Any) -> dict[str, Any]:
    """The manifest with these facts of the run added."""
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
    """The same for all methods on one split; manifests of early runs have none."""


class _Engine(BaseModel):
    name: str = ""
    device: str = ""
    compiled: bool = False
    """Manifests of early runs do not say so."""

    def rounding(self) -> str:
        """Engines with the same words here give the same bits; a federation's server and early runs name no device."""
        how = "batched" if self.name == "vmap" else "one by one"
        kinds = {name.partition(":")[0] for name in (self.device or "cpu").split(",")}  # whichever device of its kind
        return f"{how}{', compiled' * self.compiled} on {' and '.join(sorted(kinds))}"

    def words(self) -> str:
        """For people."""
        return f"{self.name}{', compiled,' * self.compiled} on {self.device}"


class Facts(BaseModel):
    """What every reader of a manifest may rely on; there is more in it."""

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
    """A hash of the settings; manifests of early runs have none."""
    code: dict[str, str] | None = None
    """By file, a hash of the user's code (`plugins.sources`); manifests of early runs say nothing about it."""


def changed(then: dict[str, str], now: dict[str, str]) -> str:
    """The first file of the user's code that is not as it was; "" where all are."""
    return next((name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)), "")
