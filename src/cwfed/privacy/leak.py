"""What an upload says about its sender's classes: estimates of p that a server can make, and how near they come.

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

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cwfed.core import mixing
from cwfed.core.events import Leak
from cwfed.core.types import Params, Task

Matrix = NDArray[np.float64]


def estimates(uploaded: Params, sent: Params | None, extras: Params, task: Task) -> dict[str, Tensor]:
    """By name, what a server can say of its participants' p; all arguments are stacked.

    `sent` is what each was given to start from, None where that was not one model.
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
    """Each row less its smallest entry, normalised to 1; uniform where all are equal."""
    height = values - values.amin(1, keepdim=True)
    return mixing.norm_distribution(height[..., None])


def measure(counts: NDArray[np.int64], estimate: Matrix) -> Leak:
    """How near an estimate comes to the participants' class counts (participants x K, both)."""
    samples = counts.sum(1)
    truth = counts / samples[:, None]
    error = np.abs(truth - estimate).sum(1) / 2
    called_absent = estimate < 1 / (2 * counts.shape[1])
    is_absent = counts == 0
    return Leak(
        error=_digits(error),
        rank=[_rounded(rank_correlation(p, e)) for p, e in zip(truth, estimate, strict=True)],
        auc=[_rounded(separation(e, absent)) for e, absent in zip(estimate, is_absent, strict=True)],
        samples=float((samples * error).mean()),
        found=_share(called_absent[is_absent]),
        mistaken=_share(called_absent[~is_absent]),
    )


def ranks(values: Matrix) -> Matrix:
    """1 for the smallest; equal values share the mean of their ranks."""
    smaller = (values[None, :] < values[:, None]).sum(1)
    equal = (values[None, :] == values[:, None]).sum(1)
    shared: Matrix = smaller + (equal + 1) / 2
    return shared


def rank_correlation(p: Matrix, estimate: Matrix) -> float | None:
    """Spearman's: Pearson's correlation of the ranks; None where either does not vary."""
    a, b = (r - r.mean() for r in (ranks(p), ranks(estimate)))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else None


def separation(estimate: Matrix, absent: NDArray[np.bool_]) -> float | None:
    """The chance that a class the client lacks has a smaller estimate than one it has (the area under the ROC curve).

    1 tells them apart for certain, 1/2 is a coin. None for a client that has all classes.
    """
    present, lacking = int((~absent).sum()), int(absent.sum())
    if not present or not lacking:
        return None
    above = ranks(estimate)[~absent].sum() - present * (present + 1) / 2
    return float(above) / (present * lacking)


def _share(flags: NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if flags.size else None


def _digits(values: Matrix) -> list[float]:
    """Four digits: these are written for every participant and round."""
    return [round(float(value), 4) for value in values]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
