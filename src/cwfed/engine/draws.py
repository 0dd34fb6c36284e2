"""Random numbers inside a network, such as dropout masks: from a generator that is seeded for each client and round.

With torch's global generator, results would depend on the order of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from cwfed.core.errors import RunError


def seed(network: nn.Module, generator: torch.Generator) -> None:
    """Make the modules of a network draw from this generator."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, _DropoutNd) and type(child) in (nn.Dropout, *WHOLE_CHANNELS):
                setattr(module, name, SeededDropout(child.p, type(child) in WHOLE_CHANNELS, generator))
    for module in network.modules():
        if isinstance(module, DRAW_INSIDE):
            SeededInside(module, generator)


def refuse_global(before: Tensor) -> None:
    """RunError if torch's global generator was used since its state was `before`."""
    if not torch.equal(before, torch.get_rng_state()):
        raise RunError(
            "the model draws from torch's global random generator while it trains, so its runs cannot be repeated: "
            "use modules such as nn.Dropout instead of functions such as F.dropout"
        )


class SeededDropout(nn.Module):
    """Dropout that draws from the worker's own generator."""

    def __init__(self, p: float, whole_channels: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.p, self.whole_channels, self.generator = p, whole_channels, generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if self.whole_channels else x.shape
        keep = torch.empty(shape, device=x.device, dtype=x.dtype).bernoulli_(1 - self.p, generator=self.generator)
        return x * keep / (1 - self.p) if self.p < 1 else x * 0


WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DRAW_INSIDE = (nn.MultiheadAttention, nn.RNNBase, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
"""Modules that draw inside their own computation, such as dropout between the layers of an LSTM."""


class _Seeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operations of this thread draw from this generator in place of torch's global one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is None and any(a.name == "generator" for a in func._schema.arguments):
            kwargs = kwargs | {"generator": self._generator}
        return func(*args, **kwargs)


class SeededInside:
    """Hooks around a module that draws inside itself: its draws come from the worker's own generator."""

    def __init__(self, module: nn.Module, generator: torch.Generator) -> None:
        self._generator = generator
        self._entered: list[_Seeded] = []
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module.training:  # in evaluation nothing is drawn, and intercepting every operation costs time
            self._entered.append(_Seeded(self._generator))
            self._entered[-1].__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training and self._entered:
            self._entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
