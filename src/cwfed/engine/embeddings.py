"""Embeddings outside the batched step: the step gets the rows that a batch looks up, and the table is updated in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cwfed.core.types import Params


def along(rate: Tensor, like: Tensor) -> Tensor:
    """A rate per client, shaped to multiply a tensor with a leading axis of clients."""
    return rate.view(-1, *[1] * (like.ndim - 1))


class Table:
    """The embeddings of several clients: some rows of a stack of tables."""

    def __init__(self, stack: Tensor, rows: Tensor) -> None:
        self.stack, self.rows = stack, rows
        self.offsets = rows * stack.shape[1]

    def _places(self, tokens: Tensor) -> Tensor:
        """The tokens' rows in all tables stacked into one."""
        return (tokens + along(self.offsets[: len(tokens)], tokens)).flatten()

    def look_up(self, tokens: Tensor) -> Tensor:
        """The embeddings of each client's tokens."""
        return self.stack.flatten(0, 1).index_select(0, self._places(tokens)).view(*tokens.shape, -1)

    def move(self, tokens: Tensor, moves: Tensor) -> None:
        """Add to the embeddings of each client's tokens."""
        self.stack.flatten(0, 1).index_add_(0, self._places(tokens), moves.flatten(0, -2))

    def sums(self) -> Tensor:
        """One number per client, finite when all of its embeddings are."""
        return torch.stack([self.stack[row].sum() for row in self.rows.tolist()])

    def save(self, stack: Tensor) -> None:
        """Copy the tables into a stack, unless they are in it already."""
        if stack is not self.stack:
            stack[self.rows.cpu()] = self.stack[self.rows].to(stack.device)


class Lookup(nn.Embedding):
    """An embedding of the network's inputs that can be given the rows it would look up."""

    rows: Tensor | None = None
    inputs: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.rows is None:
            return super().forward(tokens)
        if tokens is not self.inputs:
            raise RuntimeError("it looks up something other than its inputs in an embedding")
        return self.rows


def lookups(model: nn.Module, inputs: NDArray[Any]) -> dict[str, Lookup]:
    """The plain, trained embeddings with sparse gradients, made ready to be given rows; by the name of their weights."""
    found = {}
    names = {name for name, _ in model.named_parameters()}  # a shared weight has one name
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            module.sparse = False  # torch.func has no sparse gradients; where rows are given it needs none
            plain = type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq
            trained = module.weight.requires_grad and f"{name}.weight" in names
            if plain and trained and module.num_embeddings > inputs.max():
                module.__class__ = Lookup
                assert isinstance(module, Lookup)
                found[f"{name}.weight"] = module
    return found


def look_up(names: Iterable[str], models: Sequence[Params], inputs: Tensor, room: dict[str, Tensor]) -> Params:
    """The embeddings of these names that each client's model has for its tokens, until the next call with the same `room`.

    They lie in `room`, which is kept between calls: to get fresh memory of that size from the system takes as long as to fill it.
    """
    found = {}
    for name in names:
        width = models[0][name].shape[1]
        if name not in room or room[name].numel() < inputs.numel() * width:
            room[name] = torch.empty(inputs.numel() * width, device=inputs.device)
        rows = room[name][: inputs.numel() * width].view(*inputs.shape, width)
        for model, tokens, place in zip(models, inputs, rows, strict=True):
            torch.index_select(model[name].to(inputs.device), 0, tokens.flatten(), out=place.view(-1, width))
        found[name] = rows
    return found
