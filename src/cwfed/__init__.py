"""cwfed: personalised federated learning around class-wise federated averaging.

    import cwfed

    result = cwfed.run({"train": {"rounds": 30, "lr": 0.05}})       # the digits experiment, in memory
    result.accuracy.received.best                                   # the summary, typed
    result.history.to_pandas()                                      # one row per round and phase
    result.client_table()                                           # one row per client and phase
    result.models[3].predict(images)                                # a client's personal model

run an experiment       run, rounds (one at a time), deal (who holds what), StopRun
its settings            load_config, Config
data                    Dataset (from_arrays, from_torch, from_clients), load_data, Federation, Shard
what comes out          Result, Summary, Table, HistoryRow, ClientRow, load_model, PersonalModel,
                        colour (of a method, for pictures of your own)
what happens            Event: Started, Round (with a PhaseResult per phase), Newcomers, Note
write a method          FedAvg, CwFedAvg, Task, Download, Uploads, Start, Pass, Batch, Loss, Output, ClientData, ExtraSpec, Params,
                        Network, Sizes, Cost, attach, holder, losses, mixing; check it with cwfed.testing
write a model, metric   InputShape, Metric
errors                  CwfedError: one sentence that says what is wrong and what to do

docs/python.md is the page about all of this; `cwfed --help` is the command line.
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
        if name == "__all__":  # for help(cwfed) and `from cwfed import *`
            return ["__version__", *import_module("cwfed.api").__all__]
        is_module = (
            not name.startswith("_") and find_spec(f"cwfed.{name}") is not None
        )  # `from cwfed import data` asks here first
        if name.startswith("_") or is_module or name not in (api := import_module("cwfed.api")).__all__:
            raise AttributeError(f"module 'cwfed' has no attribute {name!r}")
        return getattr(api, name)


def __dir__() -> list[str]:
    return ["__version__", *import_module("cwfed.api").__all__]
