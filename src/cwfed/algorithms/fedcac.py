"""FedCAC. Wu et al., Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through Cautiously
Aggressive Collaboration, 2023.

Numbers of a model to which a client is sensitive are shared with clients alike only, all others with everybody:

    s = |w_after - w_before| * |w_after|        of a training; in each tensor the top tau share is critical: mask M_i
    o_ij = 1 - |M_i xor M_j| / (2 |M_i|)        overlap of two participants
    T_t = mean o + t/beta (max o - mean o)      over the pairs of round t = 1, 2, ...
    u_i = mean of w_j over j = i and all j with o_ij >= T_t
    client i is sent  M_i u_i + (1 - M_i) g,    g = sum_i p_i w_i

After round beta T is above the largest overlap (unless all are equal): critical numbers stay their client's own. Who sits
out keeps M_i and u_i, and gets the new g. The masks go up, 1 bit per parameter; as each has as many bits, overlaps are
compared by |M_i xor M_j|, in whole numbers.

Limiting cases: tau = 0 is FedAvg bit for bit. tau = 1: equal masks overlap by 1, all collaborate, and everybody gets the
plain mean (with a T above every overlap it would be Local).

(In a public version there is no u_i after round 1: critical numbers fall back to the initial model. In a tensor that did not
change at all, everything is critical there; here it is always the same number, ties by place.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Download, Form, Params, Sizes, Start, Task, Uploads

MASK = "critical"
BITS = torch.tensor([bin(byte).count("1") for byte in range(256)])
"""Of every byte, how many bits are set."""


@dataclass(frozen=True)
class FedCAC(FedAvg):
    """FedAvg whose clients have the numbers that matter most to them from clients alike."""

    name: ClassVar[str] = "fedcac"
    travels: ClassVar[str] = "2 models a participant, and 1 bit per parameter up"
    work: ClassVar[str] = "server: overlaps of all pairs of masks; keeps a model and a mask for every client"

    tau: float = 0.5
    """Share of the parameters of each tensor that are critical; the authors take 0.4 for CIFAR-100."""
    beta: float = 170.0
    """Rounds after which critical parameters are shared with nobody."""

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1 or self.beta <= 0:
            raise ConfigError("fedcac: tau must be from 0 to 1, beta above 0")

    def costs(self, sizes: Sizes) -> list[Cost]:
        bits = -(-sizes.model // 32)
        server = sizes.model + sizes.clients * (sizes.model + bits)
        up = sizes.once + sizes.participants * bits
        return [Cost(self.name, server, sizes.once, up, "the server keeps a model and a mask for every client")]

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        model = fresh(0)
        own = {name: torch.zeros(task.clients, *model[name].shape) for name in task.parameters}
        masks = torch.zeros(task.clients, *self.beside(model, task)[MASK].shape, dtype=torch.uint8)
        return {"model": model, "own": own, "masks": masks, "round": 0}  # nothing is critical yet: everybody gets g

    def send(self, state: Any, client: int) -> Download:
        critical = unpacked(state["masks"][client], {name: own[client] for name, own in state["own"].items()})
        merged = {
            name: torch.where(m, state["own"][name][client], state["model"][name]) for name, m in critical.items()
        }
        return Download((state["model"] | merged,))

    def beside(self, model: Params, task: Task) -> dict[str, Form]:
        bits = sum(model[name].numel() for name in task.parameters)
        return {MASK: Form(torch.uint8, (-(-bits // 8),), low=0.0, high=255.0)}

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        after = {name: params[name] for name in data.parameters}
        return {MASK: packed([critical((w - start.params[n]).abs() * w.abs(), self.tau) for n, w in after.items()])}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        number, clients = state["round"] + 1, torch.tensor(up.clients)
        together = self.together(differing(up.extras[MASK]), number).double()
        u = mixing.mix(together / together.sum(1, keepdim=True), {name: up.models[name] for name in state["own"]})
        return {
            "model": mixing.average(up.models, mixing.sample_weights(up.counts)),
            "own": {name: own.index_copy(0, clients, u[name]) for name, own in state["own"].items()},
            "masks": state["masks"].index_copy(0, clients, up.extras[MASK]),
            "round": number,
        }

    def together(self, differ: Tensor, number: int) -> Tensor:
        """Who collaborates with whom in a round: o_ij >= T_t, from the bits in which masks differ."""
        myself = torch.eye(len(differ), dtype=torch.bool)
        if len(differ) == 1:
            return myself
        pairs = differ[~myself].double()
        return (differ <= torch.lerp(pairs.mean(), pairs.min(), number / self.beta)) | myself


def critical(sensitivity: Tensor, share: float) -> Tensor:
    """Where the largest numbers are, so large a share of all; of equal ones the first."""
    order = sensitivity.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(sensitivity.numel(), dtype=torch.bool)
    mask[order[: round(share * len(order))].cpu()] = True
    return mask


def packed(masks: list[Tensor]) -> Tensor:
    """Masks one after the other, eight bits a byte."""
    return torch.from_numpy(np.packbits(torch.cat(masks).numpy()))


def unpacked(bits: Tensor, like: Params) -> Params:
    """The masks of tensors like these."""
    flat = torch.from_numpy(np.unpackbits(bits.numpy()).astype(bool))
    sizes = [w.numel() for w in like.values()]
    parts = torch.split(flat[: sum(sizes)], sizes)
    return {name: part.view(w.shape) for (name, w), part in zip(like.items(), parts, strict=True)}


def differing(masks: Tensor) -> Tensor:
    """|M_i xor M_j| of all pairs."""
    return torch.stack([BITS[(own ^ masks).long()].sum(1) for own in masks])
