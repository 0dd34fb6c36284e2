from __future__ import annotations

import pytest

from cwfed.errors import ConfigError
from cwfed.reproduce.verdict import NAMED, Pairs, Value, is_same, judge, leader_claims, order_claim, parse

LABELS = ["a", "b", "c"]
PAPER = [Value(60.0, 0.5), Value(62.0, 0.5), Value(90.0, 0.5)]


def values(*means: float) -> list[Value]:
    return [Value(mean) for mean in means]


def test_published_values_are_read():
    assert parse("60.68±0.84") == Value(60.68, 0.84)
    assert parse("11.18") == Value(11.18, None)
    with pytest.raises(ConfigError, match="looks like"):
        parse("about 60")


def test_same_is_a_point_or_two_standard_deviations():
    assert is_same(Value(60.9), Value(60.0, 0.1))
    assert not is_same(Value(61.1), Value(60.0, 0.1))
    assert is_same(Value(63.0, 3.0), Value(60.0, 4.0))  # 2 * 5 = 10
    assert not is_same(Value(71.0, 3.0), Value(60.0, 4.0))


def test_marks_by_hand():
    pairs = Pairs()
    cells = judge(LABELS, values(60.5, 40.0, 70.0), PAPER, pairs, "here")
    assert [cell.verdict for cell in cells] == ["same", "order", "order"]
    assert (pairs.kept, pairs.broken) == (2, [])  # a and b are 2 points apart: no pair

    pairs = Pairs()
    cells = judge(LABELS, values(60.5, 80.0, 70.0), PAPER, pairs, "here")
    assert [cell.verdict for cell in cells] == ["same", "differs", "differs"]
    assert [cell.against for cell in cells] == [(), ("c",), ("b",)]
    assert pairs.kept == 1
    assert pairs.broken == ["here: c 70.0, b 80.0 (paper 90.0, 62.0)"]


def test_a_tie_is_not_the_paper_s_order():
    pairs = Pairs()
    judge(LABELS[1:], values(70.0, 70.0), PAPER[1:], pairs, "")
    assert len(pairs.broken) == 1


def test_claim_of_order_counts_and_names_only_some():
    assert order_claim(Pairs()).holds is None
    assert order_claim(Pairs(3)).holds is True
    broken = order_claim(Pairs(3, [str(i) for i in range(NAMED + 2)]))
    assert broken.holds is False
    assert broken.detail.startswith(f"3 of {3 + NAMED + 2} pairs; not: 0; 1;")
    assert broken.detail.endswith("and 2 more (see the marks)")


def test_claims_of_the_leader_look_where_the_paper_s_lead_is_large():
    close = values(60, 62, 63)
    there, size = leader_claims("c", LABELS, ["far", "near"], [values(1, 2, 20), values(1, 5, 3)], [PAPER, close])
    assert there.holds is True  # behind in the second column, but there the paper's lead is one point
    assert "first in 1 of 2 columns" in there.detail
    assert "far +18.0 (paper +28.0)" in there.detail
    assert size.holds is True
    there, size = leader_claims("c", LABELS, ["far"], [values(1, 2, 15.9)], [PAPER])
    assert (there.holds, size.holds) == (True, False)  # 13.9 is less than half of 28
    assert [claim.holds for claim in leader_claims("c", LABELS, ["far"], [values(1, 5, 3)], [PAPER])] == [
        False,
        False,
    ]
    assert [claim.holds for claim in leader_claims("c", LABELS, ["near"], [values(1, 5, 3)], [close])] == [None]
