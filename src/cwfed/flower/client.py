"""The client's side of a federation: a Flower ClientApp that does one client's work, in the same way as the simulator's loop.

A node answers three messages: `query` (who are you, what are your data like?), `train` (train this model) and `evaluate` (how good is
this model?). What a client keeps (its own model if the algorithm wants one, running statistics, its personal model) is on its own disk.
Only what the algorithm sends leaves the node.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod

import cwfed
from cwfed.core.errors import CwfedError, plain
from cwfed.federation.rounds import one_compute_thread
from cwfed.flower import logs, wire
from cwfed.flower.members import SIZES, number_of
from cwfed.flower.plan import Plan, describe_model, short_hash
from cwfed.flower.site import Site, node_worker, site_of
from cwfed.flower.work import Worker

log = logging.getLogger("cwfed.flower")

RUN = re.compile("[0-9a-f]{16}")
"""The form of the server's name for a federation."""

WorkerOf: TypeAlias = Callable[[int, str], Worker]
"""A function from (client, federation) to the `Worker` that does its work."""


def describe(site: Site, worker: Worker, client: int) -> RecordDict:
    """What a node tells about itself; its label histogram only if its operator wants that."""
    federation = worker.federation
    hello: dict[str, Any] = {
        "name": site.name,
        "version": cwfed.__version__,
        "protocol": wire.PROTOCOL,
        "classes": federation.data.classes,
        "shape": "x".join(map(str, federation.shape.dims)),
        "vocabulary": federation.shape.vocabulary,
        "model": describe_model(worker.blueprint),
    }
    hello["class_names"] = list(federation.data.class_names)
    hello["words"] = short_hash(federation.data.words) if federation.data.words else ""
    if site.tell_histogram and worker.blueprint.config.privacy.dp == "off":  # the exact counts are in no account
        hello["histogram"] = [int(n) for n in federation.class_counts(client)]
    return RecordDict({"hello": ConfigRecord(hello), "metrics": MetricRecord(sizes_of(worker, client))})


def sizes_of(worker: Worker, client: int) -> dict[str, Any]:
    """How many training, test and validation samples a client has."""
    shard = worker.federation.shards[client]
    return dict(zip(SIZES, (len(shard.train), len(shard.test), len(shard.validation)), strict=True))


def with_news(content: RecordDict, order: Order, site: Site, worker: Worker) -> RecordDict:
    """An answer; the node describes itself again in it if the server's numbers of samples are out of date."""
    sizes = sizes_of(worker, order.client)
    if any(order.told.get(name) != sizes[name] for name in SIZES):
        content["hello"] = describe(site, worker, order.client).config_records["hello"]
        content.metric_records["metrics"].update(sizes)
    return content


def client_app(
    data: Callable[[Context], Site] | None = None, mods: Sequence[Mod] = (), plan: Plan | None = None
) -> ClientApp:
    """A Flower ClientApp for the plan in its run config (or for this one).

    `data` describes this node. Without it, the node config does: name="clinic-3" path="/data/clinic-3" (and data="imagefolder" or another
    kind of source, state="/var/lib/cwfed"). `mods` are applied to the training messages.
    """

    def worker_of(context: Context) -> tuple[Site, WorkerOf]:
        agreed = plan or Plan.of(context.run_config)
        site = data(context) if data else site_of(context, agreed)
        return site, partial(node_worker, agreed, site)

    return make_app(worker_of, mods)


def make_app(worker_of: Callable[[Context], tuple[Site, WorkerOf]], mods: Sequence[Mod]) -> ClientApp:
    """The app that answers the three messages, with a worker for each."""
    app = Wrapping()

    def answer(message: Message, context: Context, work: Callable[[Site, WorkerOf], RecordDict]) -> Message:
        """Answer a message; an error that the user can fix goes to the server as a sentence."""
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
            return describe(site, worker(number, ""), number)

        return answer(message, context, work)

    @app.train(mods=[past_the_mods, clip_if_told, *mods, stop_at_problems])
    def train(message: Message, context: Context) -> Message:
        def work(site: Site, worker: WorkerOf) -> RecordDict:
            order = Order.read(message.content)
            here = worker(order.client, order.run)
            got = wire.download_from(message.content, here.forms)
            content = here.train(order.client, order.round, order.accepted, got, bool(order.told["measure"]))
            return with_news(content, order, site, here)

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
            return with_news(content, order, site, here)

        return answer(message, context, work)

    return app


class Wrapping(ClientApp):
    """An app that unwraps a message for its functions and mods, and wraps the answer if the message was wrapped (`wire.wrapped`)."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        if not message.has_content() or not wire.is_wrapped(message.content):
            return super().__call__(message, context)
        message.content = wire.unwrapped(message.content)
        reply = super().__call__(message, context)
        if reply.has_content():
            reply.content = wire.wrapped(reply.content)
        return reply


class _Problem(Exception):
    """Carries a reply without an update past the mods."""

    def __init__(self, reply: Message) -> None:
        super().__init__()
        self.reply = reply


def stop_at_problems(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The innermost mod: a reply without an update must not reach other mods, which expect one."""
    reply = call_next(message, context)
    if "problem" in reply.content.config_records:
        raise _Problem(reply)
    return reply


def past_the_mods(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The outermost mod: such a reply goes to the server as it is."""
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
    """What a node is asked to do: for which client, of which federation, in which round."""

    client: int
    round: int
    accepted: int
    """The last round in which the client's update was good."""
    run: str
    told: ConfigRecord

    @classmethod
    def read(cls, content: RecordDict) -> Order:
        """Read a message. A node does not trust the server: the name of a run must be digits, as it becomes a part of a path."""
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
    """Whether this is a deployed node, whose log its operator reads, and not a client of a simulation."""
    return "name" in context.node_config
