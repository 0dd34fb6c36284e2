"""Tuned presets: one sweep for each method and setting, and from it src/cwfed/federation/presets/SETTING.toml.

    python benchmarks/presets.py FOLDER [SETTING | SETTING/METHOD ...]

makes the presets that are missing, and those that are named as SETTING/METHOD anew. Its sweeps are in FOLDER (`cwfed sweep`: held-out training data
decide, finished runs are reused), so whenever it is stopped the same command goes on. A preset is written as soon as its sweep is done. Where the
best learning rate is the smallest or largest that was tried, half or twice of it is tried, too. Digits take a minute or two for a method, a fifth of CIFAR-10
or CIFAR-100 hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from cwfed import __version__, algorithms
from cwfed.federation.preset import shipped

PRESETS = Path(__file__).resolve().parents[1] / "src" / "cwfed" / "federation" / "presets"
RATE = "train.lr"
HEADER = "# Made by benchmarks/presets.py from sweeps; `cwfed presets` lists what is here.\n\n"


class Setting(NamedTuple):
    """An experiment that methods are tuned on."""

    title: str
    config: dict[str, dict[str, Any]]
    lr: list[float]
    """The learning rates that are tried first, for every method."""
    own: dict[str, str]
    """What a method tries of its own settings, one of them; methods that are not here keep their defaults."""
    seeds: str


OWN = {
    "apfl": "alpha=0.25,0.5,0.75",
    "cwfedavg": "wdr=0.5,2,5",
    "ditto": "lambda=0.1,0.5,1",
    "fedamp": "lambda=0.1,1",
    "fedas": "rate=0.01,0.1",
    "fedbabu": "tune_epochs=1,5",
    "fedcac": "tau=0.3,0.5",
    "fedcp": "lambda=1,5",
    "feddbe": "kappa=1,50",
    "fednh": "scale=1,20",
    "fedpac": "lambda=0.1,1",
    "fedproto": "lambda=0.1,1,10",
    "fedprox": "mu=0.001,0.01,0.1",
    "fedrep": "head_epochs=1,5",
    "feduv": "lambda=0.1,0.5",
    "gpfl": "lambda=0.0001,0.01",
    "ifca": "k=2,4",
    "moon": "mu=0.1,1,5",
    "pfedme": "lambda=15,50",
}
"""One setting of the method beside the learning rate: that which its paper tunes."""

COMBINATIONS = ["fedavg+prior", "fedavg+balanced+owners", "fedavg+balanced+head_first+owners"]
"""The leading ones of docs/beyond.md, and their control."""

WIDER = 3
"""How often the learning rates are made wider."""

FEW = {"samples": 12000}
SETTINGS = {
    "digits": Setting(
        "digits, 20 clients with two classes each, 20 rounds",
        {"data": {"name": "digits", "partition": "pathological", "classes_per_client": 2}, "train": {"rounds": 20}},
        [0.1, 0.2, 0.4],
        {"cwfedavg": "wdr=2,5,20"},
        "0,1,2",
    ),
    "cifar10-pathological": Setting(
        "CIFAR-10, 12,000 samples, 20 clients with two classes each, 10 rounds",
        {
            "data": {"name": "cifar10", "partition": "pathological", "classes_per_client": 2} | FEW,
            "train": {"rounds": 10},
        },
        [0.005, 0.02, 0.05, 0.1],
        OWN,
        "0",
    ),
    "cifar100-dirichlet": Setting(
        "CIFAR-100, 12,000 samples, 20 clients, Dirichlet(0.1), 20 rounds",
        {"data": {"name": "cifar100", "partition": "dirichlet", "alpha": 0.1} | FEW, "train": {"rounds": 20}},
        [0.005, 0.02, 0.05, 0.1],
        OWN | {"cwfedavg": "wdr=5,50,500", "ifca": "k=4,8"},
        "0",
    ),
}


def command(setting: Setting, method: str, rates: list[float]) -> list[str]:
    """The sweep, as a user would write it."""
    sets = [f"{section}.{key}={value}" for section, keys in setting.config.items() for key, value in keys.items()]
    own = [f"algorithm.{setting.own[method]}"] if method in setting.own else []
    grids = [f"{RATE}={','.join(f'{rate:g}' for rate in rates)}", *own]
    words = [word for one in (*sets, f"algorithm.name={method}") for word in ("--set", one)]
    words += [word for one in grids for word in ("--grid", one)]
    return ["cwfed", "sweep", *words, "--seeds", setting.seeds]


def wider(rates: list[float], found: dict[str, Any]) -> list[float]:
    """The learning rates with one more beyond the best, where that is the smallest or the largest of them."""
    best = found["tried"][0]["values"][RATE]
    if best == rates[0]:
        return [best / 2, *rates]
    return [*rates, best * 2] if best == rates[-1] else rates


def swept(words: list[str], folder: Path, jobs: int) -> dict[str, Any]:
    """What `cwfed sweep` found; what is finished is not run again."""
    told = [sys.executable, "-m", *words, "-o", str(folder), "--json", "--jobs", str(jobs)]
    found: dict[str, Any] = json.loads(subprocess.run(told, check=True, stdout=subprocess.PIPE).stdout)
    return found


def as_preset(words: list[str], found: dict[str, Any]) -> dict[str, Any]:
    """A method's part of the file."""
    tried = []
    for one in found["tried"]:
        if one["given_up"]:
            continue
        held_out, test = one["validation"], one["accuracy"][one["reported"]["phase"]]["validated"]["mean"]
        std = {"std": round(100 * held_out["std"], 2)} if len(found["seeds"]) > 1 else {}
        tried.append(
            {"settings": one["values"], "validation": round(100 * held_out["mean"], 2), **std, "test": round(100 * test, 2)}
        )  # fmt: skip
    return {
        "command": " ".join(words),
        "version": __version__,
        "seeds": found["seeds"],
        "phase": next(one["reported"]["phase"] for one in found["tried"] if not one["given_up"]),
        "tried": tried,
        "failed": [
            ", ".join(f"{key}={value}" for key, value in one["values"].items())
            for one in found["tried"]
            if one["given_up"]
        ],
    }


def write(name: str, setting: Setting, method: str, made: dict[str, Any], folder: Path = PRESETS) -> None:
    """Put a preset beside the others of its setting."""
    path = folder / f"{name}.toml"
    before = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if before.get("config", setting.config) != setting.config:
        before = {}  # of another experiment
    methods = dict(sorted((before.get("methods", {}) | {method: made}).items()))
    table = {"title": setting.title, "config": setting.config, "methods": methods}
    path.write_text(HEADER + tomli_w.dumps(table), encoding="utf-8")


def asked(names: list[str], made: Collection[str]) -> list[tuple[str, str]]:
    """(setting, method) of what is named; of a setting, those that are not among the presets that are made."""
    known = sorted([*algorithms.ALGORITHMS, *COMBINATIONS])
    found = []
    for name in names or SETTINGS:
        setting, _, method = name.partition("/")
        if setting not in SETTINGS or (method and method not in known):
            sys.exit(f"unknown: {name}; settings: {', '.join(SETTINGS)}; methods: {', '.join(known)}")
        found += (
            [(setting, method)] if method else [(setting, one) for one in known if f"{setting}/{one}" not in made]
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="SETTING or SETTING/METHOD (default: all)")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time (default: as cwfed sweep does)")
    given = parser.parse_intermixed_args()
    for name, method in asked(given.names, shipped()):
        setting, folder = SETTINGS[name], given.folder.resolve() / name / method
        rates = setting.lr
        for _ in range(1 + WIDER):
            words = command(setting, method, rates)
            print(" ".join(words), flush=True)
            found = swept(words, folder, given.jobs)
            before, rates = rates, wider(rates, found)
            if rates == before:
                break
        write(name, setting, method, as_preset(words, found))


if __name__ == "__main__":
    main()
