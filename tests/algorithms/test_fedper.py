"""FedPer and FedRep: what stays, what travels, and their limiting cases bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cwfed.algorithms.fedper import FedRep
from cwfed.core.errors import ConfigError
from cwfed.core.rng import stream
from cwfed.core.types import Pass, Start
from cwfed.data import Federation, Shard, load
from cwfed.data.sources import SourceSpec
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small, use_algorithm, worker_of

SOME = ("train.participation=0.7", "train.client_dropout=0.2")


def outcome(*settings):
    progress, events = finish(Simulation(small(*settings, *SOME)))
    return progress, [(e.received, e.trained, e.client_loss) for e in events]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_nothing_personal_is_fedavg(engine):
    fedavg, plain = outcome("algorithm.name=fedavg", f"run.engine={engine}")
    fedper, events = outcome("algorithm.name=fedper", "algorithm.personal_layers=none", f"run.engine={engine}")
    assert leaves(fedper.server) == leaves(fedavg.server)
    assert events == plain


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_everything_personal_is_local(engine):
    local, alone = outcome("algorithm.name=local", f"run.engine={engine}")
    fedper, events = outcome("algorithm.name=fedper", "algorithm.personal_layers=all", f"run.engine={engine}")
    assert leaves(fedper.kept) == leaves(local.kept)
    assert [received for received, _, _ in events] == [received for received, _, _ in alone]


def test_the_server_never_has_the_head_and_a_client_that_never_trains_keeps_the_initial_one():
    simulation = Simulation(small("algorithm.name=fedper", "data.newcomers=2"))
    head = simulation.task.select("output")
    assert not set(head) & set(simulation.guard.model)
    *_, (progress, _) = simulation.rounds(simulation.start())
    assert not set(head) & set(progress.server["model"])
    for client in simulation.members:
        assert progress.kept[client].keys() == set(head)
    model = simulation.final_model(progress, simulation.newcomers[0])
    simulation.close()
    assert all(torch.equal(model[name], simulation.initial[name]) for name in head)


@pytest.fixture
def two_alike(monkeypatch):
    """Two clients with the same samples, who draw the same batches: means of two equal numbers have no rounding."""
    data = load(SourceSpec("digits"))
    everyone = Shard(np.arange(60), np.arange(60, 70), np.arange(70, 90))
    monkeypatch.setattr("cwfed.data.share_out", lambda *_: Federation(data, [everyone, everyone]))
    monkeypatch.setattr(
        "cwfed.engine.worker.stream", lambda seed, purpose, round_, client: stream(seed, purpose, round_, 0)
    )


def test_clients_that_are_alike_in_everything_are_fedavg(two_alike):
    """With the same head everywhere it does not matter whether it travels."""
    few = ("data.clients=2", "run.engine=loop", "train.rounds=3")
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", *few)))
    fedper, events = finish(Simulation(small("algorithm.name=fedper", *few)))
    for head in fedper.kept.values():
        assert leaves(dict(sorted((fedper.server["model"] | head).items()))) == leaves(
            dict(sorted(fedavg.server["model"].items()))
        )
    assert [(e.received, e.trained) for e in events] == [(e.received, e.trained) for e in plain]


def test_a_head_that_sat_out_meets_the_newer_body():
    simulation = Simulation(small("algorithm.name=fedper", "train.rounds=2"))
    *_, (after, _) = simulation.rounds(simulation.start())
    client = 0
    (model,) = simulation.engine.personal(3, after.server, [simulation.visit(client, after.kept[client])])
    for name, w in after.server["model"].items():
        assert torch.equal(model[name], w)
    for name, w in after.kept[client].items():
        assert torch.equal(model[name], w)
    simulation.close()


# --- FedRep


class Watched(FedRep):
    """FedRep that remembers the parameters before every batch, and in which pass."""

    seen: list = []  # noqa: RUF012

    def passes(self, when, task, start):
        return tuple(
            Pass(one.trained, one.epochs, stage=str(i)) for i, one in enumerate(super().passes(when, task, start))
        )

    def loss(self, network, params, batch, start, stage):
        self.seen.append((stage, {name: p.detach().clone() for name, p in params.items()}))
        return super().loss(network, params, batch, start, stage)


@pytest.mark.parametrize("step", [[], ["train.momentum=0.5", "train.weight_decay=0.1"], ["train.optimizer=adamw"]])
def test_first_the_head_then_the_body_and_each_is_frozen_in_the_other_pass(step):
    """Also where steps remember or decay: in the authors' code momentum and decay move the frozen head on."""
    simulation = Simulation(
        small("algorithm.name=fedrep", "run.engine=loop", "data.clients=1", "train.rounds=1", *step)
    )
    watched = Watched()
    watched.seen.clear()
    use_algorithm(simulation, watched)
    received = simulation.initial
    progress, _ = finish(simulation)
    head = simulation.task.select("output")
    body = [name for name in received if name not in head]
    assert [stage for stage, _ in watched.seen] == sorted(stage for stage, _ in watched.seen)
    first, second = ([params for s, params in watched.seen if s == stage] for stage in "01")
    assert len(first) == len(second) > 5
    assert all(torch.equal(params[n], received[n]) for params in (*first, second[0]) for n in body)
    kept = progress.kept[0]
    assert all(torch.equal(params[n], kept[n]) for params in second for n in head)
    assert not torch.equal(kept[head[0]], received[head[0]])
    assert not torch.equal(progress.server["model"][body[0]], received[body[0]])


def test_each_pass_has_batches_of_its_own():
    """The streams of both passes are keyed by the pass: the second does not repeat the first's order."""
    simulation = Simulation(small("algorithm.name=fedrep", "run.engine=loop"))
    worker, own = worker_of(simulation), simulation.federation.shards[0].train
    orders = []
    for index in (0, 1):
        (epoch,) = worker.epochs(own, "training", index, Pass(), 0, 1, simulation.engine.job.how)
        orders.append(torch.cat([labels for _, labels in epoch]).tolist())
    simulation.close()
    assert orders[0] != orders[1]
    assert len(orders[0]) == len(orders[1])


def test_epochs_of_the_head_and_of_the_body_are_their_own():
    """Public versions ignore one of the numbers, swap them, or take the head's out of the body's."""
    simulation = Simulation(
        small("algorithm.name=fedrep", "run.engine=loop", "data.clients=1", "train.rounds=1", "train.epochs=3")
    )
    watched = Watched(head_epochs=2)
    watched.seen.clear()
    use_algorithm(simulation, watched)
    batches = len(simulation.federation.shards[0].train) // 10
    finish(simulation)
    assert [stage for stage, _ in watched.seen] == ["0"] * 2 * batches + ["1"] * 3 * batches


class HeadOnly(FedRep):
    """FedRep without its epochs on the body."""

    def passes(self, when, task, start):
        return super().passes(when, task, start)[:1]


def test_without_epochs_on_the_body_everybody_has_a_linear_classifier_on_random_features(two_alike):
    simulation = Simulation(small("algorithm.name=fedrep", "run.engine=loop", "data.clients=2", "train.rounds=2"))
    use_algorithm(simulation, HeadOnly())
    worker, own, how = worker_of(simulation), simulation.federation.shards[0].train, simulation.engine.job.how
    params = {n: w.clone() for n, w in simulation.initial.items()}
    weight, bias = (params[n].requires_grad_() for n in ("output.weight", "output.bias"))
    for number in (1, 2):
        (epoch,) = worker.epochs(own, "training", 0, Pass(), 0, number, how)
        for inputs, labels in epoch:
            random = torch.relu(inputs.flatten(1) @ params["fc.weight"].T + params["fc.bias"])
            loss = torch.nn.functional.cross_entropy(random @ weight.T + bias, labels)
            gradients = torch.autograd.grad(loss, (weight, bias))
            with torch.no_grad():
                for w, gradient in zip((weight, bias), gradients, strict=True):
                    w -= how.lr * gradient
    progress, _ = finish(simulation)
    assert leaves(progress.server["model"]) == leaves({n: simulation.initial[n] for n in ("fc.weight", "fc.bias")})
    for head in progress.kept.values():
        torch.testing.assert_close(head["output.weight"], weight.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(head["output.bias"], bias.detach(), rtol=1e-4, atol=1e-6)


def test_without_head_epochs_the_head_is_never_trained():
    progress, _ = outcome("algorithm.name=fedrep", "algorithm.head_epochs=0")
    simulation = Simulation(small("algorithm.name=fedrep"))
    head = simulation.task.select("output")
    simulation.close()
    assert all(torch.equal(kept[n], simulation.initial[n]) for kept in progress.kept.values() for n in head)


def test_one_client_by_hand():
    """A pass on the head from the received body, then a pass on the body: plain SGD in both, written out."""
    simulation = Simulation(
        small("algorithm.name=fedrep", "run.engine=loop", "data.clients=1", "train.rounds=1", "train.lr=0.1")
    )
    worker, own = worker_of(simulation), simulation.federation.shards[0].train
    params = {name: w.clone().requires_grad_() for name, w in simulation.initial.items()}
    for index, names in enumerate((simulation.task.select("output"), ("fc.weight", "fc.bias"))):
        assert set(names) <= set(params)
        (epoch,) = worker.epochs(own, "training", index, Pass(), 0, 1, simulation.engine.job.how)
        for inputs, labels in epoch:
            hidden = torch.relu(inputs.flatten(1) @ params["fc.weight"].T + params["fc.bias"])
            logits = hidden @ params["output.weight"].T + params["output.bias"]
            loss = torch.nn.functional.cross_entropy(logits, labels)
            gradients = torch.autograd.grad(loss, [params[n] for n in names])
            with torch.no_grad():
                for name, gradient in zip(names, gradients, strict=True):
                    params[name] -= 0.1 * gradient
    progress, _ = finish(simulation)
    for name, w in (progress.server["model"] | progress.kept[0]).items():
        torch.testing.assert_close(w, params[name].detach(), rtol=1e-4, atol=1e-6)


def test_impossible_settings():
    with pytest.raises(ConfigError, match="head_epochs must not be negative"):
        FedRep(head_epochs=-1)
    with pytest.raises(ConfigError, match="no layer 'head'"):
        Simulation(small("algorithm.name=fedper", 'algorithm.personal_layers="head"'))


def test_all_personal_leaves_fedrep_one_pass():
    simulation = Simulation(small("algorithm.name=fedrep", "algorithm.personal_layers=all"))
    simulation.close()
    (only,) = simulation.algorithm.passes("training", simulation.task, Start({}))
    assert only.trained == simulation.task.parameters


def test_a_personal_norm_layer_keeps_its_statistics():
    batch_norm = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}")
    simulation = Simulation(small("algorithm.name=fedper", "algorithm.personal_layers=2", *batch_norm))
    simulation.close()
    kept = {"2.weight", "2.bias", "2.running_mean", "2.running_var", "4.weight", "4.bias"}
    assert set(simulation.kept_names) == kept
    assert set(simulation.guard.model) == {"1.weight", "1.bias"}


def test_nothing_uploaded_is_nothing_to_bound():
    _, events = finish(Simulation(small("algorithm.name=fedper", "algorithm.personal_layers=all", "train.rounds=1")))
    assert events[0].up == 0
    with pytest.raises(ConfigError, match="does not send one model"):
        finish(Simulation(small("algorithm.name=fedper", "algorithm.personal_layers=all", "guard.norm_bound=2")))


def test_nobody_reads_a_distribution_off_a_head_that_stays():
    _, events = finish(Simulation(small("algorithm.name=fedper", "train.rounds=1")))
    assert (events[0].correlation, events[0].distance) == (None, None)


def test_differential_privacy_is_refused_where_it_would_count_one_pass_of_two():
    with pytest.raises(ConfigError, match="fedrep has passes of its own"):
        Simulation(small("algorithm.name=fedrep", "privacy.dp=sample"))
