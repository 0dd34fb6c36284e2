"""FedProto: prototypes of the model that is kept, the nearest one as a linear head, and Local as its limiting case."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cwfed.algorithms.fedproto import NEVER, FedProto
from cwfed.core.errors import ConfigError
from cwfed.core.types import Download, Output, Start
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import Client, uploads
from tests.conftest import bench_of, finish, leaves, small

SOME = ("train.participation=0.7", "train.client_dropout=0.2")


def notes(prototypes, known):
    return {"prototypes": torch.tensor(prototypes), "known": torch.tensor(known)}


def test_the_nearest_prototype_is_a_linear_head():
    """||f - C_j||^2 = ||f||^2 - (2 C_j f - ||C_j||^2). For f = (1, 1): 1 and 2 from (1, 0) and (0, 2)."""
    head = FedProto().head("out", notes([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], [1.0, 1.0, 0.0]))
    f = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    logits = f @ head["out.weight"].T + head["out.bias"]
    assert (2 - logits[0, :2]).tolist() == [1, 2]
    assert (-logits[1, :2]).tolist() == [1, 4]
    assert logits.argmax(1).tolist() == [0, 0], "a class without a prototype never wins, its row of zeros included"
    assert logits[1, 2] == NEVER


def test_before_the_first_prototype_it_is_the_own_model():
    own = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.ones(2)}
    got = Download((), notes([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]))
    assert FedProto().personal(got, own, Client()) == own


def test_the_pull_and_its_gradient_by_hand():
    """(1 + 4) + (0 + 4) over 3 samples of 2 features: 9/6; the third class has no prototype and is not pulled to 0."""
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    start = Start({}, notes=notes([[0.0, 0.0], [3.0, 2.0], [0.0, 0.0]], [1.0, 1.0, 0.0]))
    labels = torch.tensor([0, 1, 2])
    pull = FedProto(lambda_=2.0).penalty({}, Output(features, features, features), labels, start)
    assert pull.item() == pytest.approx(2 * 9 / 6)
    (gradient,) = torch.autograd.grad(pull, features)
    torch.testing.assert_close(gradient, 2 * 2 / 6 * torch.tensor([[1.0, 2.0], [0.0, 2.0], [0.0, 0.0]]))


@pytest.mark.parametrize(("weights", "first"), [("samples", [4.0, 3.0]), ("equal", [3.0, 2.0])])
def test_the_server_by_hand(weights, first):
    """Class 0: (1 (1, 0) + 3 (5, 4)) / 4, or the plain mean. Class 1, which nobody has, keeps its prototype. Class 2 has one
    owner: the other's row of zeros has no part in it."""
    state = notes([[9.0, 9.0], [7.0, 7.0], [0.0, 0.0]], [1.0, 1.0, 0.0])
    sent = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[5.0, 4.0], [0.0, 0.0], [2.0, 6.0]]])
    up = uploads([0, 3], [[], []], prototypes=sent, class_counts=torch.tensor([[1.0, 0.0, 0.0], [3.0, 0.0, 2.0]]))
    after = FedProto(weights=weights).aggregate(state, up)
    assert after["prototypes"].tolist() == [first, [7.0, 7.0], [2.0, 6.0]]
    assert after["known"].tolist() == [1, 1, 1]
    again = FedProto(weights=weights).aggregate(after, up.only([0]))
    assert again["prototypes"].tolist() == [[1.0, 0.0], [7.0, 7.0], [2.0, 6.0]], "it does not vanish with its owner"
    assert again["known"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_the_pull_it_is_local(engine):
    local, plain = finish(Simulation(small("algorithm.name=local", f"run.engine={engine}", *SOME)))
    off = ("algorithm.name=fedproto", "algorithm.lambda=0", "algorithm.predict=head", f"run.engine={engine}")
    ours, events = finish(Simulation(small(*off, *SOME)))
    assert leaves(ours.kept) == leaves(local.kept)
    assert [(e.received, e.loss) for e in events] == [(e.received, e.loss) for e in plain]
    pulled, _ = finish(Simulation(small(*off, "algorithm.lambda=1", *SOME)))
    assert leaves(pulled.kept) != leaves(local.kept)


def class_means(simulation, model, clients):
    """With a model, the mean hidden feature by class of these clients' training data, written out."""
    data = simulation.federation.data
    chosen = [i for c in clients for i in simulation.federation.shards[c].train]
    inputs = bench_of(simulation).samples.batch(torch.tensor(chosen).numpy())[0].flatten(1)
    hidden = torch.relu(inputs @ model["fc.weight"].T + model["fc.bias"])
    labels = torch.from_numpy(data.labels[chosen])
    return {int(k): hidden[labels == k].mean(0) for k in labels.unique()}


def test_prototypes_are_of_the_model_that_is_kept():
    """With one client C_j is its class mean, after its training; an average over the training pass is another."""
    simulation = Simulation(
        small("algorithm.name=fedproto", "run.engine=loop", "data.clients=1", "data.partition=iid", "train.rounds=2")
    )
    *_, (after, _) = simulation.rounds(simulation.start())
    expected = class_means(simulation, after.kept[0], [0])
    before = class_means(simulation, simulation.initial, [0])
    simulation.close()
    assert after.server["known"].tolist() == [1.0] * 10
    for k, mean in expected.items():
        torch.testing.assert_close(after.server["prototypes"][k], mean, rtol=1e-4, atol=1e-5)
        assert (mean - before[k]).norm() > 0.1 * mean.norm(), "the training moved them: the test could see it"


def test_of_equal_models_they_are_the_means_of_the_pooled_data():
    simulation = Simulation(
        small("algorithm.name=fedproto", "run.engine=loop", "train.lr=1e-40", "train.rounds=1", "data.partition=iid")
    )
    *_, (after, _) = simulation.rounds(simulation.start())
    pooled = class_means(simulation, simulation.initial, range(6))
    simulation.close()
    for k, mean in pooled.items():
        torch.testing.assert_close(after.server["prototypes"][k], mean, rtol=1e-4, atol=1e-6)


def test_who_is_measured_asks_the_newest_prototypes_of_all_classes():
    """Those of the server, of classes that the client has not as well; the body is its own, also where it sat out."""
    simulation = Simulation(small("algorithm.name=fedproto", "run.engine=loop", "train.participation=0.5"))
    *_, (after, event) = simulation.rounds(simulation.start())
    absent = next(c for c in after.kept if c not in event.participants)
    (model,) = simulation.engine.personal(4, after.server, [simulation.visit(absent, after.kept[absent])])
    simulation.close()
    assert torch.equal(model["output.weight"], 2 * after.server["prototypes"])
    assert torch.equal(model["fc.weight"], after.kept[absent]["fc.weight"])
    own = {int(k) for k in simulation.federation.data.labels[simulation.federation.shards[absent].train]}
    others = set(range(10)) - own
    assert any(after.server["known"][k] for k in others)
    assert all((model["output.bias"][k] > NEVER) == bool(after.server["known"][k]) for k in range(10))


def test_nothing_of_the_model_travels():
    simulation = Simulation(small("algorithm.name=fedproto", "train.rounds=1"))
    assert not simulation.guard.model
    _, (event,) = finish(simulation)
    assert event.down == event.up == 6 * 4 * (10 * 16 + 10)
    assert list(event.leaks) == ["sent"], "the class counts go up in the clear"


def unbiased(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes, bias=False))
    model.output_layer = "3"
    return model


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="lambda must not be negative"):
        FedProto(lambda_=-1.0)
    settings = (f"model.name={__name__}:unbiased", "model.options={}", "algorithm.name=fedproto", "train.rounds=1")
    with pytest.raises(ConfigError, match=r"the output layer '3' has none: set algorithm\.predict"):
        Simulation(small(*settings))
    finish(Simulation(small(*settings, "algorithm.predict=head")))
    with pytest.raises(ConfigError, match="looks at whole batches"):
        Simulation(small("algorithm.name=fedproto", "privacy.dp=sample", "run.engine=loop"))
