"""What came out of reproducing a table or figure: for the terminal, Markdown, LaTeX, CSV and JSON."""

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
from rich.markup import escape
from rich.table import Table

from cwfed.report import figures, tables
from cwfed.report.tables import latex_escape
from cwfed.reproduce.spec import Item, Scale
from cwfed.reproduce.verdict import LEGEND, MARKS, Cell, Claim


@dataclass
class Outcome:
    """Our numbers beside the published ones, the claims, the pictures."""

    item: Item
    scale: Scale
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    pictures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    digits: int | None = 2
    runs: list[Path] = field(default_factory=list)
    """Where they lie, as seen from the folder of the scale: that one may be moved."""
    command: str = ""

    @property
    def judged(self) -> bool:
        """Whether its cells have marks that need a legend."""
        return any(cell.verdict in ("order", "differs") for _, cells in self.rows for cell in cells)

    def terminal(self) -> Table:
        """For people at a terminal."""
        title = f"{self.item.where}: {self.item.title} ({self.scale})"
        beside = any(cell.published for _, cells in self.rows for cell in cells)
        caption = [*(["Ours above, the paper's below."] if beside else []), *([LEGEND] if self.judged else [])]
        table = Table(title=escape(title), caption=" ".join(caption) or None, caption_justify="left")
        table.add_column("", overflow="fold")
        for name in self.columns:
            table.add_column(escape(name), justify="right")
        digits = 1 if self.digits and len(self.columns) > 5 else self.digits  # a terminal is only so wide
        for label, cells in self.rows:
            table.add_row(escape(label), *(_stacked(cell, digits) for cell in cells))
        return table

    def markdown(self, pictures: str = "") -> str:
        """A section of a document; `pictures` is the folder that they lie in, as seen from it."""
        lines = [f"## {self.item.where}: {self.item.title}\n", f"*Claim:* {self.item.claim}.\n"]
        if self.rows:
            lines.append(tables.markdown_table(["", *self.columns], [self._texts(*row) for row in self.rows]))
        if self.judged:
            lines.append(f"{LEGEND}\n")
        lines += [f"- **{claim.verdict}**: {claim.words}" for claim in self.claims]
        lines += [f"- {note}" for note in self.notes]
        lines += [f"\n![{self.item.title}]({pictures}{name}.png)" for name in self.pictures]
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
                ours = "--" if cell.ours is None else latex_escape(cell.ours.text(self.digits))
                there = "" if cell.published is None else f" ({latex_escape(cell.published.text(self.digits))})"
                texts.append(ours + there)
            body.append(" & ".join([latex_escape(label), *texts]) + r" \\")
        columns = "l" + "r" * len(self.columns)
        inner = "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head + r" \\", r"\midrule", *body])
        return f"% ours (published)\n{inner}\n\\bottomrule\n\\end{{tabular}}\n"

    def csv(self) -> str:
        """One line a cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["row", "column", "mean", "std", "published", "published_std", "verdict", "against"])
        for label, cells in self.rows:
            for column, cell in zip(self.columns, cells, strict=True):
                ours, there = cell.ours or (None, None), cell.published or (None, None)
                writer.writerow([label, column, *ours, *there, cell.verdict, ";".join(cell.against)])
        return text.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "name": self.item.name,
            "where": self.item.where,
            "title": self.item.title,
            "claim": self.item.claim,
            "scale": self.scale,
            "columns": self.columns,
            "rows": [{"label": label, "cells": [_cell_dict(c) for c in cells]} for label, cells in self.rows],
            "claims": [dataclasses.asdict(claim) | {"verdict": claim.verdict} for claim in self.claims],
            "notes": self.notes,
            "pictures": list(self.pictures),
            "runs": list(map(str, self.runs)),
        }

    def write(self, folder: Path, formats: Sequence[str]) -> list[Path]:
        """All of it as files; what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"md": self.markdown(), "json": json.dumps(self.as_dict(), indent=1) + "\n"}
        if self.rows:
            texts |= {"csv": self.csv(), "tex": self.latex()}
        written = []
        for ending, text in texts.items():
            written.append(folder / f"{self.item.name}.{ending}")
            written[-1].write_text(text, encoding="utf-8")
        for name, figure in self.pictures.items():
            written += figures.save(figure, folder / name, formats)
        return written


def _in_line(cell: Cell, digits: int | None) -> str:
    if cell.ours is None and cell.published is None:
        return ""
    ours = "–" if cell.ours is None else cell.ours.text(digits)
    there = "" if cell.published is None else f" ({cell.published.text(digits).replace(' ', '')})"
    return f"{ours}{there} {MARKS[cell.verdict]}".rstrip()


def _stacked(cell: Cell, digits: int | None) -> str:
    """Ours above the paper's, to keep a wide table narrow."""
    ours = "–" if cell.ours is None else cell.ours.text(digits)
    mark = f" {MARKS[cell.verdict]}" if cell.verdict else ""
    return f"{ours}{mark}" + ("" if cell.published is None else f"\n[dim]{cell.published.text(digits)}[/dim]")


def _cell_dict(cell: Cell) -> dict[str, Any]:
    def value(v: Any) -> Any:
        return None if v is None else {"mean": v.mean, "std": v.std}

    return {
        "ours": value(cell.ours),
        "published": value(cell.published),
        "verdict": cell.verdict,
        "against": cell.against,
    }
