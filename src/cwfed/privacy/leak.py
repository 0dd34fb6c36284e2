"""What an upload reveals about its sender's classes: estimates of p that a server can make, and how close they are.

Pure. An estimate is one row of K shares a participant, p~; the truth is p, the same of its training data.

    norms    p~ of cwFedAvg: the row norms of the uploaded output layer. Any server can compute it, for any algorithm.
    change   the change of the output bias from what was sent, less its smallest entry, normalised. The bias's gradient is
             softmax_j - [y = j], so training adds about steps * lr * (p_j - mean softmax_j): where the model sent out is
             undecided, that is p_j and a constant. (Without a bias: the row sums, as the features behind a ReLU are >= 0.)
    lengths  the lengths of the output rows' changes, normalised: what `owners = "updates"` weighs rows by. A row of a class that the client has is
             pulled by its samples; with a balanced loss the others hardly move.
    sent     class counts that the algorithm itself sends up: nothing is left to infer.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cwfed.core import mixing
from cwfed.core.events import Leak
from cwfed.core.types import Params, Task

Matrix = NDArray[np.float64]
FEW = 4
"""Digits: these numbers are written for every participant and round."""


def estimates(uploaded: Params, sent: Params | None, extras: Params, task: Task) -> dict[str, Tensor]:
    """By name, a server's estimates of its participants' p; all arguments are stacked.

    `sent`: the model that each was sent; None if that was not exactly one model.
    """
    found: dict[str, Tensor] = {}
    weight, bias = task.output_weight, f"{task.output}.bias"
    if weight in uploaded:
        found["norms"] = mixing.norm_distribution(uploaded[weight].double())
        if sent is not None:
            change = {name: uploaded[name].double() - sent[name].double() for name in sent}
            found["lengths"] = mixing.norm_distribution(change[weight])
            found["change"] = above_least(change[bias] if bias in change else change[weight].sum(2))
    if "class_counts" in extras:
        counts = extras["class_counts"].double()
        found["sent"] = counts / counts.sum(1, keepdim=True)
    return found


def above_least(values: Tensor) -> Tensor:
    """Each row minus its smallest entry, normalised to sum 1; uniform if all entries are equal."""
    height = values - values.amin(1, keepdim=True)
    return mixing.norm_distribution(height[..., None])


def measure(counts: NDArray[np.int64], found: Mapping[str, Matrix]) -> dict[str, Leak]:
    """How close each estimate is to the participants' class counts (participants x K)."""
    samples = counts.sum(1)
    truth = counts / samples[:, None]
    is_absent = counts == 0
    together = np.stack(
        [truth, *found.values()]
    )  # all at once: many small steps took as long as to measure a small model
    all_ranks, estimates = ranks(together), together[1:]
    errors = np.abs(truth - estimates).sum(-1) / 2
    called_absent = estimates < 1 / (2 * counts.shape[1])
    correlations, areas = rank_correlation(all_ranks[0], all_ranks[1:]), separation(all_ranks[1:], is_absent)
    return {
        name: Leak(
            error=[round(value, FEW) for value in errors[i].tolist()],
            rank=_digits(correlations[i]),
            auc=_digits(areas[i]),
            samples=float((samples * errors[i]).mean()),
            found=_share(called_absent[i][is_absent]),
            mistaken=_share(called_absent[i][~is_absent]),
        )
        for i, name in enumerate(found)
    }


def ranks(values: Matrix) -> Matrix:
    """Ranks in each row, 1 for the smallest value; equal values get the mean of their ranks."""
    order = values.argsort(-1, kind="stable")
    ordered = np.take_along_axis(values, order, -1)
    place = np.arange(values.shape[-1])
    same = ordered[..., 1:] == ordered[..., :-1]
    edge = np.zeros((*values.shape[:-1], 1), bool)
    # the first and the last place of the run of equal values that each is in
    first = np.maximum.accumulate(np.where(np.concatenate([edge, same], -1), 0, place), -1)
    last = np.where(np.concatenate([same, edge], -1), place[-1], place)
    last = np.minimum.accumulate(last[..., ::-1], -1)[..., ::-1]
    shared = np.empty(values.shape)
    np.put_along_axis(shared, order, (first + last) / 2 + 1, -1)
    return shared


def rank_correlation(ranked: Matrix, others: Matrix) -> Matrix:
    """Spearman's correlation, row by row: Pearson's correlation of ranks; NaN if either is constant."""
    a, b = (r - r.mean(-1, keepdims=True) for r in (ranked, others))
    scale = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return _ratio((a * b).sum(-1), scale)


def separation(ranked: Matrix, absent: NDArray[np.bool_]) -> Matrix:
    """For each row of ranks, the probability that a class which the client lacks has a smaller estimate than one that it has (the area under
    the ROC curve).

    1: they can be told apart with certainty; 1/2: not better than a coin. NaN for a client that has all classes.
    """
    present, lacking = (~absent).sum(-1), absent.sum(-1)
    above = np.where(absent, 0.0, ranked).sum(-1) - present * (present + 1) / 2
    return _ratio(above, present * lacking)


def _ratio(part: Matrix, whole: Matrix) -> Matrix:
    """NaN where there is nothing to have a part of."""
    found: Matrix = np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)
    return found


def _share(flags: NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if flags.size else None


def _digits(values: Matrix) -> list[float | None]:
    """None for NaN."""
    return [None if isnan(value) else round(value, FEW) for value in values.tolist()]
