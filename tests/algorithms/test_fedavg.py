from __future__ import annotations

import pytest
import torch

from cwfed.algorithms import FedAvg, build
from cwfed.algorithms.fedavg import FedAvgFT, Local
from cwfed.algorithms.fedprox import FedProx
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Output, Pass, Sizes, Start, Uploads
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import model, task
from tests.conftest import finish, leaves, small

OUTPUT = Output(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(2, 1))


def test_fedavg_by_hand():
    # (1 * 2 + 3 * 6) / 4 = 5
    up = Uploads((0, 4), {"w": torch.tensor([[2.0], [6.0]])}, torch.tensor([1, 3]))
    assert FedAvg().aggregate(None, up)["model"]["w"].item() == 5.0


@pytest.mark.parametrize(
    ("algorithm", "phase", "kept", "uploaded"),
    [(FedAvg(), "received", (), ("w",)), (FedAvgFT(), "trained", ("w",), ("w",)), (Local(), "trained", ("w",), ())],
)
def test_what_is_measured_kept_and_uploaded(algorithm, phase, kept, uploaded):
    assert algorithm.phase == phase
    assert algorithm.keeps(("w",), task(1)) == kept
    assert algorithm.uploaded(("w",), task(1)) == uploaded


def test_local_sends_and_learns_nothing_and_costs_nothing():
    local = Local()
    state = local.init(lambda number: model(float(number)), task(1))
    assert state["model"]["w"].item() == 0.0  # the first initial model, everybody's
    assert local.send(state, 0).models == ()
    assert local.aggregate(state, Uploads((0,), {}, torch.tensor([3]))) is state
    (cost,) = local.costs(Sizes(model=10, head=2, classes=2, clients=8, participants=4, kept=10))
    assert (cost.server, cost.down, cost.up) == (0, 0, 0)


def test_costs_by_hand():
    # 4 participants, 10 numbers each way; with 6 of them travelling, 4 * 6 = 24
    (whole,) = FedAvg().costs(Sizes(model=10, head=2, classes=2, clients=8, participants=4))
    assert (whole.server, whole.down, whole.up, whole.note) == (10, 40, 40, "")
    (part,) = FedAvg().costs(Sizes(model=10, head=2, classes=2, clients=8, participants=4, uploaded=6, kept=4))
    assert (part.server, part.down, part.up, part.note) == (6, 24, 24, "every client keeps 4")
    (tuned,) = FedAvgFT().costs(Sizes(model=10, head=2, classes=2, clients=8, participants=4, kept=10))
    assert tuned.note == "every client keeps its own model"


class _Halves(FedAvg):
    """Sends `w`, keeps `own`, and remembers how often it took part."""

    def uploaded(self, names, task):
        return ("w",)

    def remember(self, start):
        return {"times": torch.tensor(1.0)}


def test_the_personal_model_is_what_was_received_with_what_stayed_at_home():
    state = _Halves().init(lambda number: model(float(number)) | {"own": torch.tensor(9.0)}, task(1))
    assert state == {"model": model(0.0)}  # what travels, of the first initial model
    got = Download((model(2.0),))
    own = {"w": torch.tensor(1.0), "own": torch.tensor(3.0), "times": torch.tensor(5.0)}
    personal = _Halves().personal(got, own, None)
    assert {name: w.item() for name, w in personal.items()} == {"w": 2.0, "own": 3.0}
    assert FedAvg().personal(got, model(1.0), None) is got.model  # a copy would be measured a client at a time


def test_a_client_trains_once_and_keeps_what_it_trained():
    start = Start(model(0.0))
    assert [FedAvg().passes(when, task(1), start) for when in ("receipt", "training", "test")] == [(), (Pass(),), ()]
    trained = model(1.0)
    assert FedAvg().settle(trained, start) is trained
    assert FedAvg().held_out() == 0.0


def test_the_loss_is_cross_entropy_and_the_penalty_beside_it():
    start = Start(model(0.0), anchor=model(1.0))
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]))
    loss = FedProx(mu=0.5).loss(lambda params, inputs: OUTPUT, model(3.0), batch, start, "")
    assert loss.loss.item() == pytest.approx(0.6931, abs=1e-4)  # two classes, equal logits: ln 2
    assert loss.penalty.item() == 1.0  # 0.5 / 2 * 2^2


def test_fedprox_penalty_and_its_gradient_by_hand():
    w = torch.tensor([3.0, 1.0], requires_grad=True)
    algorithm = FedProx(mu=0.5)
    start = algorithm.begin(Download(({"w": torch.tensor([1.0, 1.0])},)), None, None)
    penalty = algorithm.penalty({"w": w}, OUTPUT, torch.tensor([0]), start)
    assert penalty.item() == 1.0  # 0.5 / 2 * 2^2
    (gradient,) = torch.autograd.grad(penalty, w)
    assert gradient.tolist() == [1.0, 0.0]  # mu (w - received)


def test_fedprox_starts_from_its_whole_model_and_is_held_there():
    own = {"w": torch.tensor(1.0), "own": torch.tensor(3.0)}
    start = FedProx().begin(Download((model(2.0),)), own, None)
    for params in (start.params, start.anchor):
        assert {name: w.item() for name, w in params.items()} == {"w": 2.0, "own": 3.0}
    assert FedProx().mu == 0.001  # the paper's


def test_fedprox_without_its_term_is_fedavg():
    fedavg, _ = finish(Simulation(small("algorithm.name=fedavg")))
    fedprox, _ = finish(Simulation(small("algorithm.name=fedprox", "algorithm.mu=0")))
    assert leaves(fedavg.server) == leaves(fedprox.server)


def test_a_strong_proximal_term_keeps_clients_near_what_they_received():
    free, _ = finish(Simulation(small("algorithm.name=fedprox", "algorithm.mu=0", "train.rounds=1")))
    held, _ = finish(Simulation(small("algorithm.name=fedprox", "algorithm.mu=10", "train.rounds=1")))
    start = Simulation(small()).fresh(0)
    distance = [sum((p.server["model"][n] - w).norm() for n, w in start.items()) for p in (free, held)]
    assert distance[1] < 0.5 * distance[0]


def test_fine_tuned_fedavg_is_fedavg_on_the_server():
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg")))
    tuned, events = finish(Simulation(small("algorithm.name=fedavg-ft")))
    assert leaves(fedavg.server) == leaves(tuned.server)
    assert [e.trained for e in plain] == [e.trained for e in events]


def test_local_clients_do_not_influence_each_other():
    """What client 0 becomes does not depend on who else is there."""
    everybody, _ = finish(Simulation(small("algorithm.name=local")))
    alone = Simulation(small("algorithm.name=local"))
    alone.members = [0]
    only, events = finish(alone)
    assert [event.participants for event in events] == [[0]] * 3
    assert only.kept.keys() == {0}
    assert leaves(everybody.kept[0]) == leaves(only.kept[0])


def test_local_before_training_is_the_common_initial_model():
    simulation = Simulation(small("algorithm.name=local"))
    assert leaves(simulation.final_model(simulation.start(), 2)) == leaves(simulation.fresh(0))
    simulation.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "fedprx"}, "did you mean fedprox"),
        ({"name": "fedprox", "mu": -1}, "mu must not be negative"),
        ({"name": "fedprox", "nu": 1}, "unknown setting algorithm.nu for fedprox: did you mean mu"),
        ({"name": "fedprox", "mu": "much"}, "algorithm.mu = 'much' is not possible"),
        ({"name": "fedavg", "mu": 1}, "it has none"),
        ({"name": "cwfedavg", "distribution": "guessed"}, "estimated"),
        ({"name": "cwfedavg", "wdr": float("nan")}, "finite"),
        ({"name": "nothere:Thing"}, "there is no module 'nothere'"),
        ({"name": "math:sqrt"}, "dataclass that derives from"),
    ],
)
def test_impossible_settings_are_one_sentence(options, says):
    with pytest.raises(ConfigError, match=says):
        build(options)
