"""LG-FedAvg: what stays, what travels, and its limiting cases bit for bit."""

from __future__ import annotations

import pytest
import torch

from cwfed.algorithms.fedper import FedPer
from cwfed.algorithms.lg_fedavg import LGFedAvg
from cwfed.core.errors import ConfigError
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import uploads
from tests.conftest import finish, leaves, small

SOME = ("train.participation=0.7", "train.client_dropout=0.2")
LG = "algorithm.name=lg-fedavg"


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_everything_shared_is_fedavg(engine):
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", f"run.engine={engine}", *SOME)))
    lg, events = finish(Simulation(small(LG, "algorithm.shared_layers=all", f"run.engine={engine}", *SOME)))
    assert leaves(lg.server) == leaves(fedavg.server)
    assert [(e.received, e.trained, e.loss) for e in events] == [(e.received, e.trained, e.loss) for e in plain]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_nothing_shared_is_local(engine):
    local, alone = finish(Simulation(small("algorithm.name=local", f"run.engine={engine}", *SOME)))
    lg, events = finish(Simulation(small(LG, "algorithm.shared_layers=none", f"run.engine={engine}", *SOME)))
    assert leaves(lg.kept) == leaves(local.kept)
    assert [e.received for e in events] == [e.received for e in alone]
    assert {(e.up, e.down) for e in events} == {(0, 0)}


BATCH_NORM = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}")


@pytest.mark.parametrize("split", ["output", "none", "all", "2"])
@pytest.mark.parametrize("model", [(), BATCH_NORM])
def test_with_one_split_lg_and_fedper_upload_each_tensor_once(split, model):
    simulation = Simulation(small(*model))
    simulation.close()
    names, task = tuple(simulation.initial), simulation.task
    choice = int(split) if split.isdigit() else split
    lg, fedper = LGFedAvg(shared_layers=choice), FedPer(personal_layers=choice)
    assert lg.uploaded(names, task) == fedper.keeps(names, task)
    assert lg.keeps(names, task) == fedper.uploaded(names, task)
    assert sorted(lg.uploaded(names, task) + fedper.uploaded(names, task)) == sorted(names)


def test_the_top_layers_travel_not_the_first_ones():
    """The mistake of a public version: the first n layers shared, which is FedPer."""
    simulation = Simulation(small(LG, "model.options.depth=2", "algorithm.shared_layers=2"))
    simulation.close()
    assert set(simulation.guard.model) == {"fc2.weight", "fc2.bias", "output.weight", "output.bias"}
    assert set(simulation.kept_names) == {"fc.weight", "fc.bias"}


def test_samples_weigh():
    """Clients with 1 and 3 samples and heads 2 and 6: (1 * 2 + 3 * 6) / 4 = 5, not their plain mean 4."""
    state = LGFedAvg().aggregate({"model": {"w": torch.zeros(1)}}, uploads([0, 1], [[2.0], [6.0]], [1, 3]))
    assert state["model"]["w"].tolist() == [5.0]


def test_received_is_the_own_body_under_the_newest_head():
    simulation = Simulation(small(LG, "train.rounds=2", "train.participation=0.5", "run.engine=loop"))
    steps = list(simulation.rounds(simulation.start()))
    after, last = steps[-1]
    sat_out = next(c for c in steps[0][1].participants if c not in last.participants)
    (model,) = simulation.engine.personal(3, after.server, [simulation.visit(sat_out, after.kept[sat_out])])
    simulation.close()
    assert leaves({n: model[n] for n in ("fc.weight", "fc.bias")}) == leaves(steps[0][0].kept[sat_out])
    assert leaves({n: model[n] for n in ("output.weight", "output.bias")}) == leaves(after.server["model"])


def test_impossible_settings():
    with pytest.raises(ConfigError, match="layers = 3, but the model has 2 layers"):
        Simulation(small(LG, "algorithm.shared_layers=3"))
    with pytest.raises(ConfigError, match="no layer 'head'"):
        Simulation(small(LG, 'algorithm.shared_layers="head"'))
