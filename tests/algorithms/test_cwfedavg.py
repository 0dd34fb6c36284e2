"""cwFedAvg point by point of its specification, on models small enough to work out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cwfed.algorithms import CwFedAvg, FedAvg
from cwfed.algorithms.fedprox import FedProx
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Download, Form, Output, Start, Task, Uploads
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small, without_seconds

TASK = Task(
    clients=3,
    classes=2,
    layers={"body": ("body.weight",), "output": ("output.weight", "output.bias")},
    output="output",
)


class Data:
    """A client with given label counts."""

    def __init__(self, *counts: float) -> None:
        self.class_counts = torch.tensor(counts)


def model(body: float, rows: list[list[float]], bias: list[float]) -> dict[str, torch.Tensor]:
    return {
        "body.weight": torch.tensor([body]),
        "output.weight": torch.tensor(rows),
        "output.bias": torch.tensor(bias),
    }


def uploads(clients, models, counts, **extras) -> Uploads:
    stack = {name: torch.stack([m[name] for m in models]) for name in models[0]}
    return Uploads(tuple(clients), stack, torch.tensor(counts), extras)


def start(algorithm: CwFedAvg):
    return algorithm.init(lambda c: model(1.0, [[1.0], [1.0]], [0.0, 0.0]), TASK)


# client 0: norms 3, 1 -> p~ = 3/4, 1/4; client 1: norms 1, 1 -> 1/2, 1/2; samples 10 and 30 -> p = 1/4, 3/4
W0, W1 = model(4.0, [[3.0], [-1.0]], [1.0, 0.0]), model(8.0, [[1.0], [1.0]], [0.0, 2.0])


def test_a_round_by_hand():
    algorithm = CwFedAvg(layers="output")
    state = algorithm.aggregate(start(algorithm), uploads([0, 1], [W0, W1], [10, 30]))
    assert state["prior"].tolist() == [[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]]
    # class 0: 1/4*3/4 = 3/16 and 3/4*1/2 = 6/16 -> q = 1/3, 2/3; class 1: 1/16 and 6/16 -> 1/7, 6/7
    # class models of the output weight: (3/3 + 2/3, -1/3 + 2/3) = (5/3, 1/3); (3/7 + 6/7, -1/7 + 6/7) = (9/7, 5/7)
    classes = algorithm.class_models(state)["output.weight"]
    torch.testing.assert_close(classes, torch.tensor([[[5 / 3], [1 / 3]], [[9 / 7], [5 / 7]]]))
    # client 0 gets 3/4 of class model 0 and 1/4 of class model 1; the body is FedAvg: 1/4 * 4 + 3/4 * 8 = 7
    got = algorithm.send(state, 0).model
    torch.testing.assert_close(got["output.weight"], torch.tensor([[5 / 4 + 9 / 28], [1 / 4 + 5 / 28]]))
    assert got["body.weight"].item() == 7.0
    # the bias has no part in p~ but is mixed with the same weights: class models (1/3, 4/3) and (1/7, 12/7)
    torch.testing.assert_close(got["output.bias"], torch.tensor([1 / 4 + 1 / 28, 1 + 3 / 7]))


def test_before_the_first_upload_everybody_gets_the_initial_model_exactly():
    algorithm = CwFedAvg(layers="all")
    state = start(algorithm)
    for client in range(3):
        assert leaves(algorithm.send(state, client).model) == leaves(model(1.0, [[1.0], [1.0]], [0.0, 0.0]))


def test_a_client_that_sits_out_keeps_its_distribution_and_gets_the_new_class_models():
    algorithm = CwFedAvg()
    state = algorithm.aggregate(start(algorithm), uploads([0, 1], [W0, W1], [10, 30]))
    later = algorithm.aggregate(state, uploads([1], [W1], [30]))
    assert later["prior"][0].tolist() == [0.75, 0.25]
    torch.testing.assert_close(algorithm.send(later, 0).model["output.weight"], W1["output.weight"])


def test_aggregate_leaves_the_old_state_as_it_was():
    algorithm = CwFedAvg(layers="all")
    state = start(algorithm)
    before = leaves(state)
    algorithm.aggregate(state, uploads([0, 1], [W0, W1], [10, 30]))
    assert leaves(state) == before


def test_beside_the_model_only_the_empirical_form_sends_something():
    assert CwFedAvg().beside(W0, TASK) == {}
    counts = Form(torch.float32, (2,), 0, counts_samples=True)  # a client may lack a class
    assert CwFedAvg(distribution="empirical").beside(W0, TASK) == {"class_counts": counts}


def test_empirical_takes_what_the_clients_send():
    algorithm = CwFedAvg(distribution="empirical")
    counts = torch.tensor([[9.0, 1.0], [10.0, 20.0]])
    state = algorithm.aggregate(start(algorithm), uploads([0, 2], [W0, W1], [10, 30], class_counts=counts))
    torch.testing.assert_close(
        state["prior"], torch.tensor([[0.9, 0.1], [0.5, 0.5], [1 / 3, 2 / 3]]).double(), atol=1e-7, rtol=0
    )


def test_only_the_ablation_sends_label_counts():
    begun = Start(params=W0)
    assert CwFedAvg().finish(W0, begun, Data(9, 1)) == {}
    assert CwFedAvg(distribution="empirical").finish(W0, begun, Data(9, 1))["class_counts"].tolist() == [9, 1]


def test_the_penalty_is_the_equation_s_coefficient_times_the_distance():
    # p = (1, 0), p~ = (3/4, 1/4): 2 * sqrt(2)/4
    algorithm = CwFedAvg(wdr=2.0)
    begun = algorithm.begin(Download((W0,)), None, Data(7, 0))
    output = Output(torch.zeros(1, 2), torch.zeros(1, 1), W0["output.weight"])
    penalty = algorithm.penalty(W0, output, torch.tensor([0]), begun)
    assert math.isclose(penalty.item(), math.sqrt(2) / 2, rel_tol=1e-6)


def test_combined_with_another_objective_both_penalties_count():
    both = CwFedAvg(wdr=2.0, objective=FedProx(mu=1.0))
    begun = both.begin(Download((W1,)), None, Data(7, 0))
    output = Output(torch.zeros(1, 2), torch.zeros(1, 1), W0["output.weight"])
    # proximal: (4-8)^2 + (3-1)^2 + (-1-1)^2 + (1-0)^2 + (0-2)^2 = 29, halved by mu/2
    penalty = both.penalty(W0, output, torch.tensor([0]), begun)
    assert math.isclose(penalty.item(), math.sqrt(2) / 2 + 14.5, rel_tol=1e-6)


def test_a_newcomer_gets_a_model_from_its_histogram_or_the_uniform_mix():
    algorithm = CwFedAvg()
    state = algorithm.aggregate(start(algorithm), uploads([0, 1], [W0, W1], [10, 30]))
    classes = algorithm.class_models(state)["output.weight"]
    torch.testing.assert_close(
        algorithm.newcomer(state, [3, 1])["output.weight"], 0.75 * classes[0] + 0.25 * classes[1]
    )
    torch.testing.assert_close(algorithm.newcomer(state)["output.weight"], classes.mean(0))
    for bad in ([1, 2, 3], [0, 0], [-1, 2], [float("nan"), 1]):
        with pytest.raises(ConfigError, match="histogram"):
            algorithm.newcomer(state, bad)


def many_uploads(participants: int, classes: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(participants, classes, 3, generator=generator)
    return {"body.weight": torch.randn(participants, 2, 2, generator=generator), "output.weight": weight}


@pytest.mark.parametrize(("participants", "classes"), [(2, 5), (5, 2), (4, 4), (1, 3)])
def test_the_state_keeps_the_smaller_factor_and_gives_the_same_models(participants, classes):
    task = Task(participants, classes, {"body": ("body.weight",), "output": ("output.weight",)}, "output")
    algorithm = CwFedAvg(layers="all")
    stack = many_uploads(participants, classes)
    state = algorithm.init(lambda c: {n: w[0] for n, w in stack.items()}, task)
    up = Uploads(tuple(range(participants)), stack, torch.arange(1, participants + 1))
    after = algorithm.aggregate(state, up)
    assert len(after["basis"]["body.weight"]) == min(participants, classes)
    prior = mixing.norm_distribution(stack["output.weight"].double())
    q = mixing.class_weights(mixing.sample_weights(up.counts), prior)
    for name, w in stack.items():
        class_models = torch.einsum("ij,i...->j...", q, w.double())
        personal = torch.einsum("ij,j...->i...", prior, class_models)
        for client in range(participants):
            got = algorithm.send(after, client).model[name].double()
            torch.testing.assert_close(got, personal[client], rtol=1e-5, atol=1e-6)


def test_each_client_a_private_class_gets_back_what_it_sent():
    stack = {"output.weight": torch.diag_embed(torch.ones(3, 3) * torch.eye(3)) @ torch.ones(3, 3, 3)}
    stack["output.weight"] = torch.stack([torch.eye(3)[i][:, None] * torch.arange(1.0, 4.0) for i in range(3)])
    task = Task(3, 3, {"output": ("output.weight",)}, "output")
    algorithm = CwFedAvg(layers="all")
    state = algorithm.init(lambda c: {"output.weight": torch.ones(3, 3)}, task)
    after = algorithm.aggregate(state, Uploads((0, 1, 2), stack, torch.tensor([5, 1, 9])))
    for client in range(3):
        assert torch.equal(algorithm.send(after, client).model["output.weight"], stack["output.weight"][client])


def test_one_class_per_client_is_fedavg_within_the_class():
    # the paper's Section 4.3: clients 0 and 1 have class 0 (2 and 6 samples), client 2 has class 1
    rows = [[[1.0], [0.0]], [[5.0], [0.0]], [[0.0], [7.0]]]
    ups = uploads([0, 1, 2], [model(float(i), r, [0.0, 0.0]) for i, r in enumerate(rows)], [2, 6, 4])
    algorithm = CwFedAvg(layers="all")
    after = algorithm.aggregate(start(algorithm), ups)
    assert algorithm.send(after, 0).model["output.weight"].flatten().tolist() == [4.0, 0.0]  # (2*1 + 6*5) / 8
    assert algorithm.send(after, 0).model["body.weight"].item() == 0.75  # (2*0 + 6*1) / 8
    assert algorithm.send(after, 2).model["body.weight"].item() == 2.0


def test_all_clients_with_the_same_distribution_are_fedavg():
    rows = [[[2.0], [1.0]], [[-4.0], [2.0]], [[6.0], [-3.0]]]
    ups = uploads([0, 1, 2], [model(float(i), r, [float(i), 1.0]) for i, r in enumerate(rows)], [2, 6, 4])
    algorithm = CwFedAvg(layers="all")
    after = algorithm.aggregate(start(algorithm), ups)
    fedavg = FedAvg().aggregate(None, ups)["model"]
    for client in range(3):
        for name, w in algorithm.send(after, client).model.items():
            torch.testing.assert_close(w, fedavg[name])


def test_no_class_wise_layers_and_no_wdr_are_fedavg_bit_for_bit():
    plain, plain_events = finish(Simulation(small("algorithm.name=fedavg")))
    off, off_events = finish(Simulation(small("algorithm.name=cwfedavg", "algorithm.layers=none", "algorithm.wdr=0")))
    assert leaves(plain.server["model"]) == leaves(off.server["shared"])
    assert [without_seconds(e) for e in plain_events] == [without_seconds(e) for e in off_events]


def test_state_memory_grows_with_participants_and_k_numbers_a_client():
    task = dataclasses.replace(TASK, clients=10_000)
    algorithm = CwFedAvg(layers="all")
    state = algorithm.init(lambda c: model(1.0, [[1.0], [1.0]], [0.0, 0.0]), task)
    after = algorithm.aggregate(state, uploads([17, 9_000], [W0, W1], [10, 30]))
    assert {name: len(w) for name, w in after["basis"].items()} == dict.fromkeys(W0, 2)
    assert after["prior"].shape == (10_000, 2)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("all", ["body.weight", "output.weight", "output.bias"]),
        ("none", []),
        ("output", ["output.weight", "output.bias"]),
        (1, ["output.weight", "output.bias"]),
        (2, ["body.weight", "output.weight", "output.bias"]),
        (0, []),
        (("body",), ["body.weight"]),
        ("body", ["body.weight"]),
    ],
)
def test_layers_are_chosen_by_name_or_from_the_end(choice, expected):
    assert list(TASK.select(choice)) == expected


def test_a_block_of_layers_is_chosen_by_path_never_by_substring():
    task = Task(1, 2, {"layer1.0": ("a",), "layer1.1": ("b",), "layer10": ("c",), "output": ("d",)}, "output")
    assert task.select(("layer1",)) == ("a", "b")
    with pytest.raises(ConfigError, match="layer10"):
        task.select("layer")


# --- defences


def test_a_captured_class_by_hand():
    """Three clients hold class 0 alike; one of them makes its row a hundred times as long."""
    honest, attacker = model(0.0, [[1.0], [1.0]], [0.0, 0.0]), model(0.0, [[100.0], [1.0]], [0.0, 0.0])
    ups = uploads([0, 1, 2], [honest, honest, attacker], [10, 10, 10])

    def row(**options):
        algorithm = CwFedAvg(**options)
        state = algorithm.aggregate(start(algorithm), ups)
        return algorithm.class_models(state)["output.weight"][0, 0, 0].item()

    # p~ = 1/2, 1/2, 100/101: the attacker has q = (100/101) / (1 + 100/101) = 100/201 of class 0, and what it sends
    # is long besides: 101/201 * 1 + 100/201 * 100
    assert row() == pytest.approx((101 + 10_000) / 201)
    # a cap bounds the share, but not what it is a share of: 0.7 * 1 + 0.3 * 100. (It must be above 1/3: they are three.)
    assert row(class_cap=0.4) == pytest.approx(0.6 + 0.4 * 100)
    # the honest have just more than half of the weight
    assert row(robust="median") == pytest.approx(1.0)
    # half is not cut off by a trim of 0.3: from 0.3 to 0.7 of the weight, the attacker has 0.7 - 101/201
    part = 0.7 - 101 / 201
    assert row(robust="trimmed", trim=0.3) == pytest.approx((0.4 - part + part * 100) / 0.4, rel=1e-5)
    assert row(robust="trimmed", trim=0.4, class_cap=0.4) == pytest.approx(1.0)


def test_a_class_that_few_hold_needs_both_cap_and_median():
    """Client 0 alone holds class 0, weakly; the attacker then has more than half of it, and the median is its value."""
    holder, other = model(0.0, [[1.0], [1.0]], [0.0, 0.0]), model(0.0, [[0.0], [1.0]], [0.0, 0.0])
    attacker = model(0.0, [[100.0], [0.0]], [0.0, 0.0])
    ups = uploads([0, 1, 2], [holder, other, attacker], [10, 10, 10])

    def row(**options):
        algorithm = CwFedAvg(robust="median", **options)
        return algorithm.class_models(algorithm.aggregate(start(algorithm), ups))["output.weight"][0, 0, 0].item()

    assert row() == pytest.approx(100.0)
    assert row(class_cap=0.45) == pytest.approx(
        1.0
    )  # 0.45 attacker, 0.45 holder, 0.1 other: the half is the holder's


@pytest.mark.parametrize("off", [["algorithm.class_cap=1.0"], ["algorithm.robust=mean", "algorithm.trim=0.3"]])
def test_defences_that_are_off_are_what_was_there_bit_for_bit(off):
    plain, plain_events = finish(Simulation(small()))
    same, same_events = finish(Simulation(small(*off)))
    assert leaves(plain.server) == leaves(same.server)
    assert [without_seconds(e) for e in plain_events] == [without_seconds(e) for e in same_events]


def test_trimmed_by_nothing_is_the_mean_but_for_rounding():
    one_round = ["algorithm.layers=all", "train.rounds=1"]  # later rounds would train on what was rounded
    plain, _ = finish(Simulation(small(*one_round)))
    trimmed, _ = finish(Simulation(small(*one_round, "algorithm.robust=trimmed", "algorithm.trim=0")))
    algorithm = CwFedAvg(layers="all")
    for client in range(6):
        there = algorithm.send(plain.server, client).model
        for name, w in algorithm.send(trimmed.server, client).model.items():
            torch.testing.assert_close(w, there[name])


@pytest.mark.parametrize("robust", ["median", "trimmed"])
def test_robust_class_models_keep_k_class_models(robust):
    progress, events = finish(Simulation(small(f"algorithm.robust={robust}", "train.rounds=12")))
    assert {len(w) for w in progress.server["basis"].values()} == {10}  # six participants would be fewer
    assert torch.equal(progress.server["recipe"], torch.eye(10, dtype=torch.float64))
    assert events[-1].received.accuracy > 0.5


@pytest.mark.parametrize(
    "bad",
    [
        {"wdr": -1.0},
        {"objective": CwFedAvg()},
        {"class_cap": 0.0},
        {"class_cap": 1.5},
        {"trim": 0.5},
        {"trim": -0.1},
    ],
)
def test_impossible_settings(bad):
    with pytest.raises(ConfigError, match="cwfedavg"):
        CwFedAvg(**bad)
    with pytest.raises(ConfigError, match="2 layers"):
        TASK.select(3)
