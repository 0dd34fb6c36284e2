"""The client's side of a federation: a Flower ClientApp that does one client's work, as the simulator's loop does it.

A node answers three messages. `query`: who are you, what are your data like? `train`: here is your model, train it.
`evaluate`: here is your model, how good is it? What a client keeps (its own model where the algorithm wants one,
running statistics, its personal model) is on its own disk; nothing of its data leaves but what the algorithm sends.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod

import cwfed
from cwfed import data as sources
from cwfed import guard, manifest
from cwfed.checkpoint import Checkpoints
from cwfed.config import Config
from cwfed.data import Dataset, Federation, Samples, Shard, fixed_shard, of_client
from cwfed.data.partition import split
from cwfed.engine import Candidate, Loop, Score, Visit, find_device
from cwfed.engine.base import as_it_is
from cwfed.engine.bench import ClientView
from cwfed.errors import ConfigError, CwfedError
from cwfed.experiment import Blueprint, deal
from cwfed.flower import wire
from cwfed.flower.plan import Plan, describe_model
from cwfed.folder import RunFolder
from cwfed.metrics import PER_CLASS, SAMPLES, Own, everything
from cwfed.rounds import one_compute_thread
from cwfed.types import Download, Params

log = logging.getLogger("cwfed.flower")

KEPT = 3
"""A client keeps its state of so many rounds: a server that was restarted may ask for the last one again."""


@dataclass(frozen=True)
class Site:
    """What a node is: its name, its data, where it keeps its state."""

    name: str
    """By this the server knows the client again, whatever happens to its node."""
    data: Dataset
    state: Path | None = None
    """A folder of its own on this machine; None keeps nothing, for algorithms that need nothing."""
    tell_histogram: bool = False
    """Whether the server is told the label histogram, for a better first model when this client joins late, and what was
    counted of the client's models class by class."""


class Worker:
    """The work of clients whose data are here: one on a node, many in a simulation."""

    def __init__(
        self,
        blueprint: Blueprint,
        federation: Federation,
        state: Callable[[int], Path | None],
        tell_sums: bool,
    ) -> None:
        self.blueprint, self.algorithm, self.federation = blueprint, blueprint.algorithm, federation
        self._tell_sums = tell_sums
        self.forms = guard.form_of(blueprint.initial)
        self._state = state
        samples = Samples(federation.data.inputs, federation.data.labels, find_device(blueprint.config.run.device))
        self._loop = Loop(
            self.algorithm, blueprint.template, federation, samples, blueprint.training(), metrics=blueprint.metrics
        )

    def train(self, client: int, round_: int, got: Download, measure: bool) -> RecordDict:
        """One visit: begin, train, finish; what goes up."""
        own, statistics = self._kept(client, before=round_)
        out = {n: torch.empty(1, *t.shape, dtype=t.dtype) for n, t in self.blueprint.initial.items()}
        (visited,) = self._loop.visit(round_, [Visit(client, lambda: got, own, statistics)], out)
        trained = {name: stack[0] for name, stack in out.items()}
        keep = (trained if self.algorithm.keeps_model else {}) | visited.remembered | visited.statistics
        is_finite = math.isfinite(visited.loss + visited.penalty) and all(map(guard.is_finite, trained.values()))
        if not is_finite:
            raise ConfigError(
                f"the training diverged in round {round_}: lower train.lr (or the weight of the penalty)"
            )
        if keep:
            self._checkpoints(client).save(round_, {"round": round_, "kept": keep})
        metrics: dict[str, Any] = {"samples": len(self.federation.shards[client].train)}
        metrics |= {"loss": visited.loss, "penalty": visited.penalty}
        if measure:
            metrics |= self._measure(client, "trained", partial(as_it_is, trained), visited.statistics)
        names = self.algorithm.uploaded(tuple(trained), self.blueprint.task)
        content = RecordDict({"metrics": MetricRecord(metrics)})
        wire.upload_to(
            content, self._blurred(client, round_, {name: trained[name] for name in names}), visited.extras
        )
        return content

    def _blurred(self, client: int, round_: int, model: Params) -> Params:
        """The model as it is sent; what stays here is not changed."""
        dial, seed = self.blueprint.config.privacy.dial(), self.blueprint.config.run.seed
        return model if dial.norms == "exact" else dial.turn(model, self.blueprint.task, seed, round_, client)

    def evaluate(self, client: int, round_: int, got: Download, kept_too: bool, keep: bool) -> RecordDict:
        """How good the model is that the server handed out after a round, and the client's own where it is asked for."""
        own, statistics = self._kept(client, before=round_ + 1)
        trained = {name: own[name] for name in self.blueprint.initial} if own is not None else {}

        def received(view: ClientView) -> Params:
            return self.algorithm.personal(got, own, view)

        metrics = self._measure(client, "received", received, statistics)
        if kept_too and trained:
            metrics |= self._measure(client, "trained", partial(as_it_is, trained), statistics)
        if keep:
            is_own = self.algorithm.phase == "trained" and trained
            model = trained if is_own else received(self._loop._benches[0].view(client, statistics))
            self._write_model(client, model | statistics)
        return RecordDict({"metrics": MetricRecord(metrics)})

    def _measure(
        self, client: int, phase: str, model: Callable[[ClientView], Params], statistics: Params
    ) -> dict[str, Any]:
        (score,) = self._loop.measure([Candidate(client, model, statistics)])
        return score_to(phase, score, self.blueprint.metrics, self._tell_sums)

    # --- what stays here

    def _checkpoints(self, client: int) -> Checkpoints:
        folder = self._state(client)
        if folder is None:
            raise ConfigError(
                "this algorithm keeps something at the client: give its node a folder for that (node config: state)"
            )
        return Checkpoints(folder, KEPT)

    def _kept(self, client: int, before: int) -> tuple[Params | None, Params]:
        """The client's own model and running statistics as they were before a round."""
        kept: Params = {}
        if self.algorithm.keeps_model or self.blueprint.local_statistics:
            tree, complaints = self._checkpoints(client).newest(before=before)
            for complaint in complaints:
                log.warning("%s: an older state is used", complaint)
            kept = tree["kept"] if tree else {}
        own = None
        if self.algorithm.keeps_model:
            local = self.blueprint.local_statistics
            own = {name: w for name, w in (self.blueprint.initial | kept).items() if name not in local}
        statistics = {name: kept.get(name, initial) for name, initial in self.blueprint.local_statistics.items()}
        return own, statistics

    def _write_model(self, client: int, model: Params) -> None:
        """The personal model on the client's disk; `cwfed.load_model(folder, client)` reads it."""
        place = self._state(client)
        if place is None:
            return
        place.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(place)
        config, about, shape = self.blueprint.config, self.federation.data, self.federation.shape
        facts = manifest.manifest(
            seed=config.run.seed,
            algorithm=config.algorithm_name,
            model={"name": self.blueprint.model_name, "parameters": self.blueprint.parameters},
            data={
                "digest": about.digest,
                "shape": list(shape.dims),
                "vocabulary": shape.vocabulary,
                "classes": list(about.class_names),
            },
            split={"digest": self.federation.digest(), "histogram": []},
        )
        folder.write_config(config)
        folder.write_json("manifest.json", facts)
        if about.words:
            folder.write_json("vocabulary.json", {"words": about.words})
        folder.save_models(iter([(client, model)]))


def score_to(phase: str, score: Score, own: Sequence[Own], tell_sums: bool) -> dict[str, Any]:
    """A score as metrics of a message: with all its sums, which say how many samples of each class were tested, or only
    with the metrics. What is beyond all bounds is -1: no loss is.
    """
    loss = score.test_loss if math.isfinite(score.test_loss) else -1.0
    told: dict[str, Any] = {
        f"{phase}-right": score.test_right,
        f"{phase}-loss": loss,
        f"{phase}-validation": score.validation_right,
    }
    for part, tally in (("test", score.test), ("held-out", score.validation)):
        if tell_sums and all(np.isfinite(tally.sums[name]).all() for name, _, _ in own):
            for name, sums in tally.sums.items():
                told[f"{phase}-{part}-sums-{name}"] = np.where(np.isfinite(sums), sums, -1.0).ravel().tolist()
            continue
        for name, key, metric in everything(own):
            value = tally.value(name, key, metric) if tally.sums[PER_CLASS][SAMPLES].any() else None
            if value is not None:
                told[f"{phase}-{part}-{name}"] = value
    return told


def describe(site_name: str, worker: Worker, client: int, tell_histogram: bool) -> RecordDict:
    """What a node says of itself: nothing of its labels, unless it wants to."""
    federation, shard = worker.federation, worker.federation.shards[client]
    hello: dict[str, Any] = {
        "name": site_name,
        "version": cwfed.__version__,
        "classes": federation.data.classes,
        "shape": "x".join(map(str, federation.shape.dims)),
        "vocabulary": federation.shape.vocabulary,
        "model": describe_model(worker.blueprint),
    }
    if tell_histogram:
        hello["histogram"] = [int(n) for n in federation.class_counts(client)]
    sizes: dict[str, Any] = {
        "samples": len(shard.train),
        "test": len(shard.test),
        "validation": len(shard.validation),
    }
    return RecordDict({"hello": ConfigRecord(hello), "metrics": MetricRecord(sizes)})


def client_app(
    data: Callable[[Context], Site] | None = None, mods: Sequence[Mod] = (), plan: Plan | None = None
) -> ClientApp:
    """A Flower ClientApp for the plan in its run config (or for this one).

    `data` says what this node is. Without it its node config does: name="clinic-3" path="/data/clinic-3" (and
    data="imagefolder" or another kind of source, state="/var/lib/cwfed"). `mods` see the training messages.
    """

    def worker_of(context: Context) -> tuple[Site, Callable[[int], Worker]]:
        agreed = plan or Plan.of(context.run_config)
        site = data(context) if data else site_of(context, agreed)
        return site, partial(_node_worker, agreed, site)

    return make_app(worker_of, mods)


def make_app(worker_of: Callable[[Context], tuple[Site, Callable[[int], Worker]]], mods: Sequence[Mod]) -> ClientApp:
    """The app that answers the three messages with the workers that it is given."""
    app = ClientApp()

    def answer(
        message: Message, context: Context, work: Callable[[Site, Callable[[int], Worker]], RecordDict]
    ) -> Message:
        """An error the user can mend goes to the server as a sentence, not as a traceback."""
        try:
            with one_compute_thread():
                content = work(*worker_of(context))
        except CwfedError as error:
            log.error("%s", error)
            content = RecordDict({"problem": ConfigRecord({"reason": str(error)})})
        return Message(content, reply_to=message)

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        def work(site: Site, worker: Callable[[int], Worker]) -> RecordDict:
            told = message.content.config_records.get("told")
            if told and told.get("refused"):
                log.error("%s was left out of the federation: %s", site.name, told["refused"])
            number = int(str(site.name)) if str(site.name).isdigit() else 0
            return describe(site.name, worker(number), number, site.tell_histogram)

        return answer(message, context, work)

    @app.train(mods=[past_the_mods, clip_if_told, *mods, stop_at_problems])
    def train(message: Message, context: Context) -> Message:
        def work(site: Site, worker: Callable[[int], Worker]) -> RecordDict:
            client, round_, told = _told(message.content)
            here = worker(client)
            got = wire.download_from(message.content, here.forms)
            return here.train(client, round_, got, bool(told["measure"]))

        return answer(message, context, work)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        def work(site: Site, worker: Callable[[int], Worker]) -> RecordDict:
            client, round_, told = _told(message.content)
            here = worker(client)
            got = wire.download_from(message.content, here.forms)
            return here.evaluate(client, round_, got, bool(told["kept"]), bool(told["keep"]))

        return answer(message, context, work)

    return app


class _Problem(Exception):
    """A client has no update to send."""

    def __init__(self, reply: Message) -> None:
        super().__init__()
        self.reply = reply


def stop_at_problems(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The innermost mod: an answer without an update is nothing for mods, which expect one."""
    reply = call_next(message, context)
    if "problem" in reply.content.config_records:
        raise _Problem(reply)
    return reply


def past_the_mods(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The outermost one: such an answer goes to the server as it is."""
    try:
        return call_next(message, context)
    except _Problem as problem:
        return problem.reply


def clip_if_told(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower's clipping of the update, in federations whose plan has a `clip`."""
    if "clipping_norm" in message.content.config_records.get("told", ConfigRecord()):
        return fixedclipping_mod(message, context, call_next)
    return call_next(message, context)


def _told(content: RecordDict) -> tuple[int, int, ConfigRecord]:
    told = wire.texts(content, "told")
    client, round_ = told.get("client"), told.get("round")
    if not isinstance(client, int) or not isinstance(round_, int):
        raise wire.BadMessage("the message does not say which client and round it is for")
    return client, round_, told


def _node_worker(plan: Plan, site: Site, client: int) -> Worker:
    """A node has one client's data, split by the client's name where they do not come split."""
    config, data = plan.config, site.data
    seed, validation = config.split_seed, config.data.validation
    number = zlib.crc32(site.name.encode())
    if data.fixed_split is None:
        shard = Shard(*split(np.arange(len(data.labels)), seed, number, validation))
    elif len(data.fixed_split) == 1:
        shard = fixed_shard(number, data.fixed_split[0], seed, validation)
    else:
        raise ConfigError(f"the data of {site.name} are those of {len(data.fixed_split)} clients: a node is one")
    federation = Federation(data, {client: shard})
    blueprint = Blueprint(config, federation.shape, data.classes, plan.clients)
    if held_out := blueprint.algorithm.held_out():
        federation = federation.with_holdout(held_out, seed)
    blueprint.check(federation)
    folder = site.state / plan.fingerprint if site.state else None
    return Worker(blueprint, federation, lambda _: folder, site.tell_histogram)


def site_of(context: Context, plan: Plan) -> Site:
    """A node as its node config describes it; one that only has a partition takes that share of the plan's data."""
    node = context.node_config
    name = str(node.get("name", node.get("partition-id", "")))
    if not name:
        raise ConfigError('this node has no name: start it with --node-config \'name="..." path="..."\'')
    default = Path.home() / ".cwfed" / "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    state = Path(str(node["state"])) if "state" in node else default
    if "partition-id" in node and "path" not in node:
        return Site(name, _partition(plan.config, int(node["partition-id"]), int(node["num-partitions"])), state)
    if "path" not in node and "data" not in node:
        raise ConfigError(f'node {name} has no data: add path="..." to its --node-config')
    spec = sources.SourceSpec(
        str(node.get("data", "arrays")),
        str(node.get("path", "")),
        str(node.get("image-column", "")),
        str(node.get("text-column", "")),
        str(node.get("label-column", "label")),
        int(node.get("image-size", 0)),
    )
    return Site(name, sources.load(spec), state, bool(node.get("histogram", False)))


def _partition(config: Config, partition: int, partitions: int) -> Dataset:
    """The share of one of the plan's clients, dealt out to as many as there are."""
    section = config.data.model_copy(update={"clients": partitions})
    return of_client(deal(config.model_copy(update={"data": section})), partition)
