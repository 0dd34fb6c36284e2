"""`cwfed run --backend flower`: an experiment through Flower's simulation engine, on Ray.

Ray's actors do the clients' work, on this machine or on the cluster that RAY_ADDRESS names; each prepares the experiment once. The server
is the same strategy as in a real federation. What reports need beyond what a server can see (the true class distributions, the portrait at
the end) is added here, where all data are.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

from cwfed.core.events import Event, Newcomers, Round, Started
from cwfed.core.types import Params
from cwfed.engine import cores
from cwfed.federation.config import Config, from_table
from cwfed.federation.experiment import Experiment
from cwfed.federation.rounds import FinalModels, Progress, is_over
from cwfed.federation.simulation import Simulation
from cwfed.flower.client import WorkerOf, make_app
from cwfed.flower.envelopes import EnvelopePost, answer
from cwfed.flower.numbers import lend
from cwfed.flower.plan import FederationSection, Plan
from cwfed.flower.server import FederatedRun
from cwfed.flower.site import Site
from cwfed.flower.strategy import PersonalisedStrategy, accepted_in
from cwfed.flower.work import KEPT, Worker
from cwfed.runs.backend import Runner
from cwfed.runs.checkpoint import Checkpoints
from cwfed.runs.result import Result

RESOURCES: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0}
"""The resources of an actor."""


class SimulatedRun(FederatedRun):
    """A federation in which the clients' data are in this process too."""

    def __init__(self, simulation: Simulation, strategy: PersonalisedStrategy, grid: Grid, state: Path) -> None:
        super().__init__(strategy, grid)
        self.simulation, self.notes, self._state = simulation, simulation.notes, state

    def started(self) -> Started:
        return replace(self.simulation.started(), engine="flower: clients on Ray, one at a time each")

    def manifest(self) -> dict[str, Any]:
        facts = self.simulation.manifest()
        return facts | {"engine": facts["engine"] | {"name": "flower", "workers": cores(), "why": ""}}

    def rounds(self, progress: Progress) -> Iterator[tuple[Progress, Event]]:
        for reached, event in super().rounds(progress):
            if isinstance(event, Round):  # notes about virtual nodes that join are left out
                yield reached, self._completed(reached, event)

    def _completed(self, after: Progress, event: Round) -> Round:
        """The event completed by what needs all data."""
        phases = {
            phase: replace(found, clients=None, samples=None)
            for phase in ("received", "trained")
            if (found := getattr(event, phase)) is not None
        }
        up, event = self.strategy.opened.closed.uploads, replace(event, **phases)
        models = up.models | self._not_uploaded(after, up.clients) if up else {}
        if is_over(self.config, after):
            after = self.complete(after)
        event = self.simulation.with_all_data(event, after, up, models, self.strategy.sent)
        return replace(event, seconds=self.strategy.opened.clock.laps("report"))

    def _not_uploaded(self, after: Progress, clients: Sequence[int]) -> Params:
        """The tensors of the participants' models that are not uploaded: as kept by the clients, or as sent if they do not train them."""
        names = [name for name in self.simulation.initial if name not in self.strategy.blueprint.guard.model]
        if not names:
            return {}
        kept, sent = self.complete(after).kept, self.strategy.sent
        whole = [(sent[c].models[0] if sent[c].models else {}) | kept.get(c, {}) for c in clients]
        return {name: torch.stack([model[name] for model in whole]) for name in names}

    def complete(self, progress: Progress) -> Progress:
        """Progress with what the clients keep, read from their folders."""
        kept = {}
        if self.simulation.keeps_any:
            for client in range(self.simulation.clients):
                last = accepted_in(progress).get(client, 0)
                tree, _ = Checkpoints(client_folder(self._state, client), KEPT).newest(before=last + 1)
                if tree:
                    kept[client] = tree["kept"]
        return replace(progress, kept=kept)

    def welcome(self, progress: Progress) -> Newcomers | None:
        return self.simulation.welcome(progress)

    def final_models(self, progress: Progress) -> FinalModels:
        return self.simulation.final_models(progress)

    def close(self) -> None:
        self.simulation.close()


def client_folder(state: Path, client: int) -> Path:
    """The folder of a simulated client's state."""
    return state / f"client-{client:05d}"


def on_flower(data_dir: str | None, config: Config, out: Path | None, use: Callable[[Runner], Result]) -> Result:
    """Make a runner on Flower's simulation engine, and call `use` with it."""
    simulation = Simulation(_plainly(config), data_dir)  # first of all: a wrong setting is an error before Ray starts
    folder = str(Path(data_dir).resolve()) if data_dir else os.environ.get("CWFED_DATA")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="cwfed-") as scratch:
        state = (out.resolve() / "clients") if out else Path(scratch)
        plan = Plan(config, _section(simulation))
        post = EnvelopePost(plan.federation, workers)
        strategy = PersonalisedStrategy(
            plan, trains=simulation.members, measured=simulation.evaluated, pack=post.pack, post=post
        )
        outcome: Future[Result] = Future()
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            try:
                post.listen(grid)
                outcome.set_result(use(SimulatedRun(simulation, strategy, grid, state)))
            except (
                BaseException
            ) as error:  # this thread is Flower's: the error is raised in the thread that waits for the outcome
                outcome.set_exception(error)

        try:
            run_simulation(
                server_app=server,
                client_app=SimulatedApp(config.model_dump_json(), folder, str(state)),
                num_supernodes=simulation.clients,
                backend_config={"client_resources": RESOURCES, "init_args": _ray(config)},
            )
        finally:
            strategy.stop.set()
        return outcome.result()


def _ray(config: Config) -> dict[str, Any]:
    """The arguments with which Ray is started; RAY_ADDRESS names an existing cluster."""
    if "RAY_ADDRESS" in os.environ:
        return {"log_to_driver": False}
    return {"num_cpus": config.run.workers or cores(), "log_to_driver": False}


def _plainly(config: Config) -> Config:
    """The config with the plain loop: the server's part (portrait, final models) needs no fast engine."""
    return config.but(engine="loop")


def _section(simulation: Simulation) -> FederationSection:
    shape = simulation.federation.shape
    return FederationSection(
        shape="x".join(map(str, shape.dims)),
        classes=simulation.task.classes,
        vocabulary=shape.vocabulary,
        nodes=simulation.clients,
        clients=simulation.clients,
        keep="never",
        pin=False,  # virtual nodes have no keys
        timeout=24 * 3600,
    )


def workers() -> int:
    """The number of actors that Flower has made."""
    return pool_size_from_resources(RESOURCES)


class SimulatedApp(ClientApp):
    """The clients' app, pickled as the texts from which it is made. It goes with every message to one of Ray's actors; pickling its functions,
    with their code, would cost more than the model.
    """

    def __init__(self, config: str, data_dir: str | None, state: str) -> None:
        super().__init__()
        self._made_of = config, data_dir, state

    def __call__(self, message: Message, context: Context) -> Message:
        return answer(_app(*self._made_of), message, context)


@cache
def _app(config: str, data_dir: str | None, state: str) -> ClientApp:
    return make_app(partial(_simulated, config, data_dir, state), ())


@cache
def _worker(config: str, data_dir: str | None, state: str) -> Worker:
    """The worker for all clients, made once in each of Ray's actors."""
    experiment = Experiment(from_table(json.loads(config)), data_dir)
    return Worker(experiment, experiment.federation, partial(client_folder, Path(state)), tell_sums=True, pack=lend)


def _simulated(config: str, data_dir: str | None, state: str, context: Context) -> tuple[Site, WorkerOf]:
    """A virtual node: the client with the number of its partition."""
    worker = _worker(config, data_dir, state)
    return Site(str(context.node_config["partition-id"]), worker.federation.data), lambda *_: worker
