"""One side of a comparison, in a process of its own, which measures on request.

    python -m cwfed.benchmark.contestant reference|loop|auto WORKLOAD SAMPLES

Each line on standard input is answered by a line of JSON on standard output: seconds by step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cwfed import models
from cwfed.benchmark import workloads
from cwfed.benchmark.workloads import Workload, reference_module
from cwfed.core.errors import CwfedError
from cwfed.core.types import Uploads, nbytes
from cwfed.data import Samples
from cwfed.engine.loaded_network import EVALUATION_BATCH
from cwfed.federation import config as configs
from cwfed.federation.experiment import Experiment
from cwfed.federation.simulation import Simulation

Measure = Callable[[], dict[str, float]]

SHARE = 10
"""So many personal models at a time: of 20 clients what each of two workers makes."""


def prepare(who: str, workload: Workload) -> tuple[Measure, dict[str, Any]]:
    """A function that does one round (or aggregation), and facts about it."""
    settings = [s for s in workload.settings if who != "reference" or "precision" not in s]
    if who == "reference":
        return _reference(workload, Experiment(configs.load(None, settings)))
    simulation = Simulation(configs.load(None, [*settings, f"run.engine={who}"]))
    facts: dict[str, Any] = {"engine": simulation.engine.name, "why": simulation.engine.why}
    if workload.what == "aggregation":
        return _aggregation(simulation), facts | {"engine": "mixing", "why": ""}
    rounds = simulation.rounds(simulation.start())
    facts["notes"] = simulation.notes
    facts["flops"] = flops_of_a_round(simulation)
    return lambda: next(rounds)[1].seconds, facts


def _reference(workload: Workload, experiment: Experiment) -> tuple[Measure, dict[str, Any]]:
    federation = experiment.federation
    samples = Samples(federation.data.inputs, federation.data.labels, torch.device("cpu"))

    def singles(indices: Any) -> list[tuple[Tensor, Tensor]]:
        inputs, labels = samples.batch(indices)
        return list(zip(inputs.contiguous().unbind(), labels.unbind(), strict=True))

    algorithm: Any = experiment.algorithm
    plain = models.build(experiment.model_name, federation.shape, federation.data.classes, {})
    for module in plain.modules():
        if isinstance(module, torch.nn.Embedding):
            module.sparse = False  # as published code has it
    reference = reference_module().Reference(
        plain,
        [(singles(shard.train), singles(shard.test)) for shard in federation.shards.values()],
        federation.data.classes,
        experiment.task.output,
        experiment.task.select(algorithm.layers),
        experiment.config.train.lr,
        algorithm.wdr,
    )
    if workload.what == "round":
        return reference.round, {}

    def aggregate() -> dict[str, float]:
        began = time.perf_counter()
        reference.aggregate()
        return {"aggregate": time.perf_counter() - began}

    return aggregate, {}


def _aggregation(simulation: Simulation) -> Measure:
    """The server's part of a round: the new state, and every client's model from it."""
    algorithm, clients = simulation.algorithm, simulation.clients
    state = simulation.start().server
    stack = {n: torch.randn(clients, *w.shape) for n, w in simulation.initial.items()}
    uploads = Uploads(tuple(range(clients)), stack, torch.full((clients,), 100))

    def measure() -> dict[str, float]:
        _forget_peak()
        before = _memory("VmRSS")
        began = time.perf_counter()
        with torch.inference_mode():
            after = algorithm.aggregate(state, uploads)
            for at in range(0, clients, SHARE):
                algorithm.send_each(after, range(at, min(at + SHARE, clients)))
        seconds = time.perf_counter() - began
        return {"aggregate": seconds, "extra_memory": (_memory("VmHWM") - before) / nbytes(stack)}

    return measure


def _memory(what: str) -> int:
    """A value of /proc/self/status in bytes; 0 if there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(what)), 0)


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def flops_of_a_round(simulation: Simulation) -> int:
    """Floating-point operations of the matrix products and convolutions of a round, both evaluations included."""
    federation, size = simulation.federation, simulation.config.train.batch_size
    samples = Samples(federation.data.inputs, federation.data.labels, torch.device("cpu"))
    network = simulation.template.train()
    batch, labels = samples.batch(federation.shards[0].train[:size])
    parameters = [p for p in network.parameters() if p.requires_grad]
    with FlopCounterMode(display=False) as step:
        torch.autograd.grad(torch.nn.functional.cross_entropy(network(batch), labels), parameters)
    test = federation.shards[0].test[:EVALUATION_BATCH]
    with FlopCounterMode(display=False) as forward, torch.inference_mode():
        network.eval()(samples.batch(test)[0])
    steps = sum(max(1, len(shard.train) // size) for shard in federation.shards.values())
    tests = sum(len(shard.test) for shard in federation.shards.values())
    return int(steps * step.get_total_flops() + 2 * tests * forward.get_total_flops() / len(test))


def main() -> None:
    """Serve one side of a race."""
    who, name, samples = sys.argv[1:]
    workloads.SAMPLES = int(samples)
    workload = next(w for w in workloads.WORKLOADS if w.name == name)
    try:
        measure, facts = prepare(who, workload)
    except CwfedError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        rounds = [measure() for _ in range(int(line))]
        print(json.dumps({step: sum(r[step] for r in rounds) for step in rounds[0]}), flush=True)


if __name__ == "__main__":
    main()
