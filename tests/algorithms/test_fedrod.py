"""FedRoD: two losses of one forward pass that do not disturb each other, and its limiting cases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cwfed
from cwfed.algorithms.fedrod import PERSONAL, PRIOR, FedRoD
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Output, Pass, Start
from cwfed.federation.simulation import Simulation
from cwfed.runs import session
from tests.conftest import finish, leaves, small, worker_of

SOME = ("train.participation=0.7", "train.client_dropout=0.2")
ROD = "algorithm.name=fedrod"
P = f"output.{PERSONAL}"
FEW = ("data.samples=300", "data.clients=3", "train.rounds=2", "run.engine=loop")


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("start", ["copy", "zero"])
def test_without_balance_body_and_generic_head_are_fedavgs_whatever_the_personal_head_does(engine, start):
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", f"run.engine={engine}", *SOME)))
    rod, events = finish(
        Simulation(
            small(ROD, "algorithm.gamma=0", f"algorithm.personal_start={start}", f"run.engine={engine}", *SOME)
        )
    )
    assert leaves(rod.server) == leaves(fedavg.server)
    assert [(e.client_loss, e.up, e.down) for e in events] == [(e.client_loss, e.up, e.down) for e in plain]
    assert events[-1].received.accuracy > plain[-1].received.accuracy


def network(params, inputs, statistics=""):
    """One layer in training: features are inputs * s, the answer is G's."""
    features = inputs * params["s"]
    return Output(features @ params["output.weight"].T, features, params["output.weight"])


def test_both_losses_and_their_gradients_by_hand():
    """One feature of 2 (input 2, s = 1), G = 0, P = (ln 3 / 2, 0): personal logits (ln 3, 0), probabilities (3/4, 1/4).

    With counts (3, 1) the balanced softmax of g = 0 is (3/4, 1/4) too; for label 1 both gradients of the logits are
    (3/4, -3/4), and those of the weights twice that.
    """
    params = {
        "s": torch.tensor(1.0, requires_grad=True),
        "output.weight": torch.zeros(2, 1, requires_grad=True),
        f"{P}.weight": torch.tensor([[np.log(3) / 2], [0.0]], dtype=torch.float32, requires_grad=True),
    }
    start = Start({}, notes={PRIOR: torch.tensor([3.0, 1.0]).log()})
    found = FedRoD().loss(network, params, Batch(torch.full((1, 1), 2.0), torch.tensor([1])), start, "")
    assert found.loss.item() == pytest.approx(np.log(4))
    assert found.penalty.item() == pytest.approx(np.log(4))
    of_generic, of_personal = torch.autograd.grad(
        found.loss + found.penalty, (params["output.weight"], params[f"{P}.weight"])
    )
    assert of_generic.flatten().tolist() == pytest.approx([1.5, -1.5])
    assert of_personal.flatten().tolist() == pytest.approx([1.5, -1.5])


def test_the_personal_loss_reaches_neither_the_body_nor_the_generic_head():
    """The mistake of a public version; with it the gradient of the body, s, would change with P."""
    params = {
        "s": torch.tensor(1.5, requires_grad=True),
        "output.weight": torch.tensor([[1.0], [-2.0]], requires_grad=True),
        f"{P}.weight": torch.tensor([[0.7], [0.1]], requires_grad=True),
    }
    start = Start({}, notes={PRIOR: torch.tensor([3.0, 1.0]).log()})
    batch = Batch(torch.tensor([[1.0], [0.5]]), torch.tensor([1, 0]))
    found = FedRoD().loss(network, params, batch, start, "")
    common = (params["s"], params["output.weight"])
    both = torch.autograd.grad(found.loss + found.penalty, common, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(both, torch.autograd.grad(found.loss, common), strict=True))
    alone = torch.autograd.grad(found.penalty, (*common, params[f"{P}.weight"]), allow_unused=True)
    assert alone[:2] == (None, None)
    assert alone[2].abs().sum() > 0


def balanced(logits, counts, labels, gamma=1.0):
    prior = FedRoD(gamma=gamma).begin(Download(({},)), {}, Client(counts)).notes[PRIOR]
    return F.cross_entropy(logits + prior, labels)


class Client:
    def __init__(self, counts) -> None:
        self.class_counts = torch.tensor(counts)


def test_equally_many_samples_of_every_class_is_the_cross_entropy():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 3, 1, 1, 2])
    ours = torch.autograd.grad(balanced(logits, [7.0] * 4, labels), logits)[0]
    plain = torch.autograd.grad(F.cross_entropy(logits, labels), logits)[0]
    torch.testing.assert_close(ours, plain)
    unequal = torch.autograd.grad(balanced(logits, [7.0, 1.0, 1.0, 1.0], labels), logits)[0]
    assert not torch.allclose(unequal, plain)


def test_a_class_that_is_absent_gets_no_gradient_and_nothing_is_infinite():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 3, 0, 0, 3])
    loss = balanced(logits, [9.0, 0.0, 0.0, 4.0], labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert torch.equal(gradient[:, 1:3], torch.zeros(5, 2))
    assert not balanced(logits, [9.0, 0.0, 0.0, 4.0], labels, gamma=0.0).isnan(), "0 log 0"


def test_counts_are_those_of_all_training_samples():
    """Not of shuffled batches without the last, incomplete one: a class in that one would have an infinite loss."""
    simulation = Simulation(small(ROD, *FEW))
    worker, shards = worker_of(simulation), simulation.federation.shards
    assert any(len(shard.train) % 10 for shard in shards.values())
    state = simulation.first_state()
    for client, shard in shards.items():
        visit = simulation.visit(client, {})
        start = simulation.algorithm.begin(
            simulation.engine.download(state, visit), visit.own, worker.view(client, {})
        )
        labels = simulation.federation.data.labels[shard.train]
        assert start.notes[PRIOR].exp().round().tolist() == np.bincount(labels, minlength=10).tolist()
        assert start.notes[PRIOR][labels].isfinite().all()
    simulation.close()


def test_one_client_by_hand():
    """Two plain SGDs on the same batches: (body, G) on the balanced loss, P on top of both without touching them."""
    simulation = Simulation(small(ROD, *FEW, "data.clients=1", "train.rounds=1", "train.lr=0.1"))
    worker, own = worker_of(simulation), simulation.federation.shards[0].train
    counts = torch.from_numpy(simulation.federation.class_counts(0)).float()
    params = {name: w.clone().requires_grad_() for name, w in simulation.initial.items()}
    assert torch.equal(params[f"{P}.weight"], params["output.weight"]), "P starts as a copy of G"
    common = [name for name in params if not name.startswith(P)]
    (epoch,) = worker.epochs(own, "training", 0, Pass(), 0, 1, simulation.engine.job.how)
    for inputs, labels in epoch:
        hidden = torch.relu(inputs.flatten(1) @ params["fc.weight"].T + params["fc.bias"])
        generic = hidden @ params["output.weight"].T + params["output.bias"]
        of_common = torch.autograd.grad(F.cross_entropy(generic + counts.log(), labels), [params[n] for n in common])
        hidden, generic = hidden.detach(), generic.detach()
        personal = generic + hidden @ params[f"{P}.weight"].T + params[f"{P}.bias"]
        heads = [f"{P}.weight", f"{P}.bias"]
        of_personal = torch.autograd.grad(F.cross_entropy(personal, labels), [params[n] for n in heads])
        with torch.no_grad():
            for name, gradient in zip([*common, *heads], [*of_common, *of_personal], strict=True):
                params[name] -= 0.1 * gradient
    progress, _ = finish(simulation)
    for name, w in (progress.server["model"] | progress.kept[0]).items():
        torch.testing.assert_close(w, params[name].detach(), rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class FixedAtZero(FedRoD):
    """FedRoD whose personal head stays zero."""

    personal_start: str = "zero"
    gamma: float = 0.0

    def passes(self, when, task, start):
        fixed = self.keeps(tuple(f"{P}.{n}" for n in ("weight", "bias")), task)
        return (Pass(fixed=fixed),) if when == "training" else ()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_personal_head_of_zero_says_nothing(engine):
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", f"run.engine={engine}")))
    rod, events = finish(Simulation(small(f"algorithm.name={__name__}:FixedAtZero", f"run.engine={engine}")))
    assert leaves(rod.server) == leaves(fedavg.server)
    assert [(e.received.right, e.trained.right) for e in events] == [
        (e.received.right, e.trained.right) for e in plain
    ]


def test_it_predicts_with_both_heads_also_when_it_is_loaded_back(tmp_path):
    config = small(ROD, *FEW)
    session.run(config, out=tmp_path / "run")
    simulation = Simulation(config)
    *_, (progress, event) = simulation.rounds(simulation.start())
    model = simulation.final_model(progress, 1)
    test = simulation.federation.shards[1].test
    inputs, labels = worker_of(simulation).samples.batch(test)
    raw = simulation.federation.data.inputs[test]
    simulation.close()
    hidden = torch.relu(inputs.flatten(1) @ model["fc.weight"].T + model["fc.bias"])
    weight, bias = (model[f"output.{n}"] + model[f"{P}.{n}"] for n in ("weight", "bias"))
    logits = hidden @ weight.T + bias  # G(f) + P(f) = (W_G + W_P) f + b_G + b_P
    assert int((logits.argmax(1) == labels).sum()) == event.received.right[1]
    loaded = cwfed.load_model(tmp_path / "run", 1, pick="last")
    np.testing.assert_allclose(loaded.probabilities(raw), logits.softmax(1).numpy(), rtol=1e-4, atol=1e-6)
    assert set(progress.kept[1]) == {f"{P}.weight", f"{P}.bias"}
    assert not any(PERSONAL in name for name in progress.server["model"])


def test_a_newcomer_has_the_initial_personal_head():
    simulation = Simulation(small(ROD, *FEW, "data.newcomers=1"))
    *_, (progress, _) = simulation.rounds(simulation.start())
    model = simulation.final_model(progress, simulation.newcomers[0])
    simulation.close()
    assert torch.equal(model[f"{P}.weight"], simulation.initial["output.weight"])
    assert torch.equal(model["output.weight"], progress.server["model"]["output.weight"])


def without_bias(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes, bias=False))
    model.output_layer = "3"
    return model


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_heads_without_a_bias(engine):
    model = (f"model.name={__name__}:without_bias", "model.options={}")
    progress, events = finish(Simulation(small(ROD, *FEW, *model, f"run.engine={engine}")))
    assert set(progress.kept[0]) == {f"3.{PERSONAL}.weight"}
    assert np.isfinite(events[-1].received.loss)


def test_impossible_settings():
    with pytest.raises(ConfigError, match="gamma must not be negative"):
        FedRoD(gamma=-1)
    with pytest.raises(ConfigError, match=r"set train\.label_smoothing = 0"):
        Simulation(small(ROD, "train.label_smoothing=0.1"))
    with pytest.raises(ConfigError, match="fedrod has a loss of its own"):
        Simulation(small(ROD, "privacy.dp=sample"))
    Simulation(small(ROD, "algorithm.gamma=0", "train.label_smoothing=0.1")).close()
