"""The speed of our engines, as ratios to a reference written as published code is.

Every side runs in a process of its own, so that neither affects the other's allocator, threads or caches. They are measured in turn, and
medians are taken: machines are noisy, and only ratios within one run count.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cwfed.benchmark.workloads import WORKLOADS, Workload, reference_module
from cwfed.core.errors import ConfigError, RunError, did_you_mean
from cwfed.engine import cores
from cwfed.engine.precision import bf16_speed
from cwfed.federation.manifest import cpu_name, instruction_set

OUTSIDE = 0.05
"""The share of a round that everything besides gradient steps and evaluation may take."""


def bench(
    names: Sequence[str] = (), quick: bool = False, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure the named workloads (all, if none is named)."""
    known = [workload.name for workload in WORKLOADS]
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown workload {name!r}: {did_you_mean(name, known)}")
    reference_module()  # an error before anything runs
    machine: dict[str, Any] = {
        "cpu": cpu_name(),
        "instruction_set": instruction_set(),
        "cores": cores(),
        "torch": torch.__version__,
        "bf16_to_fp32_product": bf16_speed(),
    }
    chosen = [workload for workload in WORKLOADS if workload.name in (names or known)]
    found = []
    for workload in chosen:
        tell(workload.title)
        found.append(race(workload, quick))
    machine["peak_gflops"] = max((line["peak_gflops"] for line in found if "peak_gflops" in line), default=None)
    return {"machine": machine, "quick": quick, "workloads": found}


class Measured(NamedTuple):
    """The measurements of a workload."""

    facts: dict[str, Any]
    """What "auto" has chosen, and why."""
    seconds: dict[str, list[dict[str, float]]]
    """By side and repeat, the seconds of each step."""
    peaks: list[float]
    """The machine's peak in GFLOPS, for each repeat."""


def race(workload: Workload, quick: bool) -> dict[str, Any]:
    """Measure one workload and compare the sides."""
    line: dict[str, Any] = {
        "name": workload.name,
        "title": workload.title,
        "precision": "bf16" if "train.precision=bf16" in workload.settings else "fp32",
        "goal": workload.goal,
        "floor": workload.floor,
    }
    facts, seconds, peaks = _measure(workload, quick)
    if refused := facts.get("refused"):
        empty = dict.fromkeys(("reference_seconds", "seconds", "loop_seconds", "ratio", "engine", "met"))
        return line | empty | {"note": refused}
    extra = [s.pop("extra_memory") for s in seconds["auto"] if "extra_memory" in s]
    total = {
        side: statistics.median(sum(s.values()) / workload.rounds for s in found) for side, found in seconds.items()
    }
    ratio = total["reference"] / total["auto"]
    peak = statistics.median(peaks)
    line |= {
        "peak_gflops": peak,
        "reference_seconds": total["reference"],
        "seconds": total["auto"],
        "loop_seconds": total.get("loop"),
        "ratio": ratio,
        "met": ratio >= workload.goal,
        "floor_met": ratio >= workload.floor,
        "engine": facts["engine"],
        "why": facts["why"],
        "note": "; ".join(facts.get("notes", [])),
    }
    if extra:
        line["extra_memory_in_stacks"] = max(extra)
    else:
        steps = {
            step: statistics.median(s[step] for s in seconds["auto"]) / workload.rounds for step in seconds["auto"][0]
        }
        line["seconds_by_step"] = steps
        line["outside"] = 1 - (steps["train"] + steps["evaluate"]) / sum(steps.values())
        line["outside_met"] = line["outside"] <= OUTSIDE
        at_peak = facts["flops"] / (peak * 1e9)
        line["roofline"] = {
            "gflop": facts["flops"] / 1e9,
            "seconds": at_peak,
            "share": at_peak / total["auto"],
        }
    return line


def _measure(workload: Workload, quick: bool) -> Measured:
    """Measure the reference, the loop (if there is time), what "auto" picks and the machine's peak, in turn."""
    who = ["reference", "auto"] if quick or workload.what == "aggregation" else ["reference", "loop", "auto"]
    seconds: dict[str, list[dict[str, float]]] = {side: [] for side in who}
    peaks: list[float] = []
    with ExitStack() as stack:
        sides = {side: stack.enter_context(_side(side, workload, quick)) for side in who}
        facts = {side: ask() for side, ask in sides.items()}["auto"]
        if "refused" in facts:
            return Measured(facts, seconds, peaks)
        for side, ask in sides.items():
            ask(workload.warm_up if side == "auto" else 1)
        for _ in range(3 if quick else 5):
            for side, ask in sides.items():
                seconds[side].append(ask(workload.rounds))
            peaks.append(peak_gflops())
    return Measured(facts, seconds, peaks)


Ask = Callable[..., dict[str, Any]]


@contextmanager
def _side(who: str, workload: Workload, quick: bool) -> Iterator[Ask]:
    """A process that measures on request: a function that asks for so many rounds, or without a number reads its first message."""
    samples = str(workload.samples[0 if quick else 1])
    command = [sys.executable, "-m", "cwfed.benchmark.contestant", who, workload.name, samples]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(rounds: int | None = None) -> dict[str, Any]:
        if rounds is not None:
            stdin.write(f"{rounds}\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            raise RunError(f"the process that measures {who} on {workload.name} ended; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        yield ask
    finally:
        process.kill()
        process.wait()
        stdin.close()
        stdout.close()


def peak_gflops(size: int = 1024, seconds: float = 0.5) -> float:
    """The speed of all cores together at fp32 matrix products, one compute thread each: the roofline."""
    done = [0] * cores()
    until = time.perf_counter() + seconds

    def work(worker: int) -> None:
        torch.set_num_threads(1)
        matrix = torch.ones(size, size)
        while time.perf_counter() < until:
            matrix @ matrix
            done[worker] += 1

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(done))]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) * 2 * size**3 / (time.perf_counter() - began) / 1e9


def picture(result: dict[str, Any], path: Path) -> None:
    """Draw one bar per workload, with its goal and its floor."""
    from matplotlib.figure import Figure

    lines = [line for line in result["workloads"] if line["ratio"] is not None]
    if not lines:
        return
    figure = Figure(figsize=(8, 1.2 + 0.55 * len(lines)), layout="constrained")
    axes = figure.subplots()
    for row, line in enumerate(lines):
        axes.barh(row, line["ratio"], color="#0072b2" if line["met"] else "#999999", height=0.6)
        axes.plot([line["goal"]] * 2, [row - 0.4, row + 0.4], color="black", label="goal" if row == 0 else None)
        axes.plot(
            [line["floor"]] * 2, [row - 0.4, row + 0.4], color="black", ls=":", label="floor" if row == 0 else None
        )
        axes.annotate(
            f"{line['ratio']:.1f} x",
            (max(line["ratio"], line["goal"]), row),
            va="center",
            xytext=(6, 0),
            textcoords="offset points",
        )
    axes.set_yticks(
        range(len(lines)), [f"{line['title']}\n{line['engine']}, {line['precision']}" for line in lines], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.8, 2 * max([line["ratio"] for line in lines] + [line["goal"] for line in lines]))
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.set_xlabel("times as fast as published-style code, side by side")
    machine = result["machine"]
    axes.set_title(
        f"{machine['cpu']}, {machine['instruction_set']}, {machine['cores']} cores, torch {machine['torch']}",
        fontsize=8,
    )
    axes.legend(loc="upper right", bbox_to_anchor=(0, -0.04), ncols=2, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
