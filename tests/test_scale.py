"""Memory at the paper's largest scale and beyond, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

RESNET_1000 = """
import resource, torch
from cwfed.algorithms import CwFedAvg
from cwfed.models import build, parameters_of, task_of
from cwfed.models.shape import InputShape
from cwfed.types import Uploads

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
    done = subprocess.run([sys.executable, "-c", RESNET_1000], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 2**30
