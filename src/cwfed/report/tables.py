"""Comparisons as tables: for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from cwfed.types import PHASES

HEADER = ("algorithm", "received", "trained", "validated", "last", "worst 10 %", "p~", "traffic", "time")
EXPLANATION = (
    "received, trained: best test accuracy (%) of the model as handed out by the server, and after local training; "
    "* marks the phase that is reported for this method. validated, last: that phase in the round picked on held-out "
    "training data, and in the last round. worst 10 %: the clients that fare worst, best round. "
    "p~: correlation of the class distributions read from the weights with the true ones."
)


def percent(spread: dict[str, Any]) -> str:
    """Mean ± std of fractions as per cent."""
    if spread["mean"] is None:
        return "–"
    return f"{100 * spread['mean']:.2f}" + (f" ± {100 * spread['std']:.2f}" if spread["std"] is not None else "")


def size(count: float) -> str:
    """
    >>> size(3_500_000)
    '3.5 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """
    >>> duration(3750)
    '1 h 2 min'
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {seconds % 60:.0f} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of a comparison as text."""
    phase = row["reported"]["phase"]
    correlation = row["correlation"]["mean"]
    return (
        row["label"],
        *(percent(row["accuracy"][p]["best"]) + ("*" if p == phase else "") for p in PHASES),
        percent(row["accuracy"][phase]["validated"]),
        percent(row["accuracy"][phase]["last"]),
        percent(row["worst_decile"]),
        "–" if correlation is None else f"{correlation:.2f}",
        size(row["traffic"]["mean"]),
        duration(row["seconds"]["mean"]),
    )


def terminal(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """A comparison for people at a terminal."""
    table = Table(title=title, caption=EXPLANATION, caption_justify="left")
    for name in HEADER:
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in rows:
        table.add_row(*cells(row))
    return table


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A comparison for a document."""
    lines = [HEADER, ("---", *["---:"] * (len(HEADER) - 1)), *map(cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
