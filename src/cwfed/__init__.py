"""cwfed: personalised federated learning around class-wise federated averaging.

import cwfed

config = cwfed.load_config(settings=["train.rounds=30", "train.lr=0.05"])
summary = cwfed.run(config, out="runs/first")
model = cwfed.load_model("runs/first", client=3)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cwfed.algorithms import CwFedAvg, FedAvg
    from cwfed.core.errors import CwfedError
    from cwfed.core.metrics import Metric
    from cwfed.core.types import Batch, Download, Form, Loss, Output, Pass, Start, Task, Uploads
    from cwfed.data import Dataset
    from cwfed.federation.config import Config
    from cwfed.federation.config import load as load_config
    from cwfed.federation.simulation import Simulation
    from cwfed.models import attach, holder
    from cwfed.runs.predict import PersonalModel, load_model
    from cwfed.runs.session import run

_PUBLIC = {
    "Batch": ("cwfed.core.types", "Batch"),
    "Config": ("cwfed.federation.config", "Config"),
    "CwFedAvg": ("cwfed.algorithms", "CwFedAvg"),
    "CwfedError": ("cwfed.core.errors", "CwfedError"),
    "Dataset": ("cwfed.data", "Dataset"),
    "Download": ("cwfed.core.types", "Download"),
    "FedAvg": ("cwfed.algorithms", "FedAvg"),
    "Form": ("cwfed.core.types", "Form"),
    "Loss": ("cwfed.core.types", "Loss"),
    "Metric": ("cwfed.core.metrics", "Metric"),
    "Output": ("cwfed.core.types", "Output"),
    "Pass": ("cwfed.core.types", "Pass"),
    "PersonalModel": ("cwfed.runs.predict", "PersonalModel"),
    "Simulation": ("cwfed.federation.simulation", "Simulation"),
    "Start": ("cwfed.core.types", "Start"),
    "Task": ("cwfed.core.types", "Task"),
    "Uploads": ("cwfed.core.types", "Uploads"),
    "attach": ("cwfed.models", "attach"),
    "holder": ("cwfed.models", "holder"),
    "load_config": ("cwfed.federation.config", "load"),
    "load_model": ("cwfed.runs.predict", "load_model"),
    "run": ("cwfed.runs.session", "run"),
}

__all__ = [
    "Batch",
    "Config",
    "CwFedAvg",
    "CwfedError",
    "Dataset",
    "Download",
    "FedAvg",
    "Form",
    "Loss",
    "Metric",
    "Output",
    "Pass",
    "PersonalModel",
    "Simulation",
    "Start",
    "Task",
    "Uploads",
    "attach",
    "holder",
    "load_config",
    "load_model",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `cwfed --help` need not wait for torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'cwfed' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
