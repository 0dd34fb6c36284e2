from __future__ import annotations

from math import inf, nan

import pytest
import torch

from cwfed.algorithms.fedfomo import FedFomo, fomo_weights
from cwfed.core.errors import ConfigError
from cwfed.core.types import Download, Start
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import Client, model, task, uploads
from tests.conftest import all_digits, finish, use_algorithm

# the client wants w = (1, 0, 0): its loss is the squared distance to that
WANTS_ONE = Client(lambda w: (w - torch.tensor([1.0, 0.0, 0.0])).square().sum())


def kept(trained, reference):
    """What a client keeps: the model it trained, and the one that it trained from."""
    return trained | FedFomo().remember(Start(reference))


def test_the_reference_is_the_model_before_the_last_training_by_hand():
    # It trained from (0,0,0), loss 1, to (.5,0,0), loss 1/4: its own gain is (1 - 1/4) / (1/2) = 3/2.
    # A = (1,0,0): loss 0, distance 1 from the reference -> gain 1. B = (3,0,0): loss 4 -> 0.
    # Weights own 3/5, A 2/5 -> w = 3/5 * 1/2 + 2/5 * 1 = 0.7. (Against its own model instead, A has all the weight: w = 1.)
    own = kept(model(0.5, 0.0, 0.0), model(0.0, 0.0, 0.0))
    got = Download((model(1.0, 0.0, 0.0), model(3.0, 0.0, 0.0)))
    mixed, weights = FedFomo().mix(got, own, WANTS_ONE)
    torch.testing.assert_close(weights, torch.tensor([0.4, 0.0], dtype=torch.float64))
    torch.testing.assert_close(mixed["w"], torch.tensor([0.7, 0.0, 0.0]))


def test_where_no_model_helps_the_last_training_is_taken_back():
    # from (1,0,0), loss 0, it trained to (2,0,0), loss 1; the other's is worse still: all weights 0, w = w_ref
    own = kept(model(2.0, 0.0, 0.0), model(1.0, 0.0, 0.0))
    mixed, weights = FedFomo().mix(Download((model(3.0, 0.0, 0.0),)), own, WANTS_ONE)
    assert weights.tolist() == [0.0]
    assert mixed["w"].tolist() == [1.0, 0.0, 0.0]


def test_its_own_model_counts_once_also_where_the_server_sends_it_back():
    own = kept(model(0.5, 0.0, 0.0), model(0.0, 0.0, 0.0))
    got = Download((model(0.5, 0.0, 0.0), model(1.0, 0.0, 0.0), model(3.0, 0.0, 0.0)))
    mixed, weights = FedFomo().mix(got, own, WANTS_ONE)
    assert weights.tolist() == [0.0, pytest.approx(0.4), 0.0]
    torch.testing.assert_close(mixed["w"], torch.tensor([0.7, 0.0, 0.0]))


def test_in_a_run_the_reference_is_where_the_last_training_started():
    simulation = Simulation(all_digits("algorithm.name=fedfomo", "train.rounds=2"))
    starts = {}

    class Watched(FedFomo):
        def begin(self, got, own, data):
            start = super().begin(got, own, data)
            starts.setdefault(len(starts), start.params)
            return start

    use_algorithm(simulation, Watched())
    progress, _ = finish(simulation)
    last = list(starts.values())[-simulation.clients :]
    for client, start in enumerate(last):
        for name, w in start.items():
            assert torch.equal(progress.kept[client][f"reference.{name}"], w)
            assert not torch.equal(progress.kept[client][name], w)


def test_weights_and_mix_by_hand():
    # a client that has not trained yet: its own model is the reference and no gain.
    # own (0,0,0): loss 1. A = (1,0,0): loss 0, distance 1 -> gain 1. B = (3,0,0): loss 4 -> harmful, weight 0.
    # C = (.5,0,0): loss 1/4, distance 1/2 -> gain 3/2. Weights 2/5, 0, 3/5 -> w = 2/5 * 1 + 3/5 * 1/2 = 0.7
    got = Download((model(1.0, 0.0, 0.0), model(3.0, 0.0, 0.0), model(0.5, 0.0, 0.0)))
    mixed, weights = FedFomo().mix(got, model(0.0, 0.0, 0.0), WANTS_ONE)
    torch.testing.assert_close(weights, torch.tensor([0.4, 0.0, 0.6], dtype=torch.float64))
    torch.testing.assert_close(mixed["w"], torch.tensor([0.7, 0.0, 0.0]))


def test_a_harmful_model_gets_no_weight_and_its_own_model_is_no_gain():
    own = model(1.0, 0.0, 0.0)
    mixed, weights = FedFomo().mix(Download((model(3.0, 0.0, 0.0), model(1.0, 0.0, 0.0))), own, WANTS_ONE)
    assert weights.tolist() == [0.0, 0.0]
    assert mixed == own


def test_weights_are_finite_for_models_that_are_almost_the_same():
    weights = fomo_weights(
        torch.tensor(1.0), torch.tensor([0.5, 0.5]), torch.tensor([1e-300, 0.0], dtype=torch.float64)
    )
    assert weights.tolist() == [1.0, 0.0]


def test_a_loss_that_is_no_number_is_that_model_s_alone():
    """One bad model made all weights zero, and a reference without a loss made them NaN, and with them the client's model."""
    ones = torch.ones(3)
    assert fomo_weights(torch.tensor(2.0), torch.tensor([1.0, nan, inf]), ones).tolist() == [1.0, 0.0, 0.0]
    # anything is better than a reference beyond all bounds, whatever it loses: 1 / distance, 1 and 1/3
    lost = fomo_weights(torch.tensor(inf), torch.tensor([1.0, nan, 2.0]), torch.tensor([1.0, 1.0, 3.0]))
    torch.testing.assert_close(lost, torch.tensor([0.75, 0.0, 0.25]))
    assert fomo_weights(torch.tensor(nan), torch.tensor([nan]), ones[:1]).tolist() == [0.0]


def test_small_gains_count_as_much_as_large_ones():
    losses, distances = torch.tensor([0.75, 0.5, 2.0]), torch.tensor([1.0, 1.0, 1.0])
    for scale in (1.0, 1e-6):
        weights = fomo_weights(torch.tensor(1.0) * scale, losses * scale, distances)
        torch.testing.assert_close(weights, torch.tensor([1 / 3, 2 / 3, 0.0]))


def test_the_distance_is_that_of_all_numbers_of_the_model():
    # Both halve the loss. A moved one of three numbers by 1, B the single number of another tensor by 2: gains 2 to 1.
    own = model(0.0, 0.0, 0.0) | {"b": torch.zeros(1)}
    a, b = model(1.0, 0.0, 0.0) | {"b": torch.zeros(1)}, model(0.0, 0.0, 1e-9) | {"b": torch.full((1,), 2.0)}
    halved = Client(lambda w: 1.0 if not w.any() else 0.5)
    _, weights = FedFomo().mix(Download((a, b)), own, halved)
    torch.testing.assert_close(weights, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))


def test_everybody_gets_the_models_of_all_who_uploaded():
    algorithm = FedFomo()
    state = algorithm.init(lambda c: model(0.0, 0.0, 0.0), task(4))
    assert algorithm.send(state, 0).models == ()  # round 1: there is nothing to send
    state = algorithm.aggregate(state, uploads([1, 3], [[1, 0, 0], [3, 0, 0]]))
    assert [m["w"][0].item() for m in algorithm.send(state, 0).models] == [1.0, 3.0]


def test_with_few_downloads_the_best_are_sent_and_now_and_then_others():
    algorithm = FedFomo(downloads=2, epsilon=0.0)
    state = algorithm.init(lambda c: model(0.0), task(5))
    state = algorithm.aggregate(state, uploads(range(5), [[0], [1], [2], [3], [4]], weights=torch.zeros(5, 2)))
    assert algorithm.chosen(state, 0) == [0, 1]  # nothing is known yet: the first
    ups = uploads([0], [[0]], weights=torch.tensor([[0.25, 0.75]]))
    state = algorithm.aggregate(state, ups)
    assert state["affinity"][0].tolist() == [0.25, 0.75, 0, 0, 0]
    curious = FedFomo(downloads=2, epsilon=1.0)
    seen = {tuple(curious.chosen(state | {"round": r}, 0)) for r in range(30)}
    assert len(seen) > 3
    assert curious.chosen(state, 0) == curious.chosen(state, 0)  # a function of seed, round and client


def test_few_downloads_in_a_run_cost_what_they_say():
    simulation = Simulation(all_digits("algorithm.name=fedfomo", "algorithm.downloads=2", "train.rounds=3"))
    from cwfed.core.types import nbytes

    size = nbytes(simulation.fresh(0))
    _, events = finish(simulation)
    assert [e.down for e in events] == [0, 6 * 2 * size, 6 * 2 * size]
    assert events[-1].up == 6 * (size + 2 * 4)


def test_held_out_data_are_neither_trained_nor_tested_on():
    simulation = Simulation(all_digits("algorithm.name=fedfomo"))
    plain = Simulation(all_digits("algorithm.name=fedavg"))
    for with_holdout, without in zip(
        simulation.federation.shards.values(), plain.federation.shards.values(), strict=True
    ):
        parts = [with_holdout.train, with_holdout.holdout, with_holdout.validation, with_holdout.test]
        assert sorted(i for part in parts[:2] for i in part) == sorted(without.train)
        assert len({i for part in parts for i in part}) == sum(map(len, parts))
        assert len(with_holdout.holdout) == pytest.approx(0.2 * len(without.train), abs=1)
    simulation.close()
    plain.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["algorithm.holdout=0"], "holdout must lie between"),
        (["algorithm.downloads=99"], "only 6 clients"),
        (["algorithm.epsilon=2"], "epsilon from 0 to 1"),
        (["data.clients=700", "train.batch_size=1", "data.partition=iid"], "at least two and leave some"),
    ],
)
def test_impossible_settings(settings, says):
    with pytest.raises(ConfigError, match=says):
        Simulation(all_digits("algorithm.name=fedfomo", *settings)).start()
