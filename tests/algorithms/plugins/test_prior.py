"""The class prior, at the test (`prior`) and in the loss (`balanced`)."""

from __future__ import annotations

from math import log

import pytest
import torch

from cwfed import load_model
from cwfed.algorithms import build
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Output, Start, Task
from cwfed.engine.base import Call, Candidate
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from cwfed.runs import session
from tests.conftest import finish, leaves, small

TASK = Task(1, 3, {"out": ("out.weight", "out.bias")}, "out")
MODEL = {"out.weight": torch.eye(3), "out.bias": torch.tensor([0.5, 0.25, -1.0])}


def test_the_prior_by_hand():
    """n = 3, 1, 0 and eps = 1: pi = 4/7, 2/7, 1/7; less the largest, log 1, log 1/2, log 1/4, twice."""
    algorithm = build({"name": "fedavg+prior", "prior_tau": 2, "prior_eps": 1})
    found = algorithm.predictor(MODEL, [3, 1, 0], TASK)
    torch.testing.assert_close(found["out.bias"], torch.tensor([0.5, 0.25 + 2 * log(1 / 2), -1 + 2 * log(1 / 4)]))
    assert found["out.weight"] is MODEL["out.weight"]
    assert MODEL["out.bias"].tolist() == [0.5, 0.25, -1.0]


def test_no_weight_and_uniform_counts_change_nothing_bit_for_bit():
    for settings, counts in (({"prior_tau": 0}, [5, 0, 1]), ({}, [7, 7, 7])):
        algorithm = build({"name": "fedavg+prior"} | settings)
        assert leaves(algorithm.predictor(MODEL, counts, TASK)) == leaves(MODEL)


def test_a_client_of_one_class_always_says_that_class():
    """Also without any smoothing, where log 0 must not spoil the numbers."""
    algorithm = build({"name": "fedavg+prior", "prior_eps": 0})
    found = algorithm.predictor(MODEL, [0, 0, 9], TASK)
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 20 + found["out.bias"]
    assert logits.argmax(1).unique().tolist() == [2]
    assert found["out.bias"].isfinite().all()


@pytest.mark.parametrize("counts", [[1, 2], [0, 0, 0], [1, -1, 2], [float("nan"), 1, 1]])
def test_a_histogram_that_is_none(counts):
    with pytest.raises(ConfigError, match="a label histogram here is 3 numbers >= 0, not all of them 0"):
        build("fedavg+prior").predictor(MODEL, counts, TASK)


@pytest.mark.parametrize("base", ["fedavg", "fedavg-ft", "cwfedavg", "fedper"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_are_those_without_it_and_models_are_measured_with_it(base, engine):
    """Nothing of it is trained, sent or kept; scores of both phases are those of the shifted models."""
    tiny = ["model.options.hidden=8", "data.clients=4", "data.samples=300", "train.rounds=2", f"run.engine={engine}"]
    plain, without = finish(Simulation(small(f"algorithm.name={base}", *tiny)))
    simulation = Simulation(small(f"algorithm.name={base}+prior", *tiny))
    progress = None
    for progress, event in simulation.rounds(simulation.start()):
        pass
    before, after = to_tree(plain), to_tree(progress)
    for scores in (before, after):
        scores.pop("trained")
    assert leaves(before) == leaves(after)
    assert event.loss == without[-1].loss
    assert (event.up, event.down) == (without[-1].up, without[-1].down)
    for phase in ("received", "trained"):
        assert getattr(event, phase).loss < getattr(without[-1], phase).loss

    counts = simulation.federation.class_counts(1).tolist()
    raised = simulation.algorithm.log_prior(counts, 10).float()
    visit = simulation.visit(1, progress.kept.get(1, {}))
    (received,) = simulation.engine.personal(3, progress.server, [visit])
    loop = simulation.engine if engine == "loop" else simulation.engine._loop
    beneath = loop.worker.on_receipt(Call("personal", 3, progress.server), Candidate(visit))
    assert torch.equal(received["output.bias"], beneath["output.bias"] + raised)
    saved = simulation.final_model(progress, 1)
    kept = progress.kept[1] if base == "fedavg-ft" else beneath
    assert torch.equal(saved["output.bias"], kept["output.bias"] + raised)
    simulation.close()


def test_newcomers_with_a_histogram_have_it_and_others_not(tmp_path):
    tiny = ["data.clients=4", "data.samples=300", "train.rounds=2", "data.newcomers=1"]
    events = []
    session.run(small("algorithm.name=fedavg+prior", *tiny), tmp_path / "run", on_event=events.append)
    plain = load_model(tmp_path / "run").network.output.bias
    counts = [5, 0, 0, 0, 0, 0, 0, 0, 0, 5]
    known = load_model(tmp_path / "run", class_counts=counts).network.output.bias
    raised = build("fedavg+prior").log_prior(counts, 10).float()
    assert torch.equal(known, plain + raised)
    with pytest.raises(ConfigError, match="a label histogram here is 10 numbers"):
        load_model(tmp_path / "run", class_counts=[1, 2])
    (joined,) = [event for event in events if type(event).__name__ == "Newcomers"]
    assert joined.histogram > joined.uniform, "a newcomer of two classes is served by its histogram"


# --- the balanced loss


def network(params, inputs, statistics=""):
    return Output(inputs @ params["w"].T, inputs, params["w"])


def balanced_gradient(**settings):
    algorithm = build({"name": "fedavg+balanced"} | settings)

    class Data:
        class_counts = torch.tensor([3.0, 1.0, 0.0])

    from cwfed.core.types import Download

    start = algorithm.begin(Download(({},)), None, Data())
    weight = torch.tensor([[0.0], [0.0], [0.0]], requires_grad=True)
    batch = Batch(torch.ones(2, 1), torch.tensor([0, 1]))
    found = algorithm.loss(network, {"w": weight}, batch, Start({}, {}, start.notes), "")
    return found.loss.detach(), torch.autograd.grad(found.loss + found.penalty, weight)[0].flatten()


def test_the_balanced_loss_by_hand():
    """z = 0 and pi = 4/7, 2/7, 1/7: the softmax is pi; labels 0 and 1: the gradient is pi - (1/2, 1/2, 0)."""
    loss, gradient = balanced_gradient(prior_eps=1)
    assert float(loss) == pytest.approx(-(log(4 / 7) + log(2 / 7)) / 2)
    torch.testing.assert_close(gradient, torch.tensor([4 / 7 - 1 / 2, 2 / 7 - 1 / 2, 1 / 7]))


def test_a_class_that_the_client_lacks_gets_no_gradient():
    _, gradient = balanced_gradient(prior_eps=0)
    assert abs(float(gradient[2])) < 1e-37
    _, plain = balanced_gradient(prior_tau=0)
    assert float(plain[2]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_weight_it_is_what_is_beneath_it(engine):
    tiny = ["data.clients=3", "data.samples=150", "train.rounds=2", "model.options.hidden=4", f"run.engine={engine}"]
    plain, _ = finish(Simulation(small("algorithm.name=fedprox", *tiny)))
    none, _ = finish(Simulation(small("algorithm.name=fedprox+balanced", "algorithm.prior_tau=0", *tiny)))
    some, _ = finish(Simulation(small("algorithm.name=fedprox+balanced", *tiny)))
    assert leaves(plain.server) == leaves(none.server)
    assert leaves(plain.server) != leaves(some.server)


def test_equal_counts_are_what_is_beneath_it_bit_for_bit():
    algorithm = build("fedavg+balanced")
    assert algorithm.log_prior([4, 4, 4], 3).tolist() == [0, 0, 0]
