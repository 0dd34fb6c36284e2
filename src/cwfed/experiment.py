"""An experiment made ready: data dealt out, model and algorithm built and checked against each other."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cwfed import data, models
from cwfed.config import Config
from cwfed.errors import ConfigError
from cwfed.rng import stream, torch_stream
from cwfed.types import Params


class Experiment:
    """What a config stands for, before anybody has trained."""

    def __init__(self, config: Config, data_dir: str | None = None) -> None:
        seed = config.run.seed
        self.config = config
        self.algorithm = config.build_algorithm()

        dataset = data.load(config.data.source(), data_dir)
        self.federation = data.share_out(
            dataset, config.partition_spec(), seed, config.data.validation, config.data.samples
        )
        if held_out := self.algorithm.held_out():
            self.federation = self.federation.with_holdout(held_out, seed)
        self.clients = len(self.federation)
        self._check_sizes()
        mixed = stream(seed, "newcomers").permutation(self.clients)
        self.newcomers = sorted(int(c) for c in mixed[: config.data.newcomers])
        """Clients that never take part."""
        self.members = sorted(int(c) for c in mixed[config.data.newcomers :])
        self.evaluated = self._choose_evaluated()

        self.model_name = config.model.name
        if self.model_name == "auto":
            self.model_name = models.default_for(self.federation.shape)
        self.template = self._build(0)
        """The initial network; never trained itself."""
        self.task = models.task_of(self.template, self.clients, self.federation.data.classes, seed)
        self._try_model(self.template)
        self.parameters = sum(p.numel() for p in self.template.parameters())
        statistics = {name: b.detach().clone() for name, b in models.statistics(self.template).items()}
        self.local_statistics: Params = statistics if config.train.batch_norm == "local" else {}
        """Initial running statistics of norm layers, where they stay with the clients."""
        self.initial: Params = self._travelling(self.template)
        """The initial model as it travels."""
        self._check_dial()

    def fresh(self, number: int) -> Params:
        """The number-th random initial model."""
        return self.initial if number == 0 else self._travelling(self._build(number))

    def _travelling(self, network: nn.Module) -> Params:
        state = models.parameters_of(network) | models.statistics(network)
        return {n: t.detach().contiguous() for n, t in state.items() if n not in self.local_statistics}

    def _build(self, number: int) -> nn.Module:
        shape, classes = self.federation.shape, self.federation.data.classes
        with torch_stream(self.config.run.seed, "model", client=number):
            model = models.build(self.model_name, shape, classes, self.config.model.options)
            return self.algorithm.adapt(model, str(model.output_layer))

    def _check_sizes(self) -> None:
        """What only shows when the data are there."""
        newcomers, wanted = self.config.data.newcomers, self.config.train.participation
        members = self.clients - newcomers
        if members < 1:
            raise ConfigError(f"data.newcomers = {newcomers} leaves none of the {self.clients} clients")
        if wanted > max(1, members):
            raise ConfigError(f"train.participation = {wanted:g}, but only {members} clients can take part")
        size = self.config.train.batch_size
        largest = max(len(shard.train) for shard in self.federation.shards)
        if size > largest:
            raise ConfigError(
                f"train.batch_size = {size} is larger than every client: the largest has {largest} training samples"
            )

    def _check_dial(self) -> None:
        """Blurring norms is refused where it would hide nothing."""
        if self.config.privacy.norms == "exact":
            return
        name, what = self.config.algorithm_name, f'privacy.norms = "{self.config.privacy.norms}"'
        if "class_counts" in self.algorithm.beside(self.initial, self.task):
            raise ConfigError(f"{what} would hide nothing: with these settings {name} sends its class counts")
        if self.task.output_weight not in self.algorithm.uploaded(tuple(self.initial), self.task):
            raise ConfigError(f"{what} blurs the uploaded output layer, and {name} uploads none")

    def _try_model(self, model: nn.Module) -> None:
        """Two samples through the network: what does not fit shows here, and not as a riddle in round 1."""
        network = copy.deepcopy(model)
        seen: list[Tensor] = []
        network.get_submodule(self.task.output).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        samples = data.Samples(self.federation.data.inputs[:2], self.federation.data.labels[:2], torch.device("cpu"))
        try:
            logits = network.eval()(samples.batch(np.arange(2))[0])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            what = f"the model {self.model_name} cannot take samples of shape {self.federation.shape.dims}"
            raise ConfigError(f"{what}: {str(error).splitlines()[0]}") from None
        if not seen:
            raise ConfigError(f"the model {self.model_name} never uses its output layer {self.task.output!r}")
        if logits.shape != (2, self.task.classes) or logits.dtype != torch.float32:
            raise ConfigError(
                f"the model {self.model_name} must give float32 logits for {self.task.classes} classes, "
                f"it gives {logits.dtype} of shape {tuple(logits.shape)}"
            )
        smallest = min(self.config.train.batch_size, *(len(shard.train) for shard in self.federation.shards))
        if smallest == 1 and any(isinstance(m, _BatchNorm) for m in model.modules()):
            raise ConfigError("the model has BatchNorm layers, which cannot train on a batch of one sample")

    def _choose_evaluated(self) -> list[int]:
        wanted = self.config.run.evaluate_clients or len(self.members)
        if wanted > len(self.members):
            raise ConfigError(f"run.evaluate_clients = {wanted}, but only {len(self.members)} clients can take part")
        chosen = stream(self.config.run.seed, "evaluated").permutation(self.members)[:wanted]
        if not any(len(self.federation.shards[c].test) for c in chosen):
            raise ConfigError("no evaluated client has a test sample: use fewer clients or more samples")
        return sorted(int(c) for c in chosen)
