"""FedBN: which layers stay, by what they are and not by what they are called, and its limiting cases bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from cwfed.algorithms.fedbn import FedBN
from cwfed.core.errors import ConfigError
from cwfed.federation.simulation import Simulation
from cwfed.models import InputShape, ResNet18, statistics, task_of
from tests.conftest import finish, leaves, small

SOME = ("train.participation=0.7", "train.client_dropout=0.2")
BATCH_NORM = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}")
NORM_LAYER = {"2.weight", "2.bias", "2.running_mean", "2.running_var"}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_without_norm_layers_it_is_fedavg(engine):
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", f"run.engine={engine}", *SOME)))
    fedbn, events = finish(Simulation(small("algorithm.name=fedbn", f"run.engine={engine}", *SOME)))
    assert leaves(fedbn.server) == leaves(fedavg.server)
    assert not fedbn.kept
    found, expected = ([(e.received, e.trained, e.loss, e.up, e.down) for e in each] for each in (events, plain))
    assert found == expected


def test_a_single_client_is_local():
    one = ("data.clients=1", "data.samples=300", *BATCH_NORM)
    fedbn, events = finish(Simulation(small("algorithm.name=fedbn", *one)))
    local, alone = finish(Simulation(small("algorithm.name=local", *one)))
    assert set(fedbn.kept[0]) == NORM_LAYER
    assert leaves(fedbn.kept[0] | fedbn.server["model"]) == leaves(local.kept[0])
    assert [e.received for e in events] == [e.received for e in alone]


@dataclass(frozen=True)
class StatisticsOnly(FedBN):
    """FedBN that averages gamma and beta."""

    def keeps(self, names, task):
        return tuple(name for name in super().keeps(names, task) if name not in task.parameters)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_where_only_the_statistics_stay_it_is_fedavg_with_local_batch_norm(engine):
    more = (f"run.engine={engine}", *BATCH_NORM, *SOME)
    ours, events = finish(Simulation(small(f"algorithm.name={__name__}:StatisticsOnly", *more)))
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", "train.batch_norm=local", *more)))
    assert leaves(ours.server) == leaves(fedavg.server)
    assert leaves(ours.kept) == leaves(fedavg.kept)
    # losses may differ in their last bits: vmap measures models that clients share one after the other
    found, expected = ([(e.received.right, e.trained.right) for e in each] for each in (events, plain))
    assert found == expected


def test_the_setting_batch_norm_changes_nothing():
    average, local = (
        finish(Simulation(small("algorithm.name=fedbn", f"train.batch_norm={policy}", *BATCH_NORM, *SOME)))
        for policy in ("average", "local")
    )
    assert leaves(average[0].server) == leaves(local[0].server)
    assert leaves(average[0].kept) == leaves({c: dict(sorted(kept.items())) for c, kept in local[0].kept.items()})
    found = [[(e.received, e.trained) for e in events] for _, events in (average, local)]
    assert found[0] == found[1]


def test_every_norm_layer_of_a_resnet_stays_whatever_its_name():
    """20 of them, 4 tensors each; three are called shortcut.1: a search for "bn" in the names would share these."""
    network = ResNet18(InputShape((3, 8, 8)), 4, width=2)
    network.output_layer = "output"
    names = (*dict(network.named_parameters()), *statistics(network))
    task = task_of(network, 2, 4)
    kept = FedBN().keeps(names, task)
    assert len(kept) == 20 * 4
    assert {"layer2.0.shortcut.1.weight", "layer4.1.bn2.running_var"} < set(kept)  # nested: with the full path
    assert sum("bn" not in name for name in kept) == 3 * 4
    assert sorted(kept + FedBN().uploaded(names, task)) == sorted(names)


class MyNorm(nn.BatchNorm1d):
    """A norm layer of the user's own."""


def many_kinds(shape, classes):
    return nn.ModuleDict(
        {
            "ebnf": nn.Linear(4, 4),  # "bn" in its name, and no norm layer
            "mine": MyNorm(4),
            "bare": nn.BatchNorm1d(4, affine=False),
            "group": nn.GroupNorm(2, 4),
            "layer": nn.LayerNorm(4),
        }
    )


def test_kinds_of_norm_layers_are_told_by_their_type():
    network = many_kinds(None, 2)
    network.output_layer = "ebnf"
    names = (*dict(network.named_parameters()), *statistics(network))
    task = task_of(network, 1, 4)
    batch = {f"mine.{n}" for n in ("weight", "bias", "running_mean", "running_var")}
    batch |= {"bare.running_mean", "bare.running_var"}
    assert set(FedBN().keeps(names, task)) == batch
    assert set(FedBN(norms=("batch", "group")).keeps(names, task)) == batch | {"group.weight", "group.bias"}
    assert set(FedBN(norms=("layer",)).keeps(names, task)) == {"layer.weight", "layer.bias"}
    assert FedBN(norms=("instance",)).keeps(names, task) == ()


def test_the_server_never_has_a_norm_layer_and_a_newcomer_has_the_initial_one():
    simulation = Simulation(small("algorithm.name=fedbn", "data.newcomers=2", *BATCH_NORM))
    *_, (progress, _) = simulation.rounds(simulation.start())
    assert not NORM_LAYER & set(progress.server["model"])
    assert all(set(progress.kept[client]) == NORM_LAYER for client in simulation.members)
    model = simulation.final_model(progress, simulation.newcomers[0])
    own = simulation.final_model(progress, simulation.members[0])
    simulation.close()
    assert all(torch.equal(model[name], simulation.initial[name]) for name in NORM_LAYER)
    assert leaves({name: own[name] for name in NORM_LAYER}) == leaves(progress.kept[simulation.members[0]])
    assert torch.equal(own["1.weight"], progress.server["model"]["1.weight"])


def test_a_client_that_sits_out_keeps_its_norm_layer():
    simulation = Simulation(small("algorithm.name=fedbn", "train.participation=0.5", "train.rounds=4", *BATCH_NORM))
    before: dict = {}
    for progress, event in simulation.rounds(simulation.start()):
        for client in before.keys() - set(event.participants):
            assert leaves(progress.kept[client]) == before[client]
        before = {client: leaves(kept) for client, kept in progress.kept.items()}
    simulation.close()


def test_impossible_settings():
    with pytest.raises(ConfigError, match=r"algorithm\.norms"):
        small("algorithm.name=fedbn", 'algorithm.norms=["bn"]')


def test_it_differs_from_fedavg_where_there_are_norm_layers():
    fedbn, _ = finish(Simulation(small("algorithm.name=fedbn", *BATCH_NORM)))
    fedavg, _ = finish(Simulation(small("algorithm.name=fedavg", "train.batch_norm=local", *BATCH_NORM)))
    assert leaves(fedbn.server["model"]["1.weight"]) != leaves(fedavg.server["model"]["1.weight"])
