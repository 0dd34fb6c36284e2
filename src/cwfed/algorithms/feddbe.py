"""FedDBE. Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, 2023.

The domain bias eliminator (DBE) over FedAvg; behind a `+`, over other methods. A client adds a vector of its own to the features (f: before that), and
the mean of its features is pulled to a common one:

    logits_i = h(f + m_i)                            m_i starts at 0, is trained with everything else, and stays with the client
    loss_i   = CE + kappa mean_d 1/2 (a - m^g)^2     a <- (1 - mu) sg(a) + mu (batch mean of f), 0 at the start of each local training
    m^g      = sum_i p_i a_i                         once: a_i is i's mean feature after a round without DBE

Over a linear head h(f + m) = h(f) + W m: what is personal are K logit offsets, and it is computed like that.

The paper has everybody train once for m^g before round 1. Here that is round 1: its participants train without DBE and send their mean features beside
their models, which are thrown away; DBE begins in round 2, one round behind. Whoever comes later is sent m^g with the model. In later rounds the mean
features sent are zeros.

Limiting cases: kappa = 0 with m_i fixed at 0 is FedAvg, bit for bit. mu scales the gradient of the pull, which is mu kappa (a - m^g) / d, shared out over the batch.

Public versions make m^g from each client's *last batch* alone (at mu = 1, which is the published setting), and train all clients for it whatever the participation;
their default kappa is 0. Here a_i is the mean over the client's training data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Download, ExtraSpec, Output, Params, Pass, Sizes, Start, Task, Uploads, When

MEMORY, AVERAGE = "dbe_memory", "dbe_average"
"""In the output layer: m_i, a parameter, and a, a buffer that every training starts anew."""
MEAN, KNOWN = "dbe_mean", "dbe_known"
"""m^g and whether there is one yet: in the server's state and in what is sent. Of a client, its mean feature."""


def add_memory(momentum: float, layer: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
    """h(f) + W m, a hook of the output layer; in training the running mean of f follows."""
    assert isinstance(layer, nn.Linear)
    memory: Tensor = getattr(layer, MEMORY)
    if layer.training and momentum < 1:
        average: Tensor = getattr(layer, AVERAGE)
        average.copy_((1 - momentum) * average + momentum * inputs[0].detach().mean(0))
    return logits + F.linear(memory, layer.weight)


@dataclass(frozen=True)
class FedDBE(FedAvg):
    """FedAvg whose clients have a mean feature of their own, apart from a body that is held to a common one."""

    name: ClassVar[str] = "feddbe"
    plugin: ClassVar[str] = "dbe"
    travels: ClassVar[str] = "2 models a participant, the common mean feature down and a mean feature up"
    work: ClassVar[str] = (
        "client: the mean feature of a batch; keeps d numbers. Round 1 is for the common mean feature"
    )
    not_over: ClassVar[Mapping[str, str]] = {
        "fedcac": "its masks are of every parameter, and what this plug-in keeps at the client never reaches the server",
        "adapt": "its vector belongs to the network's output layer, and this one has changed its network",
        "loss": "it holds the features of FedAvg's loss, and this one has a loss of its own",
        "fedamp": "its clients start from their own models, which need no vector of their own",
        "personal": "this one makes its clients' models on receipt itself, without the vector that stays with the client",
    }

    kappa: float = 50.0
    """Weight of the pull to the common mean feature; 50 is the authors' for the CNN, 1 for ResNet-18, 0.1 for fastText."""
    mean_momentum: float = 1.0
    """mu of the running mean of the features: 1 is the mean of the batch; the authors take 0.1 for ResNet-18."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kappa < 0 or not 0 < self.mean_momentum <= 1:
            raise ConfigError("feddbe: kappa must not be negative, and mean_momentum above 0 and at most 1")

    def costs(self, sizes: Sizes) -> list[Cost]:
        d, n = sizes.features, sizes.participants
        rows = super().costs(sizes)
        return [replace(r, server=r.server + d + 1, down=r.down + n * (d + 1), up=r.up + n * d) for r in rows]

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        layer = model.get_submodule(output)
        assert isinstance(layer, nn.Linear), "the model's output layer was checked when it was built"
        layer.register_parameter(MEMORY, nn.Parameter(torch.zeros(layer.in_features)))
        if self.mean_momentum < 1:
            layer.register_buffer(AVERAGE, torch.zeros(layer.in_features), persistent=False)
        layer.register_forward_hook(partial(add_memory, self.mean_momentum))
        return super().adapt(model, output)

    # server

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        features = fresh(0)[task.output_weight].shape[1]
        return super().init(fresh, task) | {MEAN: torch.zeros(features), KNOWN: torch.zeros(())}

    def send(self, state: Any, client: int) -> Download:
        sent = super().send(state, client)
        return replace(sent, notes=sent.notes | {MEAN: state[MEAN], KNOWN: state[KNOWN]})

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in super().uploaded(names, task) if name != f"{task.output}.{MEMORY}")

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        kept = {*super().keeps(names, task), f"{task.output}.{MEMORY}"}
        return tuple(name for name in names if name in kept)

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        weight = model[task.output_weight]
        return super().extras_spec(model, task) | {MEAN: ExtraSpec(weight.dtype, (weight.shape[1],))}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        if state[KNOWN]:
            return super().aggregate(state, up) | {MEAN: state[MEAN], KNOWN: state[KNOWN]}
        mean = mixing.average({MEAN: up.extras[MEAN]}, mixing.sample_weights(up.counts))
        return state | mean | {KNOWN: torch.ones(())}  # models as they were before the round

    # client

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        start = super().begin(got, own, data)
        return replace(start, notes=start.notes | {name: got.notes[name] for name in (MEAN, KNOWN)})

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        beneath = super().passes(when, task, start)
        if start.notes.get(KNOWN, True):
            return beneath
        return tuple(replace(one, fixed=(*one.fixed, f"{task.output}.{MEMORY}")) for one in beneath)

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        mean = output.features.mean(0)
        for name, average in output.buffers.items():  # with mu < 1 the value is the running mean's
            if name.endswith(f".{AVERAGE}"):
                mean = average + self.mean_momentum * (mean - mean.detach())
        pull = start.notes[KNOWN] * (mean - start.notes[MEAN]).square().mean() / 2
        return super().penalty(params, output, labels, start) + self.kappa * pull

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        mean = torch.zeros_like(start.notes[MEAN])
        if not start.notes[KNOWN]:
            means, _, counts = data.class_moments(params)
            mean = counts @ means / counts.sum()
        return super().finish(params, start, data) | {MEAN: mean}
