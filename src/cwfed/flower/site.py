"""A node, as its node config describes it: its name, its data, the folder of its state; and the worker made from that."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

from cwfed import data as sources
from cwfed.core.errors import ConfigError
from cwfed.data import Dataset, Federation, Shard, fixed_shard, of_client
from cwfed.data.partition import split
from cwfed.federation.config import Config
from cwfed.federation.experiment import Blueprint, deal
from cwfed.federation.sections import PrivacySection
from cwfed.flower.account import Account
from cwfed.flower.plan import Plan
from cwfed.flower.work import Worker, data_key
from cwfed.privacy.noise import FromSystem, Noise, SystemDraws


@dataclass(frozen=True)
class Site:
    """A node: its name, its data, and the folder of its state."""

    name: str
    """The name by which the server recognises the client, whichever node it is on."""
    data: Dataset
    state: Path | None = None
    """A folder of its own on this machine; None: nothing is kept, for algorithms that need nothing."""
    tell_histogram: bool = False
    """Whether the server is told the label histogram, for a better first model if this client joins late, and the results of the client's
    models by class. Never with `privacy.dp`."""
    dp_budget: float = 0.0
    """The largest epsilon that this node allows, whatever the plan says; 0: as the plan says."""


def in_order(data: Dataset, names: Sequence[str]) -> Dataset:
    """The same data with the federation's classes in its order, of which the data may have some."""
    if not names or data.class_names == tuple(names):
        return data
    if unknown := [name for name in data.class_names if name not in names]:
        raise ConfigError(
            f"these data have the class {unknown[0]!r}, which is none of the federation's (federation.class_names)"
        )
    order = np.array([names.index(name) for name in data.class_names], dtype=np.int64)
    return replace(data, labels=order[data.labels], class_names=tuple(names), digest="")


def node_worker(plan: Plan, site: Site, client: int, run: str = "") -> Worker:
    """The worker of a node, which has one client's data; they are split by the client's name unless they are split already."""
    config, data = plan.config, in_order(site.data, plan.federation.class_names)
    seed, validation = config.split_seed, config.data.validation
    number = zlib.crc32(site.name.encode())
    if data.fixed_split is None:
        shard = Shard(*split(np.arange(len(data.labels)), seed, number, validation))
    elif len(data.fixed_split) == 1:
        shard = fixed_shard(number, data.fixed_split[0], seed, validation)
    else:
        raise ConfigError(f"{site.name} has the data of {len(data.fixed_split)} clients, and a node is one client")
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
    """A node's privacy account; None without differential privacy, which is an error for a node with a budget."""
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
    """A node's noise, which never comes from the plan's seed, because the server knows it."""
    key = data_key(federation)
    return FromSystem(account.noise_of(key) if account else lambda classes: SystemDraws().laplace(size=classes))


def site_of(context: Context, plan: Plan) -> Site:
    """The node that a node config describes; one with only a partition number takes that share of the plan's data."""
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
    """The share of one client, when the plan's data are dealt out to so many partitions."""
    section = config.data.model_copy(update={"clients": partitions})
    dealt = deal(config.model_copy(update={"data": section}))
    if partition not in dealt.shards:
        raise ConfigError(
            f"the data have {len(dealt)} clients, and this node is partition {partition}: start {len(dealt)} nodes"
        )
    return of_client(dealt, partition)
