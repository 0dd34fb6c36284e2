from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from torch import nn

from cwfed.core.errors import ConfigError, CwfedError
from cwfed.core.types import nbytes
from cwfed.engine import Loop
from cwfed.federation.simulation import Simulation
from tests import processes
from tests.conftest import all_digits, finish, leaves


@pytest.mark.parametrize(("participation", "expected"), [("0.5", 3), ("1.0", 6), ("1", 6), ("2", 2), ("0.01", 1)])
def test_participation_by_fraction_or_number(participation, expected):
    _, events = finish(Simulation(all_digits(f"train.participation={participation}")))
    assert {len(e.participants) for e in events} == {expected}


def test_participants_differ_from_round_to_round_but_not_from_run_to_run():
    _, first = finish(Simulation(all_digits("train.participation=2", "train.rounds=6")))
    _, second = finish(Simulation(all_digits("train.participation=2", "train.rounds=6")))
    assert [e.participants for e in first] == [e.participants for e in second]
    assert len({tuple(e.participants) for e in first}) > 1


def test_lost_clients_cost_download_but_send_nothing():
    simulation = Simulation(all_digits("train.client_dropout=0.5", "train.rounds=6"))
    model = nbytes(simulation.fresh(0))
    _, events = finish(simulation)
    assert any(e.dropped for e in events)
    for e in events:
        assert (e.down, e.up) == (6 * model, len(e.participants) * model)


def test_evaluation_can_be_rarer_and_never_changes_the_run():
    every, _ = finish(Simulation(all_digits("train.rounds=5")))
    rare, events = finish(Simulation(all_digits("train.rounds=5", "run.evaluate_every=2")))
    assert [e.received is not None for e in events] == [False, True, False, True, True]
    assert leaves(every.server) == leaves(rare.server)


def test_evaluation_of_a_sample_of_clients():
    simulation = Simulation(all_digits("run.evaluate_clients=2"))
    _, events = finish(simulation)
    assert len(simulation.evaluated) == len(events[-1].received.right) == 2
    with pytest.raises(ConfigError, match="only 6 clients can take part"):
        Simulation(all_digits("run.evaluate_clients=7"))


def test_trained_of_an_absent_client_is_that_of_the_model_it_last_trained():
    simulation = Simulation(all_digits("algorithm.name=local", "train.participation=2", "train.rounds=4"))
    _, events = finish(simulation)
    for before, after in itertools.pairwise(events):
        for client in set(range(6)) - set(after.participants):
            assert after.trained.right[client] == before.trained.right[client]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg-ft", "fedamp", "cwfedavg"])
def test_rare_evaluation_gives_the_same_numbers_in_the_rounds_it_evaluates(algorithm):
    """Also for `trained` of clients that trained in a round without evaluation."""
    common = [f"algorithm.name={algorithm}", "train.participation=2", "train.rounds=6"]
    _, every = finish(Simulation(all_digits(*common)))
    _, rare = finish(Simulation(all_digits(*common, "run.evaluate_every=3")))
    for often, seldom in zip(every, rare, strict=True):
        if seldom.trained:
            assert (often.received, often.trained) == (seldom.received, seldom.trained)
    assert sum(e.trained is not None for e in rare) == 2


def test_received_is_what_the_server_hands_out_next():
    """The model measured as `received` in round 1 is what round 2 starts from."""
    config = all_digits("algorithm.name=fedavg", "train.rounds=1")
    simulation = Simulation(config)
    progress, (event,) = finish(simulation)
    again = Simulation(config)
    scores = again._measure_received(progress)
    again.close()
    assert [scores[c].test_right for c in range(6)] == event.received.right


def test_with_wdr_the_estimate_follows_the_true_distribution():
    _, with_wdr = finish(Simulation(all_digits("train.rounds=20", "data.samples=900", "algorithm.wdr=5")))
    _, without = finish(Simulation(all_digits("train.rounds=20", "data.samples=900", "algorithm.wdr=0")))
    assert with_wdr[-1].correlation > 0.97 > without[-1].correlation
    assert with_wdr[-1].distance < 0.25 * without[-1].distance


def test_cwfedavg_personalises_where_fedavg_cannot():
    _, cw = finish(Simulation(all_digits("train.rounds=15", "data.clients=20")))
    _, avg = finish(Simulation(all_digits("train.rounds=15", "data.clients=20", "algorithm.name=fedavg")))
    assert cw[-1].received.accuracy > avg[-1].received.accuracy + 0.05


def never_uses_its_output(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    model.spare = nn.Linear(64, classes)
    model.output_layer = "spare"
    model.forward = lambda x: model[1](model[0](x))
    return model


def in_float64(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).double()
    model.output_layer = "1"
    return model


def with_functional_dropout(shape, classes):
    class Net(nn.Module):
        output_layer = "fc"

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, classes)

        def forward(self, x):
            return self.fc(nn.functional.dropout(x.flatten(1), 0.5, self.training))

    return Net()


def with_two_outputs(shape, classes):
    class Net(nn.Sequential):
        output_layer = "1"

        def forward(self, x):
            return super().forward(x), x

    return Net(nn.Flatten(), nn.Linear(64, classes))


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [
        ("with_two_outputs", [], "must give logits, one tensor, and it gives a tuple"),
        ("never_uses_its_output", [], "never uses its output layer 'spare'"),
        ("in_float64", [], "cannot take samples of shape"),
        ("with_functional_dropout", [], "global random generator.*nn.Dropout"),
        ("with_batch_norm", ["train.batch_size=1"], "batch of one sample"),
    ],
)
def test_models_that_cannot_be_trained_are_told_so(model, more, says):
    module = "tests.engine.test_engines" if model == "with_batch_norm" else __name__
    with pytest.raises(CwfedError, match=says):
        finish(Simulation(all_digits("model.options={}", f"model.name={module}:{model}", *more)))


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [t for value in values for t in tensors(value)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["train.batch_size=500"], "larger than every client"),
        (["train.participation=7"], "only 6 clients can take part"),
        (["train.participation=5", "data.newcomers=2"], "only 4 clients can take part"),
        (["data.newcomers=6"], "leaves none of the 6 clients"),
        (["data.samples=5000"], "digits has only 1797"),
        (["algorithm.layers=conv9"], "has no layer 'conv9'"),
        (["data.classes_per_client=11"], "only 10 classes"),
    ],
)
def test_what_only_shows_with_the_data(settings, says):
    with pytest.raises(ConfigError, match=says):
        Simulation(all_digits(*settings)).start()


# --- the portrait in the last round


def test_portrait_of_fedavg_shows_the_average_and_its_weights():
    simulation = Simulation(all_digits("algorithm.name=fedavg"))
    progress, events = finish(simulation)
    assert [event.portrait is None for event in events] == [True, True, False]
    portrait, name = events[-1].portrait, simulation.task.output_weight
    sizes = [len(shard.train) for shard in simulation.federation.shards.values()]
    for row in portrait.mixture:
        np.testing.assert_allclose(row, np.array(sizes) / sum(sizes), atol=1e-3)
    norms = progress.server["model"][name].double().norm(dim=1)
    np.testing.assert_allclose(portrait.received, [norms.tolist()] * 6, rtol=1e-4)
    assert portrait.classes is None
    counts = simulation.federation.class_counts(2)
    np.testing.assert_allclose(portrait.distribution[2], counts / counts.sum(), atol=1e-5)


def test_portrait_of_cwfedavg_is_its_recipe():
    simulation = Simulation(all_digits())
    progress, events = finish(simulation)
    portrait, server = events[-1].portrait, progress.server
    assert server["recipe"].shape == (
        10,
        6,
    )  # six participants, ten classes: the state keeps the participants' models
    np.testing.assert_allclose(portrait.mixture, (server["prior"] @ server["recipe"]).numpy(), atol=1e-3)
    assert np.array(portrait.classes).shape == (10, 10)
    estimate = np.array(portrait.trained) / np.sum(portrait.trained, axis=1, keepdims=True)
    np.testing.assert_allclose(estimate, server["prior"].numpy(), atol=1e-4)


def test_portrait_leaves_out_who_sat_out_and_what_was_not_uploaded():
    _, events = finish(Simulation(all_digits("train.participation=2")))
    last = events[-1]
    trained = [client for client, row in zip(last.portrait.clients, last.portrait.trained, strict=True) if row]
    assert trained == last.participants
    assert all(len(row) == 2 for row in last.portrait.mixture)
    _, events = finish(Simulation(all_digits("algorithm.name=fednh")))
    assert events[-1].portrait.mixture is None  # its head is made at the server


def test_an_overflow_after_the_last_round_costs_the_portrait_and_not_the_run(monkeypatch):
    broken = {"fc.weight": torch.zeros(16, 64), "fc.bias": torch.zeros(16), "output.bias": torch.zeros(10)}
    broken["output.weight"] = torch.full((10, 16), torch.inf)
    simulation = Simulation(all_digits("algorithm.name=fedavg", "train.rounds=1"))
    monkeypatch.setattr(Loop, "personal", lambda self, round_, state, visits, is_tuned=False: [broken] * len(visits))
    _, (event,) = finish(simulation)
    assert event.portrait is None


def test_models_after_the_rounds_are_made_on_one_compute_thread_as_in_them(monkeypatch):
    """With two, sums of a pass on receipt have other last bits: saved models would depend on the number of cores."""
    threads, personal = torch.get_num_threads(), Loop.personal
    seen: list[int] = []
    monkeypatch.setattr(Loop, "personal", lambda *a, **k: seen.append(torch.get_num_threads()) or personal(*a, **k))
    monkeypatch.setattr(Loop, "measure", lambda *a, **k: seen.append(torch.get_num_threads()) or [])
    simulation = Simulation(all_digits("run.engine=loop", "data.newcomers=1"))
    torch.set_num_threads(2)
    try:
        progress = simulation.start()
        dict(simulation.final_models(progress).models)
        simulation.welcome(progress)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
        simulation.close()
    assert set(seen) == {1}


def test_who_leaves_the_rounds_has_its_threads_back():
    """Between rounds too: what a caller computes there is its own."""
    threads = torch.get_num_threads()
    simulation = Simulation(all_digits("train.rounds=3"))
    torch.set_num_threads(2)
    try:
        rounds = simulation.rounds(simulation.start())
        next(rounds)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
        simulation.close()


def test_a_script_may_end_in_the_middle_of_the_rounds():
    script = """
from cwfed.federation import config
from cwfed.federation.simulation import Simulation
rounds = (simulation := Simulation(config.load(None, ["model.name=mlp", "data.samples=400", "run.engine=vmap"]))).rounds(simulation.start())
next(rounds)
"""
    done = processes.run([sys.executable, "-c", script])
    assert (done.returncode, done.stderr) == (0, "")
