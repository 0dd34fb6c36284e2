"""Is what we measured what was published? Pure functions of two columns of numbers.

Every number has a standard error. A difference within two of its standard errors is undecided, and what is undecided
never counts as agreement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import hypot, sqrt
from typing import Literal, NamedTuple

from cwfed.core.errors import ConfigError

LARGE = 5.0
"""Points of accuracy: methods this far apart in the paper must be in the same order here."""
LEAST, CAP = 1.0, 2.0
"""Points of accuracy: numbers this near are the same whatever their error; further apart than the cap they never are."""
PUBLISHED_SEEDS = 3
"""The paper's ± is the standard deviation over three runs."""
NAMED = 8
"""At most so many pairs of a kind are named in a claim; the cells name all."""

Decision = Literal["kept", "broken", "undecided"]
Verdict = Literal["same", "order", "undecided", "differs", ""]
MARKS: dict[Verdict, str] = {"same": "=", "order": "✓", "undecided": "?", "differs": "✗", "": ""}
LEGEND = (
    f"Marks compare a method with every other that is {LARGE:g} points or more away in the paper. ✗ on the other side of one "
    "here; ? on neither side of one: their difference is within two standard errors; ✓ on the paper's side of all, with "
    f"another number; = so too, and the paper's number: within two standard errors of the difference, at least {LEAST:g} and "
    f"at most {CAP:g} points; no mark: no such method was compared. The standard error of a mean is its standard deviation over the seeds divided by the root of "
    "their number, and never less than what the finite test set gives, sqrt(p (1 - p) / N). With one seed that is all there "
    "is: how seeds differ is then unknown, and the error is a lower bound."
)


class Value(NamedTuple):
    """A mean, with what is known of how far it can be trusted."""

    mean: float
    std: float | None = None
    """Standard deviation over the seeds, where there are several."""
    seeds: int = 1
    tested: int = 0
    """For an accuracy in per cent: the test samples of a run."""

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 where nothing is known of it: then the sign decides.

        Seeds of one split share its test set, so the test set's part does not shrink with their number.

        >>> round(Value(90.0, tested=900).error, 3)
        1.0
        >>> Value(90.0, 6.0, seeds=4, tested=900).error
        3.0
        """
        share = self.mean / 100
        finite = 100 * sqrt(share * (1 - share) / self.tested) if self.tested else 0.0
        return max(finite, 0.0 if self.std is None else self.std / sqrt(self.seeds))

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
    Value(mean=60.68, std=0.84, seeds=3, tested=0)
    """
    found = re.fullmatch(r"\s*(-?[\d.]+)\s*(?:±\s*([\d.]+))?\s*", text)
    if not found:
        raise ConfigError(f"a published value looks like 60.68±0.84, not {text!r}")
    return Value(float(found[1]), float(found[2]), PUBLISHED_SEEDS) if found[2] else Value(float(found[1]))


@dataclass(frozen=True)
class Cell:
    """One entry of a table: ours, the paper's, and what to think of it. Text where it is no number."""

    ours: Value | str | None
    published: Value | str | None = None
    verdict: Verdict = ""
    against: tuple[str, ...] = ()
    """Rows on whose wrong side it is."""
    undecided: tuple[str, ...] = ()
    """Rows from which it cannot be told apart, and should be."""
    kept: int = 0
    """Rows on whose right side it is."""


@dataclass(frozen=True)
class Claim:
    """Something the paper says, and whether it is so here."""

    says: str
    holds: bool | None
    """None where it is undecided."""
    detail: str = ""

    @property
    def words(self) -> str:
        """What is claimed, and the numbers behind the verdict."""
        return f"{self.says} ({self.detail})" if self.detail else self.says

    @property
    def verdict(self) -> str:
        """In words."""
        return "undecided" if self.holds is None else "holds" if self.holds else "does not hold"


@dataclass
class Pairs:
    """Pairs of methods that are far apart in the paper: are they in its order here?"""

    kept: int = 0
    broken: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    by_sign: int = 0
    """How many are in the paper's order if any difference counts, however small."""

    @property
    def all(self) -> int:
        """Pairs that are far apart in the paper."""
        return self.kept + len(self.broken) + len(self.undecided)

    @property
    def counts(self) -> str:
        """In words, also by the sign alone."""
        return (
            f"of {self.all} pair{'s' * (self.all != 1)} {self.kept} {'is' if self.kept == 1 else 'are'} kept, {len(self.broken)} broken, {len(self.undecided)} undecided; "
            f"by the sign alone {self.by_sign} kept, {self.all - self.by_sign} broken"
        )


def error_of_difference(a: Value, b: Value) -> float:
    """The standard error of the difference of two means: sqrt(s_a^2 / n_a + s_b^2 / n_b)."""
    return hypot(a.error, b.error)


def decide(difference: float, error: float) -> Decision:
    """A difference that should be positive; within two standard errors it is undecided.

    >>> decide(0.1, 9.8), decide(20.0, 9.8), decide(-20.0, 9.8)
    ('undecided', 'kept', 'broken')
    """
    if abs(difference) <= 2 * error or difference == 0:
        return "undecided"
    return "kept" if difference > 0 else "broken"


def all_hold(decisions: Sequence[Decision]) -> bool | None:
    """Whether a claim holds that is made of several: not if one is broken, and only if all are kept."""
    if "broken" in decisions:
        return False
    return True if decisions and "undecided" not in decisions else None


def is_same(ours: Value, published: Value, least: float = LEAST, cap: float = CAP) -> bool:
    """Within two standard errors of the difference, but at least within `least` and at most within `cap` points.

    The cap is there so that noisier runs do not agree with more.
    """
    return abs(ours.mean - published.mean) <= min(cap, max(least, 2 * error_of_difference(ours, published)))


def judge(
    labels: Sequence[str], ours: Sequence[Value], published: Sequence[Value], pairs: Pairs, where: str
) -> list[Cell]:
    """One column of a table; the pairs are counted on."""
    cells = []
    for a, label in enumerate(labels):
        found: dict[Decision, list[str]] = {"kept": [], "broken": [], "undecided": []}
        for b, other in enumerate(labels):
            gap = published[a].mean - published[b].mean
            if abs(gap) < LARGE:
                continue
            difference = ours[a].mean - ours[b].mean
            decision = decide(difference if gap > 0 else -difference, error_of_difference(ours[a], ours[b]))
            found[decision].append(other)
            if gap > 0:  # every pair once
                pairs.by_sign += difference > 0
                words = f"{where}: {label} {ours[a].mean:.1f}, {other} {ours[b].mean:.1f} (paper {published[a].mean:.1f}, {published[b].mean:.1f})"
                if decision == "kept":
                    pairs.kept += 1
                else:
                    (pairs.broken if decision == "broken" else pairs.undecided).append(words)
        against, undecided = tuple(found["broken"]), tuple(found["undecided"])
        verdict: Verdict = "same" if is_same(ours[a], published[a]) else "order" if found["kept"] else ""
        verdict = "differs" if against else "undecided" if undecided else verdict
        cells.append(Cell(ours[a], published[a], verdict, against, undecided, len(found["kept"])))
    return cells


def order_claim(pairs: Pairs) -> Claim:
    """The order of methods that are far apart."""
    says = f"methods that are {LARGE:g} points or more apart in the paper are in the same order here"
    detail = pairs.counts + _named("broken", pairs.broken) + _named("undecided", pairs.undecided)
    return Claim(says, False if pairs.broken else None if pairs.undecided or not pairs.kept else True, detail)


def _named(kind: str, pairs: Sequence[str]) -> str:
    if not pairs:
        return ""
    more = f"; and {len(pairs) - NAMED} more (see the marks)" if len(pairs) > NAMED else ""
    return f"; {kind}: " + "; ".join(pairs[:NAMED]) + more


def leader_claims(
    leader: str,
    labels: Sequence[str],
    columns: Sequence[str],
    ours: Sequence[Sequence[Value]],
    published: Sequence[Sequence[Value]],
) -> list[Claim]:
    """One method's lead over the best of the others: is it there, and is it as large, where the paper's is large?"""
    row = labels.index(leader)
    here, there = ([_lead(values, row) for values in table] for table in (ours, published))
    places = [_place(values, row) for values in ours]
    first, behind, open_ = (places.count(decision) for decision in ("kept", "broken", "undecided"))
    words = [f"{c} {h.mean:+.1f} (paper {t.mean:+.1f})" for c, h, t in zip(columns, here, there, strict=True)]
    large = [i for i, lead in enumerate(there) if lead.mean >= LARGE]
    claims = [
        Claim(
            f"{leader} is before the best of the others where the paper's lead is {LARGE:g} points or more",
            all_hold([places[i] for i in large]),
            f"of {len(columns)} columns first in {first}, behind in {behind}, undecided in {open_}; "
            f"lead in points: {', '.join(words)}",
        )
    ]
    if large:
        halves = [decide(here[i].mean - there[i].mean / 2, hypot(here[i].error, there[i].error / 2)) for i in large]
        detail = f"of {len(halves)} columns in {halves.count('kept')}, not in {halves.count('broken')}, undecided in {halves.count('undecided')}"
        claims.append(Claim("that lead is at least half of the paper's", all_hold(halves), detail))
    return claims


class Lead(NamedTuple):
    """How far one method is before the best of the others."""

    mean: float
    error: float


def _lead(values: Sequence[Value], row: int) -> Lead:
    best = max((value for i, value in enumerate(values) if i != row), key=lambda value: value.mean)
    return Lead(values[row].mean - best.mean, error_of_difference(values[row], best))


def _place(values: Sequence[Value], row: int) -> Decision:
    """kept: first, decidedly before every other; broken: decidedly behind one."""
    others = [
        decide(values[row].mean - value.mean, error_of_difference(values[row], value))
        for i, value in enumerate(values)
        if i != row
    ]
    return "broken" if "broken" in others else "undecided" if "undecided" in others else "kept"
