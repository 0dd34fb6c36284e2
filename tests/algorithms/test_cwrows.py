"""cwRows: the combination of its plug-ins bit for bit; a round by hand; newcomers; what goes over it."""

from __future__ import annotations

import pytest
import torch

from cwfed.algorithms import build, find
from cwfed.algorithms.cwrows import CwRows
from cwfed.core.errors import ConfigError
from cwfed.core.types import Task, Uploads
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small

PARTS = "fedavg+balanced+fedopt+head_first+owners"
SOME = ("train.rounds=3", "train.participation=0.7", "train.client_dropout=0.2")


@pytest.mark.parametrize("more", ["", "+ala", "+dbe", "+offset", "+tune"])
def test_it_is_the_combination_of_its_plug_ins(more):
    settings = ["algorithm.most_epochs=3"] if more == "+ala" else []
    ours, events = finish(Simulation(small(f"algorithm.name=cwrows{more}", *settings, *SOME)))
    parts, expected = finish(
        Simulation(small(f"algorithm.name={PARTS}{more}", "algorithm.server_momentum=0.5", *settings, *SOME))
    )
    assert leaves(ours.server) == leaves(parts.server)
    assert [(e.received, e.trained) for e in events] == [(e.received, e.trained) for e in expected]


def test_two_rounds_of_the_server_by_hand():
    """One feature, two classes, rows W = (0, 0), body 0, beta = 0.5. Client 0 has 3 samples of class 0 and 1 of class 1, client 1 has 4 of class 1.

    Round 1: client 0 sends rows (1, 2) and body 1, client 1 rows (9, 7) and body 3. Row 0 has one owner: 1. Row 1 is
    (1 * 2 + 4 * 7) / 5 = 6. Body (4 * 1 + 4 * 3) / 8 = 2. m is the whole step, as it was 0 before: rows (1, 6), body 2.
    Round 2: both send back what they received, so w~ - w = 0, and m is half of what it was: rows (1.5, 9), body 3.
    """
    task = Task(2, 2, {"body": ("body.weight",), "output": ("output.weight",)}, "output")
    zero = {"body.weight": torch.zeros(1, 1), "output.weight": torch.zeros(2, 1)}
    method, counts = CwRows(), torch.tensor([[3.0, 1.0], [0.0, 4.0]])
    state = method.init(lambda _: zero, task)
    sent = {
        "body.weight": torch.tensor([[[1.0]], [[3.0]]]),
        "output.weight": torch.tensor([[[1.0], [2.0]], [[9.0], [7.0]]]),
    }
    for rows, body in (([1.0, 6.0], 2.0), ([1.5, 9.0], 3.0)):
        state = method.aggregate(state, Uploads((0, 1), sent, torch.tensor([4, 4]), {"class_counts": counts}))
        assert state["model"]["output.weight"].flatten().tolist() == pytest.approx(rows)
        assert float(state["model"]["body.weight"]) == pytest.approx(body)
        sent = {name: torch.stack([w, w]) for name, w in state["model"].items()}


def test_a_newcomer_is_served_by_its_own_prior():
    """It never trained; the model of all with its prior is far better than without."""
    simulation = Simulation(small("algorithm.name=cwrows", "data.newcomers=2", "train.rounds=6"))
    for progress, _ in simulation.rounds(simulation.start()):
        last = progress
    welcome = simulation.welcome(last)
    simulation.close()
    assert welcome.histogram > welcome.uniform + 0.1


def test_settings_of_its_parts_are_its_own():
    made = build({"name": "cwrows", "owners": "updates", "server": "adam", "server_lr": 0.01, "head_epochs": 2})
    assert (made.owners, made.server, made.server_momentum) == ("updates", "adam", 0.5)
    assert "class_counts" not in made.extras_spec({}, Task(2, 2, {"output": ("output.weight",)}, "output"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cwrows+owners", "cwrows already contains owners"),
        ("cwrows+prior", "cwrows already contains prior"),
        ("cwrows+programme", "programme can only be added to cwfedavg"),
    ],
)
def test_what_it_has_already_is_not_added_again(name, says):
    with pytest.raises(ConfigError, match=says):
        find(name)
