"""Data, an algorithm and a model that are given as Python objects, and the config that refers to them by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from cwfed import algorithms
from cwfed.algorithms import FedAvg
from cwfed.core import plugins
from cwfed.core.errors import ConfigError, DataError
from cwfed.core.shape import InputShape
from cwfed.data import Dataset
from cwfed.federation.config import Config, from_table

Data = Dataset | tuple[Any, Any] | TorchDataset[Any]
"""What `cwfed.run(data=...)` takes."""
AlgorithmLike = str | Mapping[str, Any] | FedAvg | type[FedAvg]
ModelLike = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True)
class Given:
    """The objects that a run is given; None: as the config says."""

    data: Data | None = None
    algorithm: AlgorithmLike | None = None
    model: ModelLike | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self))

    @cached_property
    def dataset(self) -> Dataset | None:
        """The data, as a data set."""
        if self.data is None or isinstance(self.data, Dataset):
            return self.data
        if isinstance(self.data, tuple | list) and len(self.data) == 2:
            return Dataset.from_arrays(*self.data)
        if isinstance(self.data, TorchDataset):
            return Dataset.from_torch(self.data)
        raise DataError(
            f"data = {type(self.data).__name__} is neither a cwfed.Dataset, nor (inputs, labels), nor a data set of torch"
            + _hint(self.data)
        )

    def named_in(self, config: Config) -> Config:
        """The config that refers to these objects."""
        if not self:
            return config
        table = config.model_dump()
        if self.dataset is not None:
            name = "memory" if self.dataset.fixed_split is None else "memory_split"
            table["data"] = table["data"] | {"name": name, "path": ""}
        if self.algorithm is not None:
            table["algorithm"] = _table(self.algorithm)
        if self.model is not None:
            name, before = _model(self.model), table["model"]
            options = (
                before["options"] if before["name"] in ("auto", name) else {}
            )  # the options of another model do not apply
            table["model"] = {"name": name, "options": options}
        return from_table(table)


NOTHING = Given()


def _hint(data: object) -> str:
    """The end of the error: what may have been meant."""
    if isinstance(data, str | Path):
        return ": files and data sets by name are settings, data.path and data.name"
    if isinstance(data, DataLoader):
        return ": give the loader's data set, data=loader.dataset"
    if hasattr(data, "to_numpy"):  # a table of pandas, say
        return ": give its columns, data=(table[features].to_numpy(), table[label].to_numpy())"
    return ""


def _table(algorithm: AlgorithmLike) -> dict[str, Any]:
    """An algorithm as a table of a config."""
    if isinstance(algorithm, str):
        return {"name": algorithm}
    if isinstance(algorithm, Mapping):
        return dict(algorithm)
    if isinstance(algorithm, type):
        name = algorithm.__name__
        try:
            algorithm = algorithm()
        except TypeError as error:
            raise ConfigError(f"the algorithm {name} cannot be made without settings: {error}") from None
    if not isinstance(algorithm, FedAvg):
        raise ConfigError(
            f"an algorithm is a name, a table or something that derives from cwfed.FedAvg, not {algorithm!r}"
        )
    for part in (algorithm, *(getattr(algorithm, f.name) for f in fields(algorithm))):
        if isinstance(part, FedAvg) and ":" in algorithms.name_of(part):
            plugins.give(type(part))
    return algorithms.describe(algorithm, algorithms.name_of(algorithm))


def _model(model: ModelLike) -> str:
    """The name of a model."""
    if isinstance(model, str):
        return model
    if isinstance(model, nn.Module):
        return plugins.give(_Copies(model), type(model).__name__)
    if not hasattr(model, "__qualname__"):
        raise ConfigError(f"a model is a name, a torch.nn.Module or a function of (shape, classes), not {model!r}")
    return plugins.give(model)


class _Copies:
    """A model function that returns copies of one module, with its weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, shape: InputShape, classes: int) -> nn.Module:
        return copy.deepcopy(self.module)
