"""A loss balanced by the class prior (logit adjustment), with `prior` at the test.

    loss  CE(z + tau log pi_c, y)              pi_c: as in prior.py
    y^    = argmax_k z_k + tau log pi_ck

The model z is trained as if all classes were equally frequent: classes that a client lacks get almost no gradient (none at eps = 0), so nobody pushes down output rows of classes that it
does not own. That is what `owners` averages, and why it can read the owners off the lengths of their updates.

Limiting cases: tau = 0 is what is beneath it, and so are clients with equally many samples of every class; both bit for bit.

The server is sent what it was sent before; the gradient says the same about a client's classes (docs/privacy.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.plugins.prior import Prior
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Loss, Network, Output, Params, Start

LOG_PRIOR = "log_prior"


@dataclass(frozen=True)
class Balanced(Prior):
    """Clients train and predict with their class prior on top of the model."""

    plugin: ClassVar[str] = "balanced"

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self, "wdr", 0):
            raise ConfigError(
                "balanced wants output rows of equal length and wdr rows as long as their class is frequent, so the prior would count "
                'twice: set algorithm.wdr = 0 (and distribution = "empirical")'
            )

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        start = super().begin(got, own, data)
        raised = self.log_prior(data.class_counts.tolist(), len(data.class_counts)).float()
        return replace(start, notes=start.notes | {LOG_PRIOR: raised})

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        def adjusted(params: Params, inputs: Tensor, statistics: str | None = "") -> Output:
            output = network(params, inputs, statistics)
            return output._replace(logits=output.logits + start.notes[LOG_PRIOR])

        return super().loss(adjusted, params, batch, start, stage)
