"""Text from outside: what of it reaches a terminal, a log, an event."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cwfed.core.errors import MOST_NAMES, MOST_TEXT, RunError, did_you_mean, plain
from cwfed.core.events import MOST_NOTE, Note, from_json, to_json
from cwfed.core.terminal import escape
from cwfed.report.fitting import FittedTable

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nerror: all is well\u202e\x9b31m\ud800"


@given(st.text(max_size=300), st.integers(10, 200))
def test_plain_text_is_short_printable_and_stays_as_it_is(text, most):
    once = plain(text, most)
    assert len(once) <= most
    assert all(c.isprintable() or c in "\u200c\u200d" for c in once)
    assert plain(once, most) == once
    if text.isprintable() and len(text) <= most:
        assert once == text


def test_what_is_too_long_keeps_its_beginning_and_its_end():
    said = str(RunError(f"the tensor {'x' * 10**6} is unknown: choose another model"))
    assert said.startswith("the tensor xxx")
    assert said.endswith("is unknown: choose another model")
    assert len(said) == MOST_TEXT


def test_names_that_others_write_are_few_and_short():
    said = did_you_mean("wanted", [HOSTILE, "y" * 10**5, *(f"{i:06d}" for i in range(10**4))])
    assert said.isprintable()
    assert len(said) < MOST_NAMES * 110
    assert said.endswith("and 9902 more")


def test_errors_notes_tables_and_consoles_make_text_plain():
    note = Note(HOSTILE * 1000)
    assert from_json(to_json(note)) == note
    assert len(note.message) <= MOST_NOTE
    shown = io.StringIO()
    console = Console(file=shown, width=100)
    table = FittedTable(("name", HOSTILE), title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE, "1")
    console.print(table)
    console.print(escape(f"{HOSTILE}[red]"))
    for text in (str(RunError(HOSTILE)), note.message, shown.getvalue()):
        assert not set(text) & set("\x1b\x07\r\u202e\x9b\ud800")
    assert "\n" not in str(RunError(HOSTILE)) + note.message
