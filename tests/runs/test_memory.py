"""Peak memory is that of a run, not of what ran before it in the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cwfed.runs import memory, session
from tests.conftest import small

MB = 2**20


@pytest.fixture
def counts_anew():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system counts the peak of a process only")


def garbage():
    """Unreachable, but in a cycle: nobody frees it until Python looks for cycles."""
    held: list[object] = [bytearray(300 * MB)]
    held.append(held)


def holes():
    """Freed, but below a block that is still used: the allocator keeps it."""
    blocks = [bytearray(700) for _ in range(300_000)]
    return blocks[-1]


@pytest.mark.parametrize("left_behind", [garbage, holes])
def test_what_was_left_behind_is_not_counted(counts_anew, left_behind):
    memory.forget_peak()
    before = memory.peak()
    pin = left_behind()
    assert memory.peak() > before + 150 * MB
    memory.forget_peak()
    assert memory.peak() < before + 75 * MB
    assert memory.since() == "run"
    del pin


def test_a_run_says_of_what_its_peak_is(tmp_path, monkeypatch):
    assert session.run(small(), tmp_path / "run")["peak_memory_of"] == memory.since()

    def forbidden(*_, **__):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(memory.Path, "write_text", forbidden)
        memory.forget_peak()
    assert memory.since() == "process"
