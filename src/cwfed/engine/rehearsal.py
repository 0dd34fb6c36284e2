"""Tries an algorithm's own passes and loss before round 1, so that a mistake in them is one clear sentence then."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from cwfed.algorithms import FedAvg
from cwfed.core.errors import ConfigError, did_you_mean
from cwfed.core.types import Batch, Download, Loss, Pass, Start, Task, When

if TYPE_CHECKING:
    from cwfed.engine.base import Visit
    from cwfed.engine.worker import ClientWorker, LocalTraining

MOST_EPOCHS = 10**6
"""The most epochs of a pass, as of `train.epochs`: more must be a mistake, and its list of batches would fill the memory."""


def rehearse(
    worker: ClientWorker, algorithm: FedAvg, task: Task, got: Download, visit: Visit, how: LocalTraining
) -> None:
    """Begin a round with one client, look at its passes, and compute the loss of two samples in each."""
    name, view = type(algorithm).__name__, worker.view(visit.client, visit.statistics)
    check_type(got, Download, f"{name}.send")
    start = algorithm.begin(got, visit.own, view)
    check_type(start, Start, f"{name}.begin")
    check_model(start.params, worker, f"{name}.personal or {name}.begin")
    worker.load(start.params | visit.statistics)
    worker.model.train()
    batch = Batch(*worker.samples.batch(worker.federation.shards[visit.client].train[:2]), how.label_smoothing)
    for when in get_args(When):
        passes = algorithm.passes(when, task, start)
        check_type(passes, tuple, f"{name}.passes", "a tuple of Pass")
        if when == "training" and not passes:
            raise ConfigError(f"{name} has no pass in training: its clients would never learn")
        for one in passes:
            check_type(one, Pass, f"{name}.passes", "a tuple of Pass")
            check_pass(one, f"a pass of {name} ({when})", worker)
            check_loss(algorithm, worker, batch, worker.here(start), one, name)


def check_type(found: object, wanted: type, hook: str, words: str = "") -> None:
    """ConfigError if a hook returns another type than it must; most often it returns nothing."""
    if not isinstance(found, wanted):
        raise ConfigError(f"{hook} must return {words or f'a {wanted.__name__}'}, not {type(found).__name__}")


def check_model(params: object, worker: ClientWorker, hook: str) -> None:
    """One sentence for what is no model, or one of other tensors than the network's; `load` says what it lacks."""
    check_type(params, dict, hook, "a model as a dict of tensors by name")
    for name, found in params.items():  # type: ignore[attr-defined]  # the line above
        check_type(found, Tensor, hook, f"tensors, {name} too")
        if name in worker.params and found.shape != worker.params[name].shape:
            wanted = tuple(worker.params[name].shape)
            raise ConfigError(f"{hook} returns {name} in the shape {tuple(found.shape)}; the network's is {wanted}")


def check_pass(one: Pass, what: str, worker: ClientWorker) -> None:
    """ConfigError for an impossible pass."""
    params = worker.params
    if unknown := [name for name in (*(one.trained or ()), *one.fixed) if name not in params]:
        raise ConfigError(f"{what} names {unknown[0]}, which the network lacks: {did_you_mean(unknown[0], params)}")
    moving = worker.moved_by(one)
    if not moving:
        raise ConfigError(f"{what} trains nothing: name the tensors that move, or leave the pass out")
    if left := [name for name in one.once if name not in moving]:
        raise ConfigError(f"{what} moves {left[0]} in its first step, and does not train it")
    if one.batch_size is not None and one.batch_size < 1:
        raise ConfigError(f"{what} has batches of {one.batch_size} samples: there must be one at least")
    if (one.epochs or 0) > MOST_EPOCHS or (one.steps or 0) > MOST_EPOCHS:
        raise ConfigError(
            f"{what} has {max(one.epochs or 0, one.steps or 0):,} epochs or steps: at most {MOST_EPOCHS:,}"
        )
    if (one.epochs is not None and one.epochs < 0) or (one.steps is not None and one.steps < 0):
        raise ConfigError(f"{what} must not have a negative number of epochs or steps")
    if not 0 < one.share <= 1:
        raise ConfigError(f"{what} takes a share of {one.share:g} of the data, which must be above 0 and at most 1")
    if one.lr < 0 or not one.low <= one.high:
        raise ConfigError(f"{what} has a negative learning rate, or bounds that leave nothing between them")


def check_loss(algorithm: FedAvg, worker: ClientWorker, batch: Batch, start: Start, one: Pass, name: str) -> None:
    """ConfigError for a loss that cannot be trained with."""
    found = algorithm.loss(worker.network, worker.params, batch, start, one.stage)
    check_type(found, Loss, f"{name}.loss")
    bad = [part for part in found if not isinstance(part, Tensor) or part.ndim]
    if bad:
        shape = tuple(bad[0].shape) if isinstance(bad[0], Tensor) else type(bad[0]).__name__
        raise ConfigError(f"the loss of {name} must be two numbers (loss and penalty), one of them is {shape}")
    moving = worker.moved_by(one)
    worker.choose(one)
    leaves = worker.moving
    total = sum(algorithm.loss(worker.network, worker.params, batch, start, one.stage), torch.zeros(()))
    reached = total.requires_grad and any(
        g is not None for g in torch.autograd.grad(total, leaves, allow_unused=True)
    )
    worker.choose(None)
    if not reached:
        raise ConfigError(f"a pass of {name} trains {moving[0]} and others, on which its loss does not depend")
