"""The plan: what all sides of a federation must agree on, the experiment's settings and the shape of the data.

In a Flower app these settings stand in pyproject.toml under [tool.flwr.app.config], and `flwr run --run-config`
changes them: the same sections as in a config file of cwfed, and [federation] besides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from cwfed.core.errors import ConfigError, reason
from cwfed.federation import config as configs
from cwfed.federation import guard
from cwfed.federation.config import Config
from cwfed.federation.experiment import Blueprint
from cwfed.federation.settings import Section, flat
from cwfed.models import InputShape

NORM_BOUND = 2.0
"""`guard.norm_bound` of a federation whose settings do not name it (docs/security.md has what it is worth and costs)."""


class FederationSection(Section):
    """The federation: what the data look like, how many nodes, how patient the server is."""

    shape: str
    """The shape of one sample as the network sees it, such as 3x32x32 (channels, height, width), or 200 for a vector
    or for tokens."""
    classes: int = Field(ge=2)
    class_names: list[str] = Field(default_factory=list)
    """What the classes are called, in the order of the model's outputs: a node may have some of them, in any order. Without
    it all nodes must have the same classes in the same order."""
    vocabulary: int = Field(0, ge=0)
    """For text: the number of words; every node must number its words alike."""
    nodes: int = Field(2, ge=1)
    """Nodes that must be there for a round to begin."""
    clients: int = Field(0, ge=0)
    """Clients that may ever join; 0 is twice `nodes`."""
    wait: float = Field(120.0, gt=0)
    """Seconds to wait for that many nodes before the run is given up."""
    timeout: float = Field(600.0, gt=0)
    """Seconds a round waits for answers; who is later than that is left out of it."""
    pin: bool = True
    """Whether a client's name stays with the node (its key) that used it first. Without it any node may take over the name of
    a client that is away, and with the name its model. The nodes of a simulation have no keys."""
    admitted: str = ""
    """A JSON file that says which node each name belongs to, {"clinic-3": {"node": 1234}}, in place of `pin`; it is read again
    for every node that comes. `cwfed flower serve` keeps one."""
    exclude: str = ""
    """Names, separated by commas, of clients that may not take part, whatever they did before."""
    clip: float = Field(0.0, ge=0)
    """Clients clip their updates to this length with Flower's fixedclipping_mod; 0 does not."""
    keep: Literal["every", "last", "never"] = "every"
    """In which evaluated rounds clients write the personal model they receive to their disk."""
    out: str = "~/.cwfed/federation"
    """The server's run folder: metrics, checkpoints, events."""
    checkpoints: int = Field(10, ge=2)
    """How many rounds `cwfed flower rollback` can go back to."""
    track: str = ""
    """Who follows the server's metrics live, separated by commas: tensorboard, wandb, mlflow."""

    @field_validator("shape")
    @classmethod
    def _is_shape(cls, shape: str) -> str:
        if not all(part.isdigit() and int(part) > 0 for part in shape.split("x")):
            raise ValueError(f'federation.shape = "{shape}" must look like 3x32x32')
        return shape

    @field_validator("class_names")
    @classmethod
    def _names_each_class(cls, names: list[str], info: ValidationInfo) -> list[str]:
        classes = info.data.get("classes", len(names))
        if names and (len(names) != classes or len(set(names)) != classes):
            raise ValueError(f"it must have {classes} different names (federation.classes)")
        return names


def names_in(text: str) -> list[str]:
    """Names that are separated by commas."""
    return [name for part in text.split(",") if (name := part.strip())]


@dataclass(frozen=True)
class Plan:
    """The settings of a federation."""

    config: Config
    federation: FederationSection

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Plan:
        """From the settings of a Flower run: dotted keys, texts where TOML would have a list."""
        nested: dict[str, Any] = {}
        for key, value in table.items():
            *sections, last = key.split(".")
            at = nested
            for section in sections:
                at = at.setdefault(section, {})
                if not isinstance(at, dict):
                    raise ConfigError(f"{key}: {section} is not a section")
            is_list = isinstance(value, str) and value.startswith("[")
            at[last] = configs.parse_value(value) if is_list else value
        try:
            federation = FederationSection.model_validate(nested.pop("federation", {}))
        except ValidationError as error:
            raise ConfigError("; ".join(_sentence(e) for e in error.errors())) from None
        return cls(configs.from_table(nested), federation).guarded()

    def guarded(self) -> Plan:
        """The plan with `guard.norm_bound`, if the settings do not name it and the algorithm allows it.

        A simulation has no such default: it reproduces papers, and its clients are honest.
        """
        config = self.config
        if "norm_bound" in config.guard.model_fields_set or not self.blueprint.sends_one_model():
            return self
        section = config.guard.model_copy(update={"norm_bound": NORM_BOUND})
        return replace(self, config=config.model_copy(update={"guard": section}))

    def table(self) -> dict[str, str | int | float | bool]:
        """The settings as `of` reads them, complete."""
        nested = flat(self.config.model_dump()) | {
            f"federation.{key}": value for key, value in self.federation.model_dump().items()
        }
        return {
            key: json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
            for key, value in nested.items()
        }

    @property
    def clients(self) -> int:
        """How many clients may ever join."""
        return self.federation.clients or 2 * self.federation.nodes

    @property
    def shape(self) -> InputShape:
        """The shape of one sample."""
        dims = tuple(int(part) for part in self.federation.shape.split("x"))
        return InputShape(dims, self.federation.vocabulary)

    @cached_property
    def blueprint(self) -> Blueprint:
        """The network, and what an algorithm may know."""
        return Blueprint(self.config, self.shape, self.federation.classes, self.clients)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that results depend on."""
        facts: list[Any] = [
            self.config.fingerprint,
            self.federation.shape,
            self.federation.classes,
            self.clients,
        ]
        facts += [self.federation.class_names] if self.federation.class_names else []
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def describe_model(blueprint: Blueprint) -> str:
    """A short hash of the names, shapes and types of a model's tensors, which differs for another network."""
    forms = sorted((name, str(form.dtype), form.shape) for name, form in guard.spec_of(blueprint.initial).items())
    return short_hash(forms)


def short_hash(facts: Any) -> str:
    """A short hash that differs for different facts."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _sentence(error: Any) -> str:
    where = ".".join(["federation", *map(str, error["loc"])])
    if error["type"] == "missing":
        return f"{where} is missing: say what the data of the federation look like"
    if error["type"] == "extra_forbidden":
        return f"unknown setting {where}"
    return f"{where} = {error['input']!r} is not possible: {reason(error)}"
