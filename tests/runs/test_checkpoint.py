from __future__ import annotations

import numpy as np
import pytest
import torch

from cwfed.core.errors import RunError
from cwfed.runs import checkpoint
from cwfed.runs.checkpoint import Checkpoints
from tests.conftest import leaves

TREE = {
    "round": 3,
    "server": {"model": {"a/b": torch.arange(6.0).view(2, 3).T, "half": torch.ones(2, dtype=torch.float64)}},
    "names": ["x", None, 1.5, True],
    "empty": {},
    "nothing": torch.zeros(0, 4),
}


def test_a_tree_comes_back_bit_for_bit(tmp_path):
    checkpoint.save(tmp_path / "t.safetensors", TREE)
    assert leaves(checkpoint.load(tmp_path / "t.safetensors")) == leaves(TREE)
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"server": {"n": np.int64(3)}}, "server/n cannot be saved: .* of the type int64"),
        ({"server": [1.5, {2}]}, "server/1 cannot be saved: .* of the type set"),
        ({"server": {"by client": {0: torch.zeros(2)}}}, "server/by client cannot be saved: its key 0 is not a text"),
    ],
)
def test_what_would_not_come_back_is_not_saved(tree, says, tmp_path):
    """JSON made texts of such keys, silently, and what it cannot say at all was a traceback."""
    with pytest.raises(RunError, match=says):
        checkpoint.save(tmp_path / "t.safetensors", tree)
    assert not list(tmp_path.iterdir())


def test_views_of_one_tensor_are_saved_as_what_they_show(tmp_path):
    stack = torch.arange(12.0).view(3, 4)
    checkpoint.save(tmp_path / "t.safetensors", {"row": stack[1], "other": stack[2], "again": stack[1]})
    back = checkpoint.load(tmp_path / "t.safetensors")
    assert back["row"].tolist() == back["again"].tolist() == [4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign", "missing"])
def test_damage_is_found(tmp_path, damage):
    path = tmp_path / "t.safetensors"
    checkpoint.save(path, TREE)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "foreign":
        from safetensors.torch import save_file

        save_file({"a": torch.ones(2)}, path)
    else:
        content[-3] ^= 4
        path.write_bytes({"cut": content[:-10], "flipped": content, "empty": b""}[damage])
    with pytest.raises(RunError, match="damaged"):
        checkpoint.load(path)


def test_two_are_kept_and_the_older_one_serves_when_the_newer_is_damaged(tmp_path):
    points = Checkpoints(tmp_path / "checkpoints")
    assert points.newest() == (None, [])
    for number in (1, 2, 10):
        points.save(number, {"round": number})
    assert points.rounds() == [10, 2]
    points.path(10).write_bytes(b"nonsense")
    tree, complaints = points.newest()
    assert tree == {"round": 2}
    assert "round-000010" in complaints[0]


def test_the_same_tensor_twice_in_a_tree(tmp_path):
    shared = torch.ones(3)
    checkpoint.save(tmp_path / "t.safetensors", {"a": shared, "b": shared})
    assert checkpoint.load(tmp_path / "t.safetensors")["b"].tolist() == [1, 1, 1]


def test_who_knows_what_it_goes_on_from_keeps_that_however_many_rounds_came_to_nothing(tmp_path):
    found = Checkpoints(tmp_path, keep=3)
    for round_, after in [(1, 0), (2, 1), (3, 2), (5, 3), (6, 3), (9, 3)]:
        found.save(round_, {"round": round_}, after=after)
    assert found.rounds() == [9, 3, 2], "the newest, and the last ones before it that came to something"
    assert found.newest(before=4)[0] == {"round": 3}
    found.save(3, {"round": 3}, after=2)  # somebody slow, when the next round is there already
    assert found.rounds() == [9, 3, 2]
