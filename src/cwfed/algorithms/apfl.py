"""APFL. Deng et al., Adaptive Personalized Federated Learning, 2020.

    u_i = alpha_i v_i + (1 - alpha_i) w_i             the personal model, a mix of parameters

On every batch, all right-hand sides from before the step:

    w_i     <- w_i - lr grad CE(w_i)                                  sent up and averaged as in FedAvg
    v_i     <- v_i - lr alpha_i grad CE(u_i)                          stays with the client
    alpha_i <- clip(alpha_i - lr <v_i - w_i, grad CE(u_i)>, 0, 1)     stays; first batch of a round only

That is one SGD step on CE(w_i) + CE(alpha_i v_i + (1 - alpha_i) sg(w_i)). alpha is clipped where it is used: as it moves
once per round, that is the same.

Limiting cases, bit for bit: the w_i are FedAvg's whatever alpha is; alpha = 1, not adaptive: v_i is Local's model; alpha = 0,
not adaptive: v_i never moves, both phases are FedAvg's. Where v_i = w_i alpha has no gradient: it first moves in a client's
second round. Phase `received` is the mix with the received w, `trained` (as the paper reports) with the trained w_i; the mix
has running statistics of its own. w_i is not kept: who sits out is measured, and everybody's model is saved, as the mix with the newest w.

(Public versions mix logits, which is the same for linear models only; train v at v; overwrite v by the mix; step w twice;
give v no gradient; move alpha on every batch, with a decay.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.algorithms.twin import OWN, of_twin, with_second_parameters
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Loss, Network, Params, Pass, Phase, Start, Task, When
from cwfed.models import attach, holder

MIX = "mix."
"""Before the names of what belongs to u alone: alpha, and running statistics."""
ALPHA = f"{MIX}alpha"


@dataclass(frozen=True)
class APFL(FedAvg):
    """FedAvg, and beside it a second model that is trained inside its mix with the first."""

    name: ClassVar[str] = "apfl"
    phase: ClassVar[Phase] = "trained"
    work: ClassVar[str] = "client: twice the training, keeps a second model and alpha; server: as FedAvg"

    alpha: float = 0.5
    """Share of the second model in the personal one; adaptive: the share it starts from."""
    adaptive: bool = True
    """Whether a client moves its alpha, in the first batch of each of its rounds."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"apfl: alpha must be from 0 to 1, it is {self.alpha:g}")

    def check(self, task: Task) -> None:
        if self.adaptive:
            task.training.require_plain(
                self.name, "alpha moves by its gradient alone (unless algorithm.adaptive = false)"
            )

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        statistics = {name: b.detach().clone() for name, b in model.named_buffers()}
        device = next(model.parameters()).device
        mix = holder({"alpha": torch.tensor(self.alpha, device=device)}, statistics)
        return attach(with_second_parameters(model), MIX.removesuffix("."), mix)

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if not name.startswith((OWN, MIX)))

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if name.startswith((OWN, MIX)))

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        assert own is not None, "a client keeps v and alpha"
        return self.shown(own | got.model | data.statistics)

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        assert own is not None, "a client keeps v and alpha"
        return Start(own | got.model | {ALPHA: own[ALPHA].clamp(0, 1)})

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        if when != "training":
            return ()
        return (Pass(once=(ALPHA,)) if self.adaptive else Pass(fixed=(ALPHA,)),)

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        loss = batch.cross_entropy(network(params, batch.inputs).logits)
        mixed = network(self.mixed(params), batch.inputs, MIX)
        return Loss(loss, batch.cross_entropy(mixed.logits))

    def mixed(self, params: Params) -> Params:
        """The parameters of u; none where w is not there, as among what a client keeps."""
        alpha = params[ALPHA].clamp(0, 1)
        return {n: torch.lerp(params[n].detach(), v, alpha) for n, v in of_twin(params).items() if n in params}

    def shown(self, params: Params) -> Params:
        statistics = {
            name.removeprefix(MIX): s for name, s in params.items() if name.startswith(MIX) and name != ALPHA
        }
        return params | self.mixed(params) | statistics
