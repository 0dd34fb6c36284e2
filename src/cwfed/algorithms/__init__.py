"""The algorithms: one paper, one file.

A class in a file here that sets `name` is registered as an algorithm, one that sets `plugin` as a plug-in (`combine.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import typing
from dataclasses import MISSING
from functools import cache
from importlib import import_module
from keyword import iskeyword
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from cwfed.algorithms import plugins as _plugins
from cwfed.algorithms.base import Algorithm, ClientData
from cwfed.algorithms.combine import JOINT, canonical, combine, parts_of
from cwfed.algorithms.cwfedavg import CwFedAvg
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError, did_you_mean, reason
from cwfed.core.plugins import load_object

__all__ = [
    "ALGORITHMS",
    "PLUGINS",
    "Algorithm",
    "ClientData",
    "CwFedAvg",
    "FedAvg",
    "build",
    "canonical",
    "describe",
    "find",
    "name_of",
    "parts_of",
]


def _modules() -> list[ModuleType]:
    """The files of this folder and of the plug-ins' folder."""
    places = ((__name__, __path__), (_plugins.__name__, _plugins.__path__))
    return [
        import_module(f"{package}.{name}")
        for package, path in places
        for name in sorted(info.name for info in pkgutil.iter_modules(path))
    ]


def _registered(under: str) -> dict[str, type[FedAvg]]:
    """By value, the classes that set the attribute `under` ("name" or "plugin") themselves; one that inherits it is left out."""
    found: dict[str, type[FedAvg]] = {}
    for module in _modules():
        for cls in vars(module).values():
            is_here = isinstance(cls, type) and cls.__module__ == module.__name__
            if is_here and issubclass(cls, FedAvg) and under in vars(cls):
                name = vars(cls)[under]
                if name in found:
                    raise ConfigError(f"two algorithms are called {name!r}: {found[name]} and {cls}")
                found[name] = cls
    return found


ALGORITHMS = _registered("name")
"""The algorithms by the name that a config gives them."""
PLUGINS = _registered("plugin")
"""The plug-ins by their names, which are written after a `+`."""


def find(name: str) -> type[FedAvg]:
    """The class of an algorithm: by its registered name, or "module:Class" for the user's own; each with plug-ins after a `+`."""
    base, *plugins = canonical(name).split(JOINT)
    alone = base or "".join(plugins[:1])
    if alone in PLUGINS and base not in ALGORITHMS:
        raise ConfigError(
            f"{alone} is a plug-in: write it after the algorithm that it changes, as in fedavg{JOINT}prior"
        )
    method = _find(base, ALGORITHMS, "algorithm")
    if not plugins:
        return method
    return combine((base, *plugins), (method, *(_find(plugin, PLUGINS, "plug-in") for plugin in plugins)))


def _find(name: str, known: dict[str, type[FedAvg]], what: str) -> type[FedAvg]:
    if ":" in name:
        found = load_object(name, what)
        if not (isinstance(found, type) and dataclasses.is_dataclass(found) and issubclass(found, FedAvg)):
            raise ConfigError(f"{what} {name!r} must be a dataclass that derives from cwfed's FedAvg")
        _check_hooks(found)
        return found
    if name not in known:
        raise ConfigError(f"unknown {what} {name!r}: {did_you_mean(name, known)}")
    return known[name]


def _check_hooks(cls: type[FedAvg]) -> None:
    """One sentence for a method that takes other arguments than it is called with."""
    for hook, usual in inspect.getmembers(FedAvg, inspect.isfunction):
        own = getattr(cls, hook)
        if own is usual or not inspect.isfunction(own) or hook.startswith("_"):
            continue
        wanted = list(inspect.signature(usual).parameters)
        try:
            inspect.signature(own).bind(*wanted)
        except TypeError as error:
            given = ", ".join(wanted[1:])
            raise ConfigError(
                f"{cls.__name__}.{hook} is called as {hook}({given}), and does not fit: {error}"
            ) from None


def foreign(options: Any) -> list[str]:
    """The user's code ("module:Class") that an algorithm's table names, also after a `+` and in tables inside it."""
    if not isinstance(options, dict):
        return []
    name = options.get("name", "")
    own = [part for part in name.split(JOINT) if ":" in part] if isinstance(name, str) else []
    return own + [found for value in options.values() for found in foreign(value)]


def build(options: dict[str, Any] | str) -> FedAvg:
    """An algorithm from its config table: `name`, and its hyper-parameters by name.

    >>> build({"name": "fedprox", "mu": 0.01})
    FedProx(mu=0.01)
    """
    if isinstance(options, str):
        options = {"name": options}
    if not isinstance(options, dict):
        raise ConfigError(f"an algorithm is a name or a table with a name, not {options!r}")
    options = dict(options)
    name = options.pop("name", "cwfedavg")
    if not isinstance(name, str):
        raise ConfigError(f"the name of an algorithm must be a text, it is {name!r}")
    cls = find(name)
    try:
        types = _types(cls)  # type: ignore[arg-type]  # a class is hashable even if its objects are not
    except NameError as error:
        raise ConfigError(f"algorithm {name!r}: the type of a setting is unknown ({error})") from None
    fields = {f.name: f for f in dataclasses.fields(cls)}
    known = list(fields)
    # defaults are converted like given values, so that a `float = 1` is 1.0 before it is written and after it is read
    values = {n: _value(f"algorithm.{n}", types[n], f.default) for n, f in fields.items() if f.default is not MISSING}
    for key, value in options.items():
        field = f"{key}_" if iskeyword(key) else key  # the papers' lambda is lambda_ in Python
        if field not in known:
            what = did_you_mean(key, map(setting, known)) if known else "it has none"
            raise ConfigError(f"unknown setting algorithm.{key} for {name}: {what}")
        values[field] = _value(f"algorithm.{key}", types[field], value)
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"algorithm {name!r} cannot be made: {error}") from None


@cache
def _types(cls: type[FedAvg]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def setting(field: str) -> str:
    """A field's name in the config, where lambda_ is lambda."""
    return field.removesuffix("_")


def before() -> dict[str, Any]:
    """By key, for hyper-parameters that were added later: the value that stands for the behaviour before.

    The field says it: field(default=1.0, metadata={"before": 1.0}).
    """
    return {
        f"algorithm.{setting(f.name)}": f.metadata["before"]
        for cls in ALGORITHMS.values()
        for f in dataclasses.fields(cls)
        if "before" in f.metadata
    }


def describe(algorithm: FedAvg, name: str) -> dict[str, Any]:
    """The complete config table from which `build` makes this algorithm again."""
    table: dict[str, Any] = {"name": name}
    for f in dataclasses.fields(algorithm):
        value = getattr(algorithm, f.name)
        if isinstance(value, FedAvg):
            value = describe(value, name_of(value))
        if value is not None:  # TOML has no null; a key that is left out has its default
            table[setting(f.name)] = list(value) if isinstance(value, tuple) else value
    return table


def name_of(algorithm: FedAvg) -> str:
    """The name under which `find` knows the class of this algorithm."""
    for name, cls in ALGORITHMS.items():
        if type(algorithm) is cls:
            return name
    if len(parts_of(type(algorithm))) > 1:
        return algorithm.name
    return f"{type(algorithm).__module__}:{type(algorithm).__qualname__}"


def _takes_bool(hint: Any) -> bool:
    """Whether a setting may be true or false; for others, pydantic would take these for 1 and 0."""
    return hint in (bool, Any) or any(map(_takes_bool, typing.get_args(hint)))


def _value(key: str, hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, FedAvg):
        return value if isinstance(value, FedAvg) else build(value)
    if isinstance(value, bool) and not _takes_bool(hint):
        raise ConfigError(f"{key} = {value!r} is not possible: the setting is not one that is true or false")
    try:
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        reasons = "; or ".join(dict.fromkeys(map(reason, error.errors())))
        raise ConfigError(f"{key} = {value!r} is not possible: {reasons}") from None
