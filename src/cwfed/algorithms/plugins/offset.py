"""A personal offset of the logits.

    z = W f + b + o_i        o_i in R^K: starts at 0, trained with everything else, never leaves its client

It learns what `prior` computes, and more; for a fixed head it is DBE's personal mean seen through the head (o_i = W m_i), but survives the exchange of the head. With `prior` at the test as
well the class prior would count twice; over `balanced` it learns what the prior leaves.

Limiting case: o frozen at 0 is what is beneath it, bit for bit.

The server is sent what it was sent before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Params, Task

OFFSET = "offset"


def add_offset(layer: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
    """What the output layer says, with its offset; a hook, so that the layer may be of any kind."""
    offset: Tensor = getattr(layer, OFFSET)  # no parameter any more where torch calls the network with other tensors
    return logits + offset


@dataclass(frozen=True)
class Offset(FedAvg):
    """Every client has K logit offsets of its own."""

    plugin: ClassVar[str] = "offset"
    work: ClassVar[str] = "client: keeps K numbers"
    not_over: ClassVar[Mapping[str, str]] = {
        "fedcac": "its masks are of every parameter, and what this plug-in keeps at the client never reaches the server",
        "adapt": "it belongs to the network's output layer, and this one has changed its network",
        "personal": "this one makes its clients' models on receipt itself, whole ones that need no offset",
        "fedamp": "its clients have whole models of their own, which need no offset",
    }

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        layer = model.get_submodule(output)
        assert isinstance(layer, nn.Linear), "models are checked when they are built"
        layer.register_parameter(OFFSET, nn.Parameter(torch.zeros(layer.out_features)))
        layer.register_forward_hook(add_offset)
        return super().adapt(model, output)

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        if task.output_weight not in self.uploaded(task.parameters, task):
            raise ConfigError(
                f"offset: the output layer of {self.name} stays with its client, which has a bias of its own already"
            )
        return super().init(fresh, task)

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        own = f"{task.output}.{OFFSET}"
        return tuple(name for name in super().uploaded(names, task) if name != own)

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        kept = {*super().keeps(names, task), f"{task.output}.{OFFSET}"}
        return tuple(name for name in names if name in kept)
