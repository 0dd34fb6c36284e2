from __future__ import annotations

import pytest
import torch

from cwfed.algorithms import FedAvg, build
from cwfed.algorithms.fedprox import FedProx
from cwfed.core.errors import ConfigError
from cwfed.core.types import Download, Output, Uploads
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small

OUTPUT = Output(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(2, 1))


def test_fedavg_by_hand():
    # (1 * 2 + 3 * 6) / 4 = 5
    up = Uploads((0, 4), {"w": torch.tensor([[2.0], [6.0]])}, torch.tensor([1, 3]))
    assert FedAvg().aggregate(None, up)["model"]["w"].item() == 5.0


def test_fedprox_penalty_and_its_gradient_by_hand():
    w = torch.tensor([3.0, 1.0], requires_grad=True)
    algorithm = FedProx(mu=0.5)
    start = algorithm.begin(Download(({"w": torch.tensor([1.0, 1.0])},)), None, None)
    penalty = algorithm.penalty({"w": w}, OUTPUT, torch.tensor([0]), start)
    assert penalty.item() == 1.0  # 0.5 / 2 * 2^2
    (gradient,) = torch.autograd.grad(penalty, w)
    assert gradient.tolist() == [1.0, 0.0]  # mu (w - received)


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
        ({"name": "nothere:Thing"}, "cannot be imported"),
        ({"name": "math:sqrt"}, "dataclass that derives from"),
    ],
)
def test_impossible_settings_are_one_sentence(options, says):
    with pytest.raises(ConfigError, match=says):
        build(options)
