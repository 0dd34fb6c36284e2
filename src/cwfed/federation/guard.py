"""Refuses bad updates before they reach the mixing: one NaN in one upload would be in everybody's next model.

Pure: says what is wrong with an upload, in words for the log; who calls it leaves the upload out of the round. What is
well formed may still be meant badly: `bounded` scales updates back that are much longer than the others', and `harmless`
finds those that make no state with others although each looks fine by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from cwfed.algorithms import FedAvg
from cwfed.core.mixing import rows
from cwfed.core.types import LARGEST, ExtraSpec, Params, Task, Uploads

MOST_SAMPLES = 10**9
"""More training samples than any client has: who claims them wants to be the average."""
ROUNDING = 1e-5
"""Share by which a sum of float32 counts may miss the number of samples."""
NEVER = 50.0
"""Standard Laplace noise is larger with a chance of exp(-50)."""


def spec_of(params: Params) -> dict[str, ExtraSpec]:
    """What tensors like these look like."""
    return {name: ExtraSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in params.items()}


def example(form: ExtraSpec) -> Tensor:
    """A tensor of this form, as a client with one sample could send it."""
    tensor = torch.zeros(form.shape, dtype=form.dtype)
    return tensor + 1 / tensor.numel() if form.counts_samples else tensor


@dataclass(frozen=True)
class Guard:
    """What an honest upload looks like."""

    model: Mapping[str, ExtraSpec]
    extras_spec: Mapping[str, ExtraSpec]
    most_samples: int = MOST_SAMPLES
    histogram: float = 0.0
    """The epsilon of the noise in class counts (`dp.py`); 0 where they are exact."""

    @classmethod
    def of(
        cls,
        algorithm: FedAvg,
        initial: Params,
        task: Task,
        most_samples: int = MOST_SAMPLES,
        histogram: float = 0.0,
    ) -> Guard:
        """The guard of an algorithm whose models are like the initial one."""
        uploaded = algorithm.uploaded(tuple(initial), task)
        model = spec_of({name: initial[name] for name in uploaded})
        return cls(model, algorithm.extras_spec(initial, task), most_samples, histogram)

    def problem(self, model: Mapping[str, Tensor], extras: Mapping[str, Tensor], samples: float) -> str:
        """Why this upload is refused; "" where it is fine."""
        return misfit(model, self.model, "the model") or self._extras_problem(extras, samples)

    def problems(self, stack: Params, extras: Sequence[Params], samples: Sequence[float]) -> dict[int, str]:
        """The same for uploads whose models are stacked already, by row; only who stands out has an entry.

        A model in a stack has the stack's names, shapes and dtypes, so one norm a row says whether to look closer.
        """
        norms = [length_of_rows(w) for w in stack.values()] if samples else []
        suspect = (~(torch.stack(norms) <= LARGEST).all(0)).tolist() if norms else [False] * len(samples)
        found = {}
        for row, (sent, count) in enumerate(zip(extras, samples, strict=True)):
            if suspect[row]:
                problem = self.problem({name: w[row] for name, w in stack.items()}, sent, count)
            else:
                problem = self._extras_problem(sent, count)
            if problem:
                found[row] = problem
        return found

    def _extras_problem(self, extras: Mapping[str, Tensor], samples: float) -> str:
        """What is wrong with all that is not the model."""
        if not 0 < samples <= self.most_samples or samples != int(samples):
            return f"{samples:g} training samples, which must be a whole number from 1 to {self.most_samples:,}"
        return misfit(extras, self.extras_spec, "what comes beside the model") or self._miscounted(extras, samples)

    def _miscounted(self, extras: Mapping[str, Tensor], samples: float) -> str:
        """Which counts are not those of so many samples."""
        for name, form in self.extras_spec.items():
            if form.counts_samples:
                total = float(extras[name].double().sum())
                slack = NEVER * extras[name].numel() / self.histogram if self.histogram else ROUNDING * samples
                if not total > 0 or abs(total - samples) > slack:
                    return (
                        f"{name} of what comes beside the model add up to {total:g}, not to its {samples:,} samples"
                    )
        return ""


def misfit(tensors: Mapping[str, Tensor], forms: Mapping[str, ExtraSpec], what: str) -> str:
    """How tensors differ from what they must look like; "" where they do not."""
    if missing := forms.keys() - tensors.keys():
        return f"{what} lacks {min(missing)}"
    if unknown := tensors.keys() - forms.keys():
        return f"{what} has an unknown tensor {min(unknown)}"
    for name, form in forms.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != form.shape:
            return f"{name} of {what} has the shape {tuple(tensor.shape)}, not {form.shape}"
        if tensor.dtype != form.dtype:
            return f"{name} of {what} is {tensor.dtype}, not {form.dtype}"
        if not tensor.numel():
            continue
        least, most = (float(bound) for bound in tensor.aminmax())  # NaN where there is one
        if not isfinite(least) or not isfinite(most):
            return f"{name} of {what} has values that are not finite numbers"
        if not form.low <= least <= most <= form.high:
            diverged = (
                " (the training diverged: lower train.lr; where a client may be hostile, set guard.norm_bound)"
                if max(-least, most) > LARGEST
                else ""
            )
            return f"{name} of {what} has values outside {form.low:g} to {form.high:g}{diverged}"
    return ""


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite. One sum finds most of it: NaN and infinity do not go away in sums."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def is_finite_state(tree: Any) -> bool:
    """Whether all numbers of a state, a nested dict or list of tensors and JSON values, are finite."""
    if isinstance(tree, Tensor):
        return is_finite(tree)
    if isinstance(tree, dict | list | tuple):
        return all(map(is_finite_state, tree.values() if isinstance(tree, dict) else tree))
    return not isinstance(tree, float) or isfinite(tree)


def harmless(up: Uploads, is_good: Callable[[list[int]], bool]) -> list[int]:
    """Rows of as many uploads as `is_good` allows together, where it does not allow all.

    The mildest come first: who sends the largest numbers has to fit to the others. Halves are tried whole, so that one
    culprit among n takes some log n tries.
    """

    def largest(row: int) -> float:
        sent = [w[row] for kind in (up.models, up.extras) for w in kind.values() if w[row].numel()]
        return max((abs(float(bound)) for w in sent for bound in w.aminmax()), default=0.0)

    def extend(accepted: list[int], more: list[int]) -> list[int]:
        if is_good(sorted(accepted + more)):
            return accepted + more
        if len(more) == 1:
            return accepted
        half = len(more) // 2
        return extend(extend(accepted, more[:half]), more[half:])

    return sorted(extend([], sorted(range(len(up.clients)), key=largest)))


def bounded(stack: Params, sent: Callable[[int], Params], bound: float) -> tuple[Params, list[int]]:
    """Uploads whose updates w_i - w_sent are at most `bound` times as long as the median one; and which rows were longer.

    `sent(i)` is the model that the i-th client was sent. A longer update keeps its direction. The median is of this round's
    updates: no length has to be guessed beforehand, and fewer than half of the clients cannot move it far.
    """
    names = [name for name, w in stack.items() if w.is_floating_point()]
    if not names:
        return stack, []

    def update(row: int) -> Params:
        start = sent(row)
        return {name: stack[name][row] - start[name] for name in names}

    count = len(next(iter(stack.values())))
    norms = torch.stack([length(update(row)) for row in range(count)])
    limit = bound * norms.quantile(0.5)
    longer = torch.nonzero(norms > limit).flatten().tolist()
    if not longer:
        return stack, []
    scaled = {name: w.clone() if name in names else w for name, w in stack.items()}
    for row in longer:
        start, factor = sent(row), float(limit / norms[row])
        for name, step in update(row).items():
            scaled[name][row] = start[name] + factor * step
    return scaled, longer


def length_of_rows(stacked: Tensor) -> Tensor:
    """The l2 norm of each model's tensor; not a finite number where one of its numbers is not."""
    matrix = rows(stacked if stacked.is_floating_point() else stacked.double())
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms.double()


def length(model: Params) -> Tensor:
    """The l2 norm of all numbers of a model together."""
    norms = [torch.linalg.vector_norm(w, dtype=torch.float64) for w in model.values()]
    return torch.stack(norms).square().sum().sqrt()
