"""A second model at the client: a copy of the network, attached to it, whose tensors have the prefix `own.`."""

from __future__ import annotations

import copy

from torch import nn

from cwfed.core.types import Params
from cwfed.models import attach, holder

OWN = "own."
"""The prefix of the names of the second model's tensors."""


def with_twin(network: nn.Module) -> nn.Module:
    """The network with a copy of itself; both start with the same weights."""
    return attach(network, OWN.removesuffix("."), copy.deepcopy(network))


def with_second_parameters(network: nn.Module) -> nn.Module:
    """The network with a copy of its parameters alone: both models have the same running statistics."""
    copies = holder({name: w.detach().clone() for name, w in network.named_parameters()})
    for name, w in network.named_parameters():
        copies.get_parameter(name).requires_grad_(w.requires_grad)  # what the network froze stays frozen
    return attach(network, OWN.removesuffix("."), copies)


def of_twin(tensors: Params) -> Params:
    """The second model's tensors, by their names in the network."""
    return {name.removeprefix(OWN): w for name, w in tensors.items() if name.startswith(OWN)}


def of_network(tensors: Params) -> Params:
    """The network's tensors without those of its second model."""
    return {name: w for name, w in tensors.items() if not name.startswith(OWN)}
