"""Memory that is used again: never while somebody still looks at it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from cwfed.core import memory
from cwfed.core.memory import LARGE, Shelf

SHAPE = (4, LARGE // 4)  # of bytes


def test_memory_is_given_out_again_when_nobody_has_it():
    shelf = Shelf()
    first = shelf.empty("w", SHAPE, torch.uint8)
    place = first.data_ptr()
    del first
    assert shelf.empty("w", SHAPE, torch.uint8).data_ptr() == place


@pytest.mark.parametrize("keep", [lambda w: w[1:2], lambda w: w.numpy(), lambda w: {"state": w.view(torch.float32)}])
def test_who_has_a_view_keeps_the_memory(keep):
    shelf = Shelf()
    first = shelf.empty("w", SHAPE, torch.uint8).fill_(1)
    kept = keep(first)
    place = first.data_ptr()
    del first
    second = shelf.empty("w", SHAPE, torch.uint8).fill_(2)
    assert second.data_ptr() != place
    values = kept["state"].view(torch.uint8) if isinstance(kept, dict) else kept
    assert (torch.as_tensor(values) == 1).all()


def test_another_size_of_the_same_name():
    shelf = Shelf()
    shelf.empty("w", SHAPE, torch.uint8)
    larger = shelf.empty("w", (2, 3, LARGE // 4), torch.float32)
    assert larger.shape == (2, 3, LARGE // 4)
    assert larger.data_ptr() % 64 == 0  # some libraries round in other ways elsewhere
    del larger
    again = shelf.empty("w", SHAPE, torch.uint8)
    assert again.shape == SHAPE
    assert again.is_contiguous()


def test_small_and_empty_tensors_are_torch_s_own():
    shelf = Shelf()
    assert shelf.empty("b", (0, 10), torch.float32).shape == (0, 10)
    assert shelf.empty("b", (), torch.int64).dtype == torch.int64


def test_the_shelf_may_go_before_what_lay_on_it():
    shelf = Shelf()
    w = shelf.empty("w", SHAPE, torch.uint8).fill_(3)
    shelf.clear()
    del shelf
    assert (w == 3).all()


@pytest.mark.parametrize(
    ("name", "asked"), [("", 2), ("MALLOC_TRIM_THRESHOLD_", 0), ("GLIBC_TUNABLES", 0), ("OTHER_MALLOC_", 2)]
)
def test_the_heap_is_told_to_keep_what_is_freed_unless_the_user_has_said_what_it_keeps(name, asked, monkeypatch):
    told = []
    for known in [known for known in os.environ if known.startswith("MALLOC_") or known == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(known)
    if name:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *what: told.append(what)))
    memory.keep_freed.__wrapped__()
    assert len(told) == asked


def test_another_c_library_keeps_what_it_likes(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace())
    memory.keep_freed.__wrapped__()
