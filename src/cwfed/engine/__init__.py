"""How clients are trained: `loop`, the plain reference; `threads` and `processes`, side by side; `vmap`, all in one batched step."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from cwfed.core.errors import ConfigError
from cwfed.data import Samples
from cwfed.engine.base import Candidate, Engine, Job, Score, Visit, Visited
from cwfed.engine.loop import Loop
from cwfed.engine.processes import Processes
from cwfed.engine.threads import Threads
from cwfed.engine.vmap import CannotVmap, Vmap

__all__ = [
    "Candidate",
    "Choice",
    "Engine",
    "Job",
    "Loop",
    "Processes",
    "Score",
    "Threads",
    "Visit",
    "Visited",
    "Vmap",
    "choose",
    "find_devices",
]

SMALL_STEP, LARGE_STEP = 2_000_000, 8_000_000
"""Floating-point operations of a batch's forward pass. Below the first, a step on a CPU is mostly overhead; from the second on a step is
long enough that threads hardly wait for Python's lock (docs/performance.md has the measurements).
"""
ENOUGH_CLIENTS = 4
"""The fewest clients for which a batched step pays."""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_devices(name: str, engine: str = "auto") -> tuple[torch.device, ...]:
    """The devices named in `run.device`; "auto" is all accelerators of a kind if there are any.

    An engine without worker processes uses one device: "auto" gives it the first one, and several names are an error.
    """
    has_several = engine in ("auto", "processes")
    if name == "auto":
        if torch.cuda.is_available():
            count = torch.cuda.device_count() if has_several else 1
            return tuple(torch.device("cuda", n) for n in range(count)) if count > 1 else (torch.device("cuda"),)
        return (torch.device("mps" if torch.backends.mps.is_available() else "cpu"),)
    devices = tuple(_find_device(one.strip()) for one in name.split(","))
    if len(devices) > 1 and not has_several:
        raise ConfigError(
            f'run.engine = "{engine}" works on one device, and run.device names {len(devices)}: set it to "processes" or "auto"'
        )
    return devices


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise ConfigError(f"run.device = {name!r} cannot be used: it must be cpu, cuda or mps")
        torch.zeros(1, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"run.device = {name!r} cannot be used here: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class Choice:
    """Which engine is wanted, and what "auto" needs to know to pick one."""

    name: str = "auto"
    workers: int = 0
    """0 is one per core, or one per device where there are several."""
    devices: tuple[torch.device, ...] = ()
    """The devices of worker processes; all other engines use the job's."""
    participants: int = 1
    """Clients of a round."""
    compile: str = "auto"
    rounds: int = 1
    is_steady: bool = True
    """Whether the same clients take part in every round."""


def choose(job: Job, choice: Choice) -> Engine:
    """The engine for a job. What "auto" picks depends on the experiment and the machine's cores and devices, never on a measured time."""
    several = len(choice.devices) if len(choice.devices) > 1 else 0
    workers = min(choice.workers or several or cores(), len(job.federation))
    name, reason, how = choice.name, "", job.how
    if name == "auto":
        name, reason = _pick(job, choice, workers)
    if name == "vmap":
        if how.privacy:
            raise ConfigError(
                'run.engine = "vmap" has no gradients sample by sample; for privacy.dp use "threads" or "auto"'
            )
        if how.precision != "fp32":
            raise ConfigError('run.engine = "vmap" computes in fp32 only; for bf16 use "threads" or "auto"')
        try:
            engine: Engine = Vmap(
                job,
                compile=choice.compile,
                rounds=choice.rounds,
                steady=choice.is_steady,
                lenient=bool(reason),
            )
        except CannotVmap as error:
            if not reason:
                raise
            name, reason = "loop", f"this model cannot be vmapped: {str(error).partition(': ')[2]}"
    if name == "processes":
        engine = Processes(job, workers, choice.devices)
    elif name == "threads":
        engine = Threads(job, workers)
    elif name == "loop":
        engine = Loop(job)
    engine.why = reason
    if how.precision == "bf16":
        engine.try_training()
    return engine


def _pick(job: Job, choice: Choice, workers: int) -> tuple[str, str]:
    """The engine for "auto", and why."""
    samples, how = job.samples, job.how
    if len(choice.devices) > 1:
        return "processes", f"there are {len(choice.devices)} devices, and a worker process has one"
    batched = how.precision == "fp32" and not how.privacy and choice.participants >= ENOUGH_CLIENTS
    if samples.device.type != "cpu":
        if batched:
            device = samples.device.type
            return "vmap", f"batches of {how.batch_size} samples of one client leave a {device} device idle"
        return "loop", "few clients at a time, bf16 or differential privacy, on one device"
    work = _forward_work(job.model, samples, how.batch_size)
    step = f"a step of this model ({work / 1e6:.3g} MFLOP forward)"
    if work < SMALL_STEP and batched:
        return "vmap", f"{step} is mostly overhead"
    if work < LARGE_STEP:
        return "loop", f"{step} is too short for threads"
    if workers == 1:
        return "loop", "there is one worker"
    return "threads", f"{step} is work for a core, and there are {workers}"


def _forward_work(model: nn.Module, samples: Samples, batch_size: int) -> int:
    """Floating-point operations of the linear and convolution layers for one batch.

    (torch's own counter would load its compiler, which takes longer than everything else at the start of a run.)
    """
    counted: list[int] = []

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        counted.append(2 * output.numel() * weight[0].numel())

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    inputs, _ = samples.batch(np.arange(min(batch_size, len(samples.labels))))
    training = model.training
    try:
        with torch.inference_mode():
            model.eval()(inputs.to(next(model.parameters()).device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    known = {
        id(p)
        for m in model.modules()
        if m in layers or isinstance(m, nn.Embedding)
        for p in m.parameters(recurse=False)
    }
    others = sum(p.numel() for p in model.parameters() if id(p) not in known)  # at least once a sample
    return sum(counted) + 2 * others * len(inputs)
