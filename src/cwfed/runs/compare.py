"""Several algorithms and seeds on one experiment: mean and standard deviation, in one table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cwfed import algorithms
from cwfed.core.errors import ConfigError
from cwfed.core.events import Event, Round
from cwfed.federation.config import Config, from_table, parse_value
from cwfed.runs import session
from cwfed.runs.summary import aggregate


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: an algorithm with its settings."""

    label: str
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """The label as the name of a folder."""
        return re.sub(r"[^\w.=-]+", "_", self.label)


def parse_entries(text: str, config: Config) -> list[Entry]:
    """ "fedavg,cwfedavg:wdr=0" -> entries. The config's own settings go to the algorithm it names."""
    entries = []
    for item in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):  # not inside brackets
        # a setting is separated by a colon too, so the user's own "module:Class" is taken off first
        name, *rest = item.split(":")
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


def with_algorithm(config: Config, entry: Entry, seed: int) -> Config:
    """The experiment with another algorithm and seed."""
    table = config.model_dump() | {"algorithm": entry.settings}
    table["run"] = table["run"] | {"seed": seed}
    return from_table(table)


class Watched:
    """Passes events on and counts the rounds: a run without any was there already."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event, self.rounds = on_event, 0

    def __call__(self, event: Event) -> None:
        self.rounds += isinstance(event, Round)
        self._on_event(event)


def compare(
    config: Config,
    entries: Sequence[Entry],
    seeds: Sequence[int],
    out: str | Path,
    *,
    data_dir: str | None = None,
    on_run: Callable[[str, int], Callable[[Event], None]] = lambda label, seed: lambda event: None,
    track: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run everything (what is finished already is reused, what was cut off goes on); one row an entry.

    `reused` of a row names the seeds whose run was there already.
    """
    rows = []
    for entry in entries:
        summaries, folders, reused = [], [], []
        for seed in seeds:
            folder = Path(out) / entry.folder / f"seed-{seed}"
            watched = Watched(on_run(entry.label, seed))
            one = with_algorithm(config, entry, seed)
            summaries.append(session.run(one, folder, resume=True, data_dir=data_dir, on_event=watched, track=track))
            folders.append(str(folder))
            if not watched.rounds:
                reused.append(seed)
        rows.append(aggregate(entry.label, summaries) | {"seeds": list(seeds), "runs": folders, "reused": reused})
    return rows
