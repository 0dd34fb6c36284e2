"""cwfed: personalised federated learning around class-wise federated averaging.

import cwfed

config = cwfed.load_config(settings=["train.rounds=30", "train.lr=0.05"])
summary = cwfed.run(config, out="runs/first")
model = cwfed.load_model("runs/first", client=3)

The public names are those of `cwfed.api`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from cwfed.api import *  # noqa: F403 (the same names, for type checkers and editors)
else:

    def __getattr__(name: str) -> Any:
        """Import on first use: `cwfed --help` need not wait for torch."""
        is_module = (
            not name.startswith("_") and find_spec(f"cwfed.{name}") is not None
        )  # `from cwfed import data` asks here first
        if name.startswith("_") or is_module or name not in (api := import_module("cwfed.api")).__all__:
            raise AttributeError(f"module 'cwfed' has no attribute {name!r}")
        return getattr(api, name)


def __dir__() -> list[str]:
    return ["__version__", *import_module("cwfed.api").__all__]
