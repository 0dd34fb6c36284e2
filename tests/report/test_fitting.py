"""Tables in a terminal of any width: every number is whole."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from cwfed.cli import console
from cwfed.report.fitting import FittedTable

HEADER = ("algorithm", "received", "picked on validation", "a note on it", "traffic")


def table(**changes) -> FittedTable:
    made = FittedTable(HEADER, words=("a note on it",), title="A title", caption="What it means.", **changes)
    made.add_row(
        "cwfedavg:layers=output:wdr=0", "97.55±12.67*", Text("1,234,567.89"), "folded where it is long", "4.53 GB"
    )
    made.add_row("fedavg", "38.00±0.12", "–", "", "999 MB")
    return made


def printed(made: FittedTable, width: int, monkeypatch) -> str:
    monkeypatch.setattr(console, "out", Console(file=io.StringIO(), width=width))
    console.print_table(made)
    return console.out.file.getvalue()


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("width", [5, 20, 30, 40, 60, 80, 120, 200])
def test_no_number_is_cut(width, framed, monkeypatch):
    text = printed(table(framed=framed), width, monkeypatch)
    for number in ("97.55±12.67*", "1,234,567.89", "4.53 GB", "38.00±0.12", "999 MB"):
        assert len(re.findall(rf"(?<!\S){re.escape(number)}(?!\S)", text)) == 1
    assert "…" not in text
    if width >= 30:
        assert max(map(len, text.splitlines())) <= width


def test_a_table_that_fits_is_one_table(monkeypatch):
    wide = printed(table(), 120, monkeypatch)
    assert wide.count("algorithm") == 1
    assert "cwfedavg:layers=output:wdr=0" in wide
    assert wide.count("A title") == wide.count("What it means.") == 1


def test_every_one_of_several_tables_names_its_lines(monkeypatch):
    made = FittedTable(("run", "accuracy", "round", "error"), names=("round",))
    made.add_row("cwfedavg", "98.44%", "17", "0.532 (0.80)")
    narrow = printed(made, 34, monkeypatch)
    assert narrow.count("cwfedavg") == narrow.count(" 17 ") == 2
    assert narrow.index("accuracy") < narrow.index("round")  # columns keep their order


def test_long_words_are_folded_not_cut(monkeypatch):
    text = printed(table(), 60, monkeypatch)
    folded = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│"))
    assert "cwfedavg:layers=output:wdr=0" in folded


def test_texts_are_no_markup(monkeypatch):
    made = FittedTable(("a[/b]c", "n"), title="[bold]t")
    made.add_row("x[/y]", "1")
    text = printed(made, 80, monkeypatch)
    assert all(part in text for part in ("a[/b]c", "[bold]t", "x[/y]"))
