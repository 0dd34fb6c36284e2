"""Tuned settings that come with cwfed, each with how it was found.

A preset is the best candidate of a sweep of one method on one experimental setting. `presets/SETTING.toml` is written by
`benchmarks/presets.py`: the setting's config, and for every method the command of its sweep and the results of all candidates.
`preset:SETTING/METHOD` can be given in place of any config file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import tomli_w

from cwfed.core.errors import ConfigError, did_you_mean

PREFIX = "preset:"


@dataclass(frozen=True)
class Tried:
    """A candidate of the sweep and its accuracy in percent: the mean over the seeds, and for several seeds their standard deviation."""

    settings: Mapping[str, Any]
    validation: float
    """On held-out training data, in the round that these pick. This alone decided."""
    std: float | None
    test: float
    """On test data in the same round, for the reader."""

    @property
    def label(self) -> str:
        """Such as "train.lr=0.1, algorithm.wdr=5"."""
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())

    @property
    def held_out(self) -> str:
        """Such as "97.12 ± 0.40 %"."""
        spread = "" if self.std is None else f" ± {self.std:.2f}"
        return f"{self.validation:.2f}{spread} %"


@dataclass(frozen=True)
class Preset:
    """The tuned settings of a method on an experimental setting, and how they were found."""

    name: str
    title: str
    """The experimental setting in words."""
    config: Mapping[str, Any]
    """That setting as nested tables, without the method."""
    method: str
    command: str
    """The sweep that found it."""
    seeds: tuple[int, ...]
    phase: str
    """The phase that is reported for the method, and was judged."""
    version: str
    """The version of cwfed that made the sweep."""
    tried: tuple[Tried, ...]
    """The best first."""
    failed: tuple[str, ...]
    """Candidates without a result, such as those whose training diverged."""

    @property
    def best(self) -> Tried:
        """The candidate that held-out data chose."""
        return self.tried[0]

    @property
    def at_the_end(self) -> list[str]:
        """Settings whose best value is the smallest or largest that was tried: a better one may lie beyond."""
        found = []
        for key, value in self.best.settings.items():
            values = {one.settings[key] for one in self.tried}
            for label in self.failed:  # beyond what diverged is nothing
                values |= set(map(float, re.findall(rf"\b{re.escape(key)}=([\d.e-]+)", label)))
            if isinstance(value, int | float) and len(values) > 1 and value in (min(values), max(values)):
                found.append(key)
        return found

    def to_toml(self) -> str:
        """A config file with comments that say how it was found."""
        table = {section: dict(keys) for section, keys in self.config.items()}
        for key, value in {"algorithm.name": self.method, **self.best.settings}.items():
            section, _, rest = key.partition(".")
            table.setdefault(section, {})[rest] = value
        return "\n".join(f"# {line}".rstrip() for line in self._story()) + "\n\n" + tomli_w.dumps(table)

    def _story(self) -> list[str]:
        count = len(self.tried) + len(self.failed)
        lines = [
            f"{self.method} on: {self.title}.",
            f"{self.best.label}: the best of {count} by accuracy ({self.phase}) on held-out training data, seeds {', '.join(map(str, self.seeds))}.",
            f"Tuned: {', '.join(self.best.settings)}. All other settings have their defaults.",
        ]
        if self.at_the_end:
            lines.append(
                f"At the end of what was tried: {', '.join(self.at_the_end)}. A better value may lie beyond."
            )
        lines += [f"Found by cwfed {self.version}: {self.command}", "", "validation, and test in the same round:"]
        lines += [f"{one.held_out}, {one.test:.2f} %: {one.label}" for one in self.tried]
        return lines + [f"no result: {label}" for label in self.failed]


@cache
def shipped() -> dict[str, Preset]:
    """All presets by their names."""
    found = {}
    folder = resources.files("cwfed.federation") / "presets"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            table = tomllib.loads(file.read_text(encoding="utf-8"))
            for preset in _of_setting(file.name.removesuffix(".toml"), table):
                found[preset.name] = preset
    return found


def _of_setting(setting: str, table: dict[str, Any]) -> list[Preset]:
    return [
        Preset(
            name=f"{setting}/{method}",
            title=table["title"],
            config=table["config"],
            method=method,
            command=one["command"],
            seeds=tuple(one["seeds"]),
            phase=one["phase"],
            version=one["version"],
            tried=tuple(Tried(t["settings"], t["validation"], t.get("std"), t["test"]) for t in one["tried"]),
            failed=tuple(one["failed"]),
        )
        for method, one in sorted(table["methods"].items())
    ]


def find(name: str) -> Preset:
    """A preset by its name, with or without `preset:` before it."""
    name = name.removeprefix(PREFIX)
    if name not in shipped():
        raise ConfigError(f"unknown preset {name!r}: {did_you_mean(name, shipped())} (cwfed presets lists them)")
    return shipped()[name]
