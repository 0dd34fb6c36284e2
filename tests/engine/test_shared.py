"""Messages through shared memory: what comes out is what went in, to the stride, and what need not be copied is not."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from cwfed.engine.shared import Memory, pack, unpack


@pytest.fixture
def memory():
    memory = Memory()
    yield memory
    memory.close()


def through(memory, message, copy=True):
    """As the other process reads it: with a view of its own."""
    other = Memory(os.dup(memory.file))
    found = unpack(pack(message, memory), other, copy=copy)
    other.close()
    return found


TENSORS = {
    "plain": torch.arange(6.0).view(2, 3),
    "a number": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "truth": torch.tensor([True, False]),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "expanded": torch.ones(1, 3).expand(4, 3),
    "a row of a stack": torch.arange(12.0).view(4, 3)[2],
    "a parameter": nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("copy", [True, False])
def test_tensors_keep_numbers_type_and_strides(memory, kind, copy):
    given = TENSORS[kind]
    found = through(memory, {"given": given, "word": "x"}, copy)["given"]
    assert torch.equal(found, given)
    assert (found.dtype, found.stride(), type(found), found.requires_grad) == (
        given.dtype,
        given.stride(),
        type(given),
        given.requires_grad,
    )


def test_what_is_one_tensor_is_one_there(memory):
    """Clients that share a model are told apart from others by identity."""
    w = torch.ones(3)
    one, other, third = through(memory, [w, w, torch.ones(3)])
    assert one is other
    assert one is not third


def test_messages_of_any_size_follow_each_other(memory):
    """Memory grows, and a smaller message afterwards is not mixed up with what is left of the larger one."""
    other = Memory(os.dup(memory.file))
    for size in (10, 1_000_000, 3):
        found = unpack(pack(torch.full((size,), float(size)), memory), other, copy=True)
        assert torch.equal(found, torch.full((size,), float(size)))
    other.close()


def test_without_a_copy_the_reader_has_the_writers_numbers(memory):
    found = through(memory, torch.zeros(3), copy=False)
    pack(torch.ones(3), memory)
    assert found.tolist() == [1, 1, 1]


def test_arrays_and_objects(memory):
    large, small, words = np.arange(1000.0).reshape(10, 100), np.arange(3), np.array(["a", None], dtype=object)
    found = through(memory, (large, small, words, lambda x: x + 1))
    assert all(np.array_equal(a, b) for a, b in zip(found, (large, small, words), strict=False))
    assert found[0].flags.writeable
    assert found[3](1) == 2  # functions of a script too


def test_a_view_of_a_file_is_opened_again_and_not_copied(memory, tmp_path):
    np.save(tmp_path / "data.npy", np.arange(100_000, dtype=np.int64))
    view = np.load(tmp_path / "data.npy", mmap_mode="c")
    found = through(memory, view)
    assert isinstance(found, np.memmap)
    assert np.array_equal(found, view)
    assert os.fstat(memory.file).st_size < view.nbytes


@pytest.mark.parametrize("how", ["changed", "a part", "gone"])
def test_a_view_that_is_not_its_file_is_copied(memory, tmp_path, how):
    np.save(tmp_path / "data.npy", np.arange(100_000, dtype=np.int64))
    view = np.load(tmp_path / "data.npy", mmap_mode="c")
    if how == "changed":
        view[99_999] = -1  # in this process only
    elif how == "a part":
        view = view[50_000:]
    else:
        (tmp_path / "data.npy").unlink()
    found = through(memory, view)
    assert not isinstance(found, np.memmap)
    assert np.array_equal(found, view)
