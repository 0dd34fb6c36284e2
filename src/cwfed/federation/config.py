"""A whole experiment's settings (`Config`), and how they are read: from TOML, from nested dicts, from `key=value`.

Each mistake is one clear sentence. No config object reaches the maths.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, model_validator

from cwfed import algorithms
from cwfed.core import files
from cwfed.core.errors import ConfigError, did_you_mean, reason
from cwfed.data.partition import PartitionSpec
from cwfed.federation import preset
from cwfed.federation.sections import (
    AdversarySection,
    DataSection,
    GuardSection,
    ModelSection,
    PrivacySection,
    RunSection,
    TrainSection,
)
from cwfed.federation.settings import Section, describe, former_names, free_to_change, hashed, renamed, tell

MOST_BYTES = 2**20
"""The most bytes of a config file."""
MOST_DEPTH = 16
"""The most parts of a dotted key: the time of TOML's reader grows with their square."""
MOST_NUMBER = 2**63
"""TOML's whole numbers have 64 bits."""
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?)"""
_KEY = re.compile(rf"{_PART}(?:[ \t]*+\.[ \t]*+{_PART})*+")


class Config(Section):
    """A whole experiment. `Config()` is the digits experiment.

    Examples:
        >>> import cwfed
        >>> config = cwfed.load_config(settings=["train.lr=0.05"])
        >>> config.train.lr, config.algorithm_name
        (0.05, 'cwfedavg')
    """

    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    algorithm: dict[str, Any] = Field(default_factory=lambda: {"name": "cwfedavg"})
    """`name` and the hyper-parameters of the algorithm; validated by the algorithm itself."""
    train: TrainSection = TrainSection()
    guard: GuardSection = GuardSection()
    adversary: AdversarySection = AdversarySection()
    privacy: PrivacySection = PrivacySection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Config:
        """Fill in the algorithm's defaults, so that a written config is complete; check settings of several sections against each other."""
        name = self.algorithm.get("name", "cwfedavg")
        if not isinstance(name, str):
            raise ConfigError(f"algorithm.name must be a text, it is {name!r}")
        if info.context != NO_IMPORTS or not algorithms.foreign(self.algorithm):
            table = algorithms.describe(algorithms.build(self.algorithm), algorithms.canonical(name))
            object.__setattr__(self, "algorithm", table)
        count = self.train.participation
        if count > 1 and count != int(count):
            raise ValueError(f"train.participation = {count:g} is neither a fraction nor a whole number of clients")
        plain = self.train.make_optimizer().is_plain and not self.train.clip and not self.train.label_smoothing
        if self.privacy.dp != "off" and not (plain and self.data.augment == "none"):
            raise ValueError(
                "privacy.dp is DP-SGD: it has gradients clipped and noised by itself, without momentum, weight decay, "
                "train.clip, train.label_smoothing or data.augment"
            )
        if self.privacy.dp != "off" and self.train.precision != "fp32":
            raise ValueError(
                "privacy.dp computes gradients sample by sample in fp32 only: set train.precision = fp32"
            )
        if self.run.patience and not self.data.validation:
            raise ValueError(
                f"run.patience = {self.run.patience} stops by held-out data, and none are held out: set data.validation above 0"
            )
        return self

    @property
    def algorithm_name(self) -> str:
        """The algorithm's name."""
        return str(self.algorithm["name"])

    @property
    def split_seed(self) -> int:
        """The seed that decides who holds what."""
        return self.run.seed if self.data.split_seed < 0 else self.data.split_seed

    def code(self) -> list[str]:
        """The user's code that the config names, as "module:name": algorithm (and its parts), model, data, partition and metrics."""
        own = [name for name in (self.model.name, self.data.name, self.data.partition) if ":" in name]
        return algorithms.foreign(self.algorithm) + own + self.run.metrics

    def but(self, **run: Any) -> Config:
        """The same config with other settings of `run`."""
        return self.model_copy(update={"run": self.run.model_copy(update=run)})

    def build_algorithm(self) -> algorithms.FedAvg:
        """The algorithm with its hyper-parameters."""
        return algorithms.build(self.algorithm)

    def partition_spec(self) -> PartitionSpec:
        """The partition, as the data loader takes it."""
        d = self.data
        return PartitionSpec(
            d.partition,
            d.clients,
            d.classes_per_client,
            d.alpha,
            d.balanced,
            d.shuffled,
            self.train.batch_size,
            d.shards_per_client,
            d.quantity_alpha,
            d.least_samples,
            d.client_column,
            d.split_file,
        )

    def to_toml(self) -> str:
        """All settings as a config file."""
        return tomli_w.dumps(self.model_dump())

    @property
    def fingerprint(self) -> str:
        """A hash of all settings that a resumed run must share."""
        return hashed(self.model_dump(), SETTINGS, algorithms.before())


SETTINGS = describe(Config)
"""All settings but the algorithm's, by their keys."""
FREE_TO_CHANGE = free_to_change(SETTINGS)
"""Settings that a resumed run may change, because results do not depend on them. `train.rounds` may change too (`folder.check_same`)."""
FORMER_NAMES = former_names(SETTINGS)
"""The current keys by the keys of earlier versions, which still work."""

NO_IMPORTS = "no imports"


def from_table(table: dict[str, Any], *, imports: bool = True) -> Config:
    """A validated config from nested dicts; ConfigError for a wrong key or value.

    Without `imports`, an algorithm that is code ("module:Class") is not loaded, so that looking at a run does not run its code.
    """
    for key, value in _numbers(table):
        if abs(value) >= MOST_NUMBER:
            raise ConfigError(f"{key} is not possible: a whole number has at most 19 digits")
    table = renamed(table, FORMER_NAMES)
    try:
        return Config.model_validate(table, context=None if imports else NO_IMPORTS)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(e) for e in error.errors())) from None


def _numbers(table: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, int]]:
    """All whole numbers in nested tables and lists, with their dotted names."""
    if isinstance(table, int):
        yield key, table
    elif isinstance(table, dict | list) and depth < 500:  # deeper ones cannot be read from TOML
        for name, value in table.items() if isinstance(table, dict) else enumerate(table):
            yield from _numbers(value, f"{key}.{name}" if key else str(name), depth + 1)


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        *sections, key = (str(part) for part in error["loc"])
        cls = Config.model_fields[sections[0]].annotation if sections else Config
        known = list(cls.model_fields) if isinstance(cls, type) and issubclass(cls, BaseModel) else []
        elsewhere = [name for name in SETTINGS if name.rpartition(".")[2] == key]  # such as lr, for train.lr
        hint = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else did_you_mean(key, known)
        return f"unknown setting {where}: {hint}"
    if error["type"] == "value_error":
        return str(error["msg"].removeprefix("Value error, "))
    return f"{where} = {error['input']!r} is not possible: {reason(error)}"


def load(path: str | Path | None = None, settings: Sequence[str] | str = ()) -> Config:
    """A config file, with `key=value` settings on top (one, or a list of them). Without a file: the digits experiment.

    Arguments:
        path: a TOML file, or `preset:SETTING/METHOD`, a tuned preset (`cwfed presets`). Default: all settings are defaults.
        settings: such as "train.lr=0.05", as after `--set` on the command line.

    Returns:
        The config, for `cwfed.run`.

    Errors:
        CwfedError, one sentence: a file that cannot be read, an unknown setting, an impossible value.

    Examples:
        >>> import cwfed
        >>> cwfed.load_config(settings=["train.rounds=20", "algorithm.name=ditto"]).train.rounds
        20
    """
    if isinstance(settings, str):
        settings = [settings]
    if str(path).startswith(preset.PREFIX):
        text = preset.find(str(path)).to_toml()
    else:
        text = "" if path is None else read(path)
    return loads(text, path, settings)


def read(path: str | Path) -> str:
    """The text of a config file."""
    try:
        return files.read_text(path, MOST_BYTES)
    except FileNotFoundError:
        hint = f": the preset of that name is {preset.PREFIX}{path}" if str(path) in preset.shipped() else ""
        raise ConfigError(f"the config file {path} does not exist{hint}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"the config file {path} is a folder: give the file in it, such as {path}/config.toml"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"the config file {path} is no text in UTF-8") from None
    except TypeError:
        raise ConfigError(
            f"the path of a config file is a text, not {path!r}: settings=[...] takes settings"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}") from None


def loads(text: str, path: str | Path | None = None, settings: Sequence[str] = (), *, imports: bool = True) -> Config:
    """A config from its text; see `from_table` for `imports`."""
    try:
        table = _toml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}") from None
    return from_table(_apply(renamed(table, FORMER_NAMES), settings), imports=imports)


def _toml(text: str) -> dict[str, Any]:
    for found in _KEY.finditer(text):
        if found[0].count(".") >= MOST_DEPTH and len(re.findall(_PART, found[0])) > MOST_DEPTH:
            raise ValueError(f"a key has more than {MOST_DEPTH} parts: {found[0][:50]}")
    return tomllib.loads(text)


def with_settings(config: Config, settings: Sequence[str]) -> Config:
    """A config with `key=value` settings on top."""
    return from_table(_apply(config.model_dump(), settings))


def _apply(table: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    parsed = [_parse(text) for text in settings]
    for keys, value in parsed:
        named = table.get("algorithm", {})
        if keys != ["algorithm", "name"] or not isinstance(named, dict):
            continue
        if algorithms.canonical(str(named.get("name", "cwfedavg"))) != algorithms.canonical(str(value)):
            table["algorithm"] = {}  # the file's hyper-parameters belong to the algorithm it names
    for keys, value in parsed:
        at = table
        for key in keys[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise ConfigError(f"--set {'.'.join(keys)}: {key} is not a section")
        at[keys[-1]] = value
    return table


def _parse(text: str) -> tuple[list[str], Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} must look like section.key=value")
    return current_name(key.strip()).split("."), parse_value(raw.strip())


def current_name(key: str) -> str:
    """The current key; a warning if a former one is used."""
    if key in FORMER_NAMES:
        tell(key, FORMER_NAMES[key])
    return FORMER_NAMES.get(key, key)


def parse_value(raw: str) -> Any:
    """A TOML value; anything else is text, or a list of texts, so that texts need no quotes."""
    try:
        table = _toml(f"value = {raw}")
    except (ValueError, RecursionError):
        if raw.startswith("[") and raw.endswith("]") and "[" not in raw[1:]:  # a list whose quotes a shell took away
            return [parse_value(part.strip()) for part in raw[1:-1].split(",")]
        return raw
    return table["value"] if len(table) == 1 else raw  # a line break could be followed by a whole file
