"""Configs, options, command lines."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from cwfed.core.errors import ConfigError, CwfedError
from cwfed.federation import config
from cwfed.federation.experiment import Experiment
from cwfed.federation.settings import flat
from cwfed.runs import compare
from tests.conftest import small
from tests.fuzz.base import World, target
from tests.fuzz.cases import (
    MOMENTS,
    MUTATIONS,
    NAMES,
    NUMBERS,
    mutate,
)

KEYS = sorted(
    {*flat(config.Config().model_dump()), "algorithm.layers", "algorithm.mu", "model.options.hidden", "x.y", "data"}
)
VALUES = (
    NAMES
    | NUMBERS
    | st.booleans()
    | MOMENTS
    | st.lists(NAMES | NUMBERS, max_size=3)
    | st.dictionaries(NAMES, NUMBERS, max_size=2)
)
SETTINGS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)


def check_config(found: config.Config) -> None:
    """What is accepted can be written, read back as the same, and has a hash."""
    assert config.loads(found.to_toml()) == found
    assert found.fingerprint


@target(SETTINGS)
def config_tables(world: World, settings: dict[str, Any]) -> None:
    """A config whose keys exist and whose values are strange."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        at = table
        *sections, last = key.split(".")
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise ConfigError("not a section")
        at[last] = value
    check_config(config.from_table(table))


NEARLY = st.dictionaries(
    st.sampled_from(
        [k for k in KEYS if k.startswith(("data.", "train.", "model.", "algorithm.")) and k != "data.name"]
    ),
    NUMBERS
    | st.sampled_from(["", "iid", "dirichlet", "mlp", "cnn", "resnet18", "fedprox", "ifca", "all", [1], ["fc"]]),
    max_size=3,
)


@target(NEARLY, cost=4)
def experiments(world: World, settings: dict[str, Any]) -> None:
    """A config that may pass, made ready: data dealt out, network built and tried."""
    words = [f"{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in settings.items()]
    Experiment(small(*words))


CONFIG_TEXT = config.Config().to_toml().encode()


@target(
    MUTATIONS.map(lambda m: mutate(CONFIG_TEXT, m))
    | st.binary(max_size=60)
    | NAMES.map(lambda n: n.encode(errors="replace"))
)
def config_files(world: World, content: bytes) -> None:
    """Anything as a config file."""
    path = world.fresh() / "c.toml"
    path.write_bytes(content)
    check_config(config.load(path))


@target(
    st.lists(
        st.builds(
            "{}{}{}".format, st.sampled_from(KEYS) | NAMES, st.sampled_from(["=", "", "==", "."]), VALUES | NAMES
        ),
        max_size=3,
    )
)
def set_options(world: World, words: list[str]) -> None:
    """`--set` with anything."""
    check_config(config.load(None, words))


PARTS = (
    st.sampled_from(
        ["fedavg", "cwfedavg", "fedprox", ":", ",", "=", "wdr", "mu", "0", "[", "]", "..", "/", "'", "trap:boom"]
    )
    | NAMES
)


@target(st.lists(PARTS, max_size=8).map("".join))
def compare_entries(world: World, text: str) -> None:
    """`compare -a` with anything: no label is a way out of the folder."""
    for parse in (lambda: compare.parse_seeds(text), lambda: compare.parse_entries(text, world.config)):
        try:
            found = parse()
        except CwfedError:
            continue
        for entry in found:
            if isinstance(entry, compare.Entry):
                assert (world.folder / entry.folder).resolve().parent == world.folder.resolve()


COMMANDS = [["run", "-s", "train.rounds=1", "-s", "model.name=mlp", "-s", "data.clients=2", "-s", "data.samples=60"], ["cost"], ["data", "list"],
            ["data", "show"], ["data", "prepare"], ["algorithms"], ["report"], ["runs"], ["figures"], ["reproduce"], ["compare", "-a"], ["nothing"], []]  # fmt: skip
OPTIONS = st.sampled_from(["--json", "--resume", "--out", "-o", "--set", "-s", "--data-dir", "--where", "--sort", "--seeds", "--formats", "--shape",
                           "--scale", "--help", "--track", "--title", "--dry-run", "--classes", "--model", "--differ", "whole", "case"])  # fmt: skip


@target(
    st.tuples(
        st.sampled_from(COMMANDS),
        st.lists(OPTIONS | NAMES.filter(lambda n: "\0" not in n and n[:1] != "/"), max_size=4),
    ),
    cost=8,
)
def command_lines(world: World, case: tuple[list[str], list[str]]) -> None:
    """The application with any arguments; paths that the user names himself stay in the folder here."""
    from typer.testing import CliRunner

    from cwfed.cli import app, check_text

    world.fresh()
    arguments = [word.replace("..", "_") for word in case[1]]
    check_text(arguments)
    done = CliRunner().invoke(app, [*case[0], *arguments], catch_exceptions=True)
    if isinstance(done.exception, Exception) and not isinstance(done.exception, SystemExit | OSError):
        raise done.exception
