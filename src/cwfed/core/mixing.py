"""The server's maths: a small weight matrix times the stack of the clients' models, W <- A W.

Pure functions of tensors. Weights are float64 and small (clients x classes); models are what they are.
Notation as in the paper: p_i a participant's share of the samples, p~_ij its share of class j.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cwfed.core.errors import ConfigError
from cwfed.core.types import Params


def sample_weights(counts: Tensor) -> Tensor:
    """p_i = n_i / sum_i n_i."""
    counts = counts.double()
    return counts / counts.sum()


def histogram(class_counts: Sequence[float], classes: int) -> Tensor:
    """A label histogram that somebody gives, as float64."""
    try:
        counts = torch.tensor(list(class_counts)).double()
    except (TypeError, ValueError, RuntimeError):  # no list, or not of numbers
        counts = torch.zeros(0)
    if counts.shape != (classes,) or not counts.isfinite().all() or counts.min() < 0 or counts.sum() == 0:
        raise ConfigError(f"a label histogram here is {classes} numbers >= 0, not all of them 0")
    return counts


def rows(stacked: Tensor) -> Tensor:
    """A stacked tensor as a matrix, one row a model; also where a model's tensor is a single number."""
    return stacked.reshape(len(stacked), -1)


COLUMNS = 2**14
"""So many columns of a stack are read at a time: some models' fit into a core's cache."""


def unstacked(stack: Params) -> list[Params]:
    """The models of a stack, as views."""
    return [dict(zip(stack, model, strict=True)) for model in zip(*(w.unbind() for w in stack.values()), strict=True)]


def average(stack: Params, weights: Tensor) -> Params:
    """sum_i weights_i w_i: one model from a stack."""
    (model,) = averages(stack, weights[None])
    return model


def averages(stack: Params, weights: Tensor) -> list[Params]:
    """The average for each row of weights, with the bits that it has alone: many of them read the stack only once.

    So it is a product of the stack with one row at a time, and not with the matrix of all rows, whose last bits are others.
    """
    models: list[Params] = [{} for _ in weights]
    if not models:
        return []
    rounded = {dtype: weights.to(dtype).unbind() for dtype in {w.dtype for w in stack.values()}}
    for name, w in stack.items():
        pieces = [piece.T for piece in torch.split(rows(w), COLUMNS, 1)]
        if len(pieces) == 1:
            made = [pieces[0].mv(row) for row in rounded[w.dtype]]
        else:
            made = [w.new_empty(w[0].numel()) for _ in models]
            parts = zip(*(torch.split(model, COLUMNS) for model in made), strict=True)
            for piece, into in zip(pieces, parts, strict=True):
                for row, part in zip(rounded[w.dtype], into, strict=True):
                    torch.mv(piece, row, out=part)
        for model, tensor in zip(models, made, strict=True):
            model[name] = tensor.view(w.shape[1:])
    return models


def mix(matrix: Tensor, stack: Params) -> Params:
    """A W: one model per row of the matrix, as a stack."""
    return {name: (matrix.to(w.dtype) @ rows(w)).view(len(matrix), *w.shape[1:]) for name, w in stack.items()}


def norm_distribution(weight: Tensor) -> Tensor:
    """p~_j = ||w_j||_2 / sum_k ||w_k||_2 over the rows of an output layer (... x K x features).

    Differentiable, also where a row is zero. All rows zero say nothing: uniform.
    """
    norms = torch.linalg.vector_norm(weight, dim=-1)
    total = norms.sum(-1, keepdim=True)
    return torch.where(total > 0, norms / total.clamp_min(torch.finfo(norms.dtype).tiny), 1 / norms.shape[-1])


def class_weights(shares: Tensor, prior: Tensor) -> Tensor:
    """q_ij = p_i p~_ij / sum_i p_i p~_ij: who makes the model of class j (participants x K).

    A class of total weight zero is made by everybody, weighted by p_i.
    """
    joint = shares[:, None] * prior
    total = joint.sum(0)
    return torch.where(total > 0, joint / total.clamp_min(torch.finfo(joint.dtype).tiny), shares[:, None])


def class_average(values: Tensor, weights: Tensor, old: Tensor) -> Tensor:
    """sum_i weights_ij values_ij / sum_i weights_ij: a row per class (K x d) from the participants' (C x K x d).

    A class of total weight zero keeps its old row.
    """
    total = weights.double().sum(0)
    shares = weights.double() / torch.where(total > 0, total, 1.0)
    mean = torch.einsum("ck,ckd->kd", shares.to(values.dtype), values)
    return torch.where((total > 0)[:, None], mean, old)


def column_shares(amounts: Tensor) -> Tensor:
    """Each column of amounts >= 0 divided by its sum; zeros where it has none."""
    return amounts / amounts.sum(0).clamp_min(torch.finfo(amounts.dtype).tiny)


def capped(weights: Tensor, cap: float) -> Tensor:
    """Weights (participants x K) of which none is above `cap`; every column still sums to 1, or to 0 if it did.

    What is above the cap goes to the others in proportion to their weights (equally where those are all zero), as
    often as that puts somebody else above it. Where cap * participants < 1 that cannot be: then all are equal. A column without anybody
    above the cap stays as it is.
    """
    most = weights.new_tensor(max(cap, 1 / len(weights)))
    full = torch.zeros_like(weights, dtype=torch.bool)
    result = weights
    while (over := ~full & (result > most)).any():
        full |= over
        others = torch.where(full, 0.0, weights)
        others = torch.where((others.sum(0) > 0) | full, others, 1.0)
        left = (1 - most * full.sum(0)).clamp_min(0)
        share = left / others.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)
        result = torch.where(full.any(0), torch.where(full, most, others * share), weights)
    return result


MEDIAN = 0.5 - 1e-6
"""The share to cut off each end that leaves the median: of two in the middle the mean, whatever rounding does to 0.5."""
SORTED = 2**21
"""So many numbers are sorted at once: some 50 MB of work space."""


def trimmed(weights: Tensor, stack: Params, trim: float) -> Params:
    """Like `mix`, but coordinate by coordinate the weighted mean of the middle: one model per row of the weights.

    Of each number the participants' values are sorted, and of their weight `trim` is cut off at both ends; a value
    that is cut in two counts with what is left of it. trim = 0 is `mix`, trim = MEDIAN the weighted median.
    """
    models = {}
    for name, w in stack.items():
        parts = rows(w).tensor_split(max(1, w.numel() // SORTED), dim=1)
        models[name] = torch.cat([_middle(weights, part, trim) for part in parts], 1).view(len(weights), *w.shape[1:])
    return models


def _middle(weights: Tensor, values: Tensor, trim: float) -> Tensor:
    """The trimmed means (K x columns) of the columns of `values` (participants x columns)."""
    ordered, order = values.sort(0)
    means = []
    for row in weights:
        upto = row[order].cumsum(0)
        kept = upto.clamp(trim, 1 - trim).diff(dim=0, prepend=torch.full_like(upto[:1], trim))
        means.append((kept * ordered).sum(0) / kept.sum(0))
    return torch.stack(means).to(values.dtype)


def gram(stack: Params) -> Tensor:
    """Inner products of all pairs of models: one matrix product a tensor, in float64."""
    matrices = (rows(w).double() for w in stack.values())
    return torch.stack([matrix @ matrix.T for matrix in matrices]).sum(0)


def squared_distances(stack: Params) -> Tensor:
    """||w_i - w_j||^2 of all pairs, from one Gram matrix.

    Models lie close together and far from the origin; centred first, the differences keep their digits.
    """
    g = gram({name: w - w.mean(0) for name, w in stack.items()})
    squares = g.diagonal()
    return (squares[:, None] + squares[None, :] - 2 * g).clamp_min(0)


def nearest_to_origin(gram: Tensor) -> Tensor:
    """argmin over the simplex of a^T Q a, Q the Gram matrix of points: their mixture that lies nearest to the origin.

    Wolfe's active set, in float64. Of the points on the support take the affine mixture nearest to the origin, b ~ (Q + 1 1^T)^-1 1.
    Where some b is not positive, go from a towards b until the first weight is zero, and drop that point; else a = b, and a point that
    lies below it, (Q a)_k < a^T Q a, joins the support. At the solution there is none (Karush, Kuhn and Tucker). Where points are the
    origin, they share equally.
    """
    lengths = gram.diagonal()
    if lengths.min() <= 0:
        at_origin = (lengths <= 0).to(gram.dtype)
        return at_origin / at_origin.sum()
    q = gram / lengths.min()
    support = [int(lengths.argmin())]
    weights = torch.zeros_like(lengths).index_fill(0, torch.tensor(support), 1.0)
    for _ in range(10 * len(q)):  # no support occurs twice, so that it ends; this bounds what rounding could do
        slopes = q @ weights
        joins = int(slopes.argmin())
        if joins in support or slopes[joins] >= weights @ slopes - 1e-12:
            break
        support.append(joins)
        while True:
            best, is_singular = torch.linalg.solve_ex(q[support][:, support] + 1, torch.ones_like(lengths)[support])
            if is_singular:
                return weights
            best = best / best.sum()
            if (best > 0).all():
                break
            now = weights[support]
            steps = torch.where(best > 0, torch.inf, now / (now - best))
            weights[support] = (now + float(steps.min()) * (best - now)).clamp_min(0)
            weights[support[int(steps.argmin())]] = 0.0
            support = [point for point in support if weights[point] > 0]
        weights = torch.zeros_like(weights).index_copy(0, torch.tensor(support), best)
    return weights


def cut(weights: Tensor, least: float) -> Tensor:
    """Weights (... x M) without those below `least`, which go to the others; the largest of a row always stays."""
    most = weights.amax(-1, keepdim=True)
    kept = torch.where(weights >= most.clamp_max(least), weights, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def unmix(mixed: Tensor, parts: Tensor) -> tuple[Tensor, Tensor] | None:
    """The shares with which each of `mixed` is made of `parts` (least squares), and whether it really is.

    A mixture is met up to float32: what is left over is below 1e-5 of its length and below a hundredth of how far the
    parts lie apart (parts that are nearly equal say nothing). None where the parts are more than the numbers
    each has: many shares would do.
    """
    wholes, columns = rows(mixed), rows(parts).T
    if columns.shape[1] > columns.shape[0]:
        return None
    shares = torch.linalg.lstsq(columns, wholes.T, driver="gelsd").solution.T
    left_over = (wholes - shares @ columns.T).norm(dim=1)
    is_mixture = left_over <= 1e-5 * wholes.norm(dim=1)
    if columns.shape[1] > 1:
        apart = (columns - columns.mean(1, keepdim=True)).norm(dim=0).min()
        is_mixture &= left_over <= 0.01 * apart
    return shares, is_mixture
