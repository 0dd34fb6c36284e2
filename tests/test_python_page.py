"""docs/python.md as its reader uses it: every snippet runs, in order, in one folder."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
SNIPPETS = [(title, code) for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S) for code in re.findall(r"^```python\n(.*?)^```", body, re.M | re.S)]  # fmt: skip


def test_the_page_has_a_snippet_in_every_section():
    titles = re.findall(r"^## (.*)$", TEXT, re.M)
    assert [title for title in titles if title not in dict(SNIPPETS)] == []
    assert len(SNIPPETS) >= 10


def check(title: str, code: str, scope: dict[str, object]) -> None:
    """Run a snippet; what it says in `# -> value` behind an expression is what it gives."""
    exec(compile(code, f"docs/python.md, {title}", "exec"), scope)
    for expression, value in re.findall(r"^([^#\n]+?)\s*# -> (.*)$", code, re.M):
        assert repr(eval(expression, scope)) == value, expression


def test_every_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    for title, code in SNIPPETS:
        check(title, code, scope)


def test_the_check_finds_what_it_looks_for():
    with pytest.raises(AssertionError):
        check("a mistake", "1 + 1  # -> 3", {})
