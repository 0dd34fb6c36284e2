"""Colours: one place, one colour a method, whatever stands beside it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from cwfed.algorithms import ALGORITHMS
from cwfed.report import style

DEUTERANOPIA = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
PROTANOPIA = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
"""Machado, Oliveira and Fernandes 2009, full severity, on linear RGB."""


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Where distances are about as large as they look (Ottosson 2020)."""
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    axes = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.array(axes) @ np.cbrt(np.array(cones) @ rgb.clip(0, 1))


def contrast(one: str, other: str) -> float:
    """As WCAG counts it."""
    dark, light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (light + 0.05) / (dark + 0.05)


def test_every_method_has_a_colour_of_its_own():
    found = style.looks(list(ALGORITHMS))
    assert set(ALGORITHMS) <= set(style.METHODS), "add the new method at the end of style.METHODS"
    assert len({look.colour for look in found}) == len(ALGORITHMS)
    assert not any(look.hollow for look in found)
    assert len(set(style.COLOURS)) == len(style.COLOURS) >= len(style.METHODS)


@pytest.mark.parametrize("eyes", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["all", "no green", "no red"])
def test_the_common_methods_stay_apart_without_colour_vision(eyes):
    seen = [oklab(eyes @ linear(colour)) for colour in style.COLOURS[: style.COMMON]]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 0.07


@pytest.mark.parametrize("page", ["#ffffff", "#14161a"])
def test_every_colour_can_be_seen_on_both_pages(page):
    assert min(contrast(colour, page) for colour in style.COLOURS) > 2


def test_a_colour_does_not_depend_on_who_stands_beside_it_or_in_which_order():
    names = ["local", "mine:Ditto", "cwfedavg+prior", "fedavg", "fedavg+balanced+owners"]
    alone = [style.looks([name])[0] for name in names]
    assert style.looks(names) == alone
    assert style.looks([*names[::-1], "fedrep"])[:-1] == alone[::-1]


def test_variants_have_their_methods_colour_and_other_strokes_and_markers():
    first, second, third = style.looks(["cwfedavg", "cwfedavg", "cwfedavg"])
    assert {look.colour for look in (first, second, third)} == {style.COLOURS[1]}
    assert len({look.stroke for look in (first, second, third)}) == 3
    assert len({look.marker for look in (first, second, third)}) == 3
    assert [look.hollow for look in (first, second, third)] == [False, True, True]
    plugged = style.looks(["fedavg+prior"])[0]
    assert (plugged.colour, plugged.hollow) == (style.COLOURS[0], True)


def test_no_two_of_a_page_look_the_same():
    own = [f"mine:Method{i}" for i in range(60)]
    found = style.looks(
        [*ALGORITHMS, *own, *(f"fedavg+{p}" for p in ("prior", "ala", "tune", "dbe", "owners")), "fedavg"]
    )
    assert len(set(found)) == len(found)
    assert not {look.colour for look in style.looks(own)} & set(style.COLOURS[: style.COMMON])


def test_both_libraries_are_told_the_same():
    assert len(style.DASHES) == len(style.STROKES)
    assert len(style.SYMBOLS) == len(style.MARKERS)
    (look,) = style.looks(["local"])
    assert (look.dash, look.symbol) == ("solid", "x")
    assert (look.stroke, look.marker) == ("-", "X")


@pytest.mark.parametrize("scale", [style.SEQUENTIAL, style.DIVERGING])
def test_in_the_dark_nothing_is_dark_and_more_is_lighter(scale):
    def light(which, place):
        return float(linear(scale[which][place][1]) @ [0.2126, 0.7152, 0.0722])

    zero = 0 if scale is style.SEQUENTIAL else 2
    assert light("light", zero) > 0.9 > light("light", -1)
    assert light("dark", zero) < 0.02 < light("dark", -1)


def test_a_method_that_is_a_combination_has_one_look_under_both_names():
    assert style.looks(["fedavg+balanced+fedopt+head_first+owners"]) == style.looks(["cwrows"])
    assert style.colour("cwrows") != style.colour("fedavg")
