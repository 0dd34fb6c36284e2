"""The algorithms: one paper, one file. A plain dict is the registry."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from cwfed.algorithms.base import Algorithm, ClientData
from cwfed.algorithms.cfl import CFL
from cwfed.algorithms.cwfedavg import CwFedAvg
from cwfed.algorithms.fedamp import FedAMP
from cwfed.algorithms.fedavg import FedAvg, FedAvgFT, Local
from cwfed.algorithms.fedfomo import FedFomo
from cwfed.algorithms.fednh import FedNH
from cwfed.algorithms.fedprox import FedProx
from cwfed.algorithms.feduv import FedUV
from cwfed.algorithms.ifca import IFCA
from cwfed.errors import ConfigError, did_you_mean
from cwfed.plugins import load_object

ALGORITHMS: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "local": Local,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "fedamp": FedAMP,
    "fedfomo": FedFomo,
    "cfl": CFL,
    "ifca": IFCA,
    "fednh": FedNH,
    "feduv": FedUV,
    "cwfedavg": CwFedAvg,
}

__all__ = [
    "ALGORITHMS",
    "CFL",
    "IFCA",
    "Algorithm",
    "ClientData",
    "CwFedAvg",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedFomo",
    "FedNH",
    "FedProx",
    "FedUV",
    "Local",
]


def find(name: str) -> type[FedAvg]:
    """The class of an algorithm: by its registered name, or "module:Class" for the user's own."""
    if ":" in name:
        found = load_object(name, "algorithm")
        if not (isinstance(found, type) and dataclasses.is_dataclass(found) and issubclass(found, FedAvg)):
            raise ConfigError(f"algorithm {name!r} must be a dataclass that derives from cwfed's FedAvg")
        return found
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}: {did_you_mean(name, ALGORITHMS)}")
    return ALGORITHMS[name]


def build(options: dict[str, Any] | str) -> FedAvg:
    """An algorithm from its config table: `name`, and its hyper-parameters by name.

    >>> build({"name": "fedprox", "mu": 0.01})
    FedProx(mu=0.01)
    """
    if isinstance(options, str):
        options = {"name": options}
    options = dict(options)
    name = options.pop("name", "cwfedavg")
    cls = find(name)
    types = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    values = {}
    for key, value in options.items():
        if key not in known:
            what = did_you_mean(key, known) if known else "it has none"
            raise ConfigError(f"unknown setting algorithm.{key} for {name}: {what}")
        values[key] = _value(f"algorithm.{key}", types[key], value)
    return cls(**values)


def describe(algorithm: FedAvg, name: str) -> dict[str, Any]:
    """The config table that `build` turns into this algorithm again, complete."""
    table: dict[str, Any] = {"name": name}
    for f in dataclasses.fields(algorithm):
        value = getattr(algorithm, f.name)
        if isinstance(value, FedAvg):
            value = describe(value, name_of(value))
        table[f.name] = list(value) if isinstance(value, tuple) else value
    return table


def name_of(algorithm: FedAvg) -> str:
    """The name under which `find` knows the class of this algorithm."""
    for name, cls in ALGORITHMS.items():
        if type(algorithm) is cls:
            return name
    return f"{type(algorithm).__module__}:{type(algorithm).__qualname__}"


def _value(key: str, hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, FedAvg):
        return value if isinstance(value, FedAvg) else build(value)
    try:
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        reasons = "; or ".join(dict.fromkeys(e["msg"].lower() for e in error.errors()))
        raise ConfigError(f"{key} = {value!r} is not possible: {reasons}") from None
