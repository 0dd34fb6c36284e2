"""Golden runs: small experiments whose final bits and events are recorded, so that a change of the core shows.

    python -m tests.golden          record them anew (after a change of the maths that is meant)

Bits depend on the kind of CPU. The record says what a probe (a few products and convolutions) gave on its machine; where
the probe gives something else, numbers are compared instead of bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cwfed.core.events import PhaseResult, Round
from cwfed.federation.rounds import Progress, one_compute_thread
from cwfed.federation.simulation import Simulation
from tests.conftest import all_digits, finish, leaves

RECORD = Path(__file__).with_name("record.json")
METHODS = (
    "cwfedavg",
    "fedavg",
    "fedavg-ft",
    "local",
    "fedprox",
    "fedamp",
    "fedfomo",
    "cfl",
    "ifca",
    "fednh",
    "feduv",
)
BATCH_NORM = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}")
DROPOUT = ("model.name=tests.engine.test_engines:with_dropout", "model.options={}")
WORDS = ("data.name=tests.golden:few_words", "model.name=fasttext", "model.options={}", "train.lr=0.5")
SOME = ("train.participation=0.7", "train.client_dropout=0.2", "run.evaluate_every=2")


def few_words() -> Any:
    """Text in which every class has words of its own."""
    from cwfed.testing.problems import few_words as dataset

    return dataset()


def cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and settings of all golden runs."""
    for name in METHODS:
        method = (f"algorithm.name={name}", *(("algorithm.warm_up=1",) if name == "cfl" else ()))
        for engine in ("loop", *(("threads",) if name in ("cwfedavg", "fedfomo") else ()), "vmap"):
            yield f"{name}, {engine}", (*method, f"run.engine={engine}", "run.workers=2", *SOME)
        for engine in ("loop", "vmap"):
            yield f"{name}, words, {engine}", (*method, f"run.engine={engine}", *WORDS, *SOME)
        for norm in ("average", "local"):
            norms = (*BATCH_NORM, f"train.batch_norm={norm}", "run.engine=loop")
            yield f"{name}, batch norm {norm}", (*method, *norms, *SOME)
        yield f"{name}, batch norm, vmap", (*method, *BATCH_NORM, "run.engine=vmap")
    for engine in ("loop", "threads"):
        yield (
            f"cnn, {engine}",
            ("model.name=cnn", "model.options.hidden=16", "train.rounds=2", f"run.engine={engine}"),
        )
        yield f"dropout, {engine}", (*DROPOUT, f"run.engine={engine}", "train.epochs=2")
    yield (
        "over fedprox",
        ('algorithm={name = "cwfedavg", objective = {name = "fedprox", mu = 0.1}}', "run.engine=loop"),
    )
    yield "all layers", ("algorithm.layers=all", "run.engine=loop", *SOME)
    yield "private", ("privacy.dp=sample", "algorithm.name=fedprox", "run.engine=loop", "train.batch_size=20")
    yield "guarded", ("adversary.clients=1", "guard.norm_bound=2", "privacy.norms=noise", "run.engine=loop")


def _phase(result: PhaseResult | None) -> Any:
    return result and [result.accuracy, result.validation, result.loss, result.right]


def _said(event: Round) -> list[Any]:
    """What an event says, in an order of our own: new fields change nothing here."""
    return [
        event.round,
        event.participants,
        event.dropped,
        [event.loss, event.penalty, event.client_loss, event.correlation, event.distance],
        [_phase(event.received), _phase(event.trained)],
        [event.down, event.up, event.refused, event.skipped, event.scaled_back],
    ]


def digest(progress: Progress, events: list[Round]) -> str:
    """A hash of the final state and of all that the events say."""
    sha = hashlib.sha256()
    for path, leaf in sorted(leaves({"server": progress.server, "kept": progress.kept}).items()):
        sha.update(f"{path} {leaf}".encode())
    sha.update(json.dumps([_said(event) for event in events]).encode())
    return sha.hexdigest()[:16]


def carry_out(settings: tuple[str, ...]) -> dict[str, Any]:
    """A run's bits, and its numbers for machines that round otherwise."""
    progress, events = finish(Simulation(all_digits(*settings)))
    return {"bits": digest(progress, events), "losses": [event.loss for event in events]}


def probe() -> str:
    """How this machine rounds."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    images, kernels = (torch.randn(*dims, generator=generator) for dims in ((10, 3, 12, 12), (8, 3, 5, 5)))
    with one_compute_thread():
        found = [
            a @ b,
            torch.bmm(a[None], b[None]),
            a.softmax(1),
            torch.conv2d(images, kernels),
            a.sum(0),
            (a @ b[:, :10]).exp(),
        ]
    sha = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in found))
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {sha.hexdigest()[:16]}"


def record() -> dict[str, Any]:
    """All golden runs, carried out here."""
    return {"probe": probe(), "runs": {name: carry_out(settings) for name, settings in cases()}}
