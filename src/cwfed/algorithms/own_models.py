"""The server's state for methods that keep every client's last model (memory grows with the number of clients)."""

from __future__ import annotations

from typing import Any

import torch

from cwfed.core.types import Params, Sizes, Task, Uploads

EVERY_MODEL = "the server keeps every client's model; every client keeps its own model"


def server_numbers(sizes: Sizes) -> int:
    """Every client's model, the initial one, and a number for each pair of clients."""
    return (sizes.clients + 1) * sizes.model + sizes.clients**2


def no_models(initial: Params, task: Task) -> dict[str, Any]:
    """The state before round 1: no client has uploaded, so every client has the initial model."""
    return {
        "initial": initial,
        "models": {name: torch.zeros(task.clients, *w.shape, dtype=w.dtype) for name, w in initial.items()},
        "known": torch.zeros(task.clients, dtype=torch.bool),
        "parameters": list(task.parameters),
    }


def with_uploads(state: Any, up: Uploads) -> dict[str, Any]:
    """The state with the participants' new models; the other clients' models stay."""
    clients = torch.tensor(up.clients)
    before: dict[str, Any] = state
    return before | {
        "models": {name: w.index_copy(0, clients, up.models[name]) for name, w in state["models"].items()},
        "known": state["known"].index_fill(0, clients, True),
    }


def parameters_only(state: Any) -> Params:
    """All clients' models without running statistics, which do not matter for how models differ."""
    return {name: state["models"][name] for name in state["parameters"]}
