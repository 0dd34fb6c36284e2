"""The public names of cwfed: `import cwfed` has these, and they keep their meaning from version to version.

All else is for those who change cwfed itself. `cwfed.testing` and `cwfed.flower` are imported by their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cwfed.algorithms import ClientData, CwFedAvg, FedAvg
from cwfed.core import losses, mixing
from cwfed.core.errors import ConfigError, CwfedError, did_you_mean
from cwfed.core.events import Event, Newcomers, Note, PhaseResult, Round, Started
from cwfed.core.metrics import Metric
from cwfed.core.shape import InputShape
from cwfed.core.types import (
    Batch,
    Cost,
    Download,
    Form,
    Loss,
    Network,
    Output,
    Params,
    Pass,
    Sizes,
    Start,
    Task,
    Uploads,
)
from cwfed.data import Dataset, load
from cwfed.federation.config import Config
from cwfed.federation.config import load as load_config
from cwfed.federation.simulation import Simulation
from cwfed.models import attach, holder
from cwfed.runs import session
from cwfed.runs.predict import PersonalModel, load_model
from cwfed.runs.summary import Summary

__all__ = [
    "Batch",
    "ClientData",
    "Config",
    "Cost",
    "CwFedAvg",
    "CwfedError",
    "Dataset",
    "Download",
    "Event",
    "FedAvg",
    "Form",
    "InputShape",
    "Loss",
    "Metric",
    "Network",
    "Newcomers",
    "Note",
    "Output",
    "Params",
    "Pass",
    "PersonalModel",
    "PhaseResult",
    "Round",
    "Simulation",
    "Sizes",
    "Start",
    "Started",
    "Summary",
    "Task",
    "Uploads",
    "attach",
    "holder",
    "load_config",
    "load_data",
    "load_model",
    "losses",
    "mixing",
    "run",
]


def run(
    config: Config | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_dir: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    track: Sequence[str] = (),
    backend: str = "simulator",
) -> Summary:
    """Carry out an experiment and give its summary; with `out`, leave a run folder there.

    Arguments:
        config: the experiment; nested dicts, such as {"train": {"rounds": 20}}, will do. Default: the digits experiment.
        out: the run's folder. Default: none, the run leaves nothing on disk.
        resume: continue the run in `out` after its last checkpoint, or start it where there is none; a finished run is
            only read. `config` may then be left out.
        data_dir: a folder with the data sets' files, see docs/data.md. Default: the environment's CWFED_DATA.
        on_event: called with everything that happens.
        track: who follows a run with a folder live: tensorboard, wandb, mlflow.
        backend: "simulator", in this process, or "flower", the same experiment through Flower's simulation engine on Ray.

    Returns:
        The summary: what summary.json says.

    Errors:
        CwfedError, one sentence: a setting that is not possible, data that are not there, a folder that holds another run.

    Example:
        >>> import cwfed
        >>> summary = cwfed.run({"train": {"rounds": 1, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> summary.rounds, summary.clients
        (1, 5)
    """
    if backend not in ("simulator", "flower"):
        raise ConfigError(f"unknown backend {backend!r}: {did_you_mean(backend, ('simulator', 'flower'))}")
    carried_out_by = None
    if backend == "flower":
        from cwfed.flower.ray_backend import on_flower

        carried_out_by = partial(on_flower, data_dir)
    return session.run(
        config, out, resume=resume, data_dir=data_dir, on_event=on_event, track=track, backend=carried_out_by
    )


def load_data(data: str | Config = "digits", data_dir: str | Path | None = None) -> Dataset:
    """A data set by its name, or that of an experiment: inputs, labels, names of the classes.

    >>> import cwfed
    >>> cwfed.load_data("digits").inputs.shape
    (1797, 8, 8, 1)
    """
    config = data if isinstance(data, Config) else load_config(settings=[f"data.name={data}"])
    return load(config.data.source(), data_dir)
