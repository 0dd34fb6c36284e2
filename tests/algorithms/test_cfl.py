from __future__ import annotations

import pytest
import torch

from cwfed.algorithms.cfl import CFL
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import model, task, uploads
from tests.conftest import finish, leaves, small


def begin(clients, algorithm=None):
    algorithm = algorithm or CFL(warm_up=0)
    return algorithm, algorithm.init(lambda c: model(0.0, 0.0, 0.0), task(clients))


def test_one_cluster_is_fedavg():
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg")))
    cfl, events = finish(Simulation(small("algorithm.name=cfl", "algorithm.eps1=0")))
    assert leaves(fedavg.server["model"]) == leaves(cfl.server["models"][0])
    assert [e.received for e in plain] == [e.received for e in events]


def test_the_split_by_hand():
    # two pull right, two pull left: mean update 0 < eps1, largest norm 1 > eps2 -> split; each half averages its own
    algorithm, state = begin(4)
    state = algorithm.aggregate(
        state, uploads(range(4), [[1, 0, 0], [-1, 0, 0], [1, 0.2, 0], [-1, 0, 0.2]], [1, 1, 3, 1])
    )
    assert state["cluster"].tolist() == [0, 1, 0, 1]
    torch.testing.assert_close(state["models"][0]["w"], torch.tensor([1.0, 0.15, 0.0]))  # (1*0 + 3*0.2) / 4
    torch.testing.assert_close(state["models"][1]["w"], torch.tensor([-1.0, 0.0, 0.1]))


def test_three_clients_may_part():
    algorithm, state = begin(3)  # the longest update is 0.92, just above eps2; their mean is 0.3
    state = algorithm.aggregate(state, uploads(range(3), [[0.92, 0, 0], [-0.92, 0, 0], [0.9, 0.1, 0]]))
    assert state["cluster"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("models", "why"),
    [
        ([[1, 0, 0], [1, 0.1, 0], [1, 0, 0.1]], "they agree: the mean update is large"),
        ([[1, 0, 0], [1, 0, 0], [-0.5, 0, 0]], "most agree: the mean update is 0.5, above eps1"),
        ([[0.5, 0, 0], [-0.5, 0, 0], [0, 0.1, 0]], "the largest update is small"),
        ([[1, 0, 0], [-1, 0, 0]], "two clients stay together"),
    ],
)
def test_no_split(models, why):
    algorithm, state = begin(len(models))
    state = algorithm.aggregate(state, uploads(range(len(models)), models))
    assert len(state["models"]) == 1, why


@pytest.mark.parametrize(
    ("degrees", "lengths", "halves"),
    [
        ([0, 40, 170, 180], [1, 1, 1, 1], [0, 0, 1, 1]),  # 170 and 180 are nearest; 0 and 40 go together all the same
        ([0, 60, 100], [3, 10, 1], [0, 1, 1]),  # by inner products the two long ones would go together
    ],
)
def test_a_cluster_is_halved_by_direction(degrees, lengths, halves):
    angles = torch.tensor(degrees).deg2rad()
    updates = torch.tensor(lengths)[:, None] * torch.stack([angles.cos(), angles.sin()], 1)
    assert CFL(eps1=1e9, eps2=0.0).split(mixing.gram({"w": updates})) == halves


def test_no_cluster_splits_in_the_first_rounds():
    """Two clients pull right and two left in every round: they part in round 3, the first after a warm-up of two."""
    algorithm, state = begin(4, CFL(warm_up=2))
    clusters = []
    for _ in range(3):
        sent = [algorithm.send(state, client).model["w"] for client in range(4)]
        moved = [(w + torch.tensor([1.0 - 2 * (c % 2), 0, 0])).tolist() for c, w in enumerate(sent)]
        state = algorithm.aggregate(state, uploads(range(4), moved))
        clusters.append(len(state["models"]))
    assert clusters == [1, 1, 2]
    assert CFL().warm_up == 20  # as in the authors' code


def test_a_run_that_splits_at_once_is_fedavg_while_it_warms_up():
    """eps1 and eps2 that any update meets: without a warm-up the first round splits, with one it is FedAvg to the bit."""
    eager = ["algorithm.name=cfl", "algorithm.eps1=1e9", "algorithm.eps2=0", "train.rounds=3"]
    fedavg, _ = finish(Simulation(small("algorithm.name=fedavg", "train.rounds=3")))
    splits, _ = finish(Simulation(small(*eager, "algorithm.warm_up=0")))
    warm, _ = finish(Simulation(small(*eager)))
    assert len(splits.server["models"]) > 1
    assert leaves(warm.server["models"]) == leaves([fedavg.server["model"]])


def test_a_state_of_version_0_1_goes_on_without_a_warm_up():
    algorithm, state = begin(4, CFL())
    del state["round"]
    state = algorithm.aggregate(state, uploads(range(4), [[1, 0, 0], [-1, 0, 0], [1, 0.2, 0], [-1, 0, 0.2]]))
    assert len(state["models"]) == 2
    assert state["round"] == 21


def test_norms_and_cosines_come_from_one_gram_matrix():
    updates = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    gram = mixing.gram({"w": updates})
    assert gram.tolist() == [[25.0, 8.0], [8.0, 4.0]]
    assert gram.mean().sqrt().item() == pytest.approx(updates.mean(0).norm().item())


def test_three_successive_splits_with_absent_clients_always_partition_the_clients():
    """Ten clients around six directions; some sit out in every round. Ids, not positions, decide."""
    algorithm, state = begin(10)
    right, left, up, down, front, back = [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]

    def step(state, pulls):
        models = [(algorithm.send(state, c).model["w"] + torch.tensor(d) * 1.0).tolist() for c, d in pulls.items()]
        after = algorithm.aggregate(state, uploads(list(pulls), models))
        clusters = after["cluster"].tolist()
        assert sorted(set(clusters)) == list(range(len(after["models"])))  # no cluster without clients
        for client in range(10):
            if client not in pulls:
                assert clusters[client] == state["cluster"][client]  # whoever sat out keeps its cluster
        return after

    state = step(state, {1: left, 3: right, 4: left, 6: right, 7: left, 9: right, 8: left, 2: right})
    assert state["cluster"].tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0, 1]  # 0 and 5 were absent
    # the second cluster is 2, 3, 6, 9: it splits by itself, while two of the first cluster sit out
    state = step(state, {2: up, 3: down, 6: up, 9: down, 0: left, 1: left, 4: left})
    assert state["cluster"].tolist() == [0, 0, 1, 2, 0, 0, 1, 0, 0, 2]
    # the first cluster (0, 1, 4, 5, 7, 8) splits; clients 7 and 8 are absent and stay where they were
    state = step(state, {0: front, 1: back, 4: front, 5: back, 3: right})
    assert state["cluster"].tolist() == [0, 3, 1, 2, 0, 3, 1, 0, 0, 2]
    assert len(state["models"]) == 4
    assert algorithm.send(state, 5).model is state["models"][3]


def test_impossible_settings():
    with pytest.raises(ConfigError, match="cfl"):
        CFL(eps1=-1.0)
