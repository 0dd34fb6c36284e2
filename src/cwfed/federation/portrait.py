"""The output layers of the models at the end of a run, for heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cwfed.core import mixing
from cwfed.core.events import Portrait
from cwfed.core.types import Params

if TYPE_CHECKING:
    from cwfed.federation.rounds import Progress
    from cwfed.federation.simulation import Simulation

PORTRAYED = 200
"""The most clients in a portrait; fewer if their output layers are large."""
PORTRAYED_BYTES = 2**28
"""The most bytes of their output layers."""


def portray(simulation: Simulation, after: Progress, participants: Sequence[int], stack: Params) -> Portrait | None:
    """The portrait of the models as they are now; None if a mixture has overflowed."""
    name = simulation.task.output_weight
    most = max(1, min(PORTRAYED, PORTRAYED_BYTES // (8 * simulation.initial[name].numel())))
    clients = simulation.evaluated[:most]
    rows = {c: row for row, c in enumerate(participants)}

    def trained(client: int) -> list[float] | None:
        if client in rows:
            own = simulation.algorithm.shown({n: w[rows[client]] for n, w in stack.items()}).get(name)
        else:
            kept, counts = after.kept.get(client, {}), simulation.federation.class_counts(client).tolist()
            own = (simulation.own_model(kept, counts) or kept).get(name)
        return None if own is None else _digits(own.double().norm(dim=1))

    visits = [simulation.visit(client, after.kept.get(client, {})) for client in clients]
    received = simulation.engine.personal(after.round + 1, after.server, visits)
    handed_out = torch.stack([model[name].to("cpu", torch.float64) for model in received])
    if not handed_out.isfinite().all():
        return None
    classes = simulation.algorithm.class_models(after.server).get(name)
    mixture: list[list[float] | None] | None = None
    is_uploaded = name in simulation.algorithm.uploaded(tuple(simulation.initial), simulation.task)
    found = is_uploaded and 0 < len(participants) <= most and mixing.unmix(handed_out, stack[name].double())
    if found:
        mixture = [_digits(row) if is_one else None for row, is_one in zip(*found, strict=True)]
    sent = [_digits(stack[name][rows[c]].double().norm(dim=1)) if c in rows else None for c in clients]
    return Portrait(
        clients=clients,
        distribution=[_digits(row) for row in simulation.true_distributions(clients)],
        received=[_digits(norms) for norms in handed_out.norm(dim=2)],
        trained=[trained(client) for client in clients],
        mixture=mixture,
        classes=None if classes is None else [_digits(norms) for norms in classes.double().norm(dim=2)],
        sent=sent if is_uploaded else None,
    )


def _digits(values: Tensor) -> list[float]:
    """Numbers with five digits, enough for a picture."""
    return [float(f"{value:.5g}") for value in values.tolist()]
