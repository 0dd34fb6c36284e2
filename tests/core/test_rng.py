from __future__ import annotations

import itertools
import zlib

import numpy as np
import torch

from cwfed.core import rng


def test_a_stream_is_a_function_of_its_key_alone():
    first = rng.stream(3, "shuffle", 5, 7).permutation(100)
    rng.stream(3, "shuffle", 5, 8).random(1000)
    assert (first == rng.stream(3, "shuffle", 5, 7).permutation(100)).all()


def test_every_part_of_the_key_matters():
    keys = itertools.product([0, 1], ["shuffle", "split"], [0, 1], [0, 1])
    draws = {tuple(rng.stream(*key).integers(1 << 60, size=2)) for key in keys}
    assert len(draws) == 16


def test_torch_stream_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with rng.torch_stream(0, "model"):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with rng.torch_stream(0, "model"):
        assert torch.equal(torch.rand(2), inside)


def test_torch_stream_leaves_the_generators_of_gpus_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with rng.torch_stream(0, "model"):
        inside = torch.rand(2)
    assert seeded == []
    torch.manual_seed(rng.torch_seed(0, "model"))
    assert seeded  # it would have been seen
    assert torch.equal(torch.rand(2), inside)


def test_a_stream_is_numpy_s_of_the_same_words_whatever_their_size():
    """An array of words is read faster than a list, and must be the same: recorded runs depend on it."""
    for seed, round_ in ((0, 1), (2**32 - 1, 3), (2**32, 1), (2**70 + 5, 2)):
        key = [seed, zlib.crc32(b"shuffle"), round_, 4]
        expected = np.random.default_rng(np.random.SeedSequence(key)).integers(1 << 60, size=4)
        assert (rng.stream(seed, "shuffle", round_, 4).integers(1 << 60, size=4) == expected).all()
