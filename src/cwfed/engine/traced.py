"""A function of tensors that, seen often, becomes a straight line of tensor operations, or compiled code.

Tracing records the operations a function does on inputs of one shape; done again, they are the same ones in the same
order, so the bits do not change, and Python's part is a fraction. Compiling fuses them, which changes rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from cwfed.core.errors import RunError

TRACE_AFTER = 50
"""Calls of one shape before it is traced: a trace takes as long as some dozens of calls."""
FIRST_TRACE_AFTER = 800
"""Calls before anything is traced: the first trace also loads torch's tracer, which takes a second or two."""


class Traced:
    """A function of nested dicts of tensors, which may change them in place; it gives a tuple of tensors."""

    warm: ClassVar[bool] = False
    """Whether torch's tracer is loaded."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self._seen: Counter[Hashable] = Counter()
        self._lines: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, key: Hashable, *given: Any, compile: bool = False) -> tuple[Tensor, ...]:
        """`key` tells shapes apart: what is equal in it has tensors of equal shapes."""
        line = self._lines.get(key)
        if line is None:
            self._seen[key] += 1
            often = self._seen[key] > TRACE_AFTER and (Traced.warm or self._seen.total() > FIRST_TRACE_AFTER)
            if not (often or compile):
                return self.function(*given)
            line = self._lines[key] = self._straight(given, compile)
        found: tuple[Tensor, ...] = tuple(line(*_leaves(given)))
        return found

    def _straight(self, given: tuple[Any, ...], compile: bool) -> Callable[..., Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        copies = [leaf.clone() for leaf in _leaves(given)]  # tracing carries the function out

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            return self.function(*_like(given, iter(tensors)))

        Traced.warm = True
        with torch.no_grad():
            line = make_fx(flat)(*copies)
            _drop_what_does_nothing(line)
            return self._compiled(line, copies) if compile else line

    def _compiled(self, line: GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
        from torch._inductor import compile as inductor

        try:
            compiled: Callable[..., Any] = inductor(line, list(example))
            compiled(*(tensor.clone() for tensor in example))
        except Exception as error:  # whatever a compiler may say; uncompiled the same run would have other bits
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RunError(f'torch cannot compile the step, set run.compile = "never": {reason}') from None
        return compiled


def _leaves(tree: Any) -> list[Tensor]:
    """The tensors of nested dicts and tuples. (torch's own pytree takes as long as a small step.)"""
    found: list[Tensor] = []
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, Tensor):
            found.append(part)
        elif part:
            found += _leaves(part)
    return found


def _like(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """The same nested dicts and tuples with other tensors."""
    if isinstance(tree, Tensor):
        return next(leaves)
    if isinstance(tree, dict):
        return {name: _like(part, leaves) for name, part in tree.items()}
    parts = [_like(part, leaves) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def _drop_what_does_nothing(line: GraphModule) -> None:
    aten = torch.ops.aten
    for node in list(line.graph.nodes):
        if node.target in (aten.expand.default, aten.view.default, aten._unsafe_view.default):
            before, after = node.args[0].meta["val"], node.meta["val"]
            if before.shape == after.shape and before.stride() == after.stride():
                node.replace_all_uses_with(node.args[0])
                line.graph.erase_node(node)
    line.graph.eliminate_dead_code()
    line.recompile()
