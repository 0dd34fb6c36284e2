"""FedDBE: the common mean feature and when it is made, the pull and its gradient, and what is personal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cwfed
from cwfed.algorithms.fedavg import FedAvg
from cwfed.algorithms.feddbe import KNOWN, MEAN, MEMORY, FedDBE
from cwfed.algorithms.fedper import FedPer, FedRep
from cwfed.algorithms.fedprox import FedProx
from cwfed.core.errors import ConfigError
from cwfed.core.types import Output, Pass, Start
from cwfed.federation.simulation import Simulation
from cwfed.runs import session
from tests.conftest import finish, leaves, small, worker_of
from tests.engine.test_vmap import assert_like_the_loop

DBE = "algorithm.name=feddbe"
M = f"output.{MEMORY}"
FEW = ("data.samples=300", "data.clients=3", "train.rounds=2", "run.engine=loop")
SOME = ("train.participation=0.7", "train.client_dropout=0.2")


@dataclass(frozen=True)
class FromTheStart(FedDBE):
    """FedDBE whose server has a common mean feature (0) before round 1."""

    def init(self, fresh, task):
        return super().init(fresh, task) | {KNOWN: torch.ones(())}


@dataclass(frozen=True)
class Nothing(FromTheStart):
    """Nothing of DBE is left: no pull, and memories that stay 0."""

    kappa: float = 0.0

    def passes(self, when, task, start):
        return (Pass(fixed=(M,)),) if when == "training" else ()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_a_pull_and_with_memories_of_zero_it_is_fedavg(engine):
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", f"run.engine={engine}", *SOME)))
    dbe, events = finish(Simulation(small(f"algorithm.name={__name__}:Nothing", f"run.engine={engine}", *SOME)))
    assert leaves(dbe.server["model"]) == leaves(fedavg.server["model"])
    assert [(e.client_loss, e.penalty) for e in events] == [(e.client_loss, e.penalty) for e in plain]
    assert [e.received.right for e in events] == [e.received.right for e in plain]


def features_of(simulation, model, client):
    """All training samples of a client through the body, by hand."""
    inputs, _ = worker_of(simulation).samples.batch(simulation.federation.shards[client].train)
    return torch.relu(inputs.flatten(1) @ model["fc.weight"].T + model["fc.bias"])


class Watched:
    """What a simulation's server was given."""

    def __init__(self, monkeypatch, cls) -> None:
        self.uploads, aggregate = [], cls.aggregate
        monkeypatch.setattr(cls, "aggregate", lambda a, state, up: self.uploads.append(up) or aggregate(a, state, up))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_round_one_is_for_the_common_mean_feature(engine, monkeypatch):
    """Who takes part trains as in FedAvg; m^g is the mean of these models' features over all of their training samples, whichever
    batch came last; and the models are thrown away."""
    more = (*FEW, "data.clients=4", "train.participation=0.5", f"run.engine={engine}")
    fedavg = Watched(monkeypatch, FedAvg)
    finish(Simulation(small("algorithm.name=fedavg", *more)))
    monkeypatch.undo()
    watched = Watched(monkeypatch, FedDBE)
    simulation = Simulation(small(DBE, *more))
    steps = simulation.rounds(simulation.start())
    after, event = next(steps)
    up = watched.uploads[0]
    assert len(event.participants) == 2
    assert leaves(up.models) == leaves(fedavg.uploads[0].models)
    assert leaves(after.server["model"]) == leaves({n: simulation.initial[n] for n in up.models}), (
        "the models of round 1 are thrown away"
    )

    means, last = [], []
    for row, client in enumerate(event.participants):
        found = features_of(simulation, {n: w[row] for n, w in up.models.items()}, client)
        means.append(found.mean(0))
        last.append(found[-10:].mean(0))
    counts = up.counts.float()
    common = (counts[:, None] * torch.stack(means)).sum(0) / counts.sum()
    torch.testing.assert_close(after.server[MEAN], common, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(after.server[MEAN], (counts[:, None] * torch.stack(last)).sum(0) / counts.sum())
    assert all(torch.equal(kept[M], torch.zeros(16)) for kept in after.kept.values())

    later, _ = next(steps)
    simulation.close()
    assert torch.equal(later.server[MEAN], after.server[MEAN]), "it is made once"
    assert not watched.uploads[1].extras[MEAN].any(), "what is sent later says nothing"
    assert leaves(later.server["model"]) != leaves(after.server["model"])
    fresh = [c for c in later.kept if c not in after.kept]
    assert all(later.kept[c][M].abs().sum() > 0 for c in fresh), "who comes later is sent it with the model"


def test_a_first_round_without_anybody_is_made_up_for():
    simulation = Simulation(small(DBE, *FEW))
    before = simulation.first_state()
    assert not before[KNOWN]
    assert not before[MEAN].any()
    simulation.close()
    _, (lost,) = finish(Simulation(small(DBE, *FEW, "train.rounds=1", "train.client_dropout=0.999999")))
    assert lost.participants == []


def output_of(features, weight, buffers=None):
    return Output(features @ weight.T, features, weight, buffers or {})


def test_the_pull_and_its_gradient_by_hand():
    """Features (1, 0) and (3, 4): mean (2, 2). m^g = (1, 4): kappa / 2 ((2 - 1)^2 + (2 - 4)^2) / 2 = 6 * 5 / 4 = 7.5.

    Gradient of the mean: kappa (a - m^g) / d = 6 (1, -2) / 2 = (3, -6); of each of the two samples: half of it.
    """
    features = torch.tensor([[1.0, 0.0], [3.0, 4.0]], requires_grad=True)
    notes = {MEAN: torch.tensor([1.0, 4.0]), KNOWN: torch.ones(())}
    output = output_of(features, torch.zeros(2, 2))
    pull = FedDBE(kappa=6.0).penalty({}, output, torch.tensor([0, 1]), Start({}, notes=notes))
    assert pull.item() == 7.5
    (gradient,) = torch.autograd.grad(pull, features)
    assert gradient.tolist() == [[1.5, -3.0], [1.5, -3.0]]
    unknown = FedDBE(kappa=6.0).penalty(
        {}, output, torch.tensor([0, 1]), Start({}, notes=notes | {KNOWN: torch.zeros(())})
    )
    assert unknown.item() == 0


def test_momentum_scales_the_gradient_and_remembers_batches():
    """mu = 1/4 and a running mean of (4, 8), which the batch of mean (2, 2) has been added to: the value is of (4, 8), the gradient
    a quarter of kappa (a - m^g) / d = 6 (3, 4) / 2 = (9, 12), shared out over two samples."""
    features = torch.tensor([[1.0, 0.0], [3.0, 4.0]], requires_grad=True)
    notes = {MEAN: torch.tensor([1.0, 4.0]), KNOWN: torch.ones(())}
    output = output_of(features, torch.zeros(2, 2), {"output.dbe_average": torch.tensor([4.0, 8.0])})
    pull = FedDBE(kappa=6.0, mean_momentum=0.25).penalty({}, output, torch.tensor([0, 1]), Start({}, notes=notes))
    assert pull.item() == 6 / 2 * (9 + 16) / 2
    (gradient,) = torch.autograd.grad(pull, features)
    assert gradient.tolist() == [[9 / 8, 12 / 8]] * 2


@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_a_training_by_hand(momentum):
    """SGD on the network, m and all, from the server's model after round 1; a starts at 0 and is (1 - mu) a + mu mean(f)."""
    simulation = Simulation(
        small(DBE, f"algorithm.mean_momentum={momentum}", "algorithm.kappa=4", *FEW, "data.clients=1", "train.lr=0.1")
    )
    worker, own = worker_of(simulation), simulation.federation.shards[0].train
    steps = simulation.rounds(simulation.start())
    first, _ = next(steps)
    common = first.server[MEAN]
    params = {n: w.clone().requires_grad_() for n, w in (first.server["model"] | first.kept[0]).items()}
    (epoch,) = worker.epochs(own, "training", 0, Pass(), 0, 2, simulation.engine.job.how)
    average, penalties = torch.zeros(16), []
    for inputs, labels in epoch:
        f = torch.relu(inputs.flatten(1) @ params["fc.weight"].T + params["fc.bias"])
        logits = (f + params[M]) @ params["output.weight"].T + params["output.bias"]
        a = (1 - momentum) * average + momentum * f.mean(0)
        pull = 4 * ((a - common) ** 2 / 2).mean()
        gradients = torch.autograd.grad(F.cross_entropy(logits, labels) + pull, list(params.values()))
        average = a.detach()
        penalties.append(pull.item())
        with torch.no_grad():
            for w, gradient in zip(params.values(), gradients, strict=True):
                w -= 0.1 * gradient
    second, event = next(steps)
    simulation.close()
    for name, w in (second.server["model"] | second.kept[0]).items():
        torch.testing.assert_close(w, params[name].detach(), rtol=1e-4, atol=1e-6)
    assert second.kept[0][M].abs().max() > 1e-4
    assert event.penalty == pytest.approx(np.mean(penalties), rel=1e-4)


def test_momentum_in_every_engine():
    assert_like_the_loop(DBE, "algorithm.mean_momentum=0.2", "data.samples=400", "data.clients=3", rounds=3)
    threads, loop = (
        finish(Simulation(small(DBE, "algorithm.mean_momentum=0.2", f"run.engine={e}", *FEW[:3])))[0]
        for e in ("threads", "loop")
    )
    assert leaves(threads.server) == leaves(loop.server)


def test_a_memory_is_a_bias_of_w_m_and_is_saved_with_the_model(tmp_path):
    """h(f + m) = W f + (b + W m): measured, saved and loaded back as that."""
    config = small(DBE, *FEW)
    session.run(config, out=tmp_path / "run")
    simulation = Simulation(config)
    *_, (progress, event) = simulation.rounds(simulation.start())
    model, test = simulation.final_model(progress, 1), simulation.federation.shards[1].test
    inputs, labels = worker_of(simulation).samples.batch(test)
    raw = simulation.federation.data.inputs[test]
    simulation.close()
    assert set(progress.kept[1]) == {M}
    assert torch.equal(model[M], progress.kept[1][M])
    assert M not in progress.server["model"]
    f = torch.relu(inputs.flatten(1) @ model["fc.weight"].T + model["fc.bias"])
    moved = f @ model["output.weight"].T + (model["output.bias"] + model["output.weight"] @ model[M])
    torch.testing.assert_close(moved, (f + model[M]) @ model["output.weight"].T + model["output.bias"])
    assert int((moved.argmax(1) == labels).sum()) == event.received.right[1]
    loaded = cwfed.load_model(tmp_path / "run", 1, pick="last")
    np.testing.assert_allclose(loaded.probabilities(raw), moved.softmax(1).numpy(), rtol=1e-4, atol=1e-6)
    newcomer = cwfed.load_model(tmp_path / "run").network.state_dict()
    assert torch.equal(newcomer[M], torch.zeros(16))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_heads_without_a_bias(engine):
    model = ("model.name=tests.algorithms.test_fedrod:without_bias", "model.options={}")
    progress, events = finish(Simulation(small(DBE, *FEW, *model, f"run.engine={engine}")))
    assert set(progress.kept[0]) == {f"3.{MEMORY}"}
    assert np.isfinite(events[-1].received.loss)


# --- over other methods


@dataclass(frozen=True)
class OverFedProx(FedDBE, FedProx):
    """DBE over FedProx."""

    mu: float = 0.5


@dataclass(frozen=True)
class OverFedPer(FedDBE, FedPer):
    """DBE over FedPer."""


@dataclass(frozen=True)
class OverFedRep(FedDBE, FedRep):
    """DBE over FedRep."""


@pytest.mark.parametrize("over", ["OverFedProx", "OverFedPer", "OverFedRep"])
def test_over_other_methods(over):
    more = ("data.samples=400", "data.clients=4", "train.rounds=3", "train.participation=0.7")
    outcomes = [
        finish(Simulation(small(f"algorithm.name={__name__}:{over}", f"run.engine={engine}", *more)))
        for engine in ("loop", "vmap")
    ]
    for progress, events in outcomes:
        assert progress.server[KNOWN]
        assert M not in progress.server["model"]
        assert all(M in kept for kept in progress.kept.values())
        assert np.isfinite(events[-1].received.loss)
    if over != "OverFedProx":
        assert all("output.weight" in kept for kept in outcomes[0][0].kept.values())
        assert "output.weight" not in outcomes[0][0].server["model"]


def test_over_cwfedavg_switched_off_it_is_cwfedavg():
    few = ("data.samples=300", "data.clients=3", "train.rounds=3", "run.engine=loop")
    plain, events = finish(Simulation(small("algorithm.name=cwfedavg", *few)))
    off, same = finish(Simulation(small(f"algorithm.name=cwfedavg+{__name__}:Nothing", *few)))
    assert leaves({n: off.server[n] for n in plain.server}) == leaves(plain.server)
    assert [(e.received.right, e.trained.right, e.loss) for e in same] == [
        (e.received.right, e.trained.right, e.loss) for e in events
    ]


def test_over_cwfedavg_without_class_wise_layers_and_wdr_it_is_feddbe():
    few = ("data.samples=300", "data.clients=3", "train.rounds=3", "run.engine=loop")
    plain, events = finish(Simulation(small(DBE, *few)))
    flat = ("algorithm.name=cwfedavg+dbe", "algorithm.layers=none", "algorithm.wdr=0")
    ours, same = finish(Simulation(small(*flat, *few)))
    assert leaves(ours.server["shared"]) == leaves(plain.server["model"])
    assert torch.equal(ours.server[MEAN], plain.server[MEAN])
    assert leaves(ours.kept) == leaves(plain.kept)
    assert [(e.received, e.trained) for e in same] == [(e.received, e.trained) for e in events]


def test_the_penalties_of_both_are_added():
    """FedProx 0.5 / 2 * 2^2 = 1 and a pull of 7.5 (as above)."""
    notes = {MEAN: torch.tensor([1.0, 4.0]), KNOWN: torch.ones(())}
    output = output_of(torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.zeros(2, 2))
    start = Start({}, {"w": torch.zeros(1)}, notes)
    found = OverFedProx(kappa=6.0).penalty({"w": torch.tensor([2.0])}, output, torch.tensor([0, 1]), start)
    assert found.item() == 8.5


@pytest.mark.parametrize("wrong", ["kappa=-1", "mean_momentum=0", "mean_momentum=1.5"])
def test_impossible_settings(wrong):
    with pytest.raises(ConfigError, match="feddbe: kappa must not be negative, and mean_momentum"):
        small(DBE, f"algorithm.{wrong}")


def test_differential_privacy_is_refused():
    with pytest.raises(ConfigError, match="feddbe has passes of its own"):
        Simulation(small(DBE, "privacy.dp=sample"))
