"""The paper's tables and figures as data: what they need, what was published, what they claim."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import Field

from cwfed.core.errors import ConfigError, did_you_mean
from cwfed.federation import config as configs
from cwfed.federation.config import Config
from cwfed.federation.settings import Section
from cwfed.runs.compare import Entry

Scale = Literal["smoke", "small", "whole", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "small", "whole", "paper")


class Row(Section):
    """One method of a table or figure."""

    label: str
    algorithm: dict[str, Any]
    """`name`, and settings that differ from those of the experimental setting."""
    wdr_times: float = 1.0
    """A multiple of the regulariser's coefficient in the setting."""
    models_sent: str = ""
    """The published communication cost of a participant and round, in models: 2, 1+M or 1+C."""
    published: list[str] = Field(default_factory=list)
    """mean±std for each setting."""


class Item(Section):
    """A table or figure."""

    name: str
    order: int
    where: str
    """Its number in the paper."""
    title: str
    kind: str
    """How it is made: a name in `tables.KINDS` or `pictures.KINDS`."""
    claim: str
    leader: str = ""
    """The row that comes first by the claim."""
    beyond: bool = False
    """Whether it is not in the paper. Then `all` does not include it, and it is made from those of its runs that are finished."""
    settings: list[str] = Field(default_factory=list)
    rows: list[Row] = Field(default_factory=list)
    options: dict[str, Any] = Field(default_factory=dict)

    def part(self, settings: Sequence[str] = (), rows: Sequence[str] = ()) -> Item:
        """Only these settings and methods, in this order (default: all); a method by its label or its algorithm's name."""
        columns = [_index(name, self.settings, f"setting of {self.name}") for name in settings or self.settings]
        labels = [row.label for row in self.rows]
        methods = [row.algorithm.get("name") for row in self.rows]
        wanted = [labels[methods.index(row)] if methods.count(row) == 1 else row for row in rows]
        chosen = [self.rows[_index(label, labels, f"method of {self.name}")] for label in wanted or labels]
        if settings:
            # a row has as many published numbers as there are settings, or none
            chosen = [
                row.model_copy(update={"published": [row.published[i] for i in columns if row.published]})
                for row in chosen
            ]
        names = [self.settings[i] for i in columns]
        leader = self.leader if self.leader in [row.label for row in chosen] else ""
        return self.model_copy(update={"settings": names, "rows": chosen, "leader": leader})


def _index(name: str, known: Sequence[str], what: str) -> int:
    if name not in known:
        raise ConfigError(f"{name!r} is not a {what}: {did_you_mean(name, known)}")
    return known.index(name)


class Change(Section):
    """What a scale changes."""

    seeds: list[int] = Field(default_factory=list)
    config: dict[str, Any] = Field(default_factory=dict)
    algorithms: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Setting(Change):
    """An experimental setting of the paper."""

    title: str
    smoke: Change = Change()
    small: Change = Change()
    whole: Change = Change()
    paper: Change = Change()


class Settings(Section):
    """All of `settings.toml`."""

    scales: dict[Scale, Change]
    settings: dict[str, Setting] = Field(default_factory=dict)


class Setup:
    """A setting at a scale, with the user's own changes: the config of its runs and the settings of each algorithm."""

    def __init__(self, name: str, scale: Scale, changes: Sequence[str] = ()) -> None:
        known = settings()
        if name not in known.settings:
            raise ConfigError(f"unknown setting {name!r}: {did_you_mean(name, known.settings)}")
        setting, general = known.settings[name], known.scales[scale]
        own: Change = getattr(setting, scale)
        self.name, self.scale = name, scale
        self.seeds = own.seeds or general.seeds
        layers = (setting, general, own)
        self.config: Config = configs.with_settings(
            configs.from_table(_merged([layer.config for layer in layers])), changes
        )
        self.stand_in = self.config.data.name != setting.config["data"]["name"]
        """Whether it runs on other data than the paper's setting."""
        self.title = f"{ran(self.config)} in place of {setting.title}" if self.stand_in else setting.title
        self.algorithms: dict[str, dict[str, Any]] = _merged([layer.algorithms for layer in layers])

    def entry(self, row: Row) -> Entry:
        """A row's algorithm with its settings here; the label says all of them, so equal runs share a folder."""
        name = row.algorithm["name"]
        algorithm = {**self.algorithms.get(name, {}), **row.algorithm}
        if row.wdr_times != 1:
            algorithm["wdr"] = algorithm["wdr"] * row.wdr_times
        extras = [f"{key}={algorithm[key]}" for key in sorted(algorithm) if key != "name"]
        return Entry(":".join([name, *extras]), algorithm)


def ran(config: Config) -> str:
    """Data and model in a few words, for runs that are not on the data that a table names."""
    return f"{config.data.name} ({'default model' if config.model.name == 'auto' else config.model.name})"


def _merged(tables: list[dict[str, Any]]) -> dict[str, Any]:
    """Nested tables, the later ones on top."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = _merged([result[key], value]) if both else copy.deepcopy(value)
    return result


def _read(name: str) -> dict[str, Any]:
    text = (resources.files("cwfed.reproduce") / "paper" / name).read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def settings() -> Settings:
    """The experimental settings and scales."""
    return Settings.model_validate(_read("settings.toml"))


@cache
def items() -> dict[str, Item]:
    """All tables and figures by name, in the paper's order."""
    files = sorted(
        f.name for f in (resources.files("cwfed.reproduce") / "paper").iterdir() if f.name != "settings.toml"
    )
    found = [Item.model_validate({"name": name.removesuffix(".toml"), **_read(name)}) for name in files]
    return {item.name: item for item in sorted(found, key=lambda item: item.order)}


def find(name: str) -> Item:
    """The table or figure of this name."""
    known = items()
    if name not in known:
        raise ConfigError(
            f"unknown table or figure {name!r}: {did_you_mean(name, known)}; cwfed reproduce list shows all"
        )
    return known[name]
