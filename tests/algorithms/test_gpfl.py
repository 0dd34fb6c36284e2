"""GPFL: the valve and its three losses by hand, contexts from what was received, and FedPer as its limiting case."""

from __future__ import annotations

from math import e as E
from math import exp, log, sqrt

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cwfed.algorithms import gpfl
from cwfed.algorithms.gpfl import GPFL, ValveHead, mean_embedding, valve
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Start
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import Client
from tests.conftest import finish, leaves, small

SOME = ("train.participation=0.7", "train.client_dropout=0.2")


def tensors_of(head):
    return {name: w.detach().clone() for name, w in head.named_parameters()}


def test_the_valve_by_hand():
    """Norm layers of weight 0 give their bias: gamma = (1, 0), beta = (-3, 1). T((1, 2)) = ReLU((2 - 3, 2 + 1)) = (0, 3)."""
    tensors = tensors_of(ValveHead(nn.Linear(2, 2)))
    for name, bias in (("gamma", [1.0, 0.0]), ("beta", [-3.0, 1.0])):
        tensors |= {f"{name}.2.weight": torch.zeros(2), f"{name}.2.bias": torch.tensor(bias)}
    assert valve(torch.tensor([[1.0, 2.0]]), torch.randn(2), tensors).tolist() == [[0.0, 3.0]]


def test_the_valve_is_its_modules():
    head = ValveHead(nn.Linear(5, 3))
    f, context = torch.randn(4, 5), torch.randn(5)
    expected = F.relu((head.gamma(context) + 1) * f + head.beta(context))
    torch.testing.assert_close(valve(f, context, tensors_of(head)), expected)
    head.context.data.copy_(context)
    torch.testing.assert_close(head(f), F.linear(expected, head.weight, head.bias))


def test_contexts_by_hand():
    """t = 1/4 (1, 0) + 3/4 (0, 2); g = 1/2 each; a client with as many samples of each class has t = g to the bit."""
    e = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert mean_embedding(e, torch.tensor([1.0, 3.0])).tolist() == [0.25, 1.5]
    assert mean_embedding(e).tolist() == [0.5, 1.0]
    torch.manual_seed(0)
    e = torch.randn(10, 7)
    assert torch.equal(mean_embedding(e, torch.full((10,), 13.0)), mean_embedding(e))
    assert torch.equal(mean_embedding(e, torch.zeros(10)), mean_embedding(e))


def test_contexts_are_of_the_received_embeddings():
    """Not of those that the client trained in its last round."""
    received = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    old = {"layer.weight": torch.ones(2, 2), "layer.class_embeddings": torch.full((2, 2), 9.0)}
    got = Download(({"layer.class_embeddings": received},))
    start = GPFL().begin(got, old, Client(counts=(1.0, 3.0)))
    assert start.params["layer.context"].tolist() == [0.25, 1.5]
    assert start.notes["g"].tolist() == [0.5, 1.0]
    assert torch.equal(start.notes["received"], received)
    assert torch.equal(start.params["layer.class_embeddings"], received)


def test_class_shares_are_of_all_training_samples():
    """Not only of those in full batches."""
    simulation = Simulation(small("algorithm.name=gpfl", "run.engine=loop", "train.rounds=1"))
    *_, (after, _) = simulation.rounds(simulation.start())
    (model,) = simulation.engine.personal(2, after.server, [simulation.visit(1, after.kept[1])])
    simulation.close()
    own = simulation.federation.shards[1].train
    assert len(own) % 10, "there is an incomplete batch"
    counts = np.bincount(simulation.federation.data.labels[own], minlength=10)
    shares = torch.from_numpy(counts / counts.sum()).float()
    torch.testing.assert_close(model["output.context"], shares @ after.server["model"]["output.class_embeddings"])


def guided(features, labels, e, received, **settings):
    """The guidance of a head whose valve is ReLU: norm layers of weight and bias 0, and linear layers of 0."""
    tensors = {f"layer.{n}": torch.zeros_like(w) for n, w in tensors_of(ValveHead(nn.Linear(2, len(e)))).items()}
    tensors |= {"layer.class_embeddings": torch.tensor(e), "layer.weight": torch.full((len(e), 2), 100.0)}
    start = Start({}, notes={"g": torch.zeros(2), "received": torch.tensor(received)})
    batch = Batch(torch.tensor(features), torch.tensor(labels))
    return GPFL(**settings).guidance(tensors, batch.inputs, batch, start).item()


def test_the_guidance_by_hand():
    """f = (3, 4) and (0, 1): cosines (0.6, 0.8) and (0, 1). Distances to the received e: (0, 4) and (0, 1), Frobenius sqrt(17):
    over the whole batch, no mean. Decay: ||e||^2 = 1 + 4 (and the valve's zeros); the head, of hundreds, has none."""
    given = ([[3.0, 4.0], [0.0, 1.0]], [0, 1], [[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 0.0]])
    cosine = (log(exp(0.6) + exp(0.8)) - 0.6 + log(1 + E) - 1) / 2
    assert guided(*given, lambda_=0.0, mu=0.0) == pytest.approx(cosine, rel=1e-5)
    assert guided(*given, lambda_=2.0, mu=0.0) == pytest.approx(cosine + 2 * sqrt(17), rel=1e-5)
    assert guided(*given, lambda_=0.0, mu=0.4) == pytest.approx(cosine + 0.4 / 2 * 5, rel=1e-5)


def test_the_guidance_asks_the_valve_with_the_common_context_and_the_head_with_the_clients_own():
    """T(f; g) in the second and third loss, T(f; t_i) in the first: where g and t_i differ, so do they."""
    torch.manual_seed(0)
    head = ValveHead(nn.Linear(3, 2))
    tensors, g = tensors_of(head), torch.randn(3)
    f, labels, received = torch.randn(4, 3), torch.tensor([0, 1, 1, 0]), torch.randn(2, 3)
    params = {f"layer.{n}": w for n, w in tensors.items()}
    start = Start({}, notes={"g": g, "received": received})
    found = GPFL(lambda_=0.5, mu=0.0).guidance(params, f, Batch(f, labels), start)

    def expected(context):
        common = valve(f, context, tensors)
        cosines = F.cosine_similarity(common[:, None], tensors["class_embeddings"][None], dim=2)
        return F.cross_entropy(cosines, labels) + 0.5 * (common - received[labels]).norm()

    torch.testing.assert_close(found, expected(g))
    assert not torch.allclose(found, expected(tensors["context"]))
    torch.testing.assert_close(head(f), F.linear(valve(f, tensors["context"], tensors), head.weight, head.bias))


@pytest.mark.parametrize(("classes", "least"), [(10, 0.80), (100, 2.67), (200, 3.33)])
def test_the_cosine_loss_has_a_floor(classes, least):
    """log(1 + (K - 1) e^-2): all other embeddings opposite, which a feature can have; nothing is below."""
    e = [[1.0, 0.0]] + [[-1.0, 0.0]] * (classes - 1)
    floor = log(1 + (classes - 1) * exp(-2))
    assert floor == pytest.approx(least, abs=0.005)
    assert guided([[2.0, 0.0]], [0], e, e, lambda_=0.0, mu=0.0) == pytest.approx(floor, rel=1e-4)
    torch.manual_seed(0)
    others = torch.randn(classes, 2).tolist()
    assert guided(torch.rand(8, 2).tolist(), [0] * 8, others, others, lambda_=0.0, mu=0.0) > floor


def test_the_decay_is_that_of_sgd_on_embeddings_and_valve_alone():
    """Its gradient is mu w: on the embeddings and all of the valve, on nothing else."""
    head = ValveHead(nn.Linear(3, 2))
    params = {f"layer.{n}": w.requires_grad_() for n, w in tensors_of(head).items()}
    start = Start({}, notes={"g": torch.zeros(3), "received": torch.zeros(2, 3)})
    batch = Batch(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))

    def gradients(mu):
        loss = GPFL(mu=mu).guidance(params, batch.inputs, batch, start)
        return torch.autograd.grad(loss, list(params.values()), allow_unused=True)

    for (name, w), with_, without in zip(params.items(), gradients(0.5), gradients(0.0), strict=True):
        decays = name == "layer.class_embeddings" or name.startswith(("layer.gamma.", "layer.beta."))
        if decays:
            torch.testing.assert_close(with_ - without, 0.5 * w.detach(), rtol=1e-4, atol=1e-5)
        else:
            assert with_ is without is None, name


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_valve_and_guidance_it_is_fedper(engine, monkeypatch):
    fedper, plain = finish(Simulation(small("algorithm.name=fedper", f"run.engine={engine}", *SOME)))
    monkeypatch.setattr(gpfl, "valve", lambda features, context, tensors: features)
    monkeypatch.setattr(GPFL, "guidance", lambda self, params, features, batch, start: features.new_zeros(()))
    ours, events = finish(Simulation(small("algorithm.name=gpfl", f"run.engine={engine}", *SOME)))
    body = fedper.server["model"]
    assert leaves({n: ours.server["model"][n] for n in body}) == leaves(body)
    assert leaves(ours.kept) == leaves(fedper.kept)
    assert [(e.received, e.loss) for e in events] == [(e.received, e.loss) for e in plain]


def test_what_moves_and_what_travels():
    simulation = Simulation(small("algorithm.name=gpfl", "run.engine=loop", "train.rounds=1"))
    progress, _ = finish(simulation)
    own = {"output.weight", "output.bias"}
    assert set(simulation.kept_names) == own
    assert simulation.guard.model.keys() == simulation.initial.keys() - own - {"output.context"}
    sent = progress.server["model"]
    for name in ("fc.weight", "output.class_embeddings", "output.gamma.0.weight", "output.beta.2.bias"):
        assert not torch.equal(sent[name], simulation.initial[name]), name
    assert abs(float(simulation.initial["output.class_embeddings"].std()) - 1) < 0.2, "from N(0, 1)"


def test_a_newcomer_has_the_context_of_its_histogram():
    e = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    state = {"model": {"out.class_embeddings": e}, "output": "out"}
    assert GPFL().newcomer(state, [1.0, 3.0])["out.context"].tolist() == [0.25, 1.5]
    assert GPFL().newcomer(state)["out.context"].tolist() == [0.5, 1.0]


def test_what_cannot_be():
    for setting in ({"lambda_": -1.0}, {"mu": -1.0}):
        with pytest.raises(ConfigError, match="gpfl: lambda and mu must not be negative"):
            GPFL(**setting)
    with pytest.raises(ConfigError, match="gpfl has a loss of its own"):
        Simulation(small("algorithm.name=gpfl", "privacy.dp=sample"))
