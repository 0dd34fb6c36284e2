"""Passes and losses of one's own: what cannot be is one sentence before round 1, and what can be is done as said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from cwfed.algorithms import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.rng import stream
from cwfed.core.types import Loss, Pass, Training
from cwfed.engine.worker import LocalTraining, batches
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small, use_algorithm


@dataclass(frozen=True)
class Wrong(FedAvg):
    """An algorithm with a pass or a loss that cannot be."""

    how: str = ""

    def passes(self, when, task, start):
        if when != "training":
            return ()
        return {
            "none": (),
            "empty": (Pass(trained=()),),
            "unknown": (Pass(trained=("output.wieght",)),),
            "share": (Pass(share=0.0),),
            "bounds": (Pass(low=1.0, high=0.0),),
            "once": (Pass(trained=("fc.bias",), once=("output.bias",)),),
            "batch": (Pass(batch_size=0),),
            "fixed": (Pass(fixed=task.parameters),),
            "unknown fixed": (Pass(fixed=("output.biass",)),),
        }.get(self.how, (Pass(),))

    def loss(self, network, params, batch, start, stage):
        output = network(params, batch.inputs)
        each = torch.nn.functional.cross_entropy(output.logits, batch.labels, reduction="none")
        if self.how == "vector":
            return Loss(each, torch.zeros(()))
        if self.how == "constant":
            return Loss(each.mean().detach(), torch.zeros(()))
        return Loss(each.mean(), torch.zeros(()))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("none", "has no pass in training"),
        ("empty", "trains nothing: name the tensors that move"),
        ("unknown", r"names output\.wieght, which the network lacks: did you mean"),
        ("fixed", "trains nothing: name the tensors that move"),
        ("unknown fixed", r"names output\.biass, which the network lacks: did you mean"),
        ("share", "takes a share of 0 of the data"),
        ("bounds", "bounds that leave nothing between them"),
        ("once", r"moves output\.bias in its first step, and does not train it"),
        ("batch", "has batches of 0 samples: there must be one at least"),
        ("vector", r"must be two numbers \(loss and penalty\), one of them is \(2,\)"),
        ("constant", "on which its loss does not depend"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_the_first_round(how, sentence, engine):
    with pytest.raises(ConfigError, match=sentence):
        Simulation(small(f"algorithm.name={__name__}:Wrong", f'algorithm.how="{how}"', f"run.engine={engine}"))


def test_a_loss_of_ones_own_that_is_the_common_one_gives_its_bits():
    ours, _ = finish(Simulation(small(f"algorithm.name={__name__}:Wrong", "run.engine=loop")))
    fedavg, _ = finish(Simulation(small("algorithm.name=fedavg", "run.engine=loop")))
    assert leaves(ours.server) == leaves(fedavg.server)


@dataclass(frozen=True)
class Tuned(FedAvg):
    """FedAvg whose clients train for an epoch before they are tested: `trained` is fine-tuned FedAvg."""

    epochs: int = 1

    def passes(self, when, task, start):
        return (Pass(epochs=self.epochs),) if when == "test" else super().passes(when, task, start)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_passes_before_the_test_leave_nothing_behind(engine):
    tuned, events = finish(Simulation(small(f"algorithm.name={__name__}:Tuned", f"run.engine={engine}")))
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", f"run.engine={engine}")))
    assert leaves(tuned.server) == leaves(fedavg.server)
    assert [e.received for e in events] == [e.received for e in plain]
    assert all(e.trained.accuracy > e.received.accuracy for e in events)


def test_no_passes_before_the_test_measure_what_was_received():
    _, events = finish(Simulation(small(f"algorithm.name={__name__}:Tuned", "algorithm.epochs=0", "run.engine=loop")))
    assert [e.trained for e in events] == [e.received for e in events]


def test_batches_of_a_pass():
    how = LocalTraining(seed=0, lr=0.1, batch_size=10, epochs=2)

    def plan(one):
        return batches(37, how, one, stream(0, "shuffle"))

    assert plan(Pass()).shape == (6, 10)
    assert plan(Pass(epochs=1, steps=2)).shape == (2, 10)
    assert plan(Pass(epochs=0)).shape == (0, 10)
    assert plan(Pass(batch_size=18)).shape == (4, 18)
    assert plan(Pass(batch_size=60)).shape == (2, 37)
    incomplete = plan(Pass(epochs=1, incomplete=True))
    assert [len(batch) for batch in incomplete] == [10, 10, 10, 7]
    assert sorted(np.concatenate(incomplete)) == list(range(37))
    some = plan(Pass(epochs=2, share=0.5))  # 18 samples (18.5, to the even), one batch an epoch
    assert some.shape == (2, 10)
    assert len(np.unique(plan(Pass(epochs=20, share=0.3)))) == 11


def test_bounds_hold_after_every_step():
    @dataclass(frozen=True)
    class Bounded(FedAvg):
        def passes(self, when, task, start):
            return (Pass(low=-0.01, high=0.01),) if when == "training" else ()

    for engine in ("loop", "vmap"):
        simulation = Simulation(small(f"algorithm.name={__name__}:Wrong", f"run.engine={engine}"))
        use_algorithm(simulation, Bounded())
        progress, _ = finish(simulation)
        assert all(w.abs().max() <= 0.01 + 1e-6 for w in progress.server["model"].values())


@dataclass(frozen=True)
class Once(FedAvg):
    """FedAvg whose output bias moves in the first step of a round only."""

    def passes(self, when, task, start):
        return (Pass(once=("output.bias",)),) if when == "training" else ()


@pytest.mark.parametrize(
    "optimizer", [(), ("train.momentum=0.5",), ("train.optimizer=adam", "train.keep_optimizer=true")]
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_what_moves_in_the_first_step_only(engine, optimizer):
    """After a round of many steps it is where one step puts it; everything else has moved on."""
    same = (f"algorithm.name={__name__}:Once", f"run.engine={engine}", "train.rounds=1", "data.clients=2", *optimizer)
    many, _ = finish(Simulation(small(*same)))

    @dataclass(frozen=True)
    class OneStep(FedAvg):
        def passes(self, when, task, start):
            return (Pass(steps=1),) if when == "training" else ()

    simulation = Simulation(small(*same))
    use_algorithm(simulation, OneStep())
    one, _ = finish(simulation)
    torch.testing.assert_close(many.server["model"]["output.bias"], one.server["model"]["output.bias"])
    for name in ("output.weight", "fc.bias"):
        assert not torch.allclose(many.server["model"][name], one.server["model"][name], atol=1e-4)


@dataclass(frozen=True)
class SaysLr(FedAvg):
    """FedAvg that shows the learning rate as its penalty."""

    def loss(self, network, params, batch, start, stage):
        found = super().loss(network, params, batch, start, stage)
        return Loss(found.loss, torch.zeros(()) + batch.lr)

    def passes(self, when, task, start):
        assert task.training == Training(0.05, 10, 1, True)
        return (Pass(rate=0.01),) if when == "training" else ()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_loss_knows_the_learning_rate_of_the_round(engine):
    halved = ("train.schedule=step", "train.decay_every=1", "train.decay=0.5")
    _, events = finish(Simulation(small(f"algorithm.name={__name__}:SaysLr", f"run.engine={engine}", *halved)))
    assert [e.penalty for e in events] == pytest.approx([0.05, 0.025, 0.0125])


@dataclass(frozen=True)
class Half(FedAvg):
    """FedAvg whose client keeps a head, which is not the whole of its personal model."""

    phase = "trained"

    def keeps(self, names, task):
        return tuple(name for name in names if name.startswith("output."))


def test_who_keeps_a_part_has_no_personal_model_of_its_own_in_a_round_that_it_sits_out():
    config = small(f"algorithm.name={__name__}:Half", "train.participation=0.5", "run.engine=loop")
    simulation = Simulation(config)
    assert not simulation.has_own_models
    _, events = finish(simulation)
    _, plain = finish(Simulation(small("algorithm.name=fedavg", "train.participation=0.5", "run.engine=loop")))
    assert [e.trained for e in events] == [e.trained for e in plain]


def with_a_frozen_layer(shape, classes):
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, classes)
    )
    model[1].requires_grad_(False)
    model.output_layer = "5"
    return model


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_what_is_fixed_in_a_pass_does_not_move_and_what_the_model_froze_stays_frozen(engine):
    @dataclass(frozen=True)
    class Fixed(FedAvg):
        def passes(self, when, task, start):
            return (Pass(fixed=("5.bias",)),) if when == "training" else ()

    model = (f"model.name={__name__}:with_a_frozen_layer", "model.options={}", f"algorithm.name={__name__}:Wrong")
    simulation = Simulation(small(*model, f"run.engine={engine}", "data.clients=1"))  # a mean rounds
    use_algorithm(simulation, Fixed())
    progress, _ = finish(simulation)
    moved = {n for n, w in progress.server["model"].items() if not torch.equal(w, simulation.initial[n])}
    assert moved == {"3.weight", "3.bias", "5.weight"}


@pytest.mark.parametrize(
    "name",
    [
        "pfedme",
        "apfl",
        "per-fedavg",
        "fedas",
        "fedrep",
        "fedpac",
        "fedavg+head_first",
        "fedavg+tune",
    ],
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_what_the_model_froze_stays_frozen_in_steps_of_a_methods_own(name, engine):
    few = ("model.options={}", "data.clients=1", "data.samples=200", "train.rounds=2", f"run.engine={engine}")
    simulation = Simulation(small(f"model.name={__name__}:with_a_frozen_layer", f"algorithm.name={name}", *few))
    progress, _ = finish(simulation)
    for kept in (progress.server["model"], progress.kept.get(0, {})):
        for n, w in kept.items():
            is_frozen = n.removeprefix("own.").startswith("1.")
            assert n == "mix.alpha" or torch.equal(w, simulation.initial[n]) == is_frozen
