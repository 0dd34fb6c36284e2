"""cwfed beside PFLlib: the same split, model, initial weights and settings, each program as its users run it, in turn.

PFLlib is a checkout that the user has. Its `system/main.py` is run with its own flags from a scratch folder, where it finds the data and
leaves its results: it reads and writes relative to the working directory, so nothing is written to the checkout. Ours is `cwfed run`.

A round of PFLlib is measured by its own clock ("time cost"), a round of ours by that of its events; both leave out the start, and the first
round of each process does not count. Round r of PFLlib begins with the evaluation of what round r - 1 left, and it makes one round more
than it is asked for: its last evaluation is of as many rounds as ours.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cwfed import __version__
from cwfed.benchmark import measured
from cwfed.core import files
from cwfed.core.errors import ConfigError, RunError, did_you_mean
from cwfed.core.events import Round
from cwfed.core.shape import InputShape
from cwfed.data import Federation, pfllib
from cwfed.engine import cores, find_devices
from cwfed.federation.config import SETTINGS, Config, load, with_settings
from cwfed.federation.experiment import deal
from cwfed.federation.manifest import cpu_name, instruction_set
from cwfed.models.cnn import CNN
from cwfed.runs.compare import parse_entries
from cwfed.runs.folder import RunFolder

WRITTEN_FOR = "d832e76 of November 2025"
"""The commit of PFLlib with which this was tried."""
WORKLOAD = ("data.name=cifar10", "data.samples=6000")
"""Where no config file is given; clients, partition, model and training are the paper's, which are also PFLlib's defaults."""
FEW_ROUNDS = "train.rounds=5"
DATASETS: Mapping[tuple[int, ...], str] = {(1, 28, 28): "MNIST", (3, 32, 32): "Cifar10", (3, 64, 64): "TinyImagenet"}
"""PFLlib chooses the layers of its CNN by the name of the data set: a name that gives ours, by the shape of an image."""
SAME = ("train.rounds", "train.lr", "train.batch_size", "train.epochs", "model.name", "run.seed")
"""Settings that both have; PFLlib's seed is always 0."""
NOT_OURS_ALONE = ("data.augment", "data.newcomers")
"""All other settings of the data only say what is written for PFLlib."""


Flag = Callable[[Config, Federation], Any]
FLAGS: Mapping[str, Flag] = {
    "-m": lambda config, federation: "CNN",
    "-data": lambda config, federation: DATASETS[federation.shape.dims],
    "-ncl": lambda config, federation: federation.data.classes,
    "-nc": lambda config, federation: len(federation),
    "-gr": lambda config, federation: config.train.rounds,
    "-lbs": lambda config, federation: config.train.batch_size,
    "-lr": lambda config, federation: config.train.lr,
    "-ls": lambda config, federation: config.train.epochs,
    "-eg": lambda config, federation: 1,  # an evaluation in every round, as ours
    "-dev": lambda config, federation: _device(config),
    "-algo": lambda config, federation: METHODS[config.algorithm_name].name,
}
"""What PFLlib's main.py is told."""


@dataclass(frozen=True)
class Theirs:
    """A method as PFLlib has it."""

    name: str
    evaluates: str
    """Which models it says it evaluates where it means those that the method is reported on."""
    flags: Mapping[str, Flag] = field(default_factory=dict)
    """What it is told besides."""


METHODS: Mapping[str, Theirs] = {
    "fedavg": Theirs("FedAvg", "global"),
    "ditto": Theirs(
        "Ditto",
        "personalized",
        {"-mu": lambda config, _: config.algorithm["lambda"], "-pls": lambda config, _: config.train.epochs},
    ),
}


def same_cnn(shape: InputShape, classes: int) -> CNN:
    """Our CNN with the initial weights of PFLlib's, which seeds torch with 0 and makes the same layers in the same order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CNN(shape, classes)


def bench(
    folder: Path,
    out_dir: Path,
    config_file: Path | None = None,
    settings: Sequence[str] = (),
    methods: str = "fedavg,ditto",
    repeats: int = 2,
    python: str = "",
    data_dir: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Both programs, method by method, in turn; what they printed is left in `out_dir`.

    `tell` hears what goes on, `report` what each process needed.
    """
    base = load(config_file, [*(() if config_file else WORKLOAD), FEW_ROUNDS, *settings])
    configs = _configs(base, methods)
    checkout = Checkout.at(folder)
    interpreter, their_torch = _interpreter(python or sys.executable)
    federation = deal(next(iter(configs.values())), data_dir)
    _require_same(federation, base)
    found: dict[str, list[tuple[Run, Run]]] = {method: [] for method in configs}
    with tempfile.TemporaryDirectory(prefix="cwfed-pfllib-") as made:
        scratch = Path(made)
        tell("writing the split for PFLlib")
        pfllib.write(federation, scratch / "dataset" / DATASETS[federation.shape.dims])
        (scratch / "system").mkdir()

        def take_turns(method: str, repeat: int, turn: str) -> tuple[Run, Run]:
            config, name = configs[method], f"{method}-{repeat}"
            tell(f"PFLlib, {turn}")
            theirs = _run_theirs(
                [interpreter, str(checkout.main), *_flags(config, federation)],
                scratch / "system",
                out_dir / f"pfllib-{name}.log",
                Expected(METHODS[method].evaluates, config.train.rounds, _layers(federation)),
                lambda done: tell(f"PFLlib, {turn}: {done}"),
            )
            report(f"PFLlib, {turn}: {theirs}")
            tell(f"cwfed, {turn}")
            ours = _run_ours(config, scratch / name, out_dir / f"cwfed-{name}.log", data_dir)
            report(f"cwfed, {turn}: {ours}")
            return ours, theirs

        turns = [(method, repeat) for repeat in range(1, repeats + 1) for method in configs]
        for number, (method, repeat) in enumerate(turns, 1):
            found[method].append(take_turns(method, repeat, f"{method}, turn {number} of {len(turns)}"))
    return {
        "machine": {
            "cpu": cpu_name(),
            "instruction_set": instruction_set(),
            "cores": cores(),
            "device": _device(base),
        },
        "versions": {
            "cwfed": __version__,
            "torch": torch.__version__,
            "pfllib": checkout.commit,
            "pfllib_torch": their_torch,
        },
        "config": base.model_dump(exclude={"algorithm"}),
        "clients": len(federation),
        "repeats": repeats,
        "methods": [_compared(configs[method], runs) for method, runs in found.items()],
    }


# --- what can be compared


def _configs(base: Config, methods: str) -> dict[str, Config]:
    """For each method what ours is run with: without held-out data, from PFLlib's initial weights."""
    if base.train.rounds < 2:
        raise ConfigError("train.rounds must be at least 2: the first round of a process does not count")
    for key, about in SETTINGS.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(base, section), name)
        is_same = key in SAME or (section == "data" and key not in NOT_OURS_ALONE) or about.changes == "nothing"
        if not is_same and value != about.default:
            raise ConfigError(f"PFLlib has nothing like {key} = {value!r}: leave it at {about.default!r}")
    if base.model.name not in ("auto", "cnn"):
        raise ConfigError(f"the model that both have is the cnn, and model.name is {base.model.name!r}")
    found = {}
    for entry in parse_entries(methods, base):
        method = str(entry.settings["name"])
        if method not in METHODS:
            raise ConfigError(f"{method!r} is not compared with PFLlib's: {did_you_mean(method, METHODS)}")
        if method in found:
            raise ConfigError(f"--algorithms {methods!r} names {method} twice")
        config = base.model_copy(update={"algorithm": entry.settings})
        same = [f"model.name={__name__}:{same_cnn.__name__}", "data.validation=0", "run.save_models=none"]
        found[method] = with_settings(config, same)
    return found


def _require_same(federation: Federation, config: Config) -> None:
    """An error where the two would not do the same with these data."""
    dims, batch = federation.shape.dims, config.train.batch_size
    if dims not in DATASETS:
        known = ", ".join("x".join(map(str, dims)) for dims in DATASETS)
        raise ConfigError(
            f"PFLlib has its CNN for images of {known}, and {federation.data.name} has samples of {'x'.join(map(str, dims))}: choose "
            "other data, or set data.image_size"
        )
    for client, shard in federation.shards.items():
        if len(shard.train) < batch or not len(shard.test):
            raise ConfigError(
                f"client {client} has {len(shard.train)} training and {len(shard.test)} test samples, and PFLlib needs a batch of "
                f"{batch} and one: use fewer clients or more samples"
            )


def _device(config: Config) -> str:
    devices = find_devices(config.run.device, config.run.engine)
    if len(devices) > 1 or devices[0].type not in ("cpu", "cuda"):
        raise ConfigError(
            f"PFLlib works on the CPU or on one GPU, and run.device is {','.join(map(str, devices))}: set it to cpu or cuda"
        )
    return devices[0].type


def _flags(config: Config, federation: Federation) -> list[str]:
    """The settings as PFLlib takes them."""
    flags = {**FLAGS, **METHODS[config.algorithm_name].flags}
    return [str(word) for flag, value in flags.items() for word in (flag, value(config, federation))]


def _layers(federation: Federation) -> list[str]:
    """The layers of our network, as torch prints them."""
    network = same_cnn(federation.shape, federation.data.classes)
    return [repr(layer) for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


@dataclass(frozen=True)
class Checkout:
    """A checkout of PFLlib."""

    main: Path
    commit: str

    @classmethod
    def at(cls, folder: Path) -> Checkout:
        """The one in this folder; an error where there is none, or one that does not know what it will be asked for."""
        main = folder.absolute() / "system" / "main.py"
        if not main.is_file():
            raise ConfigError(
                f"{folder} is no checkout of PFLlib: it has no system/main.py; clone https://github.com/TsingZ0/PFLlib "
                "and name its folder: --against pfllib DIR"
            )
        try:
            said = {
                node.value for node in ast.walk(ast.parse(files.read_text(main))) if isinstance(node, ast.Constant)
            }
        except (OSError, ValueError, SyntaxError) as error:
            raise ConfigError(f"{main} cannot be read as a program of PFLlib: {error}") from None
        wanted = [*FLAGS, "CNN", *(word for method in METHODS.values() for word in (method.name, *method.flags))]
        if missing := [word for word in wanted if word not in said]:
            raise ConfigError(
                f"the PFLlib in {folder} has changed: its system/main.py does not know {', '.join(missing)}; this was written for "
                f"commit {WRITTEN_FOR}"
            )
        return cls(main, _commit(folder))


def _commit(folder: Path) -> str:
    """The commit that is checked out, with a word where files differ from it; "unknown" where git does not say."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        differs = git("status", "--porcelain", "--untracked-files=no", "--", "system")
        return git("rev-parse", "HEAD") + " with changes" * bool(differs)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _interpreter(python: str) -> tuple[str, str]:
    """The Python that PFLlib is run with, and its version of torch."""
    found = shutil.which(python)
    if not found:
        raise ConfigError(f"--python {python} is no program that can be run")
    question = "from importlib.metadata import version; print(version('torch'))"
    said = subprocess.run([found, "-c", question], capture_output=True, text=True, check=False)
    if said.returncode:
        raise ConfigError(
            f"{python} is no Python with torch, which PFLlib needs: name one that has it with --python PATH"
        )
    return found, said.stdout.strip()


# --- one process


@dataclass(frozen=True)
class Run:
    """What one process needed."""

    seconds: list[float]
    """Of each round but the first."""
    accuracy: float
    """After the last round."""
    peak_memory_bytes: int
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def round(self) -> float:
        """Seconds of a round."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        return f"{self.round:.3g} s a round, {self.peak_memory_bytes / 1e6:,.0f} MB, {self.accuracy:.2%}"


def _run_ours(config: Config, folder: Path, log: Path, data_dir: str | None) -> Run:
    file = folder.with_suffix(".toml")
    file.write_text(config.to_toml())
    command = [sys.executable, "-m", "cwfed", "run", str(file), "--out", str(folder), "--quiet", "--json"]
    _, peak = _carry_out(command + (["--data-dir", data_dir] if data_dir else []), log, "our own run")
    run = RunFolder(folder)
    summary, events = run.result()
    accuracy = summary.accuracy.of(summary.reported.phase).last
    assert accuracy is not None, "the last round is always evaluated"
    seconds = [sum(event.seconds.values()) for event in events if isinstance(event, Round)]
    return Run(seconds[1:], accuracy, peak, {"engine": run.facts().engine.name})


@dataclass(frozen=True)
class Expected:
    """What a run of PFLlib must have printed."""

    evaluates: str
    rounds: int
    layers: list[str]


def _run_theirs(
    command: list[str], where: Path, log: Path, expected: Expected, tell: Callable[[str], None] = lambda _: None
) -> Run:
    lines, peak = _carry_out(command, log, "PFLlib", where, tell)
    changed = f"this was written for commit {WRITTEN_FOR}, and all it printed is in {log}"
    seconds: list[float] = []
    accuracies: list[float] = []
    layers: list[str] = []
    evaluated = ""
    for line in lines:
        if found := re.match(r"Evaluate (\w+) model", line):
            evaluated = found[1]
        elif found := re.match(r"Averaged Test Accuracy: ([\d.]+)$", line):
            accuracies += [float(found[1])] if evaluated == expected.evaluates else []
        elif found := re.match(r"-+ time cost -+ ([\d.e+-]+)$", line):
            seconds.append(float(found[1]))
        elif found := re.search(r"\b(?:Conv2d|Linear)\(.*\)$", line):
            layers.append(found[0])
    if not len(seconds) == len(accuracies) == expected.rounds + 1:
        raise RunError(
            f"PFLlib has changed: it printed the times of {len(seconds)} rounds and {len(accuracies)} accuracies of "
            f"{expected.evaluates} models where {expected.rounds + 1} were expected; {changed}"
        )
    if layers != expected.layers:
        raise RunError(f"PFLlib has changed: its CNN has other layers than ours; {changed}")
    return Run(seconds[1:], accuracies[-1], peak, {"accuracies": accuracies})


def _carry_out(
    command: list[str], log: Path, who: str, where: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> tuple[list[str], int]:
    """The lines that a process prints, which also go into a log, and its peak memory; `tell` hears the headings of rounds."""
    lines = []
    with (
        log.open("w", buffering=1) as kept,  # to be watched
        subprocess.Popen(
            [sys.executable, "-I", "-S", measured.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            cwd=where,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,  # Ctrl-C is for us: what we started ends when its input does
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                kept.write(line)
                lines.append(line.strip())
                if found := re.match(r"-+(Round number: \d+)-+$", lines[-1]):
                    tell(found[1])
        finally:
            process.stdin.close()
    try:
        needed = json.loads(lines[-1])
    except (ValueError, IndexError):
        raise RunError(f"{who} was killed; all it printed is in {log}") from None
    if needed["exit_code"]:
        raise RunError(_why(lines[:-1], log, who, command[0]))
    return lines[:-1], needed["peak_memory_bytes"]


def _why(lines: list[str], log: Path, who: str, python: str) -> str:
    """Why a process failed, from the last words that it said."""
    last = next((line for line in reversed(lines) if line), "it said nothing")
    if found := re.search(r"No module named '([\w.]+)'", last):
        return (
            f"{who} needs the package {found[1]}, which {python} does not have: install it there, or name the Python that has what "
            "PFLlib needs: --python PATH"
        )
    return f"{who} has failed: {last.removeprefix('error: ')}; all it printed is in {log}"


# --- the result


def _compared(config: Config, runs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """One method: medians over the processes of either side, and the ratios."""

    def side(mine: list[Run]) -> dict[str, Any]:
        return {
            "seconds": statistics.median(run.round for run in mine),
            "peak_memory_bytes": int(statistics.median(run.peak_memory_bytes for run in mine)),
            "accuracy": statistics.mean(run.accuracy for run in mine),
            "runs": [
                {
                    "seconds_by_round": run.seconds,
                    "peak_memory_bytes": run.peak_memory_bytes,
                    "accuracy": run.accuracy,
                    **run.facts,
                }
                for run in mine
            ],
        }

    ours, theirs = side([pair[0] for pair in runs]), side([pair[1] for pair in runs])
    return {
        "name": config.algorithm_name,
        "phase": config.build_algorithm().phase,
        "settings": config.algorithm,
        "ours": ours,
        "theirs": theirs,
        "ratio": theirs["seconds"] / ours["seconds"],
        "memory_ratio": theirs["peak_memory_bytes"] / ours["peak_memory_bytes"],
    }
