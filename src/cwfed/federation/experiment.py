"""An experiment that is ready to run: data dealt out, model and algorithm built and checked against each other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cwfed import data, models
from cwfed.core import metrics
from cwfed.core.errors import ConfigError, did_you_mean
from cwfed.core.rng import stream, torch_stream
from cwfed.core.types import Download, ExtraSpec, Params, Start, Training, Uploads
from cwfed.engine.base import Job, Visit, overrides
from cwfed.engine.worker import OPTIMIZER, LocalTraining
from cwfed.federation.adversary import Adversary
from cwfed.federation.config import Config
from cwfed.federation.guard import Guard, example, misfit, spec_of
from cwfed.models import InputShape
from cwfed.privacy.noise import Noise


def deal(config: Config, data_dir: str | None = None, given: data.Dataset | None = None) -> data.Federation:
    """A config's data, or those given instead, dealt out to its clients."""
    dataset = given or data.load(config.data.source(), data_dir)
    seed, chosen = config.split_seed, config.data
    dealt = data.share_out(dataset, config.partition_spec(), seed, chosen.validation, chosen.samples)
    return dealt if chosen.shift == "none" else data.shifted(dealt, chosen.shift, chosen.shift_groups, seed)


def how_many(participation: float, clients: int) -> int:
    """How many of the clients a round invites."""
    count = int(participation) if participation > 1 else max(1, round(participation * clients))
    return min(clients, count)


class Blueprint:
    """The network, and what an algorithm may know about it: everything that all sides of a federation must agree on."""

    def __init__(self, config: Config, shape: InputShape, classes: int, clients: int) -> None:
        self.config, self.shape, self.classes, self.clients = config, shape, classes, clients
        self.algorithm = config.build_algorithm()
        self.model_name = config.model.name
        if self.model_name == "auto":
            self.model_name = models.default_for(shape)
        self.template = self._build(0)
        """The initial network; never trained itself."""
        how = self.training()
        training = Training(how.lr, how.batch_size, how.epochs, how.is_plain)
        self.task = replace(models.task_of(self.template, clients, classes, config.run.seed), training=training)
        self.algorithm.check(self.task)
        self.parameters = sum(p.numel() for p in self.template.parameters())
        statistics = {name: b.detach().clone() for name, b in models.statistics(self.template).items()}
        self.local_statistics: Params = statistics if config.train.batch_norm == "local" else {}
        """Initial running statistics of norm layers, if they stay with the clients; else empty."""
        self.initial: Params = self._travelling(self.template)
        """The initial model, as it is sent."""
        self.kept_names = self._named("keeps")
        """The tensors that stay with a client until its next round."""
        self._named("uploaded")
        privacy = config.privacy.samples()
        histogram = privacy.histogram if privacy else 0.0
        self.guard = Guard.of(self.algorithm, self.initial, self.task, config.guard.most_samples, histogram)
        self.metrics = metrics.load(config.run.metrics, classes)
        """The user's own metrics."""
        if privacy and (different := [name for name in ("loss", "passes") if overrides(self.algorithm, name)]):
            own = {"loss": "a loss", "passes": "passes"}[different[0]]
            raise ConfigError(
                f"privacy.dp clips and counts the gradients of one pass with the cross-entropy; {config.algorithm_name} has "
                f"{own} of its own: choose another algorithm"
            )
        self._check_dial()

    def _named(self, hook: Literal["keeps", "uploaded"]) -> tuple[str, ...]:
        """The tensors of the model that a hook names; one sentence where it names another."""
        names: tuple[str, ...] = getattr(self.algorithm, hook)(tuple(self.initial), self.task)
        what = f"{type(self.algorithm).__name__}.{hook}"
        if not isinstance(names, tuple | list):
            raise ConfigError(f"{what} must return a tuple of names, not {type(names).__name__}")
        if unknown := [name for name in names if name not in self.initial]:
            raise ConfigError(
                f"{what} names {unknown[0]!r}, which the model lacks: {did_you_mean(str(unknown[0]), self.initial)}"
            )
        return names

    @cached_property
    def has_own_models(self) -> bool:
        """Whether a client keeps its whole personal model, so that it has one also in a round in which it does not take part."""
        if self.algorithm.phase != "trained" or not self.kept_names or self.is_tuned:
            return False
        shown = self.algorithm.shown({name: self.initial[name] for name in self.kept_names} | self.local_statistics)
        names = {*self.initial, *self.local_statistics}
        return all(name in shown for name in names if not models.attached(self.template, name))

    @cached_property
    def is_tuned(self) -> bool:
        """Whether clients make passes before they are tested; then phase `trained` is after these passes."""
        if not overrides(self.algorithm, "passes"):
            return False
        try:
            return bool(self.algorithm.passes("test", self.task, Start({})))
        except Exception as error:
            name = type(self.algorithm).__name__
            raise ConfigError(
                f'whether {name} has passes before the test must not depend on a start: passes("test", ...) fails ({error!r})'
            ) from None

    @property
    def keeps_any(self) -> bool:
        """Whether a client keeps anything at all between its rounds."""
        remembers = overrides(self.algorithm, "remember")
        return bool(self.kept_names or self.local_statistics) or remembers or self.config.train.keep_optimizer

    def own(self, kept: Params) -> Params | None:
        """What a client keeps, as its algorithm sees it; before its first round, the same tensors of the initial model."""
        seen = {n: w for n, w in kept.items() if n not in self.local_statistics and not n.startswith(OPTIMIZER)}
        return seen or {name: self.initial[name] for name in self.kept_names} or None

    def own_model(self, kept: Params, class_counts: Sequence[float]) -> Params | None:
        """The personal model that a client keeps, with its statistics; None if it has none (yet)."""
        if not kept or not self.has_own_models:
            return None
        return self.after_training({n: kept[n] for n in (*self.kept_names, *self.local_statistics)}, class_counts)

    def after_training(self, trained: Params, class_counts: Sequence[float]) -> Params:
        """What a client predicts with, from what it trained."""
        return self.algorithm.predictor(self.algorithm.shown(trained), class_counts, self.task)

    def sent_forms(self) -> dict[str, ExtraSpec]:
        """The forms of the tensors of a model that is sent to a client."""
        models = self.algorithm.send(self.algorithm.init(self.fresh, self.task), 0).models
        names = models[0].keys() if models else self.initial.keys()
        return {name: form for name, form in spec_of(self.initial).items() if name in names}

    def visit(self, client: int, kept: Params, got: Download | None = None) -> Visit:
        """A client with what it keeps (nothing before its first round)."""
        optimizer = {n: t for n, t in kept.items() if n.startswith(OPTIMIZER)}
        statistics = {n: kept.get(n, initial) for n, initial in self.local_statistics.items()}
        return Visit(client, self.own(kept), statistics, optimizer, got)

    def completed(self, model: Params) -> Params:
        """A model, completed by the initial tensors where it lacks those that are not sent."""
        return model if model.keys() >= self.initial.keys() else self.initial | model

    def job(self, federation: data.Federation, device: torch.device, noise: Noise | None = None) -> Job:
        """The job for an engine."""
        samples = data.Samples(federation.data.inputs, federation.data.labels, device)
        return Job(self.algorithm, self.template, self.task, federation, samples, self.training(noise), self.metrics)

    def first_state(self) -> Any:
        """The server's state before round 1."""
        state = self.algorithm.init(self.fresh, self.task)
        if not isinstance(state, dict):
            name = type(self.algorithm).__name__
            raise ConfigError(f"{name}.init must return the state, a dict, not {type(state).__name__}")
        if self.config.guard.norm_bound and not self.sends_one_model(state):
            raise ConfigError(
                "guard.norm_bound compares an upload with the one model that the client was sent, "
                f"and {self.config.algorithm_name} does not send one model: set it to 0"
            )
        return state

    def sends_one_model(self, state: Any = None) -> bool:
        """Whether a client is sent exactly one model, with which its upload can be compared; at the start, or in a given state."""
        state = self.algorithm.init(self.fresh, self.task) if state is None else state
        models = self.algorithm.send(state, 0).models
        return len(models) == 1 and bool(models[0])

    def _check_dial(self) -> None:
        """ConfigError if blurring norms would hide nothing."""
        if self.config.privacy.norms == "exact":
            return
        name, what = self.config.algorithm_name, f'privacy.norms = "{self.config.privacy.norms}"'
        extras = self.algorithm.extras_spec(self.initial, self.task)
        if "class_counts" in extras:
            raise ConfigError(f"{what} would hide nothing: with these settings {name} sends its class counts")
        if any(extra.endswith(self.task.output_weight) for extra in extras):
            raise ConfigError(f"{what} would hide nothing: {name} also sends how the output layer moved")
        if self.task.output_weight not in self.algorithm.uploaded(tuple(self.initial), self.task):
            raise ConfigError(f"{what} blurs the uploaded output layer, and {name} uploads none")

    def try_state(self, state: Any, clients: Sequence[int]) -> None:
        """A round of these clients without training, to find out what is wrong with a state from a file: any error means that it does not fit."""
        uploads = Uploads(
            clients=tuple(clients),
            models={name: torch.stack([self.initial[name]] * len(clients)) for name in self.guard.model},
            counts=torch.ones(len(clients)),
            extras={
                name: torch.stack([example(form)] * len(clients)) for name, form in self.guard.extras_spec.items()
            },
        )
        for made in (state, self.algorithm.aggregate(state, uploads)):
            for client in clients:
                for model in self.algorithm.send(made, client).models:  # perhaps only a part of it is sent
                    forms = {name: form for name, form in spec_of(self.initial).items() if name in model}
                    if problem := misfit(model, forms, "a model"):
                        raise ValueError(problem)

    def fresh(self, number: int) -> Params:
        """The number-th random initial model."""
        if number == 0:
            return self.initial
        made = self._travelling(self._build(number))
        if all(torch.equal(tensor, self.initial[name]) for name, tensor in made.items()):
            raise ConfigError(
                f"{self.config.algorithm_name} begins with several random models, and the model {self.model_name} is the same "
                "each time: give a function that makes a new one"
            )
        return made

    def _travelling(self, network: nn.Module) -> Params:
        state = models.parameters_of(network) | models.statistics(network)
        return {n: t.detach().contiguous() for n, t in state.items() if n not in self.local_statistics}

    def _build(self, number: int) -> nn.Module:
        with torch_stream(self.config.run.seed, "model", client=number):
            model = models.build(self.model_name, self.shape, self.classes, self.config.model.options)
            return self.algorithm.adapt(model, str(model.output_layer))

    @property
    def lower_is_better(self) -> list[str]:
        """The metrics of which less is better."""
        known = metrics.BUILT_IN | {name: metric for name, metric, _ in self.metrics}
        return [name for name, metric in known.items() if metric.lower_is_better]

    def training(self, noise: Noise | None = None) -> LocalTraining:
        """How a client trains; its noise comes from the seed unless another source is given."""
        train, seed = self.config.train, self.config.run.seed
        privacy = self.config.privacy.samples()
        return LocalTraining(
            seed=seed,
            lr=train.lr,
            batch_size=train.batch_size,
            epochs=train.epochs,
            precision=train.precision,
            privacy=privacy,
            noise=noise,
            optimizer=train.make_optimizer(),
            keep_optimizer=train.keep_optimizer,
            schedule=train.make_schedule(),
            clip=train.clip,
            label_smoothing=train.label_smoothing,
            augment=self.config.data.augment,
        )

    def check(self, federation: data.Federation, is_whole: bool = True) -> None:
        """ConfigError if settings and data do not fit together, so that this shows before round 1.

        `is_whole`: whether these are all clients. A node has one client's data, which may be smaller than a batch.
        """
        size = self.config.train.batch_size
        trained = [len(shard.train) for shard in federation.shards.values()]
        if is_whole and size > max(trained):
            raise ConfigError(
                f"train.batch_size = {size} is larger than every client: the largest has {max(trained)} training samples"
            )
        if min(size, *trained) == 1 and any(isinstance(m, _BatchNorm) for m in self.template.modules()):
            raise ConfigError("the model has BatchNorm layers, which cannot train on a batch of one sample")
        if self.config.data.augment != "none" and len(federation.shape.dims) != 3:
            raise ConfigError(
                f'data.augment = "{self.config.data.augment}" shifts or mirrors images, and these samples have the shape '
                f"{federation.shape.dims}: set it to none"
            )
        self._try_model(federation)

    def _try_model(self, federation: data.Federation) -> None:
        """Pass two samples through the network; ConfigError if it cannot take them or gives something else than logits."""
        network = copy.deepcopy(self.template)
        seen: list[Tensor] = []
        network.get_submodule(self.task.output).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        samples = data.Samples(federation.data.inputs[:2], federation.data.labels[:2], torch.device("cpu"))
        try:
            logits = network.eval()(samples.batch(np.arange(len(samples.labels)))[0])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            what = f"the model {self.model_name} cannot take samples of shape {federation.shape.dims}"
            raise ConfigError(f"{what}: {str(error).splitlines()[0]}") from None
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"the model {self.model_name} must give logits, one tensor, and it gives a {type(logits).__name__}: "
                "return the logits alone"
            )
        if not seen:
            raise ConfigError(f"the model {self.model_name} never uses its output layer {self.task.output!r}")
        if logits.shape != (len(samples.labels), self.task.classes) or logits.dtype != torch.float32:
            raise ConfigError(
                f"the model {self.model_name} must give float32 logits for {self.task.classes} classes, "
                f"it gives {logits.dtype} of shape {tuple(logits.shape)}"
            )


class Experiment(Blueprint):
    """A config's experiment before round 1: the data of all clients, and who takes part."""

    def __init__(self, config: Config, data_dir: str | None = None, given: data.Dataset | None = None) -> None:
        seed = config.split_seed
        self.federation = deal(config, data_dir, given)
        super().__init__(config, self.federation.shape, self.federation.data.classes, len(self.federation))
        if held_out := self.algorithm.held_out():
            self.federation = self.federation.with_holdout(held_out, seed)
        self._check_participation()
        self.check(self.federation)
        mixed = stream(seed, "newcomers").permutation(self.clients)
        self.newcomers = sorted(int(c) for c in mixed[: config.data.newcomers])
        """Clients that never take part."""
        self.members = sorted(int(c) for c in mixed[config.data.newcomers :])
        self.adversaries = self._choose_adversaries()
        self.evaluated = self._choose_evaluated()

    def participants(self) -> int:
        """How many clients a round invites."""
        return how_many(self.config.train.participation, self.clients - self.config.data.newcomers)

    def _check_participation(self) -> None:
        newcomers, wanted = self.config.data.newcomers, self.config.train.participation
        members = self.clients - newcomers
        if members < 1:
            raise ConfigError(f"data.newcomers = {newcomers} leaves none of the {self.clients} clients")
        if wanted > max(1, members):
            raise ConfigError(f"train.participation = {wanted:g}, but only {members} clients can take part")
        least, invited = self.config.guard.least, self.participants()
        if least > invited:
            raise ConfigError(f"guard.least = {least}, but a round has only {invited} participants")

    def _choose_adversaries(self) -> dict[int, Adversary]:
        """The malicious clients, and what each does to the models that it sends."""
        how = self.config.adversary
        if how.clients >= len(self.members):
            raise ConfigError(
                f"adversary.clients = {how.clients} leaves no honest client: {len(self.members)} can take part"
            )
        if how.target >= self.federation.data.classes:
            raise ConfigError(
                f"adversary.target = {how.target}, but the classes are 0 to {self.federation.data.classes - 1}"
            )
        mixed = stream(self.config.run.seed, "adversaries").permutation(self.members)
        return {int(c): Adversary(how.attack, how.strength, how.target) for c in mixed[: how.clients]}

    def _choose_evaluated(self) -> list[int]:
        """The clients whose models are measured: honest ones only."""
        honest = len(self.members) - len(self.adversaries)
        wanted = self.config.run.evaluate_clients or honest
        if wanted > honest:
            what = "honest clients" if self.adversaries else "clients"
            raise ConfigError(f"run.evaluate_clients = {wanted}, but only {honest} {what} can take part")
        mixed = stream(self.config.split_seed, "evaluated").permutation(self.members)
        chosen = [c for c in mixed if c not in self.adversaries][:wanted]
        if not any(len(self.federation.shards[c].test) for c in chosen):
            raise ConfigError("no evaluated client has a test sample: use fewer clients or more samples")
        if self.config.run.patience and not any(len(self.federation.shards[c].validation) for c in chosen):
            raise ConfigError(
                f"run.patience = {self.config.run.patience} stops by held-out data, and no evaluated client has any: "
                "use fewer clients, more samples or a larger data.validation"
            )
        return sorted(int(c) for c in chosen)
