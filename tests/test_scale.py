"""Memory at the paper's largest scale and beyond, in processes of their own."""

from __future__ import annotations

import json
import sys

import pytest

from tests import processes
from tests.conftest import ROOT

RESNET_1000 = """
import resource, torch
from cwfed.algorithms import CwFedAvg
from cwfed.models import build, parameters_of, task_of
from cwfed.core.shape import InputShape
from cwfed.core.types import Uploads

model = build("resnet18", InputShape((3, 64, 64)), 1000, {})
task = task_of(model, 20, 1000)
first = {n: p.detach() for n, p in parameters_of(model).items()}
algorithm = CwFedAvg(layers="all")
state = algorithm.init(lambda _: first, task)
stack = {n: torch.stack([w + 0.01 * i for i in range(20)]) for n, w in first.items()}
after = algorithm.aggregate(state, Uploads(tuple(range(20)), stack, torch.full((20,), 500)))
for client in range(20):
    sent = algorithm.send(after, client).model
assert sent.keys() == first.keys()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_a_thousand_classes_of_resnet18_aggregate_within_4_gib():
    """The class models alone would take 1,000 x 47 MB."""
    assert int(processes.run([sys.executable, "-c", RESNET_1000], check=True).stdout) < 4 * 2**30


MANY_CLIENTS = """
import json, sys, numpy as np, torch
from cwfed import data
from cwfed.runs import memory
from cwfed.data import Dataset
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from cwfed.core.types import nbytes
from tests.conftest import finish, leaves, all_digits

clients, rng = int(sys.argv[1]), np.random.default_rng(0)
inputs, labels = rng.normal(size=(8 * clients, 200)).astype(np.float32), rng.integers(10, size=8 * clients)
data.load = lambda *_: Dataset("many", inputs, labels, tuple("0123456789"))
simulation = Simulation(
    all_digits(f"data.clients={clients}", "data.partition=iid", "train.participation=100", "train.batch_size=5",
          "model.options.hidden=1000", "run.evaluate_clients=20", "algorithm.layers=all")
)
memory.forget_peak()  # of this run, not of what made its data
model, before = nbytes(simulation.fresh(0)), memory.peak()
progress, events = finish(simulation)
assert [len(e.participants) for e in events] == [100] * 3
kept = sum(len(leaf[1]) for leaf in leaves(to_tree(progress)).values() if isinstance(leaf, tuple))
print(json.dumps({"model": model, "kept": kept, "grown": memory.peak() - before}))
"""


def test_ten_thousand_clients_cost_k_numbers_each():
    """The server keeps K = 10 class models and p~, 10 numbers of 8 bytes a client; all clients' models would be 8 GB."""
    few, many = (
        json.loads(processes.run([sys.executable, "-c", MANY_CLIENTS, clients], cwd=ROOT, check=True).stdout)
        for clients in ("1000", "10000")
    )
    model = many["model"]
    assert many["kept"] - few["kept"] == 9_000 * 10 * 8
    assert many["kept"] < 11 * model + 10_000 * 10 * 8 + 10_000
    assert many["grown"] < 400 * model  # two stacks of 100 participants and what is in work
    assert many["grown"] < few["grown"] + 100 * model
