"""Comparisons as tables: for the terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv as csv_format
import io
from collections.abc import Sequence
from typing import Any

from cwfed.core.metrics import is_share, words
from cwfed.core.types import PHASES
from cwfed.report.fitting import FittedTable
from cwfed.runs.summary import PICKINGS

HEADER = (
    "algorithm", "received", "trained", "validated", "last", "worst 10 %", "p~ corr.", "p~ dist.", "traffic", "time", "memory",
)  # fmt: skip
AFTER = 5
"""The number of columns before those of the other metrics."""
PLAIN = ("worst_decile", "correlation", "distance", "traffic", "seconds", "memory")
"""What a row has once, and not by phase and picking."""
UNKNOWN = {"mean": None, "std": None}
EXPLANATION = (
    "received, trained: best test accuracy (%) of the model as handed out by the server, and after local training; "
    "* marks the phase that is reported for this method. validated, last: that phase in the round picked on held-out "
    "training data, and in the last round. balanced accuracy, macro F1 and your own metrics: that phase, best round. worst 10 %: the clients that fare worst, best round. "
    "p~ corr., dist.: the class distributions p~ read from the weights against the true ones p, in the last round: their correlation, "
    "and ||p - p~||, mean over the clients (a flat p~ may correlate well and still be far from p). "
    "memory: peak of the process that made the run, from its start to its end (macOS: since the process began)."
)
MEANING_IN_CSV = (
    "means over n seeds; _std: sample standard deviation over them (empty for n = 1); accuracies are fractions; best, validated, last: the "
    "round picked on test data, on held-out data, the last one; reported_phase: the one that tables mark with *; worst_decile and metrics: that "
    "phase, best round; correlation, distance: of p~ with p and ||p - p~||, last round; traffic, memory: bytes"
)


def averaged(rows: Sequence[dict[str, Any]], mark: str = "±") -> str:
    """What the spread of these rows is, which `mark` stands for: a sentence, or nothing where each has one run.

    >>> averaged([{"label": "x", "n": 3}, {"label": "y", "n": 3}], "band: ±")
    'Mean over n = 3 seeds, each with a split of its own; band: ± sample standard deviation.'
    """
    counts = {row["label"]: row.get("n", 1) for row in rows}
    most = max(counts.values(), default=1)
    if most == 1:
        return ""
    fewer = ", ".join(f"{label} n = {n}" for label, n in counts.items() if n < most)
    over = (
        "training seeds on one split"
        if any(row.get("one_split") for row in rows)
        else "seeds, each with a split of its own"
    )
    return f"Mean over n = {most} {over}{f' ({fewer})' if fewer else ''}; {mark} sample standard deviation."


def explanation(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence about the columns, the star and ± of a comparison."""
    return f"{EXPLANATION} {averaged(rows)}".rstrip()


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


def rounds(count: int) -> str:
    """1 round, 2 rounds."""
    return f"{count} round{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """
    >>> duration(3750)
    '1 h 2 min'
    >>> duration(119.7)
    '2 min 0 s'
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def label(row: dict[str, Any]) -> str:
    """The method of a row of a comparison, with the number of its runs that were reused, if known."""
    reused, seeds = len(row.get("reused", ())), len(row.get("seeds", ()))
    if not reused:
        return str(row["label"])
    return f"{row['label']} (reused)" if reused == seeds else f"{row['label']} ({reused} of {seeds} reused)"


def shown(name: str, value: float | None) -> str:
    """A metric as people read it.

    >>> shown("macro_f1", 0.5), shown("loss", 0.25)
    ('50.00%', '0.25')
    """
    return "–" if value is None else f"{value:.2%}" if is_share(name) else f"{value:.4g}"


def spread_of(name: str, spread: dict[str, Any]) -> str:
    """Mean ± std of a metric."""
    if is_share(name):
        return percent(spread)
    if spread["mean"] is None:
        return "–"
    return f"{spread['mean']:.4g}" + (f" ± {spread['std']:.2g}" if spread["std"] is not None else "")


def metrics_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The metrics besides the accuracy that any of these rows has; rows of earlier versions have none."""
    found = dict.fromkeys(name for row in rows for name in row.get("metrics", {}))
    return [name for name in found if name != "loss"]


def header(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The columns of a comparison of these rows."""
    return (*HEADER[:AFTER], *map(words, metrics_of(rows)), *HEADER[AFTER:])


def cells(row: dict[str, Any], metrics: Sequence[str] = ()) -> tuple[str, ...]:
    """One row of a comparison as text, with these metrics."""
    phase = row["reported"]["phase"]
    correlation, distance = row["correlation"]["mean"], row.get("distance", UNKNOWN)["mean"]
    return (
        label(row),
        *(percent(row["accuracy"][p]["best"]) + ("*" if p == phase else "") for p in PHASES),
        percent(row["accuracy"][phase]["validated"]),
        percent(row["accuracy"][phase]["last"]),
        *(spread_of(name, row.get("metrics", {}).get(name, UNKNOWN)) for name in metrics),
        percent(row["worst_decile"]),
        "–" if correlation is None else f"{correlation:.2f}",
        "–" if distance is None else f"{distance:.3f}",
        size(row["traffic"]["mean"]),
        duration(row["seconds"]["mean"]),
        "–" if row["memory"]["mean"] is None else size(row["memory"]["mean"]),
    )


def numbers(row: dict[str, Any], metrics: Sequence[str] = ()) -> tuple[float | None, ...]:
    """The same without the label, as numbers to sort by."""
    phase, accuracy = row["reported"]["phase"], row["accuracy"]
    spreads = [accuracy[p]["best"] for p in PHASES] + [accuracy[phase]["validated"], accuracy[phase]["last"]]
    spreads += [row.get("metrics", {}).get(name, UNKNOWN) for name in metrics]
    spreads += [row.get(name, UNKNOWN) for name in PLAIN]
    return tuple(spread["mean"] for spread in spreads)


def footnotes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The notes of the runs in a table, each with the methods that it is about unless these are all."""
    found: dict[str, list[str]] = {}
    for row in rows:
        picked = row.get("pick", "accuracy")
        by = [f"rounds are picked by {words(picked)}, not by accuracy"] if picked != "accuracy" else []
        for note in [*by, *row.get("notes", [])]:
            found.setdefault(note, []).append(row["label"])
    return [note if len(of) == len(rows) else f"{', '.join(of)}: {note}" for note, of in found.items()]


def terminal(rows: Sequence[dict[str, Any]], title: str) -> FittedTable:
    """A comparison for people at a terminal."""
    caption = "\n".join([explanation(rows), *(f"note: {note}" for note in footnotes(rows))])
    table = FittedTable(header(rows), title=title, caption=caption)
    for row in rows:
        table.add_row(*(text.replace(" ± ", "±") for text in cells(row, metrics_of(rows))))  # narrow
    return table


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A comparison for a document."""
    notes = "".join(f"- {note}\n" for note in (explanation(rows), *footnotes(rows)))
    lines = [cells(row, metrics_of(rows)) for row in rows]
    return f"{markdown_table(header(rows), lines)}\n{notes}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Any table for a document: the first column is aligned left, the others right."""
    texts = [[text.replace("|", "\\|") for text in line] for line in (header, *rows)]
    lines = [texts[0], ["---", *["---:"] * (len(header) - 1)], *texts[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex_escape(text: str) -> str:
    r"""
    >>> latex_escape("p~ & 10 %")
    'p\\textasciitilde{} \\& 10 \\%'
    """
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "–": "--",
        "|": r"\textbar{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
    return "".join(special.get(c, "\\" + c if c in "&%$#_{}" else c) for c in text)


def latex(rows: Sequence[dict[str, Any]]) -> str:
    """A comparison for a paper; needs the package booktabs."""
    texts = [header(rows), *(cells(row, metrics_of(rows)) for row in rows)]
    lines = [" & ".join(map(latex_escape, line)) + r" \\" for line in texts]
    columns = "l" + "r" * (len(texts[0]) - 1)
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    notes = [f"% {' '.join(note.split())}" for note in footnotes(rows)]
    below = rf"\multicolumn{{{len(columns)}}}{{p{{0.98\linewidth}}}}{{\footnotesize {latex_escape(explanation(rows))}}} \\"
    body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", below]
    return "\n".join([*notes, begin, *body, end]) + "\n"


def csv(rows: Sequence[dict[str, Any]]) -> str:
    """A comparison for a spreadsheet: plain numbers, accuracies as fractions; each row says what it is the mean of."""
    text = io.StringIO()
    writer = csv_format.writer(text, lineterminator="\n")
    picks = [(phase, name) for phase in PHASES for name in PICKINGS]
    names = [f"{phase}_{name}{end}" for phase, name in picks for end in ("", "_std")]
    others = list(dict.fromkeys(name for row in rows for name in row.get("metrics", {})))
    names += [f"{name}{end}" for name in others for end in ("", "_std")]
    writer.writerow(["label", "algorithm", "reported_phase", *names, *PLAIN, "n", "meaning"])
    for row in rows:
        spreads = [row["accuracy"][phase][name] for phase, name in picks]
        spreads += [row.get("metrics", {}).get(name, UNKNOWN) for name in others]
        values = [spread[key] for spread in spreads for key in ("mean", "std")]
        fixed = [row["label"], row["algorithm"], row["reported"]["phase"]]
        plain = [row.get(name, UNKNOWN)["mean"] for name in PLAIN]
        writer.writerow([*fixed, *values, *plain, row.get("n", 1), MEANING_IN_CSV])
    return text.getvalue()
