"""Flower's own idea of which run and node a process works for."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    """Every test starts as in the server's process of run 1: outside a run, Flower makes no message."""
    if not find_spec("flwr"):
        return
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
