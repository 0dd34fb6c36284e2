"""How clients are trained: `loop`, the plain oracle, and `threads`, side by side."""

from __future__ import annotations

import os

import torch
from torch import nn

from cwfed.algorithms import FedAvg
from cwfed.data import Federation, Samples
from cwfed.engine.base import Candidate, Loop, Score, Visit, Visited
from cwfed.engine.bench import LocalTraining
from cwfed.engine.threads import Threads
from cwfed.errors import ConfigError

__all__ = ["Candidate", "Loop", "Score", "Threads", "Visit", "Visited", "choose", "find_device"]


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_device(name: str) -> torch.device:
    """The device of this name; "auto" is the accelerator where there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise ConfigError(f"run.device = {name!r} cannot be used: it must be cpu, cuda or mps")
        torch.zeros(1, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"run.device = {name!r} cannot be used here: {str(error).splitlines()[0]}") from None


def choose(
    name: str,
    workers: int,
    algorithm: FedAvg,
    model: nn.Module,
    federation: Federation,
    device: torch.device,
    how: LocalTraining,
) -> Loop:
    """The engine of this name; "auto" is threads on a CPU with several cores, else the loop."""
    samples = Samples(federation.data.inputs, federation.data.labels, device)
    workers = workers or cores()
    if name == "auto":
        name = "threads" if device.type == "cpu" and workers > 1 else "loop"
    if name == "threads":
        return Threads(algorithm, model, federation, samples, how, min(workers, len(federation)))
    return Loop(algorithm, model, federation, samples, how)
