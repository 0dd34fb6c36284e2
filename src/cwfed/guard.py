"""Refuses bad updates before they reach the mixing: one NaN in one upload would be in everybody's next model.

Pure: says what is wrong with an upload, in words for the log; who calls it leaves the upload out of the round. What is
well formed may still be meant badly: `bounded` scales updates back that are much longer than the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from cwfed.algorithms import FedAvg
from cwfed.mixing import rows
from cwfed.types import Form, Params, Task

MOST_SAMPLES = 10**9
"""More training samples than any client has: who claims them wants to be the average."""


def form_of(params: Params) -> dict[str, Form]:
    """What tensors like these look like."""
    return {name: Form(tensor.dtype, tuple(tensor.shape)) for name, tensor in params.items()}


@dataclass(frozen=True)
class Guard:
    """What an honest upload looks like."""

    model: Mapping[str, Form]
    beside: Mapping[str, Form]
    most_samples: int = MOST_SAMPLES

    @classmethod
    def of(cls, algorithm: FedAvg, initial: Params, task: Task, most_samples: int = MOST_SAMPLES) -> Guard:
        """The guard of an algorithm whose models are like the initial one."""
        uploaded = algorithm.uploaded(tuple(initial), task)
        model = form_of({name: initial[name] for name in uploaded})
        return cls(model, algorithm.beside(initial, task), most_samples)

    def problem(self, model: Mapping[str, Tensor], beside: Mapping[str, Tensor], samples: float) -> str:
        """Why this upload is refused; "" where it is fine."""
        return misfit(model, self.model, "the model") or self._problem_beside(beside, samples)

    def problems(self, stack: Params, beside: Sequence[Params], samples: Sequence[float]) -> dict[int, str]:
        """The same for uploads whose models are stacked already, by row; only who stands out has an entry.

        A model in a stack has the stack's names, shapes and dtypes, so one sum a row says whether to look closer.
        """
        sums = [rows(w).sum(1) for w in stack.values()] if samples else []
        suspect = (~torch.stack(sums).isfinite().all(0)).tolist() if sums else [False] * len(samples)
        found = {}
        for row, (sent, count) in enumerate(zip(beside, samples, strict=True)):
            if suspect[row]:
                problem = self.problem({name: w[row] for name, w in stack.items()}, sent, count)
            else:
                problem = self._problem_beside(sent, count)
            if problem:
                found[row] = problem
        return found

    def _problem_beside(self, beside: Mapping[str, Tensor], samples: float) -> str:
        """What is wrong with all that is not the model."""
        if not 0 < samples <= self.most_samples or samples != int(samples):
            return f"{samples:g} training samples, which must be a whole number from 1 to {self.most_samples:,}"
        return misfit(beside, self.beside, "what comes beside the model")


def misfit(tensors: Mapping[str, Tensor], forms: Mapping[str, Form], what: str) -> str:
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
        if not is_finite(tensor):
            return f"{name} of {what} has values that are not finite numbers"
        is_bounded = form.low > -inf or form.high < inf
        if is_bounded and tensor.numel() and not form.low <= float(tensor.min()) <= float(tensor.max()) <= form.high:
            return f"{name} of {what} has values outside {form.low:g} to {form.high:g}"
    return ""


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite. One sum finds most of it: NaN and infinity do not go away in sums."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def bounded(stack: Params, sent: Callable[[int], Params], bound: float) -> tuple[Params, list[int]]:
    """Uploads whose updates w_i - w_sent are at most `bound` times as long as the median one; and which rows were longer.

    `sent(i)` is the model that the i-th client was sent. A longer update keeps its direction. The median is of this round's
    updates: no length has to be guessed beforehand, and fewer than half of the clients cannot move it far.
    """
    names = [name for name, w in stack.items() if w.is_floating_point()]

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


def length(model: Params) -> Tensor:
    """The l2 norm of all numbers of a model together."""
    norms = [torch.linalg.vector_norm(w, dtype=torch.float64) for w in model.values()]
    return torch.stack(norms).square().sum().sqrt()
