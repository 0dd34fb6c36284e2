"""The class prior at the test: Bayes' rule under label shift, and the control of every comparison.

    pi_ck = (n_ck + eps) / (n_c + K eps)       the class prior of client c, from its own label counts
    y^    = argmax_k z_k + tau log pi_ck       z: what its model says

What is trained is not changed and nothing is sent or kept: whenever a client's model is tested or saved, its output bias is raised by tau log (pi_ck / max_j pi_cj), which is the same but
for a constant of all classes. So it holds in both phases, for saved models, and for newcomers that give their histogram.

Limiting cases: tau = 0 or uniform counts change nothing, bit for bit. A client of one class, with eps = 0, always says that class.

The server learns nothing. (A saved model has the client's class counts in its bias.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Params, Task


@dataclass(frozen=True)
class Prior(FedAvg):
    """Every client predicts with its own class prior on top of its model."""

    plugin: ClassVar[str] = "prior"
    work: ClassVar[str] = "client: K logarithms before a test"

    prior_tau: float = 1.0
    """tau, how much the log-prior counts; 1 is Bayes' rule."""
    prior_eps: float = 0.01
    """eps, samples that every class has more than were counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior_tau < 0 or self.prior_eps < 0:
            raise ConfigError("prior: prior_tau and prior_eps must not be negative")

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        network = super().adapt(model, output)
        if getattr(network.get_submodule(output), "bias", None) is None:
            raise ConfigError(
                f"prior raises the output bias, and the output layer {output!r} of {self.name} has none here"
            )
        return network

    def log_prior(self, class_counts: Sequence[float], classes: int) -> Tensor:
        """tau log pi less its largest entry; finite also where eps = 0 and a class has no sample."""
        counts = mixing.histogram(class_counts, classes) + self.prior_eps
        return self.prior_tau * (counts / counts.max()).clamp_min(torch.finfo(torch.float32).tiny).log()

    def predictor(self, params: Params, class_counts: Sequence[float], task: Task) -> Params:
        params, bias = super().predictor(params, class_counts, task), f"{task.output}.bias"
        raised = params[bias] + self.log_prior(class_counts, task.classes).to(params[bias])
        return params | {bias: raised}
