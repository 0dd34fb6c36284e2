"""Augmentation: what it does to an image by hand, from the keyed stream, in every engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cwfed.core import augment
from cwfed.core.rng import stream
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small
from tests.engine.test_vmap import assert_like_the_loop


def images(count: int = 2) -> torch.Tensor:
    return torch.arange(count * 2 * 3 * 5, dtype=torch.float32).view(count, 2, 3, 5)


def test_nothing_drawn_changes_nothing():
    drawn = torch.tensor([[augment.PAD, augment.PAD, 0]] * 2)
    assert torch.equal(augment.change(images(), drawn), images())


def test_a_mirror_and_a_shift_by_hand():
    mirrored, shifted = augment.change(
        images(), torch.tensor([[augment.PAD, augment.PAD, 1], [augment.PAD + 1, augment.PAD - 2, 0]])
    )
    assert torch.equal(mirrored, images()[0].flip(2))
    # one row down: the first row is gone and the last is black; two columns to the left of the image are black
    assert torch.equal(shifted[:, :2, 2:], images()[1][:, 1:, :3])
    assert (shifted[:, 2] == -1).all()
    assert (shifted[:, :, :2] == -1).all()


def test_batches_of_clients_are_changed_like_each_alone():
    rng = stream(0, "augment", 1, 2)
    both = images(6).view(2, 3, 2, 3, 5)
    drawn = torch.from_numpy(augment.draw("crop-flip", (2, 3), rng))
    together = augment.change(both, drawn)
    for client in range(2):
        assert torch.equal(together[client], augment.change(both[client], drawn[client]))


@pytest.mark.parametrize(
    ("kind", "shifts", "mirrors"), [("crop", True, False), ("flip", False, True), ("crop-flip", True, True)]
)
def test_what_is_drawn(kind, shifts, mirrors):
    drawn = augment.draw(kind, (200,), stream(0, "augment"))
    assert (len(np.unique(drawn[:, 0])) == 9) == shifts
    assert (drawn[:, 2].max() == 1) == mirrors
    assert np.array_equal(drawn, augment.draw(kind, (200,), stream(0, "augment")))


def test_engines_see_the_same_images():
    options = ("data.augment=crop-flip", "model.name=cnn", "model.options.hidden=16", "data.samples=600")
    assert_like_the_loop(*options, "algorithm.name=fedavg", rounds=2)
    loop, _ = finish(Simulation(small(*options, "run.engine=loop")))
    threads, _ = finish(Simulation(small(*options, "run.engine=threads", "run.workers=3")))
    plain, _ = finish(Simulation(small(*options[1:], "run.engine=loop")))
    assert leaves(loop.server) == leaves(threads.server) != leaves(plain.server)
