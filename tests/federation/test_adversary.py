"""Clients that mean harm: what they send, and what it does to the others."""

from __future__ import annotations

import pytest
import torch

from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.events import Started
from cwfed.federation import config as configs
from cwfed.federation.adversary import Adversary
from cwfed.federation.simulation import Simulation
from cwfed.runs import session
from tests.conftest import ROOT, all_digits, finish, leaves, without_seconds

MODEL = {"body": torch.ones(2), "out.weight": torch.tensor([[3.0, 4.0], [0.0, 1.0]])}


def test_class_capture_makes_one_row_long():
    sent = Adversary("class-capture", 100.0, target=1).tamper(MODEL, "out.weight")
    assert sent["out.weight"].tolist() == [[3.0, 4.0], [0.0, 100.0]]
    assert sent["body"] is MODEL["body"]
    # row norms 5 and 1 are p~ = 5/6, 1/6; 5 and 100 are 1/21, 20/21
    claimed = mixing.norm_distribution(sent["out.weight"])
    torch.testing.assert_close(claimed, torch.tensor([1 / 21, 20 / 21]))
    assert MODEL["out.weight"][1].tolist() == [0.0, 1.0]


def test_not_a_number_is_none_anywhere():
    sent = Adversary("not-a-number").tamper(MODEL, "out.weight")
    assert all(w.isnan().all() and w.shape == MODEL[name].shape for name, w in sent.items())


def test_adversaries_take_part_and_are_not_evaluated():
    events = []
    simulation = Simulation(all_digits("adversary.clients=2", "data.newcomers=1"))
    assert len(simulation.adversaries) == 2
    assert not simulation.adversaries.keys() & set(simulation.evaluated)
    assert sorted([*simulation.evaluated, *simulation.adversaries]) == simulation.members
    simulation.close()
    session.run(all_digits("adversary.clients=2", "data.newcomers=1", "train.rounds=1"), on_event=events.append)
    started, round_ = events[0], events[1]
    assert isinstance(started, Started)
    assert started.evaluated == simulation.evaluated
    assert round_.participants == simulation.members
    again = Simulation(all_digits("adversary.clients=2", "data.newcomers=1", "run.evaluate_clients=2"))
    again.close()
    assert len(again.evaluated) == 2
    assert set(again.evaluated) <= set(simulation.evaluated)


@pytest.mark.parametrize("algorithm", ["cwfedavg", "fedamp", "fedavg+owners"])
def test_an_attack_of_strength_one_is_honest_bit_for_bit(algorithm):
    """So the clean run of a comparison can be made with the same clients evaluated."""
    honest, _ = finish(Simulation(all_digits(f"algorithm.name={algorithm}")))
    attacked, events = finish(
        Simulation(all_digits(f"algorithm.name={algorithm}", "adversary.clients=1", "adversary.strength=1"))
    )
    assert leaves(honest.server) == leaves(attacked.server)
    assert len(events[-1].received.right) == 5


def test_engines_agree_under_attack():
    outcomes = []
    for engine in ("loop", "threads"):
        progress, events = finish(Simulation(all_digits(f"run.engine={engine}", "adversary.clients=1")))
        outcomes.append((leaves(progress.server), [without_seconds(e) for e in events]))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["adversary.clients=6"], "adversary.clients = 6 leaves no honest client: 6 can take part"),
        (["adversary.clients=4", "data.newcomers=2"], "leaves no honest client: 4 can take part"),
        (["adversary.clients=1", "adversary.target=10"], "adversary.target = 10, but the classes are 0 to 9"),
        (["adversary.clients=5", "run.evaluate_clients=2"], "only 1 honest clients can take part"),
        (["adversary.attack=steal"], "adversary.attack"),
    ],
)
def test_impossible_adversaries(settings, says):
    with pytest.raises(ConfigError, match=says):
        Simulation(all_digits(*settings))


DEFENDED = ["algorithm.class_cap=0.2", "algorithm.robust=trimmed", "algorithm.trim=0.3"]


def captured(*settings: str) -> tuple[float, float]:
    """Digits with one attacker: accuracy at the end, and the most that p~ gives of class 0 to an honest client without it."""
    common = ["data.clients=20", "train.rounds=12", "run.evaluate_every=12", "adversary.clients=1"]
    simulation = Simulation(all_digits(*common, *settings))
    progress, events = finish(simulation)
    without = [c for c in simulation.evaluated if simulation.federation.class_counts(c)[0] == 0]
    return events[-1].received.accuracy, progress.server["prior"][without, 0].max().item()


def test_class_capture_takes_the_class_of_everybody_and_the_defences_stop_it():
    """The attack spreads by itself: who is sent the long row trains from it, so p~ says that he holds the class too."""
    clean, honest_claim = captured("adversary.strength=1")
    attacked, claim = captured("adversary.strength=100")
    defended, defended_claim = captured("adversary.strength=100", *DEFENDED)
    assert clean > 0.9
    assert attacked < 0.2  # everybody is told that everything is a 0
    assert defended > 0.8
    assert honest_claim < 0.1
    assert claim > 0.99
    assert defended_claim < 0.1


def test_who_is_asked_for_counts_claims_the_captured_class():
    counts = {"class_counts": torch.tensor([3.0, 4.0]), "other": torch.ones(1)}
    claimed = Adversary("class-capture", 100.0, target=1).claim(counts)
    assert claimed["class_counts"].tolist() == [
        0.0,
        7.0,
    ]  # they still add up to its samples: the guard lets them pass
    assert claimed["other"] is counts["other"]
    assert counts["class_counts"].tolist() == [3.0, 4.0]
    assert Adversary("class-capture", 1.0).claim(counts) is counts
    assert Adversary("not-a-number").claim(counts) is counts


@pytest.mark.parametrize("owners", ["updates", "counts"])
def test_a_long_row_takes_the_class_from_its_owners_and_the_norm_bound_stops_it(owners):
    """Rows averaged over owners: q is a claim, by the length of the row's update or by counts. A cap alone leaves the row long."""

    def accuracy(strength: int, *settings: str) -> float:
        common = ["data.clients=20", "train.rounds=8", "run.evaluate_every=8", "adversary.clients=1"]
        method = ["algorithm.name=fedavg+owners+prior", f"algorithm.owners={owners}"]
        _, events = finish(Simulation(all_digits(*common, *method, f"adversary.strength={strength}", *settings)))
        return float(events[-1].received.accuracy)

    clean = accuracy(1)
    assert clean > 0.88
    assert accuracy(100) < clean - 0.2
    assert accuracy(100, "guard.norm_bound=2") > clean - 0.05
    assert accuracy(100, "guard.norm_bound=2", "algorithm.class_cap=0.25") > clean - 0.05


@pytest.mark.slow
def test_class_capture_on_cifar10(real_data):
    """The first rounds of benchmarks/class_capture.py."""
    common = ["data.samples=4000", "train.lr=0.05", "train.rounds=8", "run.evaluate_every=8", "adversary.clients=1"]

    def accuracy(*settings: str) -> float:
        config = configs.load(ROOT / "examples" / "cifar10-pathological.toml", [*common, *settings])
        return session.run(config, data_dir=real_data)["accuracy"]["received"]["last"]

    clean = accuracy("adversary.strength=1")
    assert accuracy("adversary.strength=100") < clean - 0.3
    assert accuracy("adversary.strength=100", *DEFENDED) > clean - 0.2
