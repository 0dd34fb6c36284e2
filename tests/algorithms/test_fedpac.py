"""FedPAC: statistics on receipt, the programme and whom its weights meet, the pull, and FedRep as its limiting case."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cwfed.algorithms.fedpac import FedPAC
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Output, Start, Task, Uploads
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import Client
from tests.conftest import finish, leaves, small, worker_of

SOME = ("train.participation=0.7", "train.client_dropout=0.2")
MOMENTS = (torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([5.0, 20.0]), torch.tensor([1.0, 3.0]))


def got(known, prototypes=((9.0, 9.0), (8.0, 8.0))):
    return Download(({"w": torch.ones(1)},), {"prototypes": torch.tensor(prototypes), "known": torch.tensor(known)})


def test_statistics_by_hand():
    """p = (1/4, 3/4); H = p mu; V = ((5/4 - 4/16) + (3/4 20 - 9/16 16)) / 4 = (1 + 6) / 4, with the received model."""
    asked = []
    client = Client(moments=lambda params: (asked.append(params), MOMENTS)[1])
    start = FedPAC().begin(got([0.0, 0.0]), None, client)
    assert start.notes["H"].tolist() == [[0.5, 0.0], [0.0, 3.0]]
    assert start.notes["V"].item() == 1.75
    assert asked == [got([0.0, 0.0]).model]
    trained = {"w": torch.zeros(1)}
    sent = FedPAC().finish(trained, start, client)
    assert asked[1:] == [trained], "prototypes are of the trained body"
    assert torch.equal(sent["H"], start.notes["H"])
    assert sent["V"] == 1.75


def test_statistics_of_a_client_of_the_simulator():
    simulation = Simulation(small("algorithm.name=fedpac", "run.engine=loop"))
    state = simulation.first_state()
    worker, own = worker_of(simulation), simulation.federation.shards[2].train
    start = simulation.algorithm.begin(simulation.algorithm.send(state, 2), None, worker.view(2, {}))
    inputs, labels = worker.samples.batch(own)
    simulation.close()
    model = simulation.initial
    f = torch.relu(inputs.flatten(1) @ model["fc.weight"].T + model["fc.bias"]).double()
    h = torch.stack([f[labels == k].sum(0) for k in range(10)]) / len(own)
    torch.testing.assert_close(start.notes["H"].double(), h, rtol=1e-5, atol=1e-6)
    v = (f.square().sum() / len(own) - h.square().sum()) / len(own)
    assert start.notes["V"].item() == pytest.approx(float(v), rel=1e-5)


def test_the_pull_is_nothing_in_round_1_then_to_the_class_mean_or_to_its_own():
    client = Client(moments=lambda params: MOMENTS)
    pac, batch = FedPAC(lambda_=2.0), Batch(torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([0, 1]))

    def network(params, inputs, statistics=""):
        return Output(inputs, inputs, inputs)

    def penalty(known, stage):
        return pac.loss(network, {}, batch, pac.begin(got(known), None, client), stage).penalty.item()

    assert penalty([0.0, 0.0], "body") == 0
    # class 0 has C = (9, 9): 64 + 64; class 1 has none, and its own mean on receipt is (0, 4): 4 + 4; over 2 x 2 numbers
    assert penalty([1.0, 0.0], "body") == 2 * (128 + 8) / 4
    assert penalty([1.0, 1.0], "body") == 2 * (128 + 72) / 4
    assert penalty([1.0, 1.0], "head") == 0


# --- the programme


def test_equal_statistics_share_equally():
    h = torch.randn(1, 3, 4).expand(5, 3, 4)
    torch.testing.assert_close(FedPAC().weights(h, torch.full((5,), 0.3)), torch.full((5, 5), 0.2).double())
    torch.testing.assert_close(FedPAC().weights(h, torch.zeros(5)), torch.full((5, 5), 0.2).double())
    # V alone: a_j ~ 1 / V_j, (1, 1/3) / (4/3)
    torch.testing.assert_close(
        FedPAC().weights(h[:2], torch.tensor([1.0, 3.0])), torch.tensor([[0.75, 0.25]] * 2).double()
    )


def test_without_variance_everybody_is_alone_to_the_bit():
    torch.manual_seed(0)
    h = torch.randn(6, 3, 4)
    assert torch.equal(FedPAC().weights(h, torch.zeros(6)), torch.eye(6).double())
    assert torch.equal(FedPAC().weights(h, torch.full((6,), 1e-9)), torch.eye(6).double())


def test_with_large_variance_all_are_equal():
    torch.manual_seed(0)
    weights = FedPAC().weights(torch.randn(4, 3, 4), torch.full((4,), 1e8))
    torch.testing.assert_close(weights, torch.full((4, 4), 0.25).double(), atol=1e-5, rtol=0)


def test_two_clients_by_hand():
    """H_0 - H_1 = 2: client 0 minimises 4 a^2 + (1 - a)^2 + a^2 over the share a of client 1: a = 1/6."""
    weights = FedPAC().weights(torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(weights, torch.tensor([[5 / 6, 1 / 6], [1 / 6, 5 / 6]]).double())


def test_the_weights_minimise_the_paper_s_objective():
    """Against all points of a grid; with float noise no eigenvalue is thrown away."""
    torch.manual_seed(1)
    h, v = torch.randn(3, 2, 2).double(), torch.rand(3).double()
    steps = torch.linspace(0, 1, 51, dtype=torch.float64)
    grid = torch.stack([torch.tensor([a, b, 1 - a - b]) for a in steps for b in steps if a + b <= 1 + 1e-9]).double()

    def objective(i, a):
        return (h[i] - torch.einsum("nj,jkd->nkd", a, h)).square().sum((1, 2)) + (a.square() * v).sum(1)

    for i, row in enumerate(FedPAC().weights(h, v)):
        assert objective(i, row[None]).item() <= objective(i, grid).min().item() + 1e-9


def fedpac_state(clients):
    task = Task(clients, 2, {"body": ("w",), "layer": ("layer.weight",)}, "layer")
    return FedPAC().init(lambda _: {"w": torch.zeros(1), "layer.weight": torch.zeros(2, 1)}, task)


def sent(clients, heads, h, v, counts, prototypes):
    models = {"w": torch.tensor([[4.0 * c] for c in clients]), "layer.weight": torch.tensor(heads)[:, :, None]}
    extras = {"H": torch.tensor(h)[:, :, None], "V": torch.tensor(v), "class_counts": torch.tensor(counts)}
    return Uploads(
        clients, models, extras["class_counts"].sum(1), extras | {"prototypes": torch.tensor(prototypes)[:, :, None]}
    )


def test_the_server_by_hand():
    """Clients 1 and 4 of six: their weights are those above, 5/6 and 1/6 (for H apart by 2), and meet their own heads."""
    h, heads = [[0.0, 0.0], [2.0, 0.0]], [[6.0, 0.0], [0.0, 12.0]]
    up = sent((1, 4), heads, h, [1.0, 1.0], [[1.0, 0.0], [3.0, 0.0]], [[8.0, 0.0], [4.0, 0.0]])
    before = fedpac_state(6)
    after = FedPAC().aggregate(before | {"prototypes": torch.tensor([[1.0], [7.0]])}, up)
    own = {c: FedPAC().send(after, c).model["layer.weight"].flatten().tolist() for c in range(6)}
    assert own[1] == pytest.approx([5.0, 2.0])
    assert own[4] == pytest.approx([1.0, 10.0])
    assert all(own[c] == [0, 0] for c in (0, 2, 3, 5)), "who sits out keeps its head ..."
    assert all(FedPAC().send(after, c).model["w"].item() == 1 / 4 * 4 + 3 / 4 * 16 for c in range(6)), (
        "... over the new body"
    )
    # counts weigh prototypes: (1 8 + 3 4) / 4; a class that no participant has keeps its own, and nothing fails
    assert after["prototypes"].flatten().tolist() == [5.0, 7.0]
    assert after["known"].tolist() == [1.0, 0.0]


def test_weights_meet_their_own_clients_in_any_order():
    torch.manual_seed(0)
    h, v, order = torch.randn(5, 3, 2), torch.rand(5) / 3, torch.tensor([3, 0, 4, 2, 1])
    weights, shuffled = FedPAC().weights(h, v), FedPAC().weights(h[order], v[order])
    torch.testing.assert_close(shuffled, weights[order][:, order], atol=1e-9, rtol=0)
    assert len({round(float(x), 6) for x in weights.diagonal()}) == 5, "a test that could not fail for equal ones"
    torch.testing.assert_close(weights.sum(1), torch.ones(5).double())


# --- whole runs


@dataclass(frozen=True)
class Alone(FedPAC):
    """a_i = e_i."""

    lambda_: float = 0.0

    def weights(self, statistics, variances):
        return torch.eye(len(variances)).double()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_alone_and_without_the_pull_it_is_fedrep(engine):
    fedrep, plain = finish(Simulation(small("algorithm.name=fedrep", f"run.engine={engine}", *SOME)))
    alone, events = finish(Simulation(small(f"algorithm.name={__name__}:Alone", f"run.engine={engine}", *SOME)))
    body = fedrep.server["model"]
    assert leaves({n: alone.server["model"][n] for n in body}) == leaves(body)
    for client, head in fedrep.kept.items():
        assert leaves({n: alone.server["heads"][n][client] for n in head}) == leaves(head)
    assert [(e.received, e.loss) for e in events] == [(e.received, e.loss) for e in plain]


def test_one_local_epoch_trains_head_and_body_and_norm_layers_see_training():
    """Statistics are taken in evaluation mode before the training, which is not: running statistics move."""
    norms = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}", "train.batch_norm=average")
    simulation = Simulation(small("algorithm.name=fedpac", "run.engine=loop", "train.rounds=1", *norms))
    progress, _ = finish(simulation)
    for name in ("1.weight", "2.running_mean", "4.weight"):
        assert not torch.equal(progress.server["model"][name], simulation.initial[name]), name


def test_class_counts_go_up_in_the_clear():
    _, (event,) = finish(Simulation(small("algorithm.name=fedpac", "train.rounds=1")))
    assert event.leaks["sent"].error == [0] * 6


def only_an_output(shape, classes):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))
    model.output_layer = "1"
    return model


def test_what_cannot_be():
    for setting in ({"lambda_": -1.0}, {"head_epochs": -1}, {"head_lr": 0.0}):
        with pytest.raises(ConfigError, match="fedpac: lambda and head_epochs must not be negative"):
            FedPAC(**setting)
    model = (f"model.name={__name__}:only_an_output", "model.options={}", "algorithm.name=fedpac", "train.rounds=1")
    finish(Simulation(small(*model)))
    with pytest.raises(ConfigError, match="no pass in training"):
        Simulation(small(*model, "algorithm.head_epochs=0"))
    with pytest.raises(ConfigError, match="fedpac has a loss of its own"):
        Simulation(small("algorithm.name=fedpac", "privacy.dp=sample"))


def test_the_learning_rate_of_the_head():
    simulation = Simulation(small("algorithm.name=fedpac", "algorithm.head_lr=5"))
    simulation.close()
    head, body = simulation.algorithm.passes("training", simulation.task, Start({}))
    assert (head.trained, head.lr, body.lr) == (("output.weight", "output.bias"), 5.0, 1.0)
