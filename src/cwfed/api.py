"""The public names of cwfed: `import cwfed` has these, and they keep their meaning from version to version.

All else is for those who change cwfed itself. `cwfed.testing` and `cwfed.flower` are imported by their own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cwfed.algorithms import ClientData, CwFedAvg, FedAvg
from cwfed.core import losses, mixing
from cwfed.core.errors import ConfigError, CwfedError, StopRun, did_you_mean
from cwfed.core.events import Event, Newcomers, Note, PhaseResult, Round, Started
from cwfed.core.metrics import Metric
from cwfed.core.shape import InputShape
from cwfed.core.types import (
    Batch,
    Cost,
    Download,
    ExtraSpec,
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
from cwfed.data import Dataset, Federation, Shard, load
from cwfed.federation import experiment
from cwfed.federation.config import Config
from cwfed.federation.config import load as load_config
from cwfed.federation.given import AlgorithmLike, Data, Given, ModelLike
from cwfed.federation.simulation import Simulation
from cwfed.models import attach, holder
from cwfed.report.style import colour
from cwfed.runs import session
from cwfed.runs.bars import Listener, watching
from cwfed.runs.history import ClientRow, HistoryRow, Table
from cwfed.runs.predict import PersonalModel, load_model
from cwfed.runs.result import Result
from cwfed.runs.stepping import Rounds
from cwfed.runs.summary import Summary

__all__ = [
    "Batch",
    "ClientData",
    "ClientRow",
    "Config",
    "Cost",
    "CwFedAvg",
    "CwfedError",
    "Dataset",
    "Download",
    "Event",
    "ExtraSpec",
    "FedAvg",
    "Federation",
    "HistoryRow",
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
    "Result",
    "Round",
    "Rounds",
    "Shard",
    "Simulation",
    "Sizes",
    "Start",
    "Started",
    "StopRun",
    "Summary",
    "Table",
    "Task",
    "Uploads",
    "attach",
    "colour",
    "deal",
    "holder",
    "load_config",
    "load_data",
    "load_model",
    "losses",
    "mixing",
    "rounds",
    "run",
]


def run(
    config: Config | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    data: Data | None = None,
    algorithm: AlgorithmLike | None = None,
    model: ModelLike | None = None,
    resume: bool = False,
    data_dir: str | None = None,
    on_event: Listener | Sequence[Listener] = (),
    progress: bool | None = None,
    track: Sequence[str] = (),
    backend: str = "simulator",
) -> Result:
    """Carry out an experiment and give its result; with `out`, leave a run folder there.

    Arguments:
        config: the experiment; nested dicts, such as {"train": {"rounds": 20}}, will do. Default: the digits experiment.
        out: the run's folder. Default: none, the run leaves nothing on disk.
        data: data in memory in place of those that the config names: a `cwfed.Dataset`, a pair (inputs, labels), or a data set of
            torch. They are dealt out as the config says, unless they come split (`Dataset.from_clients`).
        algorithm: in place of the config's: an object such as `Mine(strength=2.0)`, its class, a name, or a table.
        model: in place of the config's: a function of (shape, classes), a torch.nn.Module (which begins with the weights it has), or
            a name. Its attribute `output_layer` names its last linear layer.
        resume: continue the run in `out` after its last checkpoint, or start it where there is none; a finished run is
            only read. `config` may then be left out; objects are given again.
        data_dir: a folder with the data sets' files, see docs/data.md. Default: the environment's CWFED_DATA.
        on_event: a listener, or several: each is called with everything that happens (`cwfed.Started`, `Round`, `Newcomers`, `Note`).
            One that raises `cwfed.StopRun` ends the run after this round.
        progress: a progress bar. Default: in a terminal and in a notebook; False: never; True: elsewhere too, as lines.
        track: who follows a run with a folder live: tensorboard, wandb, mlflow.
        backend: "simulator", in this process, or "flower", the same experiment through Flower's simulation engine on Ray.

    Returns:
        The result: the summary (`result.accuracy.received.best`, what summary.json says) with `history`, `client_table()`, `models`.

    Errors:
        CwfedError, one sentence: a setting that is not possible, data that are not there, a folder that holds another run.

    Examples:
        >>> import cwfed
        >>> result = cwfed.run({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> result.rounds, result.clients, len(result.history)
        (2, 5, 4)
    """
    if backend not in ("simulator", "flower"):
        raise ConfigError(f"unknown backend {backend!r}: {did_you_mean(backend, ('simulator', 'flower'))}")
    carried_out_by = None
    if backend == "flower":
        from cwfed.flower.ray_backend import on_flower

        carried_out_by = partial(on_flower, data_dir)
    with watching(progress) as shown:
        return session.run(
            config,
            out,
            resume=resume,
            data_dir=data_dir,
            on_event=_together(shown, on_event),
            track=track,
            backend=carried_out_by,
            given=Given(data, algorithm, model),
        )


def rounds(
    config: Config | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    data: Data | None = None,
    algorithm: AlgorithmLike | None = None,
    model: ModelLike | None = None,
    resume: bool = False,
    data_dir: str | None = None,
    on_event: Listener | Sequence[Listener] = (),
    progress: bool | None = False,
    track: Sequence[str] = (),
) -> Rounds:
    """The same experiment, round by round: each is carried out when the loop asks for it.

    Arguments:
        config: as for `cwfed.run`.
        out: as for `cwfed.run`.
        data: as for `cwfed.run`.
        algorithm: as for `cwfed.run`.
        model: as for `cwfed.run`.
        resume: as for `cwfed.run`.
        data_dir: as for `cwfed.run`.
        on_event: as for `cwfed.run`.
        progress: as there, but off unless it is asked for.
        track: as for `cwfed.run`.

    Returns:
        An iterator over `cwfed.Round`s; its `result()` gives the result of the rounds that are done. Leave the loop whenever you like.

    Errors:
        as those of `cwfed.run`, when the first round is asked for.

    Examples:
        >>> import cwfed
        >>> rounds = cwfed.rounds({"train": {"rounds": 9, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> for event in rounds:
        ...     if event.round == 2:
        ...         break
        >>> rounds.result().rounds
        2
    """
    given, shown = Given(data, algorithm, model), list[Listener]()

    def carried_out() -> session.Steps:
        with watching(progress) as bar:  # it ends with the run, however that ends
            shown.append(bar)
            made = session.steps(config, out, resume=resume, data_dir=data_dir, track=track, given=given)
            return (yield from made)

    return Rounds(carried_out(), lambda event: _together(*shown, on_event)(event))


def _together(*listeners: Listener | Sequence[Listener]) -> Listener:
    """Several listeners as one; what one is told, the next one is too."""
    every = [one for given in listeners for one in (given if isinstance(given, Sequence) else [given])]
    if wrong := [one for one in every if not callable(one)]:
        raise ConfigError(f"on_event takes a function of one event, or several of them, not {wrong[0]!r}")

    def tell(event: Event) -> None:
        for listener in every:
            listener(event)

    return tell


def deal(
    config: Config | Mapping[str, Any] | None = None, *, data: Data | None = None, data_dir: str | None = None
) -> Federation:
    """Who holds what: the data of an experiment, dealt out to its clients.

    Arguments:
        config: the experiment. Default: the digits experiment.
        data: data in memory, as for `cwfed.run`.
        data_dir: a folder with the data sets' files. Default: the environment's CWFED_DATA.

    Returns:
        The clients' shares: `shards[3].train` are the sample numbers that client 3 trains on, `histogram()` is clients x classes.

    Errors:
        CwfedError, one sentence: data that are not there, a partition that is not possible.

    Examples:
        >>> import cwfed
        >>> cwfed.deal({"data": {"clients": 3, "partition": "iid"}}).histogram().sum(1).tolist()
        [599, 599, 599]
    """
    given = Given(data)
    chosen = config if isinstance(config, Config) else session.as_config(config) or Config()
    return experiment.deal(given.named_in(chosen), data_dir, given.dataset)


def load_data(data: str | Config = "digits", data_dir: str | Path | None = None) -> Dataset:
    """A data set by its name, or that of an experiment: inputs, labels, names of the classes.

    Arguments:
        data: a name, such as "cifar10", or a config.
        data_dir: a folder with the data sets' files. Default: the environment's CWFED_DATA.

    Returns:
        The data set.

    Errors:
        CwfedError, one sentence: an unknown name, data that are not there.

    Examples:
        >>> import cwfed
        >>> cwfed.load_data("digits").inputs.shape
        (1797, 8, 8, 1)
    """
    config = data if isinstance(data, Config) else load_config(settings=[f"data.name={data}"])
    return load(config.data.source(), data_dir)
