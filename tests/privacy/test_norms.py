"""The dial: what it does to an upload, and that it is off where it is off."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cwfed.core.errors import ConfigError
from cwfed.core.types import Task
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from cwfed.privacy import norms as privacy
from cwfed.privacy.noise import Seeded
from cwfed.privacy.norms import Dial
from tests.conftest import all_digits, finish, leaves, without_seconds

TASK = Task(2, 3, {"body": ("body.weight",), "out": ("out.weight", "out.bias")}, "out")
MODEL = {  # norms 5, 1, 0
    "body.weight": torch.ones(2),
    "out.weight": torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]]),
    "out.bias": torch.ones(3),
}


def test_levels_by_hand():
    norms = torch.tensor([0.0, 1.0, 2.4, 2.6, 5.0])
    assert privacy.coarse(norms, 2).tolist() == [0, 0, 0, 5, 5]
    assert privacy.coarse(norms, 6).tolist() == [0, 1, 2, 3, 5]  # levels 0 1 2 3 4 5
    assert privacy.coarse(norms, 1).tolist() == pytest.approx([2.2] * 5)
    assert privacy.coarse(torch.ones(3), 4).tolist() == [1, 1, 1]


def test_noise_by_hand():
    """Norms 3, 1: mean 2; half of it times 1 and -2 is +1 and -2; lengths are positive."""
    assert privacy.noisy(torch.tensor([3.0, 1.0]), 0.5, torch.tensor([1.0, -2.0])).tolist() == [4, 1]


def test_only_the_lengths_of_output_rows_change():
    blurred = Dial("noise", 0.5).turn(MODEL, TASK, Seeded(0), 1, 2)
    before, after = MODEL["out.weight"], blurred["out.weight"]
    assert not torch.equal(before[0], after[0])
    cosine = torch.nn.functional.cosine_similarity(before[:2], after[:2])
    assert cosine.tolist() == pytest.approx([1, 1])
    assert float(after.norm(dim=1).sum()) == pytest.approx(5 + 1)  # as before: noise must not add up over the rounds
    assert after[2].tolist() == [0, 0]  # no direction to keep
    for name in ("body.weight", "out.bias"):
        assert blurred[name] is MODEL[name]
    assert MODEL["out.weight"][0].tolist() == [3, 4]


def test_noise_is_a_function_of_seed_round_and_client():
    def turned(seed, *key):
        return Dial("noise", 0.5).turn(MODEL, TASK, Seeded(seed), *key)["out.weight"]

    assert torch.equal(turned(0, 1, 2), turned(0, 1, 2))
    for other in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        assert not torch.equal(turned(0, 1, 2), turned(*other))


def test_exact_is_the_same_object_and_no_noise_the_same_bits():
    assert Dial().turn(MODEL, TASK, Seeded(0), 1, 2) is MODEL
    exact, still = (finish(Simulation(all_digits(*s))) for s in ([], ["privacy.norms=noise", "privacy.norm_noise=0"]))
    assert leaves(to_tree(exact[0])) == leaves(to_tree(still[0]))
    assert list(map(without_seconds, exact[1])) == list(map(without_seconds, still[1]))


def test_what_stays_at_the_client_is_not_blurred():
    """fedavg-ft keeps its model: with all norms made equal its kept rows still differ in length, the uploaded do not."""
    settings = ["algorithm.name=fedavg-ft", "train.rounds=1", "privacy.norms=coarse", "privacy.norm_levels=1"]
    blurred, (event,) = finish(Simulation(all_digits(*settings)))
    exact, _ = finish(Simulation(all_digits(*settings[:2])))
    assert leaves(blurred.kept) == leaves(exact.kept)
    uploaded = np.array(event.portrait.trained)
    assert uploaded.std(1).max() < 1e-4 * uploaded.mean()
    assert min(event.leaks["norms"].error) > 0.7  # two of ten classes each: 1/10 for every class is wrong for 0.8


def test_leaks_of_a_run():
    """WDR makes the norms tell; FedAvg's bias tells as well; class counts that are sent tell everything."""

    def leaks(*settings):
        return finish(Simulation(all_digits("train.rounds=1", *settings)))[1][-1].leaks

    wdr, plain = leaks("train.rounds=8"), leaks("train.rounds=8", "algorithm.wdr=0")
    assert np.mean(wdr["norms"].error) < 0.5 * np.mean(plain["norms"].error)
    assert np.mean(plain["change"].error) < 0.8 * np.mean(plain["norms"].error)
    assert min(plain["change"].auc) == 1  # every absent class, of every client
    assert leaks("algorithm.distribution=empirical")["sent"].error == [0] * 6
    assert list(leaks("algorithm.name=fednh")) == ["sent"]
    assert leaks("algorithm.name=local") == {}
    assert list(leaks("algorithm.name=ifca")) == [
        "norms"
    ]  # two models were sent: which was trained is not the audit's to say


def test_a_dial_that_hides_nothing_is_refused():
    with pytest.raises(ConfigError, match="cwfedavg sends its class counts"):
        Simulation(all_digits("privacy.norms=noise", "algorithm.distribution=empirical"))
    with pytest.raises(ConfigError, match="fednh sends its class counts"):
        Simulation(all_digits("privacy.norms=coarse", "algorithm.name=fednh"))
    with pytest.raises(ConfigError, match="local uploads none"):
        Simulation(all_digits("privacy.norms=coarse", "algorithm.name=local"))
    with pytest.raises(ConfigError, match=r"privacy.norm_levels = 0 is not possible"):
        all_digits("privacy.norm_levels=0")
