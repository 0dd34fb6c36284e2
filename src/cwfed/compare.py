"""Several algorithms and seeds on one experiment: mean and standard deviation, in one table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cwfed import algorithms, session
from cwfed.config import Config, from_table, parse_value
from cwfed.errors import ConfigError
from cwfed.events import Event
from cwfed.types import PHASES

PICKINGS = ("best", "validated", "last")


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
        if rest and "=" not in rest[0]:
            name, rest = f"{name}:{rest[0]}", rest[1:]
        settings = dict(config.algorithm) if name == config.algorithm_name else {"name": name}
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


def compare(
    config: Config,
    entries: Sequence[Entry],
    seeds: Sequence[int],
    out: str | Path,
    *,
    data_dir: str | None = None,
    on_run: Callable[[str, int], Callable[[Event], None]] = lambda label, seed: lambda event: None,
) -> list[dict[str, Any]]:
    """Run everything (what is finished already is reused, what was cut off goes on); one row an entry."""
    rows = []
    for entry in entries:
        summaries, folders = [], []
        for seed in seeds:
            table = config.model_dump() | {"algorithm": entry.settings}
            table["run"] = table["run"] | {"seed": seed}
            folder = Path(out) / entry.folder / f"seed-{seed}"
            on_event = on_run(entry.label, seed)
            summaries.append(
                session.run(from_table(table), folder, resume=True, data_dir=data_dir, on_event=on_event)
            )
            folders.append(str(folder))
        rows.append(aggregate(entry.label, summaries) | {"seeds": list(seeds), "runs": folders})
    return rows


def aggregate(label: str, summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of everything the table shows."""
    return {
        "label": label,
        "algorithm": summaries[0]["algorithm"],
        "accuracy": {
            phase: {name: _spread([s["accuracy"][phase][name] for s in summaries]) for name in PICKINGS}
            for phase in PHASES
        },
        "reported": summaries[0]["reported"] | _spread([s["reported"]["accuracy"] for s in summaries]),
        "worst_decile": _spread([s["per_client"]["worst_decile"] for s in summaries]),
        "correlation": _spread([s["correlation"] for s in summaries]),
        "traffic": _spread([s["traffic"]["down"] + s["traffic"]["up"] for s in summaries]),
        "seconds": _spread([s["seconds"]["total"] for s in summaries]),
    }


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample standard deviation; the latter needs two values."""
    known = [v for v in values if v is not None]
    if len(known) < len(values) or not known:
        return {"mean": None, "std": None}
    return {"mean": float(np.mean(known)), "std": float(np.std(known, ddof=1)) if len(known) > 1 else None}
