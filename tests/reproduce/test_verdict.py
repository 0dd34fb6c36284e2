from __future__ import annotations

import csv
import json
from math import sqrt

import pytest

from cwfed.core.errors import ConfigError
from cwfed.reproduce import Outcome, find
from cwfed.reproduce.pictures import coefficient_claims
from cwfed.reproduce.verdict import (
    NAMED,
    Claim,
    Pairs,
    Value,
    all_hold,
    decide,
    is_same,
    judge,
    leader_claims,
    order_claim,
    parse,
)

LABELS = ["a", "b", "c"]
PAPER = [Value(60.0, 0.5, 3), Value(62.0, 0.5, 3), Value(90.0, 0.5, 3)]


def values(*means: float, std: float | None = None, seeds: int = 1, tested: int = 0) -> list[Value]:
    return [Value(mean, std, seeds, tested) for mean in means]


# --- how far a number can be trusted


def test_published_values_are_read():
    assert parse("60.68±0.84") == Value(60.68, 0.84, seeds=3)
    assert parse("11.18") == Value(11.18)
    with pytest.raises(ConfigError, match="looks like"):
        parse("about 60")


def test_the_error_of_a_mean_by_hand():
    assert Value(60.0, 0.6, seeds=9).error == pytest.approx(0.2)  # 0.6 / sqrt 9
    # one seed: 90 % of 900 samples, sqrt(0.9 * 0.1 / 900) = 0.01
    assert Value(90.0, tested=900).error == pytest.approx(1.0)
    # several: the larger of both, 2 / sqrt 4 = 1 against 1.25, and 4 / sqrt 4 = 2
    assert Value(50.0, 2.0, seeds=4, tested=1600).error == pytest.approx(1.25)
    assert Value(50.0, 4.0, seeds=4, tested=1600).error == pytest.approx(2.0)
    assert Value(50.0).error == 0  # nothing is known


def test_a_difference_within_two_standard_errors_is_undecided():
    assert decide(2.0, 1.0) == "undecided"
    assert decide(2.01, 1.0) == "kept"
    assert decide(-2.01, 1.0) == "broken"
    assert decide(0.0, 0.0) == "undecided"  # a tie, also where no error is known
    assert all_hold(["kept", "kept"]) is True
    assert all_hold(["kept", "undecided"]) is None
    assert all_hold(["kept", "undecided", "broken"]) is False
    assert all_hold([]) is None


# --- the paper's number


def test_same_is_two_standard_errors_between_a_point_and_the_cap():
    assert is_same(Value(60.9), Value(60.0, 0.1, 3))
    assert not is_same(Value(61.1), Value(60.0, 0.1, 3))
    # s^2 / n: 0.75 / 3 + 1.5 / 3 = 0.75; two standard errors are 2 * 0.866 = 1.73
    wide = Value(60.0, sqrt(1.5), 3)
    assert is_same(Value(61.7, sqrt(0.75), 3), wide)
    assert not is_same(Value(61.8, sqrt(0.75), 3), wide)
    assert not is_same(Value(61.7, sqrt(0.75), 30), wide)  # more seeds, a smaller error: 2 * 0.725 = 1.45


def test_noisier_runs_do_not_agree_with_more():
    assert not is_same(Value(70.0, 12.0, 3), Value(90.0, 0.2, 3))
    assert not is_same(Value(62.1, 12.0, 3), Value(60.0, 12.0, 3))  # the cap
    assert is_same(Value(62.0, 12.0, 3), Value(60.0, 12.0, 3))


# --- order


def test_nothing_is_in_order_where_nothing_was_compared():
    """No other method is five points away in the paper: only the number itself can agree."""
    cells = judge(["x", "y"], values(60.1, 40.0), [Value(60.0), Value(62.0)], Pairs(), "here")
    assert [cell.verdict for cell in cells] == ["same", ""]


def test_marks_by_hand():
    pairs = Pairs()
    cells = judge(LABELS, values(60.5, 40.0, 70.0), PAPER, pairs, "here")
    assert [cell.verdict for cell in cells] == ["same", "order", "order"]
    assert (pairs.kept, pairs.broken, pairs.undecided) == (2, [], [])  # a and b are 2 points apart: no pair

    pairs = Pairs()
    cells = judge(LABELS, values(60.5, 80.0, 70.0), PAPER, pairs, "here")
    assert [cell.verdict for cell in cells] == ["same", "differs", "differs"]
    assert [cell.against for cell in cells] == [(), ("c",), ("b",)]
    assert [cell.kept for cell in cells] == [1, 0, 1]
    assert pairs.kept == 1
    assert pairs.broken == ["here: c 70.0, b 80.0 (paper 90.0, 62.0)"]


def test_a_difference_within_its_error_is_neither_kept_nor_broken():
    """60.1 ± 12 against 60.0 ± 12: the error is sqrt(144 / 3 + 144 / 3) = 9.8."""
    for first, second in ((60.1, 60.0), (60.0, 60.1), (60.0, 60.0)):
        pairs = Pairs()
        cells = judge(["x", "y"], values(first, second, std=12.0, seeds=3), [Value(90.0), Value(60.0)], pairs, "here")
        assert (pairs.kept, len(pairs.broken), len(pairs.undecided)) == (0, 0, 1)
        assert pairs.by_sign == (first > second)
        assert [cell.verdict for cell in cells] == ["undecided", "undecided"]
        assert [cell.undecided for cell in cells] == [("y",), ("x",)]
    # 20 points are more than 2 * 9.8
    pairs = Pairs()
    judge(["x", "y"], values(80.0, 60.0, std=12.0, seeds=3), [Value(90.0), Value(60.0)], pairs, "here")
    assert pairs.kept == 1


def test_one_seed_is_judged_by_the_size_of_its_test_set():
    """40 and 43 % of 1,000 samples: sqrt((0.4 * 0.6 + 0.43 * 0.57) / 1000) = 2.2 points, of 100,000 it is 0.22."""
    for tested, decision in ((1000, "undecided"), (100_000, "broken")):
        pairs = Pairs()
        judge(["x", "y"], values(40.0, 43.0, tested=tested), [Value(90.0), Value(60.0)], pairs, "here")
        assert {"undecided": pairs.undecided, "broken": pairs.broken}[decision]
        assert pairs.all == 1


def test_what_is_broken_weighs_more_than_what_is_undecided():
    pairs = Pairs()
    ours = [Value(50.0, 3.0, 3), Value(52.0, 3.0, 3), Value(20.0, 3.0, 3)]
    cells = judge(LABELS, ours, [Value(80.0), Value(70.0), Value(30.0)], pairs, "here")
    assert [cell.verdict for cell in cells] == ["undecided", "undecided", "order"]
    cells = judge(LABELS, ours, [Value(30.0), Value(40.0), Value(80.0)], pairs, "here")
    assert [cell.verdict for cell in cells] == ["differs", "differs", "differs"]
    assert cells[0].undecided == ("b",)


def test_claim_of_order_counts_all_three_and_names_only_some():
    assert order_claim(Pairs()).holds is None
    assert order_claim(Pairs(3, by_sign=3)).holds is True
    assert order_claim(Pairs(3, [], ["x"], by_sign=4)).holds is None  # undecided is not kept
    broken = order_claim(Pairs(3, [str(i) for i in range(NAMED + 2)], ["x"], by_sign=4))
    assert broken.holds is False
    assert broken.detail.startswith(
        f"of {NAMED + 6} pairs 3 are kept, {NAMED + 2} broken, 1 undecided; by the sign alone 4 kept, {NAMED + 2} broken; "
        "broken: 0; 1;"
    )
    assert "and 2 more (see the marks); undecided: x" in broken.detail


def test_a_claim_in_words():
    said = [Claim("it is so", holds).verdict for holds in (True, False, None)]
    assert said == ["holds", "does not hold", "undecided"]
    assert Claim("it is so", True, "by 3").words == "it is so (by 3)"
    assert Claim("it is so", True).words == "it is so"


# --- the leader


def test_claims_of_the_leader_look_where_the_paper_s_lead_is_large():
    close = values(60, 62, 63)
    there, size = leader_claims("c", LABELS, ["far", "near"], [values(1, 2, 20), values(1, 5, 3)], [PAPER, close])
    assert there.holds is True  # behind in the second column, but there the paper's lead is one point
    assert "of 2 columns first in 1, behind in 1, undecided in 0" in there.detail
    assert "far +18.0 (paper +28.0)" in there.detail
    assert size.holds is True
    there, size = leader_claims("c", LABELS, ["far"], [values(1, 2, 15)], [PAPER])
    assert (there.holds, size.holds) == (True, False)  # 13 is less than half of 28
    assert [claim.holds for claim in leader_claims("c", LABELS, ["far"], [values(1, 5, 3)], [PAPER])] == [
        False,
        False,
    ]
    assert [claim.holds for claim in leader_claims("c", LABELS, ["near"], [values(1, 5, 3)], [close])] == [None]


def test_a_tie_is_not_first():
    (there, _) = leader_claims("c", LABELS, ["far"], [values(1, 5, 5)], [PAPER])
    assert there.holds is None
    assert "first in 0, behind in 0, undecided in 1" in there.detail


def test_a_lead_within_its_error_is_not_first():
    ours = [Value(50.0, 1.0, 4), Value(60.0, 0.2, 4), Value(60.9, 1.0, 4)]  # 0.9 against 2 * sqrt(0.01 + 0.25) = 1.02
    (there, size) = leader_claims("c", LABELS, ["far"], [ours], [PAPER])
    assert there.holds is None
    assert size.holds is False  # 0.9 is far below 14
    # first is before every other: the second best may be the noisier one
    ours = [Value(59.0, 8.0, 4), Value(59.5, 0.2, 4), Value(62.0, 0.2, 4)]
    assert leader_claims("c", LABELS, ["far"], [ours], [PAPER])[0].holds is None


def test_half_of_a_lead_has_an_error_too():
    ours = [Value(0.0), Value(10.0, 2.0, 4), Value(23.0, 2.0, 4)]  # +13, half of the paper's is +14, error sqrt 2
    assert [claim.holds for claim in leader_claims("c", LABELS, ["far"], [ours], [PAPER])] == [True, None]


# --- the figure of lambda


def test_a_distance_that_grows_is_not_let_pass():
    """0.064 to 0.069 was within an allowance of 0.005."""
    accuracies = values(30.0, 31.0, 40.0, 39.0, tested=1000)
    nearer, _ = coefficient_claims("x", values(0.5, 0.2, 0.064, 0.069), accuracies, 2)
    assert nearer.holds is False
    assert nearer.detail == "||p - p~|| 0.5000, 0.2000, 0.0640, 0.0690; one seed, so by the sign alone"
    assert coefficient_claims("x", values(0.5, 0.2, 0.064, 0.06), accuracies, 2)[0].holds is True
    # over seeds the noise decides: 0.006 / sqrt 4 = 0.003, twice sqrt 2 of it is 0.0085
    assert coefficient_claims("x", values(0.5, 0.2, 0.064, 0.069, std=0.006, seeds=4), accuracies, 2)[0].holds is None
    assert (
        coefficient_claims("x", values(0.5, 0.2, 0.064, 0.069, std=0.001, seeds=4), accuracies, 2)[0].holds is False
    )


def test_the_chosen_lambda_near_the_best():
    def near(*means: float) -> bool | None:
        return coefficient_claims("x", values(3, 2, 1), values(*means, tested=2500), 1)[1].holds

    # 40 and 42 % of 2,500: an error of 1.4 points
    assert near(10.0, 40.0, 30.0) is True  # it is the best
    assert near(10.0, 40.0, 42.002) is None  # 2.002 below, which may be less
    assert near(10.0, 40.0, 50.0) is False


# --- what is written


def test_every_format_says_the_three_counts(tmp_path):
    item = find("ablation")
    pairs = Pairs()
    labels = [row.label for row in item.rows]
    published = [parse(row.published[0]) for row in item.rows]  # 48, 32, 55
    cells = judge(labels, values(40.0, 20.0, 41.0, tested=1000), published, pairs, "x")
    outcome = Outcome(item, "small", columns=["x"], rows=[(n, [c]) for n, c in zip(labels, cells, strict=True)])
    outcome.pairs, outcome.claims = pairs, [order_claim(pairs)]
    outcome.write(tmp_path, [])
    counts = "of 3 pairs 2 are kept, 0 broken, 1 undecided; by the sign alone 3 kept, 0 broken"
    markdown = (tmp_path / "ablation.md").read_text()
    assert (
        f"**undecided**: methods that are 5 points or more apart in the paper are in the same order here ({counts}"
        in markdown
    )
    assert "| p~, with WDR | 41.00 (54.99±0.27) ? |" in markdown
    assert "? on neither side" in markdown
    assert counts in (tmp_path / "ablation.tex").read_text()
    found = json.loads((tmp_path / "ablation.json").read_text())
    assert (found["pairs"]["kept"], found["pairs"]["broken"], len(found["pairs"]["undecided"])) == (2, [], 1)
    assert (found["pairs"]["by_sign"], found["pairs"]["all"]) == (3, 3)
    lines = {line["row"]: line for line in csv.DictReader((tmp_path / "ablation.csv").read_text().splitlines())}
    last = lines["p~, with WDR"]
    assert (last["verdict"], last["kept"], last["against"], last["undecided"]) == (
        "undecided",
        "1",
        "",
        "p, without WDR",
    )
    assert float(last["standard_error"]) == pytest.approx(1.555, abs=1e-3)  # sqrt(0.41 * 0.59 / 1000)
