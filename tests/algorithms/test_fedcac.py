"""FedCAC: masks, overlaps and merged models by hand, and its limiting cases bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cwfed.algorithms.fedcac import MASK, FedCAC, critical, differing, packed, unpacked
from cwfed.core.errors import ConfigError
from cwfed.core.types import Start
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import Client, model, task, tiny, uploads
from tests.conftest import finish, leaves

SOME = ("train.participation=0.7", "train.client_dropout=0.2")


def run(*settings: str):
    return finish(Simulation(tiny("algorithm.name=fedcac", *settings)))


def bits(*masks: str) -> torch.Tensor:
    """Packed masks, one row each, from texts of 0 and 1."""
    return torch.stack([packed([torch.tensor([c == "1" for c in mask])]) for mask in masks])


def test_the_sensitivity_and_its_mask_by_hand():
    """|w_after - w_before| * |w_after|: (1 * 2, 2 * 3, 0 * 9, 4 * 1) = (2, 6, 0, 4): half of them are places 1 and 3."""
    client = Client()
    client.parameters = ("w",)
    after, before = model(2.0, -3.0, 9.0, 1.0), Start(model(1.0, -1.0, 9.0, -3.0))
    assert torch.equal(FedCAC().finish(after, before, client)[MASK], bits("0101")[0])
    # by the change alone it would be the same places, by the weight alone 1 and 2


@pytest.mark.parametrize(
    ("share", "places"), [(0.0, []), (0.2, [3]), (0.5, [1, 3]), (0.6, [1, 3, 4]), (1.0, [0, 1, 2, 3, 4])]
)
def test_how_many_are_critical(share, places):
    """round(tau n), the largest; of equal ones the first, so that a tensor that did not change has no more than others."""
    s = torch.tensor([0.0, 2.0, 0.0, 5.0, 1.0])
    assert critical(s, share).nonzero().flatten().tolist() == places
    assert critical(torch.zeros(5), share).sum() == len(places)


def test_masks_are_one_bit_per_parameter_and_come_back():
    rng = np.random.default_rng(0)
    like = {"a": torch.zeros(3, 5), "b": torch.zeros(2), "c": torch.zeros(())}
    masks = {name: torch.from_numpy(rng.random(w.numel()) < 0.5) for name, w in like.items()}
    sent = packed(list(masks.values()))
    assert (sent.dtype, len(sent)) == (torch.uint8, 3)  # 18 bits
    back = unpacked(sent, like)
    assert all(torch.equal(back[name].flatten(), mask) for name, mask in masks.items())
    assert back["a"].shape == (3, 5)


def test_overlaps_and_their_threshold_by_hand():
    """Three masks of 4 bits, of which 2 are set: 1100, 1010, 0011 differ in 2, 4 and 2 bits.

    o = 1 - d / 4: 1/2, 0, 1/2; mean 1/3, max 1/2. With beta = 2, T_1 = 1/3 + 1/2 (1/6) = 5/12: pairs (0, 1) and (1, 2) are above.
    T_2 = 1/2, which they still reach; T_3 = 7/12: nobody.
    """
    differ = differing(bits("1100", "1010", "0011"))
    assert differ.tolist() == [[0, 2, 4], [2, 0, 2], [4, 2, 0]]
    near, alone = [[1, 1, 0], [1, 1, 1], [0, 1, 1]], torch.eye(3).int().tolist()
    fedcac = FedCAC(beta=2.0)
    assert [fedcac.together(differ, t).int().tolist() for t in (1, 2, 3)] == [near, near, alone]


def test_equal_masks_overlap_by_one_in_every_round():
    differ = differing(bits(*["0110"] * 7))
    assert not differ.any()
    for number in (1, 170, 1000):
        assert FedCAC().together(differ, number).all()
    assert FedCAC().together(differ[:1, :1], 1).tolist() == [[True]]


def test_what_clients_are_sent_by_hand():
    """u_0 = (w_0 + w_1) / 2 and so on as above; the others' numbers are g = mean of all = (5, 6, 7, 8)."""
    fedcac = FedCAC(beta=2.0)
    state = fedcac.init(lambda _: model(0.0, 0.0, 0.0, 0.0), task(4))
    w = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]]
    after = fedcac.aggregate(state, uploads([0, 1, 3], w, **{MASK: bits("1100", "1010", "0011")}))

    def sent(state):
        return [fedcac.send(state, client).model["w"].tolist() for client in range(4)]

    def approx(rows):  # thirds are added in another order on other CPUs
        return [pytest.approx(row, rel=1e-6) for row in rows]

    g = [5.0, 6.0, 7.0, 8.0]
    assert sent(after) == approx([[3.0, 4.0, 7.0, 8.0], [5.0, 6.0, 7.0, 8.0], g, [5.0, 6.0, 9.0, 10.0]])
    assert sent(state) == [[0.0] * 4] * 4
    # client 0 alone: a new mask and u_0; 1 and 3 keep theirs and get the new g; 2 never took part
    last = fedcac.aggregate(after, uploads([0], [[0.0, 1.0, 2.0, 3.0]], **{MASK: bits("0110")}))
    g = [0.0, 1.0, 2.0, 3.0]
    assert sent(last) == approx([g, [5.0, 1.0, 7.0, 3.0], g, [0.0, 1.0, 9.0, 10.0]])
    assert (after["round"], last["round"]) == (1, 2)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_nothing_critical_is_fedavg(engine):
    fedavg, plain = finish(Simulation(tiny("algorithm.name=fedavg", f"run.engine={engine}", *SOME)))
    fedcac, events = run("algorithm.tau=0", f"run.engine={engine}", *SOME)
    assert leaves(fedcac.server["model"]) == leaves(fedavg.server["model"])
    assert [(e.loss, e.trained.right, e.received.right) for e in events] == [
        (e.loss, e.trained.right, e.received.right) for e in plain
    ]


@dataclass(frozen=True)
class Alone(FedCAC):
    """A threshold above every overlap."""

    def together(self, differ, number):
        return torch.eye(len(differ), dtype=torch.bool)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_all_critical_and_a_threshold_above_every_overlap_is_local(engine):
    """All take part: one who comes later begins with g here, and with the initial model there."""
    local, alone = finish(Simulation(tiny("algorithm.name=local", f"run.engine={engine}")))
    simulation = Simulation(tiny(f"algorithm.name={__name__}:Alone", "algorithm.tau=1", f"run.engine={engine}"))
    fedcac, events = finish(simulation)
    for client, kept in local.kept.items():
        assert leaves(simulation.algorithm.send(fedcac.server, client).model) == leaves(kept)
    assert [e.client_loss for e in events] == [e.client_loss for e in alone]


def test_all_critical_is_the_plain_mean():
    fedcac = FedCAC(tau=1.0)
    state = fedcac.init(lambda _: model(0.0), task(2))
    up = uploads([0, 1], [[1.0], [3.0]], counts=[1, 99], **{MASK: bits("1", "1")})
    after = fedcac.aggregate(state, up)
    assert [fedcac.send(after, c).model["w"].tolist() for c in (0, 1)] == [[2.0], [2.0]]
    assert after["model"]["w"].tolist() == pytest.approx([2.98])


def test_after_round_1_critical_numbers_are_not_the_initial_ones():
    simulation = Simulation(tiny("algorithm.name=fedcac", "train.rounds=1", "run.engine=loop"))
    progress, _ = finish(simulation)
    for client in range(6):
        sent = simulation.algorithm.send(progress.server, client).model["output.weight"]
        assert (sent != simulation.initial["output.weight"]).float().mean() > 0.95


def test_the_masks_are_counted_in_the_traffic():
    _, plain = finish(Simulation(tiny("algorithm.name=fedavg")))
    simulation = Simulation(tiny("algorithm.name=fedcac"))
    _, events = finish(simulation)
    parameters = sum(w.numel() for w in simulation.initial.values())
    assert [e.up - p.up for e, p in zip(events, plain, strict=True)] == [6 * -(-parameters // 8)] * 2
    assert [e.down for e in events] == [p.down for p in plain]


def test_running_statistics_are_averaged_and_have_no_mask():
    norm = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}", "run.engine=loop")
    simulation = Simulation(tiny("algorithm.name=fedcac", *norm))
    progress, _ = finish(simulation)
    assert set(progress.server["own"]) == set(simulation.task.parameters)
    for client in (0, 5):
        sent = simulation.algorithm.send(progress.server, client).model
        assert torch.equal(sent["2.running_var"], progress.server["model"]["2.running_var"])


@pytest.mark.parametrize("wrong", ["tau=-0.1", "tau=1.1", "beta=0", "beta=-1"])
def test_impossible_settings(wrong):
    with pytest.raises(ConfigError, match="fedcac: tau must be from 0 to 1, beta above 0"):
        tiny("algorithm.name=fedcac", f"algorithm.{wrong}")
