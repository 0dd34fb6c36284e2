from __future__ import annotations

import gc
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cwfed.algorithms import FedAvg
from cwfed.engine import Choice, Loop, choose, precision
from cwfed.engine.worker import ClientWorker
from cwfed.federation import config as configs
from cwfed.federation.config import Config
from cwfed.federation.simulation import Simulation
from cwfed.testing.conformance import BASE, finish, leaves, without_seconds

os.environ.pop("COLUMNS", None)  # xdist's workers have one: what is printed would be as narrow as their terminal

__all__ = ["all_digits", "finish", "leaves", "small", "two_blobs", "without_seconds"]

ROOT = Path(__file__).parent.parent
REAL_DATA = Path(os.environ.get("CWFED_DATA") or ROOT.parent / "shared" / "data")


EARLY = ("train.rounds=8", "train.lr=0.3", "train.schedule=step", "train.decay_every=3", "train.decay=1e-6")
"""Almost nothing moves after round 3, so that validation picks an earlier round than the last, on every CPU."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch, request):
    """No test reads or fills the user's cache, and none sees the user's data folder unless it asks."""
    monkeypatch.setenv("CWFED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.delenv("CWFED_DATA", raising=False)


@pytest.fixture
def real_data() -> str:
    if not REAL_DATA.is_dir():
        pytest.skip(f"the real data sets are not on this machine ({REAL_DATA}); set CWFED_DATA to their folder")
    return str(REAL_DATA)


def no_wait(handle):
    """In place of os.fsync: what a test kills is a process, never the machine, and a tenth of the suite was waiting for the disk."""


def pytest_sessionstart(session):
    """Before anything computes: where bf16 needs torch's CPU library restrained, its first use settles it."""
    precision.bf16_speed()
    os.fsync = no_wait
    # who ends the suite ends what its tests have started, too
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", 143))


LONG = (
    "reproduce/test_reproduce.py", "conformance/test_every_algorithm.py", "flower/test_parity.py", "test_cli.py", "runs/test_session.py",
    "flower/test_faults.py", "engine/test_worker_processes.py", "test_examples.py", "engine/test_vmap.py", "report/test_finished.py",
    "report/test_browser.py", "chaos/test_chaos.py",
)  # fmt: skip
"""Files that take longest, and so begin first: the last one to begin is what a free worker waits for."""


def pytest_collection_modifyitems(items):
    order = {ROOT / "tests" / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(LONG)))


def pytest_collection_finish(session):
    """What is imported stays: looking through it for garbage, as every run does once, takes longer than a small run."""
    gc.collect()
    gc.freeze()


def small(*settings: str) -> Config:
    """An experiment of less than a second: a third of the digits, a small MLP, few clients, few rounds."""
    return all_digits("data.samples=600", *settings)


def all_digits(*settings: str) -> Config:
    """The same on all digits, or on other data."""
    return configs.load(None, [*BASE, *settings])


def worker_of(simulation: Simulation) -> ClientWorker:
    """Where an engine of one worker trains its clients."""
    engine = simulation.engine
    return (engine if isinstance(engine, Loop) else engine._loop).tasks.worker


def use_algorithm(simulation: Simulation, algorithm: FedAvg) -> None:
    """Go on with another algorithm, on an engine of the same kind."""
    job, name = simulation.engine.job, simulation.engine.name
    simulation.engine.close()
    simulation.algorithm = algorithm
    simulation.engine = choose(replace(job, algorithm=algorithm), Choice(name))


def make_endless(path: Path, way: str) -> None:
    """A pipe that nobody writes to, or a link to a device that never ends, where a file should be."""
    if way == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


def two_blobs(samples: int = 400, classes: int = 4, seed: int = 0):
    """A separable toy problem: Gaussian blobs around the corners of a simplex."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=samples)
    inputs = 4 * np.eye(classes)[labels] + rng.normal(size=(samples, classes)) * 0.3
    return inputs.astype(np.float32), labels
