"""Who is in the federation: clients by a stable name, whatever node they are on today.

Flower's node ids are random, and a node that restarts without a fixed key has another one. So the server asks every
new node for its name. The first to come are numbered in the order of their names, later ones after them; a number
stays with its name for ever, also over restarts of the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cwfed.flower import wire
from cwfed.flower.plan import Plan, describe_model, names_in
from cwfed.flower.wire import BadMessage


@dataclass(frozen=True)
class Hello:
    """What a node said of itself."""

    node: int
    name: str
    version: str
    """Of cwfed, for the log: other versions of the same protocol may be in one federation."""
    protocol: str
    classes: int
    shape: str
    vocabulary: int
    model: str
    samples: int
    test: int
    validation: int
    histogram: tuple[float, ...] = ()

    @classmethod
    def read(cls, node: int, told: dict[str, Any], sizes: dict[str, Any]) -> Hello:
        """A node's answer; what is not of its kind is refused."""
        kinds = {
            "name": str,
            "version": str,
            "protocol": str,
            "classes": int,
            "shape": str,
            "vocabulary": int,
            "model": str,
        }
        for key, kind in kinds.items():
            if not isinstance(told.get(key), kind):
                raise BadMessage(f"it does not say its {key}")
        counts = told.get("histogram", [])
        histogram = tuple(float(n) for n in counts) if isinstance(counts, list) else ()
        if any(not 0 <= n < 1e12 for n in histogram) or (histogram and not any(histogram)):
            raise BadMessage("its label histogram must have numbers from 0 on, not all of them 0")
        if not 0 < len(told["name"]) <= 100 or not told["name"].isprintable():
            raise BadMessage("its name must have 1 to 100 printable characters")
        facts = {key: told[key] for key in kinds} | {key: sizes[key] for key in ("samples", "test", "validation")}
        return cls(node=node, histogram=histogram, **facts)

    def misfit(self, plan: Plan) -> str:
        """Why this node cannot take part; "" where it can."""
        ours = plan.federation
        facts = {
            "messages of protocol": (self.protocol, wire.PROTOCOL),
            "classes:": (self.classes, ours.classes),
            "samples of shape": (self.shape, ours.shape),
            "words:": (self.vocabulary, ours.vocabulary),
            "a model of form": (self.model, describe_model(plan.blueprint)),
        }
        for what, (theirs, wanted) in facts.items():
            if theirs != wanted:
                return f"it has {what} {theirs}, the federation {wanted}"
        if self.histogram and len(self.histogram) != ours.classes:
            return f"its label histogram has {len(self.histogram)} numbers, there are {ours.classes} classes"
        return "" if self.samples else "it has no training samples"


@dataclass
class Members:
    """The clients that ever joined, and where they are now."""

    plan: Plan
    names: list[str] = field(default_factory=list)
    """By number; saved with every checkpoint."""
    keys: list[str] = field(default_factory=list)
    """By number, the node that used the name first, where names are pinned to nodes (as text: ids have 64 bits)."""
    hellos: dict[int, Hello] = field(default_factory=dict)
    """By number, what the client's present node said."""
    refused: dict[int, str] = field(default_factory=dict)
    """By node, why it was left out."""

    @property
    def asked(self) -> set[int]:
        """Nodes that need not be asked again."""
        return {hello.node for hello in self.hellos.values()} | self.refused.keys()

    def here(self, nodes: Iterable[int]) -> list[int]:
        """The clients whose node is connected."""
        connected = set(nodes)
        return sorted(client for client, hello in self.hellos.items() if hello.node in connected)

    def client_of(self, node: int) -> int | None:
        """Whose node this is."""
        return next((client for client, hello in self.hellos.items() if hello.node == node), None)

    def welcome(self, hellos: Iterable[Hello], connected: Iterable[int]) -> list[str]:
        """Let nodes in or leave them out; what happened, in sentences."""
        online = set(connected)
        return [self._welcome(hello, online) for hello in sorted(hellos, key=lambda h: natural(h.name))]

    def _welcome(self, hello: Hello, online: set[int]) -> str:
        problem = hello.misfit(self.plan)
        known = hello.name in self.names
        client = self.names.index(hello.name) if known else len(self.names)
        present = self.hellos.get(client) if known else None
        if not problem and present and present.node != hello.node and present.node in online:
            # asked again next time: Flower takes a while to notice that a node is gone
            return f"{hello.name} has to wait: another node that seems to be connected has this name"
        problem = problem or self._not_theirs(hello, client if known else None)
        if not problem and client >= self.plan.clients:
            problem = f"federation.clients = {self.plan.clients} clients have joined already"
        if problem:
            self.refused[hello.node] = problem
            return f"{hello.name} was left out: {problem}"
        if not known:
            self.names.append(hello.name)
            self.keys.append("")
        self.keys[client] = self.keys[client] or str(hello.node)
        if self.plan.federation.admitted:
            self.keys[client] = str(hello.node)  # the operator says whose the name is, also when its key was changed
        self.hellos[client] = hello
        return f"{hello.name} {'came back' if known else 'joined'} as client {client}"

    def _not_theirs(self, hello: Hello, client: int | None) -> str:
        """Why a node may not use the name that it says; "" where it may."""
        federation, node = self.plan.federation, str(hello.node)
        if hello.name in names_in(federation.exclude):
            return "it is excluded (federation.exclude)"
        if federation.admitted:
            allowed = admitted_node(federation.admitted, hello.name)
            return "" if allowed == node else "the name was not admitted with this node's key (cwfed flower admit)"
        if federation.pin and client is not None and self.keys[client] != node:
            return "the name belongs to a node with another key"
        return ""


def admitted_node(path: str, name: str) -> str:
    """The id of the node that a name belongs to; "" where there is none, or nothing that says so."""
    try:
        return str(json.loads(Path(path).expanduser().read_text(encoding="utf-8"))[name]["node"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def natural(name: str) -> tuple[int, str]:
    """Names that are numbers sort as numbers."""
    return (int(name), name) if name.isdigit() else (-1, name)
