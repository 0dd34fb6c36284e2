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
    from cwfed.config import Config
    from cwfed.config import load as load_config
    from cwfed.data import Dataset
    from cwfed.errors import CwfedError
    from cwfed.metrics import Metric
    from cwfed.models import attach, holder
    from cwfed.predict import PersonalModel, load_model
    from cwfed.session import run
    from cwfed.simulation import Simulation
    from cwfed.types import Batch, Download, Form, Loss, Output, Pass, Start, Task, Uploads

_PUBLIC = {
    "Batch": ("cwfed.types", "Batch"),
    "Config": ("cwfed.config", "Config"),
    "CwFedAvg": ("cwfed.algorithms", "CwFedAvg"),
    "CwfedError": ("cwfed.errors", "CwfedError"),
    "Dataset": ("cwfed.data", "Dataset"),
    "Download": ("cwfed.types", "Download"),
    "FedAvg": ("cwfed.algorithms", "FedAvg"),
    "Form": ("cwfed.types", "Form"),
    "Loss": ("cwfed.types", "Loss"),
    "Metric": ("cwfed.metrics", "Metric"),
    "Output": ("cwfed.types", "Output"),
    "Pass": ("cwfed.types", "Pass"),
    "PersonalModel": ("cwfed.predict", "PersonalModel"),
    "Simulation": ("cwfed.simulation", "Simulation"),
    "Start": ("cwfed.types", "Start"),
    "Task": ("cwfed.types", "Task"),
    "Uploads": ("cwfed.types", "Uploads"),
    "attach": ("cwfed.models", "attach"),
    "holder": ("cwfed.models", "holder"),
    "load_config": ("cwfed.config", "load"),
    "load_model": ("cwfed.predict", "load_model"),
    "run": ("cwfed.session", "run"),
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
