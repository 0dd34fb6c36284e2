"""Flower's own idea of which run and node a process works for."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="module")
def in_a_run():
    """Every test starts as in the server's process of run 1: outside a run, Flower makes no message."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("flwr"):
            from flwr.supercore.task_identity import TaskIdentity

            for name in ("_run_id", "_task_id", "_node_id"):
                patch.setattr(TaskIdentity, name, 1)
        yield
