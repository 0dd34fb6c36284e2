"""Refuses bad updates before they reach the mixing: one NaN in one upload would be in everybody's next model.

Pure: says what is wrong with an upload, in words for the log; who calls it leaves the upload out of the round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from torch import Tensor

from cwfed.algorithms import FedAvg
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
        if not 0 < samples <= self.most_samples or samples != int(samples):
            return f"{samples:g} training samples, which must be a whole number from 1 to {self.most_samples:,}"
        return misfit(model, self.model, "the model") or misfit(beside, self.beside, "what comes beside the model")


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
