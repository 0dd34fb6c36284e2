"""Rows of the output layer averaged over their owners: by hand, its limits, and who claims to own what."""

from __future__ import annotations

import pytest
import torch

from cwfed.algorithms import build
from cwfed.core.types import Task, Uploads
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, small

NAMES = ("body", "out.weight", "out.bias")
TASK = Task(3, 2, {"layer": ("body",), "out": ("out.weight", "out.bias")}, "out")
OLD = {"body": torch.zeros(1), "out.weight": torch.zeros(2, 2), "out.bias": torch.zeros(2)}


def state(**settings):
    algorithm = build({"name": "fedavg+owners"} | settings)
    return algorithm, algorithm.init(lambda _: OLD, TASK)


def uploads(rows, biases, counts):
    """Models of two rows; the number of samples is that of the label counts."""
    labels = torch.tensor(counts, dtype=torch.float32)
    models = {
        "body": torch.arange(len(rows), dtype=torch.float32)[:, None],
        "out.weight": torch.tensor(rows),
        "out.bias": torch.tensor(biases),
    }
    return Uploads(tuple(range(len(rows))), models, labels.sum(1), {"class_counts": labels})


UP = uploads(
    rows=[[[1.0, 0.0], [3.0, 4.0]], [[0.0, 5.0], [0.0, 0.0]], [[0.0, 0.0], [8.0, 6.0]]],
    biases=[[1.0, 10.0], [5.0, 20.0], [9.0, 40.0]],
    counts=[[3, 1], [1, 0], [0, 3]],
)


def test_by_hand_from_counts():
    """Class 0: 3/4 of the first and 1/4 of the second; class 1: 1/4 of the first and 3/4 of the third. Body: 4/8, 1/8, 3/8."""
    algorithm, before = state()
    after = algorithm.aggregate(before, UP)["model"]
    assert after["out.weight"].tolist() == [[0.75, 1.25], [3 / 4 + 6, 1 + 4.5]]
    assert after["out.bias"].tolist() == [0.75 + 1.25, 2.5 + 30]
    assert after["body"].tolist() == [1 / 8 + 2 * 3 / 8]
    assert before["model"]["out.bias"].tolist() == [0, 0]


def test_by_hand_from_the_lengths_of_updates():
    """Row 0 moved by 1, 5, 0, row 1 by 5, 0, 10: q = 1/6, 5/6, 0 and 1/3, 0, 2/3. Nothing is sent."""
    algorithm, before = state(owners="updates")
    after = algorithm.aggregate(before, Uploads(UP.clients, UP.models, UP.counts))["model"]
    torch.testing.assert_close(after["out.weight"], torch.tensor([[1 / 6, 25 / 6], [1 + 16 / 3, 4 / 3 + 4]]))
    torch.testing.assert_close(after["out.bias"], torch.tensor([1 / 6 + 25 / 6, 10 / 3 + 80 / 3]))
    assert algorithm.extras_spec(OLD, TASK) == {}
    # lengths are of the update, not of the row: where the same rows were sent out, nobody has moved
    same = {"model": {name: w[2] for name, w in UP.models.items()}, "output": "out"}
    assert algorithm.owned(same, UP)[2].tolist() == [0, 0]


def test_a_class_that_nobody_of_the_round_owns_keeps_its_row():
    algorithm, before = state()
    old = {"out.weight": torch.tensor([[7.0, 7.0], [1.0, 1.0]]), "out.bias": torch.tensor([7.0, 1.0])}
    before = before | {"model": before["model"] | old}
    after = algorithm.aggregate(before, uploads([[[1.0, 2.0], [3.0, 4.0]]], [[5.0, 6.0]], [[0, 2]]))["model"]
    assert after["out.weight"].tolist() == [[7, 7], [3, 4]]
    assert after["out.bias"].tolist() == [7, 6]


def test_it_keeps_its_row_also_where_somebody_is_above_the_cap_of_another_class():
    """Class 1 has one owner, whose share becomes 1/2; the first class had then been everybody's."""
    algorithm, before = state(class_cap=0.5)
    old = {"out.weight": torch.tensor([[7.0, 7.0], [1.0, 1.0]]), "out.bias": torch.tensor([7.0, 1.0])}
    before = before | {"model": before["model"] | old}
    up = uploads([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]], [[5.0, 6.0], [0.0, 0.0]], [[0, 2], [0, 0]])
    after = algorithm.aggregate(before, up)["model"]
    assert after["out.weight"].tolist() == [[7, 7], [5, 6]]
    assert after["out.bias"].tolist() == [7, 3]


def test_one_owner_has_its_row_and_equal_clients_are_fedavg():
    generator = torch.Generator().manual_seed(0)
    weights, biases = torch.randn(2, 2, 2, generator=generator), torch.randn(2, 2, generator=generator)
    algorithm, before = state()
    own = algorithm.aggregate(before, uploads(weights.tolist(), biases.tolist(), [[4, 0], [0, 9]]))["model"]
    assert torch.equal(own["out.weight"], torch.stack([weights[0, 0], weights[1, 1]]))
    assert torch.equal(own["out.bias"], torch.stack([biases[0, 0], biases[1, 1]]))
    alike = uploads(weights.tolist(), biases.tolist(), [[2, 4], [4, 8]])
    fedavg = build("fedavg").aggregate({}, alike)["model"]
    for name, w in algorithm.aggregate(before, alike)["model"].items():
        torch.testing.assert_close(w, fedavg[name])


def test_the_cap_by_hand():
    """Class 0: 3/4 becomes 1/2, the rest goes to the other owner; class 1: 3/4 becomes 1/2, the first has the other half."""
    algorithm, before = state(class_cap=0.5)
    after = algorithm.aggregate(before, UP)["model"]
    assert after["out.weight"].tolist() == [[0.5, 2.5], [5.5, 5.0]]


@pytest.mark.parametrize("owners", ["counts", "updates"])
def test_the_body_is_fedavgs_and_the_output_layer_not(owners):
    tiny = ["data.clients=3", "data.samples=150", "train.rounds=1", "model.options.hidden=4"]
    plain, _ = finish(Simulation(small("algorithm.name=fedavg", *tiny)))
    progress, events = finish(Simulation(small("algorithm.name=fedavg+owners", f"algorithm.owners={owners}", *tiny)))
    for name, w in plain.server["model"].items():
        assert torch.equal(w, progress.server["model"][name]) == (not name.startswith("output"))
    assert ("sent" in events[0].leaks) == (owners == "counts")
    assert {"lengths", "change", "norms"} <= events[0].leaks.keys()
