"""Training with differential privacy (DP-SGD): per-sample gradients, clipped, with noise.

Clipping covers gradients only, so an algorithm gets nothing else of a client's data: no losses or mean features, a noisy histogram in
place of the class counts, and a penalty that sees the weights but no batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from cwfed.algorithms import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Output, Params, Pass, Start, When
from cwfed.data import Federation, Samples
from cwfed.data.partition import Indices
from cwfed.engine.view import ClientView
from cwfed.engine.worker import ClientWorker, LocalTraining
from cwfed.privacy import dp
from cwfed.privacy.noise import Seeded

BEYOND = "privacy.dp: the algorithm asks its clients for {}, which clipped gradients do not cover: choose another algorithm"


class PrivateView(ClientView):
    """What an algorithm may ask of a client whose samples are private."""

    @cached_property
    def class_counts(self) -> Tensor:
        """n_ij with noise; the noise is the same in every round."""
        worker = self._worker
        assert isinstance(worker, PrivateWorker)
        return worker.privacy.class_counts(worker.federation.class_counts(self._client), worker.noise, self._client)

    def squared_gradients(self, params: Params, batch_size: int) -> Tensor:
        raise ConfigError(BEYOND.format("gradients of their data"))

    def losses(self, models: Sequence[Params], part: Literal["train", "holdout"]) -> Tensor:
        raise ConfigError(BEYOND.format("losses on their data"))

    def class_means(self, params: Params) -> Tensor:
        raise ConfigError(BEYOND.format("mean features of their data"))

    def class_moments(self, params: Params) -> tuple[Tensor, Tensor, Tensor]:
        raise ConfigError(BEYOND.format("mean features of their data"))


class PrivateWorker(ClientWorker):
    """A worker whose training is DP-SGD."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        samples: Samples,
        stop: threading.Event,
        how: LocalTraining,
    ) -> None:
        assert how.privacy is not None
        dp.check_model(model)
        super().__init__(model, federation, samples, stop, how.precision)
        self.privacy, self.noise = how.privacy, how.noise or Seeded(how.seed)
        self._normals = self.noise.normals(samples.device, 0, 0)

    def view(self, client: int, statistics: Params) -> ClientView:
        return PrivateView(self, client, statistics)

    @property
    def _trained(self) -> Params:
        """The network's own tensors that move in this pass: what is attached to it takes no part in what it computes."""
        return {name: self.params[name] for name in self._own_names if self.params[name].requires_grad}

    def epochs(
        self, own: Indices, when: When, index: int, one: Pass, client: int, round_: int, how: LocalTraining
    ) -> Iterator[Iterable[tuple[Tensor, Tensor]]]:
        """Poisson batches; some may be empty."""
        assert (when, index, one) == ("training", 0, Pass()), "what is accounted is one pass over everything"
        self._normals = self.noise.normals(self.samples.device, round_, client)
        rng = self.noise.draws("poisson", round_, client)
        drawn = dp.poisson_batches(len(own), how.batch_size, how.epochs, rng)
        yield (self.samples.batch(own[chosen]) for chosen in drawn)

    def gradients(
        self, algorithm: FedAvg, batch: Batch, start: Start, stage: str, size: int, leaves: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        each, losses = self.per_sample(batch.inputs, batch.labels)
        sums = dp.private_sum(each, self.privacy, self._normals)
        penalty = self._penalty(algorithm, start)
        pulls: Sequence[Tensor | None] = [None] * len(leaves)
        if penalty.requires_grad:
            pulls = torch.autograd.grad(penalty, leaves, allow_unused=True)
        mean = {id(p): g / size for p, g in zip(self._trained.values(), sums, strict=True)}
        own = [mean.get(id(leaf)) for leaf in leaves]
        steps = [pull if g is None else g if pull is None else g + pull for g, pull in zip(own, pulls, strict=True)]
        return losses.sum() / size, penalty, steps

    def per_sample(self, inputs: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor]:
        """The gradient and the cross-entropy of each sample by itself, samples first."""
        if not len(labels):
            return [p.new_zeros(0, *p.shape) for p in self._trained.values()], inputs.new_zeros(0)

        def loss(params: Params, sample: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.model, params, (sample[None],)), label[None])

        trained = {name: p.detach() for name, p in self._trained.items()}
        gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(trained, inputs, labels)
        self.take_features()  # of no use outside
        return list(gradients.values()), losses

    def _penalty(self, algorithm: FedAvg, start: Start) -> Tensor:
        """The penalty of the weights alone: it gets NaN in place of a batch's outputs and labels."""
        logits, features = (
            torch.full((2, width), torch.nan, device=self.samples.device)
            for width in (self._output.out_features, self._output.in_features)
        )
        return algorithm.penalty(self.params, Output(logits, features, self._output.weight), logits[:, 0], start)

    def rehearse(self, algorithm: FedAvg, got: Download, own: Params | None, statistics: Params, client: int) -> None:
        """A visit without training, before round 1: ConfigError if the algorithm or the network needs what must stay private."""
        if algorithm.held_out():
            raise ConfigError(BEYOND.format("losses on data they hold out"))
        view = self.view(client, statistics)
        start = algorithm.begin(got, own, view)
        self.load(start.params | statistics)
        self.model.train()
        try:
            needs_batch = bool(self._penalty(algorithm, self.here(start)).isnan())
        except (RuntimeError, IndexError, TypeError):
            needs_batch = True  # such as labels that are no indices
        if needs_batch:
            raise ConfigError(
                f"privacy.dp: the penalty of {type(algorithm).__name__} looks at whole batches, so a sample's share in "
                "it cannot be clipped: choose another algorithm"
            )
        inputs, labels = self.samples.batch(self.federation.shards[client].train[:2])
        try:
            self.per_sample(inputs, labels)
        except RuntimeError as error:
            raise ConfigError(
                f"privacy.dp: this model has no gradient sample by sample: {str(error).splitlines()[0]}"
            ) from None
        algorithm.finish(self.complete(), start, view)
