"""cwfed beside PFLlib: the same split, model, initial weights and settings, each program as its users run it, in turn.

PFLlib is a checkout that the user has. Its `system/main.py` is run with its own flags from a scratch folder, where it finds the data and
leaves its results: it reads and writes relative to the working directory, so nothing is written to the checkout. Ours is `cwfed run`.

A round of PFLlib is measured by its own clock ("time cost"), a round of ours by that of its events; both leave out the start, and the first
round of each process does not count. Round r of PFLlib begins with the evaluation of what round r - 1 left, and it makes one round more
than it is asked for: its last evaluation is of as many rounds as ours.
"""

from __future__ import annotations

import ast
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
from cwfed.benchmark.one_process import WRITTEN_FOR, Expected, Run, run_ours, run_theirs
from cwfed.core import files
from cwfed.core.errors import ConfigError, did_you_mean
from cwfed.core.shape import InputShape
from cwfed.data import Federation, pfllib
from cwfed.engine import cores, find_devices
from cwfed.federation.config import SETTINGS, Config, load, with_settings
from cwfed.federation.experiment import deal
from cwfed.federation.manifest import cpu_name, instruction_set
from cwfed.models.cnn import CNN
from cwfed.runs.compare import parse_entries

WORKLOAD = ("data.name=cifar10", "data.samples=6000")
"""The settings without a config file; clients, partition, model and training are the paper's, which are also PFLlib's defaults."""
FEW_ROUNDS = "train.rounds=5"
DATASETS: Mapping[tuple[int, ...], str] = {(1, 28, 28): "MNIST", (3, 32, 32): "Cifar10", (3, 64, 64): "TinyImagenet"}
"""By image shape, a data set's name with which PFLlib's CNN has our layers: it chooses them by that name."""
SAME = ("train.rounds", "train.lr", "train.batch_size", "train.epochs", "model.name", "run.seed")
"""Settings that both programs have; PFLlib's seed is always 0."""
NOT_OURS_ALONE = ("data.augment", "data.newcomers")
"""Settings of the data that PFLlib does not have; all others only decide what is written for it."""


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
"""The flags of PFLlib's main.py, and how their values are found."""


@dataclass(frozen=True)
class Theirs:
    """A method as PFLlib has it."""

    name: str
    evaluates: str
    """The word by which it announces the evaluation of the models that the method is reported on."""
    flags: Mapping[str, Flag] = field(default_factory=dict)
    """Flags of this method alone."""


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
    """Run both programs, method by method, in turn; what they print is left in `out_dir`.

    `tell` is called with what goes on, `report` with what each process took.
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
            theirs = run_theirs(
                [interpreter, str(checkout.main), *_flags(config, federation)],
                scratch / "system",
                out_dir / f"pfllib-{name}.log",
                Expected(METHODS[method].evaluates, config.train.rounds, _layers(federation)),
                lambda done: tell(f"PFLlib, {turn}: {done}"),
            )
            report(f"PFLlib, {turn}: {theirs}")
            tell(f"cwfed, {turn}")
            ours = run_ours(config, scratch / name, out_dir / f"cwfed-{name}.log", data_dir)
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
    """By method, the config of our runs: nothing held out, PFLlib's initial weights."""
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
    """ConfigError if the two programs would not do the same with these data."""
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
                f"client {client} has {len(shard.train)} training and {len(shard.test)} test samples, and PFLlib needs "
                f"{batch}, a batch, and 1: use fewer clients or more samples"
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
        """The checkout in a folder; ConfigError if it is none, or does not know the flags and methods that will be used."""
        main = folder.absolute() / "system" / "main.py"
        if not main.is_file():
            raise ConfigError(
                f"{folder} is not a checkout of PFLlib: it has no system/main.py; clone https://github.com/TsingZ0/PFLlib "
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
    """The commit that is checked out, with a remark if files differ from it; "unknown" if git does not say."""

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
        raise ConfigError(f"--python {python} is not a program that can be run")
    question = "from importlib.metadata import version; print(version('torch'))"
    said = subprocess.run([found, "-c", question], capture_output=True, text=True, check=False)
    if said.returncode:
        raise ConfigError(
            f"{python} is not a Python with torch, which PFLlib needs: name one that has it with --python PATH"
        )
    return found, said.stdout.strip()


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
