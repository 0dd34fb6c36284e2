"""FedBABU: a head that never moves, tuning from what was received, and nothing left behind."""

from __future__ import annotations

import pytest
import torch

import cwfed
from cwfed.algorithms.fedbabu import FedBABU
from cwfed.core.errors import ConfigError
from cwfed.core.types import Pass
from cwfed.engine import worker
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from cwfed.runs import session
from tests.conftest import finish, leaves, small, worker_of

SOME = ("train.participation=0.7", "train.client_dropout=0.2")
BABU = "algorithm.name=fedbabu"
FEW = ("data.samples=300", "data.clients=3", "train.rounds=2", "run.engine=loop")


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_tuning_it_is_fedrep_without_head_epochs(engine):
    fedrep, plain = finish(
        Simulation(small("algorithm.name=fedrep", "algorithm.head_epochs=0", f"run.engine={engine}", *SOME))
    )
    babu, events = finish(Simulation(small(BABU, "algorithm.tune_epochs=0", f"run.engine={engine}", *SOME)))
    assert leaves(babu.server) == leaves(fedrep.server)
    assert leaves(babu.kept) == leaves(fedrep.kept)
    assert [(e.received, e.client_loss, e.up) for e in events] == [(e.received, e.client_loss, e.up) for e in plain]
    assert [e.trained for e in events] == [e.received for e in events]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_head_is_the_initial_one_for_ever_and_everywhere(engine):
    simulation = Simulation(small(BABU, f"run.engine={engine}", "algorithm.tune_epochs=1", *SOME))
    head = simulation.task.select("output")
    for progress, _ in simulation.rounds(simulation.start()):
        assert not set(head) & set(progress.server["model"])
        for kept in progress.kept.values():
            assert kept.keys() == set(head)
            assert all(torch.equal(w, simulation.initial[n]) for n, w in kept.items())
    assert not torch.equal(progress.server["model"]["fc.weight"], simulation.initial["fc.weight"])
    simulation.close()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_measuring_leaves_nothing_behind(engine):
    often, _ = finish(Simulation(small(BABU, "algorithm.tune_epochs=1", f"run.engine={engine}", *SOME)))
    rarely, _ = finish(
        Simulation(
            small(BABU, "algorithm.tune_epochs=1", "run.evaluate_every=3", f"run.engine={engine}", *SOME),
        )
    )
    never_tuned, _ = finish(Simulation(small(BABU, "algorithm.tune_epochs=0", f"run.engine={engine}", *SOME)))
    assert leaves(to_tree(often)) == leaves(to_tree(rarely))
    assert leaves(often.server) == leaves(never_tuned.server)


def test_one_epoch_on_everything_from_fedavgs_model_is_fine_tuned_fedavg(monkeypatch):
    """Where both draw the same batches: what is tuned after round t is what fedavg-ft trains in round t + 1."""
    monkeypatch.setattr(worker, "purpose", lambda of, when, index: of)
    _, ours = finish(
        Simulation(small(BABU, "algorithm.personal_layers=none", "algorithm.tune_epochs=1", *FEW, "train.rounds=3"))
    )
    _, theirs = finish(Simulation(small("algorithm.name=fedavg-ft", *FEW, "train.rounds=3")))
    assert [e.received for e in ours] == [e.received for e in theirs]
    assert [e.trained for e in ours[:-1]] == [e.trained for e in theirs[1:]]


def sgd(params, names, batches, lr):
    """Plain SGD on the cross-entropy of the small MLP, written out."""
    params = {name: w.clone().requires_grad_() for name, w in params.items()}
    for inputs, labels in batches:
        hidden = torch.relu(inputs.flatten(1) @ params["fc.weight"].T + params["fc.bias"])
        logits = hidden @ params["output.weight"].T + params["output.bias"]
        loss = torch.nn.functional.cross_entropy(logits, labels)
        gradients = torch.autograd.grad(loss, [params[n] for n in names])
        with torch.no_grad():
            for name, gradient in zip(names, gradients, strict=True):
                params[name] -= lr * gradient
    return {name: w.detach() for name, w in params.items()}


BODY, HEAD = ("fc.weight", "fc.bias"), ("output.weight", "output.bias")


@pytest.mark.parametrize(("tuned", "names"), [("all", (*BODY, *HEAD)), ("head", HEAD), ("body", BODY)])
def test_a_round_and_the_tuning_by_hand(tuned, names):
    """The round moves the body alone; tuning starts from the averaged body and the initial head, also at a client that
    has just trained (from its own trained body it would be another model)."""
    simulation = Simulation(small(BABU, f"algorithm.tuned={tuned}", "algorithm.tune_epochs=2", *FEW))
    worker, how, shards = worker_of(simulation), simulation.engine.job.how, simulation.federation.shards
    steps = simulation.rounds(simulation.start())
    after, _ = next(steps)
    trained = {}
    for client in range(3):
        (epoch,) = worker.epochs(shards[client].train, "training", 0, Pass(), client, 1, how)
        trained[client] = sgd(simulation.initial, BODY, epoch, how.lr)
    sizes = torch.tensor([len(shards[c].train) for c in range(3)], dtype=torch.float64)
    for name in BODY:
        mean = sum(p * trained[c][name].double() for c, p in enumerate(sizes / sizes.sum()))
        torch.testing.assert_close(after.server["model"][name], mean.float(), rtol=1e-4, atol=1e-6)

    (epoch,) = worker.epochs(shards[0].train, "test", 0, Pass(epochs=2), 0, 2, how)
    expected = sgd(simulation.initial | after.server["model"], names, epoch, how.lr)
    visit = simulation.visit(0, after.kept[0])
    (model,) = simulation.engine.personal(2, after.server, [visit], is_tuned=True)
    (received,) = simulation.engine.personal(2, after.server, [visit])
    simulation.close()
    assert leaves({n: received[n] for n in BODY}) == leaves(after.server["model"])
    for name, w in model.items():
        torch.testing.assert_close(w, expected[name], rtol=1e-4, atol=1e-6)
        assert torch.equal(w, received[name]) == (name not in names)


def test_a_client_that_never_took_part_is_tuned_too(tmp_path):
    """Its saved model is not the untuned one; `received` is measured before, `trained` after the tuning."""
    simulation = Simulation(small(BABU, *FEW, "train.participation=1", "data.newcomers=1"))
    *_, (progress, event) = simulation.rounds(simulation.start())
    (newcomer,) = simulation.newcomers
    model = simulation.final_model(progress, newcomer)
    simulation.close()
    assert not torch.equal(model["output.weight"], simulation.initial["output.weight"])
    assert event.trained.accuracy > event.received.accuracy


def test_the_saved_model_is_the_tuned_one(tmp_path):
    config = small(BABU, *FEW)
    summary = session.run(config, out=tmp_path / "run")
    simulation = Simulation(config)
    progress, _ = finish(simulation)
    simulation = Simulation(config)
    model = simulation.final_model(progress, 1)
    simulation.close()
    loaded = cwfed.load_model(tmp_path / "run", 1, pick="last").network.state_dict()
    assert leaves(dict(loaded)) == leaves({name: model[name] for name in loaded})
    assert summary["reported"]["phase"] == "trained"


def test_impossible_settings():
    with pytest.raises(ConfigError, match="tune_epochs must not be negative"):
        FedBABU(tune_epochs=-1)
    with pytest.raises(ConfigError, match="fedbabu: personal_layers = 'all' leaves no body to train"):
        Simulation(small(BABU, "algorithm.personal_layers=all"))
    with pytest.raises(
        ConfigError, match="fedbabu: tuned = \"head\", but with personal_layers = 'none' there is no head"
    ):
        Simulation(small(BABU, "algorithm.personal_layers=none", "algorithm.tuned=head"))
    with pytest.raises(ConfigError, match="1,000,000,000 epochs or steps: at most 1,000,000"):
        Simulation(small(BABU, "algorithm.tune_epochs=1000000000"))
    with pytest.raises(ConfigError, match=r"algorithm\.tuned"):
        small(BABU, "algorithm.tuned=tail")
    with pytest.raises(ConfigError, match="fedbabu has passes of its own"):
        Simulation(small(BABU, "privacy.dp=sample"))
