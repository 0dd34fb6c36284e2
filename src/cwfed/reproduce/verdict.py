"""Is what we measured what was published? Pure functions of two columns of numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import hypot
from typing import Literal, NamedTuple

from cwfed.errors import ConfigError

LARGE = 5.0
"""Points of accuracy: methods this far apart in the paper must be in the same order here."""

NAMED = 8
"""At most so many broken pairs are named in a claim; the cells name all."""

Verdict = Literal["same", "order", "differs", ""]
MARKS: dict[Verdict, str] = {"same": "=", "order": "✓", "differs": "✗", "": ""}
LEGEND = (
    f"= the paper's number, within a point or two standard deviations; ✓ another number, but on the paper's side of every "
    f"method that is {LARGE:g} points or more away in the paper; ✗ on the other side of one."
)


class Value(NamedTuple):
    """A mean, with its standard deviation where there is one."""

    mean: float
    std: float | None = None

    def text(self, digits: int | None = 2) -> str:
        """No digits: as it is.

        >>> Value(60.678, 0.84).text()
        '60.68 ± 0.84'
        >>> Value(1000.0).text(None)
        '1000'
        """
        form = "g" if digits is None else f".{digits}f"
        return f"{self.mean:{form}}" + (f" ± {self.std:{form}}" if self.std is not None else "")


def parse(text: str) -> Value:
    """
    >>> parse("60.68±0.84")
    Value(mean=60.68, std=0.84)
    """
    found = re.fullmatch(r"\s*(-?[\d.]+)\s*(?:±\s*([\d.]+))?\s*", text)
    if not found:
        raise ConfigError(f"a published value looks like 60.68±0.84, not {text!r}")
    return Value(float(found[1]), float(found[2]) if found[2] else None)


@dataclass(frozen=True)
class Cell:
    """One number of a table: ours, the paper's, and what to think of it."""

    ours: Value | None
    published: Value | None = None
    verdict: Verdict = ""
    against: tuple[str, ...] = ()
    """Rows on whose wrong side it is."""


@dataclass(frozen=True)
class Claim:
    """Something the paper says, and whether it is so here."""

    says: str
    holds: bool | None
    """None where this scale cannot say."""
    detail: str = ""

    @property
    def words(self) -> str:
        """What is claimed, and the numbers behind the verdict."""
        return f"{self.says} ({self.detail})" if self.detail else self.says

    @property
    def verdict(self) -> str:
        """In words."""
        return "cannot be said" if self.holds is None else "holds" if self.holds else "does not hold"


@dataclass
class Pairs:
    """How many pairs of methods that are far apart in the paper are in its order here."""

    kept: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def all(self) -> int:
        """Pairs that are far apart in the paper."""
        return self.kept + len(self.broken)


def is_same(ours: Value, published: Value, least: float = 1.0) -> bool:
    """Within `least`, or within two standard deviations of the difference."""
    spread = hypot(ours.std or 0.0, published.std or 0.0)
    return abs(ours.mean - published.mean) <= max(least, 2 * spread)


def judge(
    labels: Sequence[str], ours: Sequence[Value], published: Sequence[Value], pairs: Pairs, where: str
) -> list[Cell]:
    """One column of a table; the pairs are counted on."""
    cells = []
    for a, label in enumerate(labels):
        against = []
        for b, other in enumerate(labels):
            gap = published[a].mean - published[b].mean
            if abs(gap) < LARGE:
                continue
            kept = (ours[a].mean - ours[b].mean) * gap > 0
            if not kept:
                against.append(other)
            if gap > 0:  # every pair once
                if kept:
                    pairs.kept += 1
                else:
                    words = f"{label} {ours[a].mean:.1f}, {other} {ours[b].mean:.1f} (paper {published[a].mean:.1f}, {published[b].mean:.1f})"
                    pairs.broken.append(f"{where}: {words}")
        verdict: Verdict = "differs" if against else "same" if is_same(ours[a], published[a]) else "order"
        cells.append(Cell(ours[a], published[a], verdict, tuple(against)))
    return cells


def order_claim(pairs: Pairs) -> Claim:
    """The order of methods that are far apart."""
    says = f"methods that are {LARGE:g} points or more apart in the paper are in the same order here"
    detail = f"{pairs.kept} of {pairs.all} pairs"
    if pairs.broken:
        more = len(pairs.broken) - NAMED
        detail += (
            "; not: " + "; ".join(pairs.broken[:NAMED]) + (f"; and {more} more (see the marks)" if more > 0 else "")
        )
    return Claim(says, not pairs.broken if pairs.all else None, detail)


def leader_claims(
    leader: str,
    labels: Sequence[str],
    columns: Sequence[str],
    ours: Sequence[Sequence[Value]],
    published: Sequence[Sequence[Value]],
) -> list[Claim]:
    """One method's lead over the best of the others: is it there, and is it as large, where the paper's is large?"""
    row = labels.index(leader)
    leads = [[_lead(values, row) for values in pair] for pair in zip(ours, published, strict=True)]
    words = [
        f"{column} {here:+.1f} (paper {there:+.1f})" for column, (here, there) in zip(columns, leads, strict=True)
    ]
    large = [(here, there) for here, there in leads if there >= LARGE]
    first = sum(here >= 0 for here, _ in leads)
    claims = [
        Claim(
            f"{leader} is before the best of the others where the paper's lead is {LARGE:g} points or more",
            all(here > 0 for here, _ in large) if large else None,
            f"first in {first} of {len(columns)} columns; lead in points: {', '.join(words)}",
        )
    ]
    if large:
        halves = [here >= there / 2 for here, there in large]
        detail = f"in {sum(halves)} of {len(halves)} columns"
        claims.append(Claim("that lead is at least half of the paper's", all(halves), detail))
    return claims


def _lead(values: Sequence[Value], row: int) -> float:
    return values[row].mean - max(value.mean for i, value in enumerate(values) if i != row)
