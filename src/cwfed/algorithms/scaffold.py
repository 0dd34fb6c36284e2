"""SCAFFOLD. Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020.

Every client has a control variate c_i (what its gradients look like on average), the server c, their mean. All start at 0. x is what the client received, eta its
learning rate:

    y_i   <- y_i - eta (grad CE(y_i) - c_i + c)        K steps from x
    c_i+   = c_i - c + (x - y_i) / (K eta)             the paper's option II: the mean of the plain gradients on the way
    x     <- sum_i p_i y_i
    c     <- sum_i n_i c_i / n                         over all N clients; only the participants' c_i have changed

No c_i is known to the server, which adds up their changes: n c <- n c + sum_i n_i (c_i+ - c_i). What a client counts for, n_i, is what it said in its first round, and n is N times
the mean of those that are known. With everybody present, or clients of one size, that is the paper's c <- c + |S| / N sum_i p_i (c_i+ - c_i). With others it is not: a client
would count for more among small ones than among large ones, the changes would no longer add up to a mean of the c_i, and the fixed point would be another.

The correction is the gradient of the linear term <c - c_i, y>, so a step is plain SGD. K eta is read off a number that is attached to the network and moves by eta in every
step: it is right under any schedule. The paper's means are over clients of equal size; ours are weighted by samples, as FedAvg's are.

Limiting cases: the first round is FedAvg bit for bit. Clients that make the same steps never correct anything (but for rounding). On quadratics with full gradients the
fixed point is the optimum of the mean loss, which FedAvg's is not (tests/algorithms/test_scaffold.py).

The server learns a mean gradient of each participant beside its model. `guard.norm_bound` bounds the changes of c as it does the models' updates. (Public versions add up the changes of c where they should average them, count the batches of one
epoch whatever the epochs, or start c_i at the model's weights.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import mixing
from cwfed.core.types import Cost, Download, ExtraSpec, Output, Params, Sizes, Start, Task, Uploads
from cwfed.models import attach, holder

COUNT = "steps.moved"
"""Moves by the learning rate in every step: K eta."""
CONTROL, CORRECTION, SENT = "control.", "correction.", "sent."
"""Before the names of parameters: c, c_i - c, and x."""


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg whose clients correct each step by how their gradients differ from everybody's."""

    name: ClassVar[str] = "scaffold"
    travels: ClassVar[str] = "4 models a participant: model and control variate down, both up"
    work: ClassVar[str] = "client: a linear term in its loss, keeps three models; server: as FedAvg, twice"

    def costs(self, sizes: Sizes) -> list[Cost]:
        twice = 2 * sizes.participants * sizes.travelling
        server, down = 2 * sizes.travelling + sizes.clients + 1, twice + sizes.participants  # COUNT is handed out
        return [Cost(self.name, server, down, twice, "every client keeps three models")]

    def check(self, task: Task) -> None:
        task.training.require_plain(self.name, "its control variates are means of plain SGD's gradients")

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        place, _, name = COUNT.partition(".")
        return attach(model, place, holder({name: torch.zeros((), device=next(model.parameters()).device)}))

    # server

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        state = with_count(super().init(fresh, task))
        control = {n: torch.zeros_like(w) for n, w in state["model"].items() if n in task.parameters}
        return state | {"control": control, "samples": torch.zeros(task.clients, dtype=torch.float64)}

    def send(self, state: Any, client: int) -> Download:
        return Download((state["model"],), {CONTROL + name: c for name, c in state["control"].items()})

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if name != COUNT)

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if name in task.parameters or name == COUNT)

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        return {
            CONTROL + name: ExtraSpec(w.dtype, tuple(w.shape), is_update=True)
            for name, w in model.items()
            if name in task.parameters
        }

    def aggregate(self, state: Any, up: Uploads) -> Any:
        clients, samples = list(up.clients), state["samples"].clone()
        samples[clients] = torch.where(samples[clients] > 0, samples[clients], up.counts.double())
        before, total = expected_total(state["samples"]), expected_total(samples)
        change = mixing.average({n: up.extras[CONTROL + n] for n in state["control"]}, samples[clients] / total)
        control = {name: c * (before / total) + change[name] for name, c in state["control"].items()}
        after = with_count(super().aggregate(state, up))
        return state | after | {"control": control, "samples": samples}

    def newcomer(self, state: Any, class_counts: Sequence[float] | None = None) -> Params:
        return {name: w for name, w in state["model"].items() if name != COUNT}

    # client

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        return got.model

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        assert own is not None, "a client keeps what its control variate is made from"
        control = {name: got.notes[CONTROL + name] for name in data.parameters if CONTROL + name in got.notes}
        correction = {CORRECTION + name: self.control(name, own) - c for name, c in control.items()}
        anchor = {SENT + name: got.model[name] for name in control} | {CONTROL + n: c for n, c in control.items()}
        return Start(got.model, anchor, correction)

    def control(self, name: str, own: Params) -> Tensor:
        """c_i of one parameter, from what the client kept of its last round; 0 before its first."""
        if CORRECTION + name not in own:
            return torch.zeros_like(own[name])
        return own[CORRECTION + name] + mean_gradient(own[SENT + name], own[name], own[COUNT])

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        terms = [(params[name] * start.notes[CORRECTION + name]).sum() for name in self.corrected(start)]
        return -torch.stack(terms).sum() - params[COUNT]

    def corrected(self, start: Start) -> list[str]:
        """The names of the parameters."""
        return [name.removeprefix(CORRECTION) for name in start.notes if name.startswith(CORRECTION)]

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        found = {}
        for name in self.corrected(start):
            mean = mean_gradient(start.anchor[SENT + name], params[name], params[COUNT])
            found[CONTROL + name] = mean - start.anchor[CONTROL + name]  # c_i+ - c_i
        return found

    def remember(self, start: Start) -> Params:
        # a start without notes: what is kept looks like this
        names = self.corrected(start) or [name for name in start.params if name != COUNT]
        corrections = {CORRECTION + name: start.notes.get(CORRECTION + name, start.params[name]) for name in names}
        return corrections | {SENT + name: start.anchor.get(SENT + name, start.params[name]) for name in names}


def with_count(state: Any) -> Any:
    """The model is handed out with the count at 0, so that clients can be measured on one model that all share."""
    return state | {"model": state["model"] | {COUNT: torch.zeros(())}}


def expected_total(samples: Tensor) -> float:
    """The samples of all clients, where those that never took part (0) are like the others."""
    seen = samples[samples > 0]
    return float(seen.mean()) * len(samples) if len(seen) else 0.0


def mean_gradient(sent: Tensor, trained: Tensor, moved: Tensor) -> Tensor:
    """(x - y) / (K eta); 0 where nobody moved."""
    return (sent - trained) / torch.where(moved > 0, moved, torch.inf)
