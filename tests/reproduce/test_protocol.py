"""The notes of a page, from the configs of its runs."""

from __future__ import annotations

from cwfed.reproduce import protocol
from cwfed.reproduce.spec import Setup
from tests.conftest import small


def test_what_is_held_out():
    everything = protocol.held_out([small("data.validation=0", "algorithm.name=fedavg")])
    assert "nothing is held out for validation, so no round can be picked on it" in everything
    assert "another" not in everything
    tenth = protocol.held_out([small("algorithm.name=fedavg"), small("algorithm.name=fedfomo")])
    assert "10 % of each client's training data" in tenth
    assert "not trained on; no round is picked on it here" in tenth
    assert tenth.endswith("fedfomo holds out another 20 % for its own use.")
    half = protocol.held_out([small("algorithm.name=fedfomo", "algorithm.holdout=0.5")])
    assert "fedfomo holds out another 50 %" in half


def test_what_seeds_are():
    seeds = [["run.seed=0"], ["run.seed=1"]]
    assert protocol.spread_over([small()]).startswith("One seed")
    assert "2 seeds, each with a split of its own" in protocol.spread_over([small(*s) for s in seeds])
    on_one = [small("data.split_seed=0", *s) for s in seeds]
    assert "2 training seeds on one split" in protocol.spread_over(on_one)
    assert "each with a split of its own" in protocol.spread_over([on_one[0], small("run.seed=1")])
    assert protocol.notes([]) == []


def test_what_a_scale_reduces():
    (note,) = protocol.reduced([Setup(name, "small") for name in ("cifar100", "tiny-imagenet")])
    shared, *each = note.split("; ")
    assert "data.samples = 4000 (all)" in shared
    assert "train.lr = 0.05 (0.005)" in shared
    assert "cwfedavg.wdr = 250.0 (500.0)" in each[0]
    assert "data.image_size = 32 (0)" in each[1]
    assert "validation" not in note  # it has a note of its own
    assert protocol.reduced([Setup("cifar100", "paper")]) == []
