from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
import torch

from cwfed.algorithms.ifca import IFCA
from cwfed.core.errors import ConfigError
from cwfed.core.types import Download
from cwfed.data import Dataset, Federation, Shard
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import Client, model, task, uploads
from tests.conftest import finish, leaves, small, worker_of


def test_a_client_takes_the_model_with_the_lowest_loss():
    near_two = Client(lambda w: (w - 2).square().sum())
    algorithm = IFCA(k=3)
    got = Download((model(0.0), model(2.1), model(5.0)))
    start = algorithm.begin(got, None, near_two)
    assert start.params["w"].item() == pytest.approx(2.1)
    assert algorithm.finish(start.params, start, near_two)["cluster"].item() == 1
    assert algorithm.personal(got, None, near_two) is got.models[1]


def test_a_model_whose_answers_are_no_numbers_is_taken_by_nobody():
    """torch's argmin takes NaN for the lowest: one broken model would have drawn all clients to it, and broken them."""
    got = Download((model(0.0), model(1.0), model(2.0)))
    for said, wanted in (({0.0: nan, 1.0: 5.0, 2.0: 4.0}, 2), ({0.0: nan, 1.0: inf, 2.0: nan}, 0)):
        assert IFCA(k=3).choose(got, Client(lambda w, said=said: said[float(w)])) == wanted


def test_aggregation_by_hand():
    # clients 0 and 2 chose cluster 0: (1 * 2 + 3 * 6) / 4 = 5; client 1 chose cluster 2; nobody chose cluster 1
    algorithm = IFCA(k=3)
    state = algorithm.init(lambda c: model(100.0 + c), task(3))
    assert [m["w"].item() for m in state["models"]] == [100.0, 101.0, 102.0]
    state = algorithm.aggregate(
        state, uploads([0, 1, 2], [[2], [9], [6]], [1, 5, 3], cluster=torch.tensor([0, 2, 0]))
    )
    assert [m["w"].item() for m in state["models"]] == [5.0, 101.0, 9.0]
    assert algorithm.newcomer(state)["w"].item() == 5.0  # most clients chose it


def test_k_one_is_fedavg():
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg")))
    ifca, events = finish(Simulation(small("algorithm.name=ifca", "algorithm.k=1")))
    assert leaves(fedavg.server["model"]) == leaves(ifca.server["models"][0])
    assert [(e.received, e.down) for e in plain] == [(e.received, e.down) for e in events]


def test_finds_two_planted_clusters(monkeypatch):
    """Half of the clients have the labels of the other half swapped: no single model can serve both."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    y[400:] = 1 - y[400:]
    data = Dataset("planted", x, y, ("no", "yes"))
    shards = [Shard(a[:60], a[60:70], a[70:]) for a in np.split(np.arange(800), 8)]
    monkeypatch.setattr("cwfed.data.share_out", lambda *_: Federation(data, shards))
    simulation = Simulation(small("algorithm.name=ifca", "train.rounds=25", "data.clients=8"))
    progress, events = finish(simulation)
    again = Simulation(small("algorithm.name=ifca", "data.clients=8"))
    worker = worker_of(again)
    got = again.algorithm.send(progress.server, 0)
    chosen = [again.algorithm.choose(got, worker.view(c, {})) for c in range(8)]
    again.close()
    assert chosen[:4] == [chosen[0]] * 4
    assert chosen[4:] == [1 - chosen[0]] * 4
    assert events[-1].received.accuracy > 0.9


@pytest.mark.parametrize("wanted", [0.0, 1.0])
def test_of_two_models_the_better_one_is_taken(wanted):
    got = Download((model(0.0), model(1.0)))
    client = Client(lambda w: (w - wanted).square().sum())
    start = IFCA().begin(got, None, client)
    assert start.params["w"].item() == wanted
    assert IFCA().finish(start.params, start, client)["cluster"].item() == int(wanted)


def test_impossible_settings():
    with pytest.raises(ConfigError, match="k must be at least 1"):
        IFCA(k=0)
    with pytest.raises(ConfigError, match="k = 4 clusters, but there are only 3 clients"):
        IFCA(k=4).init(lambda c: model(0.0), task(3))
