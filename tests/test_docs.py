"""What the docs say about the code is so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_architecture_page_names_every_module_once():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text[text.index("## Where things are") : text.index("## An algorithm")]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", "".join(first))
    assert len(named) == len(set(named))
    package = ROOT / "src/cwfed"
    files = {p.name for p in package.glob("*.py") if not p.name.startswith("__")}
    folders = {f"{p.parent.name}/" for p in package.glob("*/__init__.py")}
    assert set(named) == files | folders


def test_tests_named_in_the_algorithms_page_exist():
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    tests = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"::(test_\w+)", text)
    assert len(named) > 8
    assert [name for name in named if f"def {name}(" not in tests] == []
