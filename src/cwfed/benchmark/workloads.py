"""What is measured: models and synthetic data of the shapes that the paper has, and the ratio wanted for each."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from cwfed.core.errors import ConfigError
from cwfed.data import Dataset

HERE = "cwfed.benchmark.workloads"
SAMPLES = 0
"""Set by the process that measures, before it makes its data."""


@dataclass(frozen=True)
class Workload:
    """One line of the benchmark. `goal` is the ratio to the reference that is wanted, `floor` the least."""

    name: str
    title: str
    settings: tuple[str, ...]
    goal: float
    floor: float
    samples: tuple[int, int] = (0, 0)
    """Quick, full."""
    rounds: int = 1
    """Rounds that make one measurement."""
    warm_up: int = 1
    """Rounds before the first measurement."""
    what: str = "round"
    """A whole round, or the aggregation alone."""


PAPER = ("data.validation=0", "algorithm.name=cwfedavg", "train.batch_size=10", "train.rounds=1000000")
CIFAR = ("model.name=cnn", *PAPER)

WORKLOADS = (
    Workload(
        "cnn",
        "the paper's CNN, 32x32x3, 20 clients",
        (f"data.name={HERE}:images32", *CIFAR),
        4.0,
        3.0,
        samples=(3000, 12000),
    ),
    Workload(
        "cnn-bf16",
        "the same in bf16",
        (f"data.name={HERE}:images32", *CIFAR, "train.precision=bf16"),
        6.0,
        4.5,
        samples=(3000, 12000),
    ),
    Workload(
        "mlp",
        "MLP on digits, 20 clients, a long run (compiled)",
        ("data.name=digits", "model.name=mlp", *PAPER),
        10.0,
        10.0,
        rounds=40,
        warm_up=100,
    ),
    Workload(
        "fasttext",
        "fastText, 100,000 words, 10 clients",
        (f"data.name={HERE}:texts", "model.name=fasttext", "data.clients=10", "data.partition=iid", *PAPER),
        8.0,
        8.0,
        samples=(12000, 40000),
        warm_up=7,
    ),
    Workload(
        "resnet18",
        "ResNet-18, 64x64x3, 200 classes, 4 clients",
        (f"data.name={HERE}:images64", "model.name=resnet18", "data.clients=4", "data.partition=iid", *PAPER),
        1.8,
        1.8,
        samples=(400, 800),
    ),
    Workload(
        "aggregation",
        "class-wise aggregation alone, all layers, K = 100, M = 20, CNN",
        (f"data.name={HERE}:images32of100", "algorithm.layers=all", "data.partition=iid", *CIFAR),
        20.0,
        20.0,
        samples=(2000, 2000),
        what="aggregation",
    ),
)


def reference_module() -> ModuleType:
    """benchmarks/reference.py of the source tree."""
    path = Path(__file__).parents[3] / "benchmarks" / "reference.py"
    if not path.exists():
        raise ConfigError("cwfed bench needs benchmarks/reference.py of the source tree: run it in a clone of cwfed")
    spec = importlib.util.spec_from_file_location("cwfed_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def images32() -> Dataset:
    """CIFAR-10's shapes."""
    return _images(32, 10)


def images32of100() -> Dataset:
    """CIFAR-100's shapes."""
    return _images(32, 100)


def images64() -> Dataset:
    """Tiny ImageNet's shapes."""
    return _images(64, 200)


def _images(side: int, classes: int) -> Dataset:
    pixels = np.random.default_rng(0).integers(0, 256, (SAMPLES, side, side, 3), dtype=np.uint8)
    return Dataset("synthetic", pixels, np.arange(SAMPLES) % classes, tuple(map(str, range(classes))))


def texts() -> Dataset:
    """AG News' shapes: up to 64 words of 100,000 whose frequencies fall off as in a language."""
    rng = np.random.default_rng(0)
    words = np.minimum(rng.zipf(1.2, (SAMPLES, 64)) + 1, 99_999)
    lengths = rng.integers(20, 65, SAMPLES)
    tokens = np.where(np.arange(64) < lengths[:, None], words, 0).astype(np.int32)
    vocabulary = tuple(f"word{i}" for i in range(100_000))
    return Dataset("synthetic", tokens, np.arange(SAMPLES) % 4, tuple("0123"), vocabulary)
