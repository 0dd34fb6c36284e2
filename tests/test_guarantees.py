"""docs/guarantees.md names a test for every promise: each of them exists."""

from __future__ import annotations

import ast
import re

from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)


def test_every_test_that_is_named_exists():
    assert len(NAMED) > 20
    for file, name in NAMED:
        tree = ast.parse((ROOT / file).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not name or name in found, f"{file} has no {name}"


def test_every_promise_has_a_test():
    promises = [
        line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "|---"))
    ]
    assert len(promises) > 15
    assert not [line for line in promises if line.startswith("| **") and "`tests/" not in line]
