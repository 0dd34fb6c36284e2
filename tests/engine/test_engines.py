"""The engines: same bits however many workers, and what happens inside one client."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from cwfed.core.errors import ConfigError, RunError
from cwfed.core.types import Pass
from cwfed.data import Dataset, Federation, Shard
from cwfed.engine.base import Call
from cwfed.engine.loop import Loop
from cwfed.engine.worker import LocalTraining, batches
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from tests.conftest import all_digits, finish, leaves, two_blobs, worker_of


def with_dropout(shape, classes):
    """A user's model with dropout, the usual source of order-dependent randomness."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, classes))
    model.output_layer = "4"
    return model


def with_batch_norm(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes))
    model.output_layer = "4"
    return model


def outcome(*settings):
    config = all_digits("model.options={}", "data.samples=400", *settings)
    progress, events = finish(Simulation(config))
    return leaves(to_tree(progress)), [(e.loss, e.received, e.trained) for e in events]


@pytest.mark.parametrize(
    "model",
    [
        "with_dropout",
        "with_dropout_2d",
        "with_batch_norm",
        "with_cumulative_batch_norm",
        "with_attention",
        "with_lstm",
        "with_other_draws",
    ],
)
def test_same_bits_for_any_number_of_workers(model):
    name = f"model.name={__name__}:{model}"
    loop = outcome(name, "run.engine=loop")
    for workers in (2, 5):
        assert outcome(name, "run.engine=threads", f"run.workers={workers}") == loop


def with_dropout_2d(shape, classes):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(8 * 36, classes))
    model.output_layer = "3"
    return model


def with_cumulative_batch_norm(shape, classes):
    """momentum=None averages over all batches by a count that is a whole number, not a statistic."""
    norm = nn.BatchNorm1d(32, momentum=None)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, classes))
    model.output_layer = "4"
    return model


class Rows(nn.Module):
    """The rows of an image as a sequence, through a layer that draws inside itself."""

    output_layer = "output"

    def __init__(self, classes, inside):
        super().__init__()
        self.inside, self.output = inside, nn.Linear(8, classes)

    def forward(self, images):
        found = self.inside(images.flatten(1).unflatten(1, (8, 8)))
        return self.output((found[0] if isinstance(found, tuple) else found).mean(1))


def with_attention(shape, classes):
    """torch's layer as it comes: dropout 0.1 behind both halves, and inside the attention."""
    return Rows(classes, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))


def with_lstm(shape, classes):
    return Rows(classes, nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True))


def with_other_draws(shape, classes):
    layers = [nn.Linear(8, 8), nn.RReLU(), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)]
    return Rows(classes, nn.Sequential(*layers, nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)))


@pytest.mark.parametrize("model", ["with_attention", "with_lstm", "with_other_draws"])
def test_what_modules_draw_inside_themselves_is_seeded(model):
    """By round and client alone; the masks are others with another seed, and gone when nobody trains."""
    simulation = Simulation(all_digits("model.options={}", f"model.name={__name__}:{model}", "run.engine=loop"))
    worker = worker_of(simulation)
    worker.load(simulation.fresh(0))
    inputs, _ = worker.samples.batch(np.arange(20))

    def forward(seed):
        worker._generator.manual_seed(seed)
        return worker.forward(inputs).logits

    before = torch.get_rng_state()
    worker.model.train()
    assert torch.equal(forward(1), forward(1))
    assert not torch.equal(forward(1), forward(2))
    worker.model.eval()
    assert torch.equal(forward(1), forward(2))
    assert torch.equal(before, torch.get_rng_state())


def test_attention_without_seeding_would_be_refused(monkeypatch):
    """The layer does draw from the global generator: were it left alone, its runs could not be repeated."""
    monkeypatch.setattr("cwfed.engine.draws.DRAW_INSIDE", ())
    with pytest.raises(RunError, match="global random generator"):
        outcome(f"model.name={__name__}:with_attention", "run.engine=loop")


def test_a_model_with_attention_runs_by_default():
    simulation = Simulation(all_digits("model.options={}", f"model.name={__name__}:with_attention"))
    assert simulation.engine.name == "loop"
    assert "random" in simulation.engine.why
    finish(simulation)


def test_dropout_really_drops():
    config = all_digits("model.options={}", f"model.name={__name__}:with_dropout", "run.engine=loop")
    simulation = Simulation(config)
    worker = worker_of(simulation)
    worker.load(simulation.fresh(0))
    inputs, _ = worker.samples.batch(np.arange(50))
    worker.model.train()
    features = worker.forward(inputs).features
    assert 0.4 < (features == 0).float().mean() < 0.95
    worker.model.eval()
    assert torch.equal(worker.forward(inputs).features, worker.forward(inputs).features)


def test_local_statistics_stay_with_the_client_and_travel_nowhere():
    name = f"model.name={__name__}:with_batch_norm"
    local, _ = finish(
        Simulation(all_digits("model.options={}", name, "algorithm.name=fedavg", "train.batch_norm=local"))
    )
    average, _ = finish(
        Simulation(all_digits("model.options={}", name, "algorithm.name=fedavg", "train.batch_norm=average"))
    )
    assert not any("running" in n for n in local.server["model"])
    assert sorted(local.kept[0]) == ["2.running_mean", "2.running_var"]
    assert not torch.equal(local.kept[0]["2.running_mean"], local.kept[1]["2.running_mean"])
    assert "2.running_mean" in average.server["model"]
    assert average.kept == {}


@pytest.mark.parametrize("policy", ["local", "average"])
def test_class_wise_on_all_layers_works_with_batch_norm(policy):
    name = f"model.name={__name__}:with_batch_norm"
    config = all_digits(
        "model.options={}", name, "algorithm.layers=all", f"train.batch_norm={policy}", "train.rounds=8"
    )
    progress, events = finish(Simulation(config))
    assert events[-1].received.accuracy > 0.5
    assert {"2.weight", "2.bias"} <= set(progress.server["basis"])
    assert not any("running" in n for n in progress.server["basis"])


def test_measuring_many_clients_of_one_model_together_is_measuring_each():
    """Forty clients share tasks and batches; the scores are those of each alone."""
    simulation = Simulation(all_digits("data.clients=40", "algorithm.name=fedavg", "train.batch_size=5"))
    progress = simulation.start()
    together = simulation._measure_received(progress)
    worker = worker_of(simulation)
    worker.load(simulation.fresh(0))
    for client, score in together.items():
        shard = simulation.federation.shards[client]
        right, loss = worker.measure(shard.test)
        assert (score.test_right, score.test_loss) == (right.sum(), pytest.approx(loss.sum(), rel=1e-5))
        assert score.validation_right == worker.measure(shard.validation)[0].sum()
    simulation.close()


def test_one_sgd_step_by_hand():
    """One client, one batch of all its samples: w - lr * gradient of the mean loss."""
    config = all_digits("data.clients=1", "data.partition=iid", "data.samples=40", "train.batch_size=27", "train.rounds=1",
                   "algorithm.name=fedavg", "train.lr=0.1")  # fmt: skip
    simulation = Simulation(config)
    start = simulation.fresh(0)
    worker = worker_of(simulation)
    inputs, labels = worker.samples.batch(simulation.federation.shards[0].train)
    assert len(labels) == 27
    w = {n: t.clone().requires_grad_() for n, t in start.items()}
    hidden = torch.relu(inputs.flatten(1) @ w["fc.weight"].T + w["fc.bias"])
    logits = hidden @ w["output.weight"].T + w["output.bias"]
    loss = -logits.log_softmax(1)[torch.arange(27), labels].mean()
    gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
    progress, (event,) = finish(simulation)
    assert event.loss == pytest.approx(loss.item(), rel=1e-5)
    for n, t in progress.server["model"].items():
        torch.testing.assert_close(t, start[n] - 0.1 * gradients[n], rtol=1e-4, atol=1e-6)


def test_the_last_incomplete_batch_is_dropped():
    how = LocalTraining(seed=0, lr=0.1, batch_size=10, epochs=2)
    found = list(batches(37, how, Pass(), np.random.default_rng(0)))
    assert [len(b) for b in found] == [10] * 6
    assert len(set(np.concatenate(found[:3]).tolist())) == 30


def test_a_client_smaller_than_a_batch_trains_on_all_it_has():
    how = LocalTraining(seed=0, lr=0.1, batch_size=10, epochs=1)
    (only,) = batches(7, how, Pass(), np.random.default_rng(0))
    assert sorted(only.tolist()) == list(range(7))


def test_newcomers_are_served_with_batch_norm():
    """Averaged statistics by default: a client that never trained has no statistics of its own."""
    name = f"model.name={__name__}:with_batch_norm"
    settings = ["model.options={}", name, "algorithm.name=fedavg", "data.partition=iid", "data.newcomers=2"]
    simulation = Simulation(all_digits(*settings, "train.rounds=6"))
    progress = simulation.start()
    for progress, _ in simulation.rounds(progress):
        pass
    joined = simulation.welcome(progress)
    simulation.close()
    assert joined.histogram > 0.8


@pytest.mark.parametrize("engine", ["loop", "threads", "vmap"])
@pytest.mark.parametrize("algorithm", ["fedavg", "local"])
def test_divergence_in_the_last_batch_is_noticed_too(engine, algorithm, monkeypatch):
    """There is one batch, so the only loss is finite; the weights after it are not, and nobody keeps them."""
    data = blobs_with_a_broken_client(1e30)
    monkeypatch.setattr("cwfed.data.share_out", lambda *_: data)
    settings = ["data.clients=3", f"run.engine={engine}", "train.batch_size=40", "train.lr=1e12"]
    progress, (event,) = finish(Simulation(all_digits(f"algorithm.name={algorithm}", "train.rounds=1", *settings)))
    assert event.participants == [0, 2]
    assert "client 1 in round 1 is not a finite number" in event.refused["1"]
    assert sorted(progress.kept) == ([0, 2] if algorithm == "local" else [])
    models = [progress.server["model"], *progress.kept.values()]
    assert all(w.isfinite().all() for model in models for w in model.values())


@pytest.mark.parametrize("engine", ["loop", "threads", "vmap"])
def test_a_run_that_always_diverges_is_given_up(engine):
    """After three rounds in vain, with client and round in the sentence; the events of those rounds are there."""
    simulation = Simulation(all_digits(f"run.engine={engine}", "train.lr=1e30", "train.rounds=50"))
    events = []
    with pytest.raises(RunError, match=r"client \d+ in round 3 is not a finite number.*lower train.lr"):
        events += (event for _, event in simulation.rounds(simulation.start()))
    simulation.close()
    with pytest.raises(RunError, match=r"client \d+ in round 1 is not a finite number.*lower train.lr"):
        finish(Simulation(all_digits(f"run.engine={engine}", "train.lr=1e30", "train.rounds=1")))


@pytest.mark.parametrize("engine", ["loop", "threads", "vmap"])
def test_one_client_that_diverges_is_left_out_and_the_others_go_on(engine, monkeypatch):
    data = blobs_with_a_broken_client(np.nan)
    monkeypatch.setattr("cwfed.data.share_out", lambda *_: data)
    settings = [
        "data.clients=3",
        f"run.engine={engine}",
        "train.rounds=4",
        "algorithm.name=fedavg",
        "train.batch_size=5",
    ]
    progress, events = finish(Simulation(all_digits(*settings)))
    assert [(e.participants, list(e.refused)) for e in events] == [([0, 2], ["1"])] * 4
    assert all(w.isfinite().all() for w in progress.server["model"].values())
    assert events[-1].loss < events[0].loss


def blobs_with_a_broken_client(factor: float) -> Federation:
    """Three clients; the inputs of client 1 are multiplied."""
    inputs, labels = two_blobs()
    shards = [Shard(at + np.arange(40), at + np.arange(40, 50), at + np.arange(50, 60)) for at in (0, 60, 120)]
    data = Dataset("blobs", inputs, labels.astype(np.int64), ("a", "b", "c", "d"))
    data.inputs[60:100] *= factor
    return Federation(data, shards)


@pytest.mark.parametrize("engine", ["loop", "threads"])
def test_a_closed_simulation_lets_go_of_its_data_at_once(engine):
    """Not only when Python looks for cycles: a comparison makes many simulations in one process."""
    gc.disable()
    try:
        simulation = Simulation(all_digits(f"run.engine={engine}", "train.rounds=1"))
        data = weakref.ref(simulation.federation)
        finish(simulation)
        del simulation
        assert data() is None
    finally:
        gc.enable()


def test_the_longest_tasks_are_begun_first_and_results_stay_in_order():
    """With sizes 1, 5, 3, 5: what is begun last is short. Equal ones keep their order."""

    class Noting(Loop):
        def __init__(self):
            self.begun = []

        def spread(self, call, items):
            self.begun += items
            return [item.upper() for item in items]

    engine = Noting()
    assert engine._longest_first(Call("visit"), ["a", "b", "c", "d"], [1, 5, 3, 5]) == ["A", "B", "C", "D"]
    assert engine.begun == ["b", "d", "c", "a"]


def test_an_unknown_device_is_one_sentence():
    with pytest.raises(ConfigError, match=r"run\.device = 'cuda:7' cannot be used here"):
        Simulation(all_digits("run.device=cuda:7"))
    with pytest.raises(ConfigError, match="must be cpu, cuda or mps"):
        Simulation(all_digits("run.device=meta"))
