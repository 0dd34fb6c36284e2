"""Several algorithms and seeds on one experiment: mean and standard deviation, in one table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cwfed import algorithms
from cwfed.core.errors import ConfigError
from cwfed.federation.config import Config, from_table, parse_value, with_settings
from cwfed.runs.series import Done, Planned, Series
from cwfed.runs.summary import aggregate


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: an algorithm with its settings."""

    label: str
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """The label as a folder name."""
        return re.sub(r"[^\w.=-]+", "_", self.label)


def parse_entries(text: str, config: Config) -> list[Entry]:
    """ "fedavg,cwfedavg:wdr=0" -> entries. The config's settings of an algorithm apply only to the algorithm that it names."""
    entries = []
    for item in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):  # not inside brackets
        # a setting is separated by a colon too, so the user's own "module:Class" is taken off first
        name, *rest = item.split(":")
        if rest and name in algorithms.ALGORITHMS and "=" not in rest[0]:
            raise ConfigError(f"--algorithms {item!r}: settings look like name:key=value:key=value")
        while rest and "=" not in rest[0] and name.count(":") <= name.count("+"):
            name, rest = f"{name}:{rest[0]}", rest[1:]
        is_own = algorithms.canonical(name) == config.algorithm_name
        settings = dict(config.algorithm) if is_own else {"name": name}
        for part in rest:
            key, equals, value = part.partition("=")
            if not equals:
                raise ConfigError(f"--algorithms {item!r}: settings look like name:key=value:key=value")
            settings[key] = parse_value(value)
        algorithms.build(settings)
        entries.append(Entry(item, settings))
    if len({entry.folder for entry in entries}) != len(entries):
        raise ConfigError(f"--algorithms {text!r} names the same thing twice")
    if not entries:
        raise ConfigError("--algorithms names none; for example fedavg,cwfedavg")
    return entries


def parse_seeds(text: str) -> list[int]:
    """ "0,1,2" -> [0, 1, 2]."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {text!r} must be whole numbers, such as 0,1,2") from None
    if len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ConfigError(f"--seeds {text!r} must be different numbers that are not negative")
    return seeds


def check_settings(settings: Sequence[str], config: Config, entries: Sequence[Entry]) -> None:
    """One sentence for a setting that no run would have."""
    for text in settings:
        if re.match(r"\s*run\.seed\s*=", text):
            raise ConfigError(f"--set {text}: give seeds as --seeds 0,1,2")
        name = config.algorithm_name
        if re.match(r"\s*algorithm\b", text) and all(
            algorithms.canonical(entry.settings["name"]) != name for entry in entries
        ):
            raise ConfigError(f"--set {text} is for {name}, which is not among --algorithms")


def with_algorithm(config: Config, entry: Entry, seed: int) -> Config:
    """The experiment with another algorithm and seed."""
    table = config.model_dump() | {"algorithm": entry.settings}
    table["run"] = table["run"] | {"seed": seed}
    return from_table(table)


def without_models(config: Config) -> Config:
    """The same without saved models, unless the config says otherwise: of many runs, only the numbers are wanted."""
    return with_settings(config, ["run.save_models=none"]) if config.run.save_models == "auto" else config


def plan(config: Config, entries: Sequence[Entry], seeds: Sequence[int], out: str | Path) -> list[Planned]:
    """All runs, entry by entry."""
    return [
        Planned(entry.label, seed, with_algorithm(config, entry, seed), Path(out) / entry.folder / f"seed-{seed}")
        for entry in entries
        for seed in seeds
    ]


def compare(
    config: Config, entries: Sequence[Entry], seeds: Sequence[int], out: str | Path, series: Series | None = None
) -> list[dict[str, Any]]:
    """Run everything; finished runs are reused, interrupted ones are resumed. One row per entry, without those of which every run was given up.

    `reused` in a row has the seeds whose runs were finished already.
    """
    done = (series or Series()).carry_out(plan(config, entries, seeds, out))
    parts = [done[start : start + len(seeds)] for start in range(0, len(done), len(seeds))]
    return [row(part) for part in parts if any(one.summary for one in part)]


def row(done: Sequence[Done]) -> dict[str, Any]:
    """The runs of one method, one per seed, in numbers; those that were given up are left out."""
    there = [one for one in done if one.summary]
    return aggregate(done[0].planned.label, [one.summary for one in there if one.summary]) | {
        "seeds": [one.planned.seed for one in there],
        "runs": [str(one.planned.folder) for one in there],
        "reused": [one.planned.seed for one in there if one.reused],
    }
