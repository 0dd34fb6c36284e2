"""The server's optimisers: by hand, their limits, and what is no parameter."""

from __future__ import annotations

import pytest
import torch

from cwfed.algorithms import build
from cwfed.core.errors import ConfigError
from cwfed.core.types import Task, Uploads
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import model, task, uploads
from tests.conftest import finish, small


def steps(*received, **settings):
    """The model after each round in which the two clients' mean is 2 above what they received, or as given."""
    algorithm = build({"name": "fedavg+fedopt"} | settings)
    state, models = algorithm.init(lambda _: model(1.0), task(2)), []
    for change in received:
        sent = float(state["model"]["w"])
        state = algorithm.aggregate(state, uploads([0, 1], [[sent], [sent + 2 * change]]))
        models.append(float(state["model"]["w"]))
    return models, state


def test_momentum_by_hand():
    """m = 2, then 0.5 * 2 - 4 = -3, then 0.5 * -3 + 0 = -1.5; each times 0.1 is added: 1.2, 0.9, 0.75."""
    models, state = steps(2.0, -4.0, 0.0, server_lr=0.1, server_momentum=0.5)
    assert models == pytest.approx([1.2, 0.9, 0.75])
    assert float(state["moments"]["first"]["w"]) == pytest.approx(-1.5)
    assert "second" not in state["moments"]


def test_adaptive_optimizers_by_hand():
    """tau = 1, so v starts at 1; D = 2 and then -1; b1 = 0.5: m = 1, then 0.5 * 1 + 0.5 * -1 = 0.

    adam      v = 0.75 * 1 + 0.25 * 4 = 1.75                  the first step is 1 / (sqrt(1.75) + 1)
    yogi      v = 1 - 0.25 * 4 * sign(1 - 4) = 2              1 / (sqrt(2) + 1)
    adagrad   v = 1 + 4 = 5                                   1 / (sqrt(5) + 1)
    """
    settings = {"server_lr": 1.0, "server_momentum": 0.5, "server_decay": 0.75, "tau": 1.0}
    for server, first, second in (
        ("adam", 1.75, 0.75 * 1.75 + 0.25),
        ("yogi", 2.0, 2 - 0.25 * 1),  # v = 2 is above D^2 = 1: down by a quarter of it
        ("adagrad", 5.0, 6.0),
    ):
        models, state = steps(2.0, -1.0, server=server, **settings)
        expected = 1 + 1 / (first**0.5 + 1)
        assert models == pytest.approx([expected, expected]), server  # the second direction is 0
        assert float(state["moments"]["second"]["w"]) == pytest.approx(second)


def test_without_momentum_and_with_rate_1_it_is_what_is_beneath_but_for_rounding():
    for name in ("fedavg", "fedper", "fedavg+balanced+owners"):
        plain, _ = finish(Simulation(small(f"algorithm.name={name}", "train.rounds=2", "data.samples=400")))
        stepped = small(
            f"algorithm.name={name}+fedopt", "algorithm.server_momentum=0", "train.rounds=2", "data.samples=400"
        )
        after, _ = finish(Simulation(stepped))
        for tensor, w in plain.server["model"].items():
            torch.testing.assert_close(after.server["model"][tensor], w, atol=1e-5, rtol=1e-4)


def test_it_steps_towards_what_owners_made():
    """Class 0 has one owner, so its row goes half of the way from 0 to 6; FedAvg's mean would be 3."""
    algorithm = build({"name": "fedavg+owners+fedopt", "server_lr": 0.5})
    names = ("out.weight", "out.bias")
    old = {"out.weight": torch.zeros(2, 1), "out.bias": torch.zeros(2)}
    state = algorithm.init(lambda _: old, Task(2, 2, {"out": names}, "out"))
    counts = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    sent = {"out.weight": torch.tensor([[[6.0], [2.0]], [[0.0], [4.0]]]), "out.bias": torch.zeros(2, 2)}
    after = algorithm.aggregate(state, Uploads((0, 1), sent, torch.tensor([1, 1]), {"class_counts": counts}))
    assert after["model"]["out.weight"].tolist() == [[3.0], [2.0]]


def test_running_statistics_are_averaged_and_not_stepped():
    """A step of momentum past the mean would make a variance negative."""
    algorithm = build("fedavg+fedopt")
    names = {"w": torch.zeros(1), "norm.running_var": torch.ones(1)}
    state = algorithm.init(lambda _: names, task(1))
    for variance in (0.1, 0.1):
        sent = {"w": torch.ones(1, 1), "norm.running_var": torch.tensor([[variance]])}
        state = algorithm.aggregate(state, Uploads((0,), sent, torch.tensor([1])))
        assert float(state["model"]["norm.running_var"]) == pytest.approx(variance)
    assert state["moments"]["first"].keys() == {"w"}
    assert float(state["model"]["w"]) == pytest.approx(1.9)  # 1, then 0.9 * 1 + (1 - 1)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("fedavg+fedopt", {"server_lr": 0.0}, "server_lr and tau must be above 0"),
        ("fedavg+fedopt", {"tau": 0.0}, "server_lr and tau must be above 0"),
        ("fedavg+fedopt", {"server_momentum": 1.0}, "below 1"),
        ("fedavg+fedopt", {"server_decay": -0.1}, "at least 0"),
        ("cwfedavg+fedopt", {}, "cannot be added to cwfedavg: it makes a step from FedAvg's one model"),
        ("local+fedopt", {}, "cannot be added to local"),
    ],
)
def test_what_cannot_be_is_one_sentence(name, settings, says):
    with pytest.raises(ConfigError, match=says):
        build({"name": name} | settings)
