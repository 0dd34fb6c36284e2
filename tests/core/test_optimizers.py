"""Optimisers: torch.optim is the twin, on one client, on all engines; schedules by hand."""

from __future__ import annotations

import pytest
import torch

from cwfed.core.errors import ConfigError
from cwfed.core.optimizers import SGD, Adam, Schedule, clipped
from cwfed.federation.rounds import from_tree, to_tree
from cwfed.federation.simulation import Simulation
from tests.conftest import all_digits, finish, leaves
from tests.engine.test_vmap import assert_like_the_loop

PAIRS = [
    (SGD(), lambda p: torch.optim.SGD(p, lr=0.1)),
    (SGD(0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (SGD(0.9, nesterov=True), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    (SGD(0.5, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1)),
    (Adam(), lambda p: torch.optim.Adam(p, lr=0.1)),
    (Adam(0.1), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1)),
    (Adam(0.1, decoupled=True), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_like_torch(ours, theirs):
    torch.manual_seed(0)
    params = {"a": torch.randn(4, 3, dtype=torch.float64), "b": torch.randn(5, dtype=torch.float64)}
    twins = {name: w.clone().requires_grad_() for name, w in params.items()}
    optimizer, state = theirs(list(twins.values())), ours.init(params)
    for _ in range(5):
        gradients = {name: torch.randn_like(w) for name, w in params.items()}
        before = {name: w.clone() for name, w in params.items()}
        given = params
        params, state = ours.update(params, gradients, state, 0.1)
        assert leaves(given) == leaves(before), "what is given stays as it is"
        for name, twin in twins.items():
            twin.grad = gradients[name].clone()
        optimizer.step()
    for name, w in params.items():
        torch.testing.assert_close(w, twins[name].detach(), rtol=1e-6, atol=1e-8)


def test_clipping_by_hand():
    # (3, 4) together have length 5: to 1 is a fifth
    found = clipped({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)
    assert found["a"].item() == pytest.approx(0.6)
    assert found["b"].item() == pytest.approx(0.8)
    short = {"a": torch.tensor([0.3])}
    assert torch.equal(clipped(short, 1.0)["a"], short["a"])


def test_schedules_by_hand():
    assert [Schedule().rate(0.1, r) for r in (1, 50)] == [0.1, 0.1]
    step = Schedule("step", 100, every=10, factor=0.5)
    assert [step.rate(1.0, r) for r in (1, 10, 11, 20, 21)] == [1.0, 1.0, 0.5, 0.5, 0.25]
    cosine = Schedule("cosine", 4)
    assert [cosine.rate(1.0, r) for r in (1, 2, 3, 4)] == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])
    assert [Schedule("cosine", 5, warm_up=5).rate(1.0, r) for r in (4, 5, 6)] == [0.8, 1.0, 1.0]  # 6: measured only
    warm = Schedule("step", 100, every=10, factor=0.5, warm_up=4)
    assert [warm.rate(1.0, r) for r in (1, 2, 4, 5, 14, 15)] == [0.25, 0.5, 1.0, 1.0, 1.0, 0.5]


OPTIONS = [
    ("train.momentum=0.9", "train.nesterov=true", "train.weight_decay=0.01"),
    ("train.optimizer=adam", "train.clip=1.0"),
    ("train.optimizer=adamw", "train.weight_decay=0.1", "train.keep_optimizer=true"),
    ("train.label_smoothing=0.1", "train.clip=0.5", "train.schedule=cosine", "train.warm_up=2"),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_batched_like_the_loop(options):
    assert_like_the_loop(*options, "algorithm.name=fedprox", "train.participation=0.7")


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_batched_like_the_loop_on_text(options):
    """Embeddings get dense gradients where a step is more than the gradient."""
    words = ("data.name=tests.golden:few_words", "model.name=fasttext", "model.options={}")
    assert_like_the_loop(*words, *options, "algorithm.name=fedavg", rounds=2)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_kept_state_survives_a_break(engine):
    config = all_digits(
        "train.momentum=0.9",
        "train.keep_optimizer=true",
        "train.rounds=4",
        "train.participation=0.5",
        f"run.engine={engine}",
    )
    whole, _ = finish(Simulation(config))
    fresh, _ = finish(
        Simulation(
            all_digits("train.momentum=0.9", "train.rounds=4", "train.participation=0.5", f"run.engine={engine}")
        )
    )
    assert leaves(whole.server) != leaves(fresh.server), "a kept momentum makes a difference"
    simulation = Simulation(config)
    for progress, _ in simulation.rounds(simulation.start()):
        if progress.round == 2:
            break
    simulation.check_progress(from_tree(to_tree(progress)))
    simulation.close()
    resumed, _ = finish(Simulation(config), from_tree(to_tree(progress)))
    assert leaves(to_tree(resumed)) == leaves(to_tree(whole))


@pytest.mark.parametrize("optimizer", ["train.momentum=0.9", "train.optimizer=adam"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_kept_state_of_other_tensors_is_left(engine, optimizer):
    """FedDBE's memories move from round 2 on, and what is trained in round 1 is thrown away: so is the optimiser's state."""
    same = (optimizer, "train.participation=0.7", "algorithm.name=feddbe", "train.rounds=2", f"run.engine={engine}")
    kept, _ = finish(Simulation(all_digits("train.keep_optimizer=true", *same)))
    fresh, _ = finish(Simulation(all_digits(*same)))
    assert leaves(kept.server) == leaves(fresh.server)


def test_label_smoothing_is_torchs():
    smooth, _ = finish(
        Simulation(
            all_digits("train.label_smoothing=0.2", "algorithm.name=fedavg", "run.engine=loop", "train.rounds=1")
        )
    )
    plain, _ = finish(Simulation(all_digits("algorithm.name=fedavg", "run.engine=loop", "train.rounds=1")))
    assert leaves(smooth.server) != leaves(plain.server)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("train.optimizer=adam", "train.momentum=0.9"), "train.momentum and train.nesterov belong to sgd"),
        (("train.nesterov=true",), "train.nesterov needs a train.momentum"),
        (("train.keep_optimizer=true",), "plain SGD has no state to keep"),
        (("privacy.dp=sample", "train.momentum=0.9"), "privacy.dp is DP-SGD"),
        (("data.augment=flip", "data.name=tests.golden:few_words"), "shifts or mirrors images"),
        (("run.engine=vmap", "run.compile=always", "train.momentum=0.9"), "is for one pass of plain SGD"),
    ],
)
def test_what_does_not_fit_is_one_sentence(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Simulation(all_digits(*settings, "model.name=auto", "model.options={}"))
