"""The clients of a federation, identified by name, whichever node they are on.

Flower's node ids are random, and a node that restarts without a fixed key gets a new one. So the server asks every new node for its name.
The first clients are numbered in the order of their names, later ones after them. A number stays with its name for ever, also when the
server is restarted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cwfed.flower import wire
from cwfed.flower.plan import Plan, describe_model, names_in
from cwfed.flower.wire import BadMessage, said

SIZES = ("samples", "test", "validation")
"""How many training, test and validation samples a node has."""


@dataclass(frozen=True)
class Hello:
    """What a node has told about itself."""

    node: int
    name: str
    version: str
    """The version of cwfed, for the log; versions with the same protocol may be in one federation."""
    protocol: str
    classes: int
    shape: str
    vocabulary: int
    model: str
    words: str
    """A short hash of its vocabulary; "" if the data are not text."""
    samples: int
    test: int
    validation: int
    class_names: tuple[str, ...] = ()
    histogram: tuple[float, ...] = ()

    @classmethod
    def read(cls, node: int, told: Mapping[str, Any], sizes: Mapping[str, Any]) -> Hello:
        """Read a node's answer; BadMessage if a value has the wrong type."""
        kinds = {
            "name": str, "version": str, "protocol": str, "classes": int, "shape": str, "vocabulary": int, "model": str, "words": str,
            "class_names": list,
        }  # fmt: skip
        for key, kind in kinds.items():
            if not isinstance(told.get(key), kind) or isinstance(told[key], bool):
                raise BadMessage(f"it does not say its {key}")
        facts = {key: told[key] for key in kinds} | {key: sizes[key] for key in SIZES}
        for key in ("name", "version"):
            if not 0 < len(told[key]) <= 100 or not told[key].isprintable():
                raise BadMessage(f"its {key} must have 1 to 100 printable characters")
        names, counts = told["class_names"], told.get("histogram", [])
        if not all(isinstance(n, str) and len(n) <= 100 for n in names):
            raise BadMessage("the names of its classes must be texts of at most 100 characters")
        if not isinstance(counts, list) or not all(type(n) is int and n >= 0 for n in counts):
            raise BadMessage("its label histogram must have whole numbers from 0 on")
        if counts and sum(counts) != sizes["samples"]:
            raise BadMessage(f"its label histogram has {sum(counts)} samples, it says {sizes['samples']}")
        return cls(node=node, **facts | {"class_names": tuple(names), "histogram": tuple(map(float, counts))})

    def misfit(self, plan: Plan) -> str:
        """Why this node cannot take part; "" if it can."""
        ours, most = plan.federation, plan.config.guard.most_samples
        facts = {
            "messages of protocol": (self.protocol, wire.PROTOCOL),
            "classes:": (self.classes, ours.classes),
            "samples of shape": (self.shape, ours.shape),
            "words:": (self.vocabulary, ours.vocabulary),
            "a model of form": (self.model, describe_model(plan.blueprint)),
        }
        for what, (theirs, wanted) in facts.items():
            if theirs != wanted:
                return f"it has {what} {said(theirs, 50)}, the federation {wanted}"
        if len(self.class_names) != ours.classes:
            return f"it has names for {len(self.class_names)} classes, and there are {ours.classes}"
        for what in SIZES:
            if getattr(self, what) > most:
                return (
                    f"it says that it has {getattr(self, what):,} {what} samples, and guard.most_samples = {most:,}"
                )
        if self.histogram and len(self.histogram) != ours.classes:
            return f"its label histogram has {len(self.histogram)} numbers, there are {ours.classes} classes"
        return "" if self.samples else "it has no training samples"

    @property
    def meanings(self) -> tuple[tuple[str, ...], str]:
        """What its labels and tokens stand for; all nodes must agree on it to train one model."""
        return self.class_names, self.words

    @property
    def sizes(self) -> dict[str, int]:
        """How many samples it has."""
        return {name: getattr(self, name) for name in SIZES}


@dataclass
class Members:
    """All clients that ever joined, and the nodes that they are on now."""

    plan: Plan
    names: list[str] = field(default_factory=list)
    """By number; saved with every checkpoint."""
    keys: list[str] = field(default_factory=list)
    """By number, a hash of the key of the node that used the name first; its id if nodes have no keys (and in earlier versions)."""
    agreed: tuple[tuple[str, ...], str] | None = None
    """The agreed names of classes and words, saved too: from the plan, or from most of the first nodes."""
    public_keys: dict[int, str] = field(default_factory=dict)
    """By node, a hash of its key; nodes of a simulation have none."""
    hellos: dict[int, Hello] = field(default_factory=dict)
    """By number, what the client's present node has told."""
    refused: dict[int, str] = field(default_factory=dict)
    """By node, why it was left out."""

    def to_tree(self) -> dict[str, Any]:
        """The members as a checkpoint stores them."""
        agreed = {"class_names": list(self.agreed[0]), "words": self.agreed[1]} if self.agreed else None
        return {"names": self.names, "keys": self.keys, "agreed": agreed}

    def from_tree(self, tree: Mapping[str, Any]) -> None:
        """Read them from a checkpoint; those of earlier versions have no agreed names."""
        self.names, self.keys = list(tree.get("names", [])), list(tree.get("keys", []))
        agreed = tree.get("agreed")
        self.agreed = (tuple(agreed["class_names"]), agreed["words"]) if agreed else None

    @property
    def nodes(self) -> set[int]:
        """The nodes that the clients are on."""
        return {hello.node for hello in self.hellos.values()}

    def here(self, nodes: Iterable[int]) -> list[int]:
        """The clients whose node is connected."""
        connected = set(nodes)
        return sorted(client for client, hello in self.hellos.items() if hello.node in connected)

    @property
    def by_node(self) -> dict[int, int]:
        """The client of each node. It is computed at every access, so get it once for many answers."""
        return {hello.node: client for client, hello in self.hellos.items()}

    def welcome(self, hellos: Iterable[Hello], connected: Iterable[int]) -> list[str]:
        """Admit nodes or leave them out; returns what happened, in sentences."""
        online = set(connected)
        ordered = sorted(hellos, key=lambda h: natural(h.name))
        if self.agreed is None:
            said = Counter(h.meanings for h in ordered if not h.misfit(self.plan) and not self._misunderstanding(h))
            self.agreed = said.most_common(1)[0][0] if said else None
        numbers = {name: number for number, name in enumerate(self.names)}
        return [self._welcome(hello, online, numbers) for hello in ordered]

    def _welcome(self, hello: Hello, online: set[int], numbers: dict[str, int]) -> str:
        problem = hello.misfit(self.plan) or self._misunderstanding(hello)
        known = hello.name in numbers
        client = numbers.get(hello.name, len(self.names))
        present = self.hellos.get(client) if known else None
        key = self._key(hello)
        problem = problem or self._not_theirs(hello, client if known else None)
        if not problem and present and present.node != hello.node and present.node in online:
            # it is asked again: Flower notices only after a while that a node is gone
            return f"{hello.name} has to wait: another node that seems to be connected has this name"
        if not problem and client >= self.plan.clients:
            problem = f"federation.clients = {self.plan.clients} clients have joined already"
        if problem:
            self.refused[hello.node] = problem
            return f"{hello.name} was left out: {problem}"
        if not known:
            self.names.append(hello.name)
            self.keys.append(key)
            numbers[hello.name] = client
        elif self.plan.federation.admitted:
            self.keys[client] = key  # the operator decides which key a name has
        self.refused.pop(hello.node, None)
        self.hellos[client] = hello
        return f"{hello.name} {'came back' if known else 'joined'} as client {client}"

    def _misunderstanding(self, hello: Hello) -> str:
        """How its classes or words differ from the federation's; "" if they do not."""
        names, words = self.agreed or hello.meanings
        names = tuple(self.plan.federation.class_names) or names
        for number, (ours, theirs) in enumerate(zip(names, hello.class_names, strict=True)):
            if ours != theirs:
                return (
                    f"its class {number} is {said(theirs, 50)!r}, the federation's {said(ours, 50)!r}: with a list of all "
                    "classes in federation.class_names, nodes that have some of them put theirs in its order"
                )
        return "" if hello.words == words else "its words are others than the federation's, or in another order"

    def renewed(self, client: int, hello: Hello) -> Hello:
        """What a client tells about itself after its data have changed; BadMessage if it is not possible."""
        before = self.hellos[client]
        if hello.name != before.name:
            raise BadMessage(f"it was {before.name} before")
        if problem := hello.misfit(self.plan) or self._misunderstanding(hello):
            raise BadMessage(problem)
        return hello

    def _not_theirs(self, hello: Hello, client: int | None) -> str:
        """Why a node may not use its name; "" if it may."""
        federation, node = self.plan.federation, str(hello.node)
        if hello.name in names_in(federation.exclude):
            return "it is excluded (federation.exclude)"
        if federation.admitted:
            allowed = admitted_node(federation.admitted, hello.name)
            return "" if allowed == node else "the name was not admitted with this node's key (cwfed flower admit)"
        is_pinned = federation.pin and self.public_keys and client is not None
        if is_pinned and self.keys[client or 0] not in (self._key(hello), node):
            return "the name belongs to a node with another key (federation.pin)"
        return ""

    def _key(self, hello: Hello) -> str:
        """What a name is tied to: a hash of its node's key, or the node's id if it has no key."""
        return self.public_keys.get(hello.node, str(hello.node))


def admitted_node(path: str, name: str) -> str:
    """The id of the node to which a name belongs; "" if there is none."""
    try:
        return str(json.loads(Path(path).expanduser().read_text(encoding="utf-8"))[name]["node"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def natural(name: str) -> tuple[int, str]:
    """Names that are numbers sort as numbers."""
    return (number, name) if (number := number_of(name)) is not None else (-1, name)


def number_of(name: str) -> int | None:
    """The number that a name is, if it is one."""
    return int(name) if name.isascii() and name.isdigit() else None
