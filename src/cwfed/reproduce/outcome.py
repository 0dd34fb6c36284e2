"""The outcome of reproducing a table or figure: for the terminal, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.text import Text

from cwfed.report import drawing, tables
from cwfed.report.fitting import FittedTable
from cwfed.report.tables import latex_escape
from cwfed.reproduce.spec import Item, Scale
from cwfed.reproduce.verdict import LEGEND, MARKS, Cell, Claim, Pairs, Value


@dataclass
class Outcome:
    """Our numbers beside the published ones, the claims, the pictures."""

    item: Item
    scale: Scale
    title: str = ""
    """The item's own, unless what was run is something else."""
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)
    pairs: Pairs | None = None
    """For a table of methods: whether they are in the paper's order."""
    claims: list[Claim] = field(default_factory=list)
    pictures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    digits: int | None = 2
    runs: list[Path] = field(default_factory=list)
    """The paths of the runs, relative to the folder of the scale, which may be moved."""
    command: str = ""

    def __post_init__(self) -> None:
        self.title = self.title or self.item.title

    @property
    def judged(self) -> bool:
        """Whether its cells have marks that need a legend."""
        return self.pairs is not None and any(cell.verdict for _, cells in self.rows for cell in cells)

    @property
    def averaged(self) -> str:
        """A sentence about what our means and ± are computed over, for readers of the table alone; "" for plain numbers."""
        seeds = sorted({cell.ours.seeds for _, cells in self.rows for cell in cells if isinstance(cell.ours, Value)})
        if not seeds or seeds == [1]:
            return ""
        counts = " or ".join(map(str, seeds))
        return f"Mean over n = {counts} seeds; ± sample standard deviation."

    def terminal(self) -> FittedTable:
        """For people at a terminal."""
        title = f"{self.item.where}: {self.title} ({self.scale})"
        beside = any(cell.published for _, cells in self.rows for cell in cells)
        caption = [*(["Ours above, the paper's below."] if beside else []), *([LEGEND] if self.judged else [])]
        table = FittedTable(["", *self.columns], title=title, caption=" ".join(caption))
        digits = 1 if self.digits and len(self.columns) > 5 else self.digits  # a terminal is only so wide
        for label, cells in self.rows:
            table.add_row(label, *(_stacked(cell, digits) for cell in cells))
        return table

    def markdown(self, pictures: str = "") -> str:
        """A section of a document; `pictures` is the folder that they lie in, as seen from it."""
        lines = [f"## {self.item.where}: {self.title}\n", f"*Claim:* {self.item.claim}.\n"]
        if self.rows:
            lines.append(tables.markdown_table(["", *self.columns], [self._texts(*row) for row in self.rows]))
        if self.judged:
            lines.append(f"{LEGEND}\n")
        lines += [f"- **{claim.verdict}**: {claim.words}" for claim in self.claims]
        lines += [f"- {note}" for note in self.notes]
        lines += [f"\n![{self.title}]({pictures}{name}.png)" for name in self.pictures]
        if self.command:
            lines.append(f"\n```sh\n{self.command}\n```")
        return "\n".join(lines) + "\n"

    def _texts(self, label: str, cells: Sequence[Cell]) -> list[str]:
        return [label, *(_in_line(cell, self.digits) for cell in cells)]

    def latex(self) -> str:
        """The table for a paper; needs the package booktabs."""
        head = " & ".join(["", *map(latex_escape, self.columns)])
        body = []
        for label, cells in self.rows:
            texts = []
            for cell in cells:
                ours = "--" if cell.ours is None else latex_escape(_text(cell.ours, self.digits))
                there = "" if cell.published is None else f" ({latex_escape(_text(cell.published, self.digits))})"
                texts.append(ours + there)
            body.append(" & ".join([latex_escape(label), *texts]) + r" \\")
        if self.judged and self.pairs:
            words = latex_escape(f"In the paper's order, {self.pairs.counts}.")
            body += [r"\midrule", rf"\multicolumn{{{len(self.columns) + 1}}}{{l}}{{{words}}} \\"]
        if self.averaged:
            words = latex_escape(f"Ours (published). {self.averaged}")
            body += [r"\midrule", rf"\multicolumn{{{len(self.columns) + 1}}}{{l}}{{\footnotesize {words}}} \\"]
        columns = "l" + "r" * len(self.columns)
        inner = "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head + r" \\", r"\midrule", *body])
        title = f"% {self.item.where}: {self.title} ({self.scale}); ours (published)"
        return f"{title}\n{inner}\n\\bottomrule\n\\end{{tabular}}\n"

    def csv(self) -> str:
        """One line a cell: `std` is the sample standard deviation over the seeds, `standard_error` that of the mean."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        values = ["mean", "std_over_seeds", "seeds", "standard_error", "published", "published_std"]
        writer.writerow(["row", "column", *values, "verdict", "kept", "against", "undecided"])
        for label, cells in self.rows:
            for column, cell in zip(self.columns, cells, strict=True):
                ours, there = _plain(cell.ours), _plain(cell.published)
                numbers = [
                    *(ours.get(key) for key in ("mean", "std", "seeds", "error")),
                    there.get("mean"),
                    there.get("std"),
                ]
                named = [cell.kept, ";".join(cell.against), ";".join(cell.undecided)]
                writer.writerow([label, column, *numbers, cell.verdict, *named])
        return text.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "name": self.item.name,
            "where": self.item.where,
            "title": self.title,
            "claim": self.item.claim,
            "scale": self.scale,
            "columns": self.columns,
            "rows": [{"label": label, "cells": [_cell_dict(c) for c in cells]} for label, cells in self.rows],
            "pairs": None if self.pairs is None else dataclasses.asdict(self.pairs) | {"all": self.pairs.all},
            "claims": [dataclasses.asdict(claim) | {"verdict": claim.verdict} for claim in self.claims],
            "notes": self.notes,
            "pictures": list(self.pictures),
            "runs": list(map(str, self.runs)),
        }

    def write(self, folder: Path, formats: Sequence[str]) -> list[Path]:
        """Write all of it to files; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"md": self.markdown(), "json": json.dumps(self.as_dict(), indent=1) + "\n"}
        if self.rows:
            texts |= {"csv": self.csv(), "tex": self.latex()}
        written = []
        for ending, text in texts.items():
            written.append(folder / f"{self.item.name}.{ending}")
            written[-1].write_text(text, encoding="utf-8")
        for name, figure in self.pictures.items():
            written += drawing.save(figure, folder / name, formats)
        return written


def _in_line(cell: Cell, digits: int | None) -> str:
    if cell.ours is None and cell.published is None:
        return ""
    there = "" if cell.published is None else f" ({_text(cell.published, digits).replace(' ± ', '±')})"
    return f"{_text(cell.ours, digits)}{there} {MARKS[cell.verdict]}".rstrip()


def _stacked(cell: Cell, digits: int | None) -> Text:
    """Ours above the paper's, to keep a wide table narrow."""
    mark = f" {MARKS[cell.verdict]}" if cell.verdict else ""
    there = "" if cell.published is None else f"\n{_text(cell.published, digits)}"
    return Text.assemble(f"{_text(cell.ours, digits)}{mark}", (there, "dim"))


def _text(value: Value | str | None, digits: int | None) -> str:
    return "–" if value is None else value if isinstance(value, str) else value.text(digits)


def _plain(value: Value | str | None) -> dict[str, Any]:
    """For programs; a setting that is not a number takes the place of the mean."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"mean": value, "std": None}
    return {"mean": value.mean, "std": value.std, "seeds": value.seeds, "error": value.error or None}


def _cell_dict(cell: Cell) -> dict[str, Any]:
    return {
        "ours": _plain(cell.ours) or None,
        "published": _plain(cell.published) or None,
        "verdict": cell.verdict,
        "kept": cell.kept,
        "against": cell.against,
        "undecided": cell.undecided,
    }
