"""FedAS: alignment, the Fisher number and its weights by hand; without them it is FedPer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cwfed.algorithms.fedas import PROTOTYPES, FedAS, apart
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Output, Start
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import model, task, tiny, uploads
from tests.conftest import finish, leaves, worker_of

SOME = ("train.participation=0.7", "train.client_dropout=0.2")
PLAIN = ("algorithm.align_epochs=0", "algorithm.weights=samples")


def run(*settings: str):
    return finish(Simulation(tiny("algorithm.name=fedas", *settings)))


def test_the_distance_from_the_prototypes_by_hand():
    """Class 0, c = (2, 1): samples (1, 2) and (3, 0) are 1 off in every coordinate: mean 1. Class 1, c = 0: (0, 1): 0.5.

    (The mean of the two samples of class 0 *is* c: who aligns means of a batch finds nothing to do there.)
    """
    features = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]], requires_grad=True)
    labels, prototypes = torch.tensor([0, 0, 1]), torch.tensor([[2.0, 1.0], [0.0, 0.0]])
    distance = apart(features, labels, prototypes)
    assert distance.item() == 1.5
    (gradient,) = torch.autograd.grad(distance, features)
    # 2 (f - c) / (2 coordinates * samples of the class)
    assert gradient.tolist() == [[-0.5, 0.5], [0.5, -0.5], [0.0, 1.0]]


def test_one_sample_per_class_has_no_gradient_towards_its_own_class_mean():
    features = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    distance = apart(features, torch.tensor([2, 0, 1]), features.detach()[[1, 2, 0]])
    assert distance.item() == 0
    assert not torch.autograd.grad(distance, features)[0].any()


def test_the_weights_by_hand():
    """F = 1 and 3: (1 * 10 + 3 * 20) / 4 = 17.5. All zero: by samples, (1 * 10 + 4 * 20) / 5 = 18. Equal: 15."""
    for weights, fisher, expected in (
        ("fisher", [1.0, 3.0], 17.5),
        ("fisher", [0.0, 0.0], 18.0),
        ("fisher", [0.0, 1e-45], 20.0),
        ("samples", None, 18.0),
        ("equal", None, 15.0),
    ):
        extras = {} if fisher is None else {"fisher": torch.tensor(fisher)}
        up = uploads([0, 1], [[10.0], [20.0]], counts=[1, 4], **extras)
        assert FedAS(weights=weights).aggregate({"model": model(0.0)}, up)["model"]["w"].tolist() == [expected]
    assert set(FedAS().extras_spec({}, task(2))) == {"fisher"}
    assert FedAS(weights="equal").extras_spec({}, task(2)) == {}


def linear_model(shape, classes):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, classes))
    network.output_layer = "2"
    return network


def test_the_fisher_number_by_hand():
    """A linear network of zero weights and a bias: p is uniform, so a batch's gradient of the output bias is mean(p - e_y),
    that of its weights the same times the features, here 1; nothing reaches the body through zero weights."""
    config = tiny(
        "algorithm.name=fedas", f"model.name={__name__}:linear_model", "model.options={}", "run.engine=loop"
    )
    simulation = Simulation(config)
    params = {name: torch.zeros_like(w) for name, w in simulation.initial.items()}
    params["1.bias"] = torch.ones(6)
    own = simulation.federation.shards[1].train
    expected = 0.0
    for at in range(0, len(own) - 15, 16):
        y = simulation.federation.data.labels[own[at : at + 16]]
        mean = 0.1 - np.eye(10)[y].mean(0)
        expected += (1 + 6) * (mean**2).sum()
    view = worker_of(simulation).view(1, {})
    assert len(view.squared_gradients(params, 16)) == len(own) // 16
    fisher = simulation.algorithm.finish(params, Start({}), view)["fisher"]
    simulation.close()
    assert float(fisher) == pytest.approx(expected, rel=1e-6)
    assert (fisher.dtype, fisher.shape) == (torch.float32, ())


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_alignment_and_by_samples_it_is_fedper(engine):
    fedper, plain = finish(Simulation(tiny("algorithm.name=fedper", f"run.engine={engine}", *SOME)))
    fedas, events = run(*PLAIN, f"run.engine={engine}", *SOME)
    assert leaves(fedas.server) == leaves(fedper.server)
    for client, head in fedper.kept.items():
        assert leaves({name: fedas.kept[client][name] for name in head}) == leaves(head)
    assert [(e.received, e.loss, e.up, e.down) for e in events] == [(e.received, e.loss, e.up, e.down) for e in plain]


def test_with_all_its_layers_common_and_by_samples_it_is_fedavg():
    fedavg, _ = finish(Simulation(tiny("algorithm.name=fedavg", "run.engine=loop")))
    fedas, _ = run(*PLAIN, "algorithm.personal_layers=none", "run.engine=loop")
    assert leaves(fedas.server) == leaves(fedavg.server)


def begun(simulation, progress, client):
    """A client's start of the next round before and after its passes on receipt."""
    engine, visit = simulation.engine, simulation.visit(client, progress.kept.get(client, {}))
    worker = worker_of(simulation)
    start = simulation.algorithm.begin(engine.download(progress.server, visit), visit.own, worker.view(client, {}))
    return start, engine.tasks.received(progress.round + 1, visit, start)


def test_alignment_moves_the_received_body_towards_the_old_features_and_leaves_the_head():
    simulation = Simulation(tiny("algorithm.name=fedas", "algorithm.rate=0.1", "run.engine=loop"))
    for progress, _ in simulation.rounds(simulation.start()):
        pass
    for client in (0, 4):
        before, after = begun(simulation, progress, client)
        own, body = progress.kept[client], progress.server["model"]
        assert sorted(body) == ["fc.bias", "fc.weight"]
        view = worker_of(simulation).view(client, {})
        old = view.class_moments(own)[0]
        torch.testing.assert_close(before.notes[PROTOTYPES], old)
        for name, w in own.items():
            if name in body:
                assert torch.equal(before.params[name], body[name])
                assert not torch.equal(after.params[name], body[name])
            else:
                assert torch.equal(before.params[name], w), "the server has no part in the head"
                assert torch.equal(after.params[name], w), "and alignment neither"
        held = view.class_counts > 0
        far, near = (float((view.class_moments(start.params)[0] - old)[held].norm()) for start in (before, after))
        assert near < far
    simulation.close()


def test_every_client_receives_the_same_body_whoever_was_served_before():
    """The third client's visit alone, and after two others: the same bits; and the server's state is what it was."""
    simulation = Simulation(tiny("algorithm.name=fedas", "run.engine=loop"))
    progress, _ = next(simulation.rounds(simulation.start()))
    was = leaves(progress.server)

    def train(clients):
        out = {n: torch.empty(len(clients), *w.shape) for n, w in simulation.initial.items()}
        visits = [simulation.visit(c, progress.kept[c]) for c in clients]
        visited = simulation.engine.visit(2, progress.server, visits, out)
        return leaves({n: w[-1] for n, w in out.items()} | visited[-1].extras)

    assert train([0, 1, 2]) == train([2])
    assert leaves(progress.server) == was
    simulation.close()


def test_measuring_changes_nothing_and_what_was_measured_is_what_the_next_round_starts_from():
    often, _ = run("run.engine=loop", *SOME)
    rarely, _ = run("run.engine=loop", "run.evaluate_every=2", *SOME)
    assert leaves(to_tree(often)) == leaves(to_tree(rarely))
    simulation = Simulation(tiny("algorithm.name=fedas", "run.engine=loop"))
    (measured,) = simulation.engine.personal(3, often.server, [simulation.visit(1, often.kept[1])])
    assert leaves(begun(simulation, often, 1)[1].params) == leaves(measured)
    trained = simulation.final_model(often, 1)
    assert leaves(trained) == leaves(often.kept[1]), "reported is what the client trained last"
    simulation.close()


def test_the_loss_of_the_alignment_asks_the_features_and_that_of_training_the_labels():
    def network(params, inputs, statistics=""):
        return Output(torch.zeros(len(inputs), 2), inputs, params["w"])

    batch = Batch(torch.tensor([[2.0, 0.0]]), torch.tensor([1]))
    start = Start({}, notes={PROTOTYPES: torch.zeros(2, 2)})
    assert FedAS().loss(network, model(0.0), batch, start, "align").loss.item() == 2.0
    assert FedAS().loss(network, model(0.0), batch, start, "").loss.item() == pytest.approx(0.6931472)


def only_an_output(shape, classes):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    network.output_layer = "1"
    return network


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["algorithm.align_epochs=-1"], "align_epochs and rate must not be negative"),
        (["algorithm.batch_size=0"], "batch_size at least 1"),
        (["algorithm.weights=best"], "algorithm.weights = 'best' is not possible"),
        ([f"model.name={__name__}:only_an_output", "model.options={}"], "no layer of this model is shared"),
        (["privacy.dp=sample"], "of its own: choose another algorithm"),
    ],
)
def test_impossible_settings_are_one_sentence_before_round_1(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Simulation(tiny("algorithm.name=fedas", *settings))
