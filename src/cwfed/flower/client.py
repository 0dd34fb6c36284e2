"""The client's side of a federation: a Flower ClientApp that does one client's work, as the simulator's loop does it.

A node answers three messages. `query`: who are you, what are your data like? `train`: here is your model, train it.
`evaluate`: here is your model, how good is it? What a client keeps (its own model where the algorithm wants one,
running statistics, its personal model) is on its own disk; nothing of its data leaves but what the algorithm sends.
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod

import cwfed
from cwfed import data as sources
from cwfed import models
from cwfed.core.errors import ConfigError, CwfedError, plain
from cwfed.core.metrics import PER_CLASS, SAMPLES, Own, everything
from cwfed.core.types import Download, Params
from cwfed.data import Dataset, Federation, Shard, fixed_shard, of_client
from cwfed.data.partition import split
from cwfed.engine import Candidate, Loop, Score, find_devices
from cwfed.federation import guard, manifest
from cwfed.federation.config import Config, PrivacySection
from cwfed.federation.experiment import Blueprint, deal
from cwfed.federation.rounds import one_compute_thread
from cwfed.flower import logs, wire
from cwfed.flower.account import Account
from cwfed.flower.members import SIZES, number_of
from cwfed.flower.plan import Plan, describe_model, short_hash
from cwfed.privacy import dp
from cwfed.privacy.noise import FromSystem, Noise, Seeded, SystemDraws
from cwfed.runs.checkpoint import Checkpoints
from cwfed.runs.folder import RunFolder

log = logging.getLogger("cwfed.flower")

KEPT = 4
"""A client keeps its state of so many rounds: the one that the server has not said yet whether it was good, and a few before it,
since a server that was restarted may ask for them again."""


RUN = re.compile("[0-9a-f]{16}")
"""What the server calls a federation."""


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
    counted of the client's models class by class. Never with `privacy.dp`."""
    dp_budget: float = 0.0
    """The largest epsilon that this node lets its samples cost, whatever the plan says; 0 leaves it to the plan."""


class Worker:
    """The work of clients whose data are here: one on a node, many in a simulation.

    What a client trained is only its own when the server has taken it: until then the next round begins where the last
    good one ended (`accepted`, 0 before the first), as for a client of the simulator whose update is refused or lost.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        federation: Federation,
        state: Callable[[int], Path | None],
        tell_sums: bool,
        noise: Noise | None = None,
        account: Account | None = None,
    ) -> None:
        self.blueprint, self.algorithm, self.federation = blueprint, blueprint.algorithm, federation
        self._tell_sums = tell_sums
        self._noise = noise or Seeded(blueprint.config.run.seed)
        self._account = account
        self.forms = blueprint.sent_forms()
        self._state = state
        self._loop = Loop(
            blueprint.job(federation, find_devices(blueprint.config.run.device, "loop")[0], self._noise)
        )

    def train(self, client: int, round_: int, accepted: int, got: Download, measure: bool) -> RecordDict:
        """One visit: begin, train, finish; what goes up."""
        visit = self.blueprint.visit(client, self._kept(client, accepted), got)
        self._loop.rehearse(
            None, visit
        )  # what cannot be trained, or not with differential privacy, is said before it costs
        epsilon = self._charge(client, round_)
        out = {n: torch.empty(1, *t.shape, dtype=t.dtype) for n, t in self.blueprint.initial.items()}
        (visited,) = self._loop.visit(round_, None, [visit], out)
        trained = {name: stack[0] for name, stack in out.items()}
        own = {name: trained[name] for name in self.blueprint.kept_names}
        keep = own | visited.remembered | visited.statistics
        is_finite = math.isfinite(visited.loss + visited.penalty) and all(map(guard.is_finite, trained.values()))
        if not is_finite:
            raise ConfigError(
                f"the training diverged in round {round_}: lower train.lr (or the weight of the penalty)"
            )
        if keep:
            self._checkpoints(client).save(round_, {"round": round_, "kept": keep}, after=accepted)
        metrics: dict[str, Any] = {"samples": len(self.federation.shards[client].train)}
        metrics["penalty"] = visited.penalty
        if self.blueprint.config.privacy.dp == "off":  # else it says of the samples what no noise covers
            metrics["loss"] = visited.loss
        if epsilon is not None:
            metrics["epsilon"] = epsilon
        if measure and not self.blueprint.is_tuned:
            now = replace(visit, statistics=visited.statistics)
            whole = self.blueprint.after_training(trained | visited.statistics, self._counts(client))
            metrics |= self._measure("trained", Candidate(now, whole))
        names = self.algorithm.uploaded(tuple(trained), self.blueprint.task)
        content = RecordDict({"metrics": MetricRecord(metrics)})
        wire.upload_to(
            content, self._blurred(client, round_, {name: trained[name] for name in names}), visited.extras
        )
        return content

    def _charge(self, client: int, round_: int) -> float | None:
        """Enter the training that is about to begin in the privacy account, where there is one; epsilon after it."""
        if self._account is None:
            return None
        train, samples = self.blueprint.config.train, len(self.federation.shards[client].train)
        rate, steps = dp.rate(samples, train.batch_size), dp.steps_of_a_round(samples, train.batch_size, train.epochs)
        epsilon = self._account.charge(rate, steps, data_key(self.federation), self.blueprint.classes)
        # a warning, so that a node's operator sees it without setting anything up
        log.warning("round %d: %s", round_, self._account.sentence(epsilon))
        return epsilon

    def _blurred(self, client: int, round_: int, model: Params) -> Params:
        """The model as it is sent; what stays here is not changed."""
        dial = self.blueprint.config.privacy.dial()
        return model if dial.norms == "exact" else dial.turn(model, self.blueprint.task, self._noise, round_, client)

    def evaluate(
        self, client: int, round_: int, accepted: int, got: Download, kept_too: bool, keep: bool
    ) -> RecordDict:
        """How good the model is that the server handed out after a round, and the client's own where it is asked for."""
        kept, number = self._kept(client, accepted), round_ + 1
        visit = self.blueprint.visit(client, kept, got)
        metrics = self._measure("received", Candidate(visit), number)
        trained = self.blueprint.own_model(kept, self._counts(client))
        if self.blueprint.is_tuned:
            metrics |= self._measure("trained", Candidate(visit, is_tuned=True), number)
        elif kept_too and trained is not None:
            metrics |= self._measure("trained", Candidate(visit, trained))
        if keep:
            model = trained
            if model is None:
                (model,) = self._loop.personal(number, None, [visit], is_tuned=self.blueprint.is_tuned)
            network = self.blueprint.template
            self._write_model(client, {n: w for n, w in model.items() if not models.attached(network, n)})
        return RecordDict({"metrics": MetricRecord(metrics)})

    def _measure(self, phase: str, candidate: Candidate, round_: int = 0) -> dict[str, Any]:
        (score,) = self._loop.measure([candidate], round_)
        return score_to(phase, score, self.blueprint.metrics, self._tell_sums)

    # --- what stays here

    def _counts(self, client: int) -> list[float]:
        """n_ij: the client's training samples by class."""
        counts: list[float] = self.federation.class_counts(client).tolist()
        return counts

    def folder(self, client: int) -> Path | None:
        """Where a client's state and model are; None where nothing is kept."""
        return self._state(client)

    def _checkpoints(self, client: int) -> Checkpoints:
        folder = self._state(client)
        if folder is None:
            raise ConfigError(
                "this algorithm keeps something at the client: give its node a folder for that (node config: state)"
            )
        return Checkpoints(folder, KEPT)

    def _kept(self, client: int, accepted: int) -> Params:
        """What the client kept after the last round in which its update was good."""
        if not self.blueprint.keeps_any:
            return {}
        tree, complaints = self._checkpoints(client).newest(before=accepted + 1)
        for complaint in complaints:
            log.warning("%s: an older state is used", complaint)
        kept: Params = tree["kept"] if tree else {}
        return kept

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


WorkerOf: TypeAlias = Callable[[int, str], Worker]
"""(client, federation) -> who does its work."""


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
        "protocol": wire.PROTOCOL,
        "classes": federation.data.classes,
        "shape": "x".join(map(str, federation.shape.dims)),
        "vocabulary": federation.shape.vocabulary,
        "model": describe_model(worker.blueprint),
    }
    hello["class_names"] = list(federation.data.class_names)
    hello["words"] = short_hash(federation.data.words) if federation.data.words else ""
    if tell_histogram and worker.blueprint.config.privacy.dp == "off":  # the exact counts are in no account
        hello["histogram"] = [int(n) for n in federation.class_counts(client)]
    sizes: dict[str, Any] = dict(zip(SIZES, (len(shard.train), len(shard.test), len(shard.validation)), strict=True))
    return RecordDict({"hello": ConfigRecord(hello), "metrics": MetricRecord(sizes)})


def with_news(content: RecordDict, told: ConfigRecord, now: RecordDict) -> RecordDict:
    """An answer, with what the node says of itself where its data are no longer those that the server knows of."""
    sizes = now.metric_records["metrics"]
    if any(told.get(name) != sizes[name] for name in SIZES):
        content["hello"] = now.config_records["hello"]
        content.metric_records["metrics"].update(sizes)
    return content


def client_app(
    data: Callable[[Context], Site] | None = None, mods: Sequence[Mod] = (), plan: Plan | None = None
) -> ClientApp:
    """A Flower ClientApp for the plan in its run config (or for this one).

    `data` says what this node is. Without it its node config does: name="clinic-3" path="/data/clinic-3" (and
    data="imagefolder" or another kind of source, state="/var/lib/cwfed"). `mods` see the training messages.
    """

    def worker_of(context: Context) -> tuple[Site, WorkerOf]:
        agreed = plan or Plan.of(context.run_config)
        site = data(context) if data else site_of(context, agreed)
        return site, partial(_node_worker, agreed, site)

    return make_app(worker_of, mods)


def make_app(worker_of: Callable[[Context], tuple[Site, WorkerOf]], mods: Sequence[Mod]) -> ClientApp:
    """The app that answers the three messages with the workers that it is given."""
    app = ClientApp()

    def answer(message: Message, context: Context, work: Callable[[Site, WorkerOf], RecordDict]) -> Message:
        """An error the user can fix goes to the server as a sentence, not as a traceback."""
        if _is_node(context):
            logs.show()
        try:
            with one_compute_thread():
                content = work(*worker_of(context))
        except CwfedError as error:
            log.error("%s", error)
            content = RecordDict({"problem": ConfigRecord({"reason": str(error)})})
        return Message(content, reply_to=message)

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        def work(site: Site, worker: WorkerOf) -> RecordDict:
            told = message.content.config_records.get("told")
            if told and told.get("refused"):
                log.error("%s was left out of the federation: %s", site.name, plain(str(told["refused"])))
            number = number_of(str(site.name)) or 0
            return describe(site.name, worker(number, ""), number, site.tell_histogram)

        return answer(message, context, work)

    @app.train(mods=[past_the_mods, clip_if_told, *mods, stop_at_problems])
    def train(message: Message, context: Context) -> Message:
        def work(site: Site, worker: WorkerOf) -> RecordDict:
            order = Order.read(message.content)
            here = worker(order.client, order.run)
            got = wire.download_from(message.content, here.forms)
            content = here.train(order.client, order.round, order.accepted, got, bool(order.told["measure"]))
            return with_news(content, order.told, describe(site.name, here, order.client, site.tell_histogram))

        return answer(message, context, work)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        def work(site: Site, worker: WorkerOf) -> RecordDict:
            order = Order.read(message.content)
            here = worker(order.client, order.run)
            got = wire.download_from(message.content, here.forms)
            told = order.told
            content = here.evaluate(
                order.client, order.round, order.accepted, got, bool(told["kept"]), bool(told["keep"])
            )
            if told["keep"] and _is_node(context) and (folder := here.folder(order.client)):
                log.info(
                    '%s is client %d; its model of round %d: cwfed.load_model("%s", client=%d)',
                    *(site.name, order.client, order.round, folder, order.client),
                )
            return with_news(content, told, describe(site.name, here, order.client, site.tell_histogram))

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


@dataclass(frozen=True)
class Order:
    """What a node is told to do: for which client, of which federation, in which round."""

    client: int
    round: int
    accepted: int
    """The last round in which the client's update was good."""
    run: str
    told: ConfigRecord

    @classmethod
    def read(cls, content: RecordDict) -> Order:
        """From a message. A node does not trust the server, either: a run is named by digits, never by a path."""
        told = wire.texts(content, "told")
        client, round_, accepted, run = (told.get(name) for name in ("client", "round", "accepted", "run"))
        if not (isinstance(client, int) and isinstance(round_, int) and isinstance(accepted, int)):
            raise wire.BadMessage("the message does not say which client and round it is for")
        if min(client, round_, accepted) < 0 or max(client, round_, accepted) >= 2**31:
            raise wire.BadMessage("the message is for a client or round that cannot be")
        if not isinstance(run, str) or not RUN.fullmatch(run):
            raise wire.BadMessage("the message does not say which federation it belongs to")
        return cls(client, round_, accepted, run, told)


def _is_node(context: Context) -> bool:
    """Whether somebody reads the log of this node alone, as in a simulation nobody does."""
    return "name" in context.node_config


def in_order(data: Dataset, names: Sequence[str]) -> Dataset:
    """The same data with their classes in this order, of which they may have some."""
    if not names or data.class_names == tuple(names):
        return data
    if unknown := [name for name in data.class_names if name not in names]:
        raise ConfigError(
            f"these data have the class {unknown[0]!r}, which is none of the federation's (federation.class_names)"
        )
    order = np.array([names.index(name) for name in data.class_names], dtype=np.int64)
    return replace(data, labels=order[data.labels], class_names=tuple(names), digest="")


def _node_worker(plan: Plan, site: Site, client: int, run: str = "") -> Worker:
    """A node has one client's data, split by the client's name where they do not come split."""
    config, data = plan.config, in_order(site.data, plan.federation.class_names)
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
    blueprint.check(federation, is_whole=False)
    folder = site.state / run if site.state and run else None
    account = account_of(site, config.privacy)
    tell_sums = site.tell_histogram and account is None  # the exact counts are in no account
    return Worker(blueprint, federation, lambda _: folder, tell_sums, node_noise(account, federation), account)


def account_of(site: Site, privacy: PrivacySection) -> Account | None:
    """A node's privacy account; none without differential privacy, which a node with a budget insists on."""
    how = privacy.samples()
    if how is None:
        if site.dp_budget:
            raise ConfigError(
                f"{site.name} has a privacy budget (dp_budget in its node config), and the federation trains without "
                "differential privacy: set privacy.dp = sample in its settings"
            )
        return None
    if site.state is None:
        raise ConfigError(
            "privacy.dp: a node keeps its account of epsilon on its disk: give it a folder for that (node config: state)"
        )
    return Account(site.state, how, privacy.dp_budget, site.dp_budget)


def node_noise(account: Account | None, federation: Federation) -> Noise:
    """A node's noise: never from the plan's seed, which the server has."""
    key = data_key(federation)
    return FromSystem(account.noise_of(key) if account else lambda classes: SystemDraws().laplace(size=classes))


def data_key(federation: Federation) -> str:
    """Says whether data are still the same."""
    return f"{federation.data.digest} {federation.digest()}"


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
    return Site(
        name, sources.load(spec), state, bool(node.get("histogram", False)), _budget(node.get("dp_budget", 0))
    )


def _budget(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < math.inf:
        raise ConfigError(f"dp_budget = {given!r} in the node config must be a number from 0 on")
    return float(given)


def _partition(config: Config, partition: int, partitions: int) -> Dataset:
    """The share of one of the plan's clients, dealt out to as many as there are."""
    section = config.data.model_copy(update={"clients": partitions})
    dealt = deal(config.model_copy(update={"data": section}))
    if partition not in dealt.shards:
        raise ConfigError(
            f"the data are those of {len(dealt)} clients, and this node is partition {partition}: start as many"
        )
    return of_client(dealt, partition)
