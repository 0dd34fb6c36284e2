"""What tools/site.py makes of pages. Needs mkdocs (extra docs), which the suite's environment may lack."""

from __future__ import annotations

import re
import runpy
from functools import cache
from typing import Any

import pytest

from tests.conftest import ROOT

pytest.importorskip("mkdocs")


@cache
def site() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "site.py"))


def drawn(text: str) -> str:
    return site()["DIAGRAM"].sub(site()["as_list"], text)


def test_a_diagram_is_a_list_and_what_follows_it_stays():
    flow = '```mermaid\nflowchart TB\n    a["a: first"] --> b & c\n    a --> d["d: last"]\n    b & c --> d\n```\n\nafter\n'
    said = drawn(flow)
    assert said.splitlines()[2:] == [
        "| `a` | first | `b`, `c`, `d` |",
        "| `b` |  | `d` |",
        "| `c` |  | `d` |",
        "",
        "after",
    ]
    steps = "```mermaid\nsequenceDiagram\n  participant S as server\n  participant C as clients\n  S->>C: send\n  C->>C: train\n```\n"
    assert drawn(steps) == "1. **server** → **clients**: send\n1. **clients**: train\n"


def test_no_diagram_of_the_architecture_page_is_left_as_source():
    page = drawn((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert not re.search(r"-->|->>|mermaid", page)
    assert "\n| `core` |" not in page, "core imports nothing of ours"
    assert "| `models` |  | `core` |" in page


def test_pictures_can_be_opened_and_options_are_not_broken():
    content = site()["on_page_content"]
    html = '<p><img alt="a" src="a.png"></p><img src="data:image/png;base64,AA"><div class="language-sh highlight">cwfed <span class="w"> </span>--seeds 0 a--b</div>'
    made = content(html, None, None, None)
    assert '<a class="picture" href="a.png"><img alt="a" src="a.png"></a>' in made
    assert made.count("<a ") == 1, "not those that are inside the page"
    assert made.count('<span class="option">') == 1
    assert '<span class="option">--seeds</span>' in made
