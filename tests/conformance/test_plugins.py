"""One suite over sensible combinations: every plug-in over FedAvg and over cwFedAvg, and some over others and over each other."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from cwfed.algorithms import build, describe, name_of
from cwfed.federation.rounds import from_tree, to_tree
from cwfed.federation.simulation import Simulation
from cwfed.runs import checkpoint
from cwfed.testing.conformance import cost_of, tensors
from tests.conftest import finish, leaves, small, without_seconds

TINY = ("data.clients=4", "data.samples=200", "model.options.hidden=4", "train.rounds=3")
SOME = ("train.participation=0.7", "train.client_dropout=0.2")
COMBINATIONS = {
    "fedavg+ala": ["algorithm.most_epochs=3", "algorithm.rows=true"],
    "fedavg+balanced": [],
    "fedavg+fedopt": [],
    "fedavg+head_first": [],
    "fedavg+offset": [],
    "fedavg+owners": [],
    "fedavg+prior": [],
    "fedavg+tune": [],
    "cwfedavg+ala": ["algorithm.most_epochs=3"],
    "cwfedavg+balanced": ["algorithm.wdr=0", "algorithm.distribution=empirical"],
    "cwfedavg+dbe": [],
    "cwfedavg+head_first": [],
    "cwfedavg+offset": ['algorithm.objective={name = "fedprox"}'],
    "cwfedavg+prior": [],
    "cwfedavg+programme": [],
    "cwfedavg+tune": ["algorithm.layers=all"],
    "cfl+offset": ["algorithm.warm_up=0", "algorithm.eps1=100", "algorithm.eps2=0"],
    "ditto+balanced": [],
    "fedamp+prior": [],
    "fedavg-ft+owners": ["algorithm.owners=updates"],
    "fedfomo+tune": [],
    "fedper+balanced": [],
    "feduv+head_first": [],
    "ifca+prior": [],
    "cwfedavg+ala+head_first+offset+prior": ["algorithm.most_epochs=3"],
    "fedbn+ala": ["algorithm.most_epochs=3"],
    "cwfedavg+bn": [f"model.name={__name__}:normed"],
    "fedrep+prox": [],
    "fedavg+dbe+head_first+owners+prior": [],
    "scaffold+prior": [],
    "moon+fedopt": ["algorithm.server_momentum=0.5"],
    "fedrod+fedopt": ["algorithm.server=adam", "algorithm.server_lr=0.01"],
    "fedprox+balanced+head_first+owners": ["algorithm.owners=updates", "algorithm.class_cap=0.5"],
    "fedala+fedopt+offset+owners+prior": ["algorithm.most_epochs=3", "algorithm.server=yogi"],
}


def normed(shape, classes, hidden=4):
    """A network with a norm layer."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )
    model.output_layer = "4"
    return model


pytestmark = pytest.mark.parametrize("name", list(COMBINATIONS))


def settings_of(name: str, *more: str):
    return small(f"algorithm.name={name}", *COMBINATIONS[name], *TINY, *more)


def outcome(simulation: Simulation):
    progress, events = finish(simulation)
    return leaves(to_tree(progress)), [without_seconds(e) for e in events]


def test_interrupted_on_threads_is_whole_on_the_loop(name, tmp_path):
    """Repeatable, whatever the engine and however often it is resumed, with clients that sit out or are lost."""
    whole = outcome(Simulation(settings_of(name, *SOME, "run.engine=loop")))
    config = settings_of(name, *SOME, "run.engine=threads", "run.workers=2")
    simulation = Simulation(config)
    for progress, _ in simulation.rounds(simulation.start()):
        if progress.round == 2:
            break
    simulation.close()
    checkpoint.save(tmp_path / "state.safetensors", to_tree(progress))
    resumed, (event,) = finish(Simulation(config), from_tree(checkpoint.load(tmp_path / "state.safetensors")))
    assert leaves(to_tree(resumed)) == whole[0]
    assert without_seconds(event) == whole[1][-1]
    assert np.isfinite(event.received.loss)


def test_one_batched_step_gives_the_same_but_for_rounding(name):
    """Traffic and memory are what `cwfed cost` says."""
    simulation = Simulation(settings_of(name, "run.engine=vmap"))
    cost = cost_of(simulation, participants=4)
    progress, events = finish(simulation)
    loop, plain = finish(Simulation(settings_of(name, "run.engine=loop")))
    for a, b in zip(tensors(progress.server), tensors(loop.server), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-4)
    assert [e.up for e in events] == [e.up for e in plain]
    for event in events[1:]:
        assert event.down == 4 * cost.down
        assert 0 <= event.up - 4 * cost.up <= 4 * 8 * 12
    small_things = 4 * 4 + 4 + 10 * 10 + 4 * 10 + 4
    if not name.startswith(("cfl", "cwfedavg+tune")):  # more clusters, or another row of the table
        assert abs(sum(t.numel() for t in tensors(progress.server)) - cost.server) <= small_things


def test_a_newcomer_has_a_model_and_the_table_builds_it_again(name):
    simulation = Simulation(settings_of(name, "data.newcomers=1", "train.rounds=1", "data.clients=3"))
    *_, (progress, _) = simulation.rounds(simulation.start())
    joined = simulation.welcome(progress)
    assert 0 <= joined.histogram <= 1
    assert all(w.isfinite().all() for w in simulation.final_model(progress, simulation.newcomers[0]).values())
    simulation.close()
    algorithm = build(simulation.config.algorithm)
    assert name_of(algorithm) == name
    assert build(describe(algorithm, name)) == algorithm
