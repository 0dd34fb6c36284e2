"""A whole federation on this machine, for trying it out: a SuperLink and SuperNodes as real processes, with TLS and a key for each node.

`cwfed flower up` runs it. All of its files are in one folder: data/client-000 (what only that node reads),
state/client-000 (what that client keeps), server (the run folder), keys, app (the Flower project), logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cwfed import data
from cwfed.core.errors import RunError
from cwfed.core.events import Event, from_json
from cwfed.federation.config import Config
from cwfed.federation.experiment import deal
from cwfed.federation.settings import flat
from cwfed.flower import keys, programs
from cwfed.flower.plan import FederationSection, Plan
from cwfed.flower.programs import Programs, free_port, supernode, written
from cwfed.flower.project import read_plan, with_most_samples, write_project

LOOK_EVERY, LOOK_AT_THE_END = 20.0, 1.0
"""Seconds after the last event or query until the state of the run is queried, which starts a process of Flower that takes a core for two
seconds; the second one applies when the server has written its summary."""


def node_name(number: int) -> str:
    """The name of a trial federation's node, and of its folders."""
    return f"client-{number:03d}"


def _fitted(config: Config, nodes: int) -> Config:
    """The settings of a trial: one client per node, and a checkpoint in every round."""
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"clients": nodes}),
            "run": config.run.model_copy(update={"checkpoint_seconds": 0.0}),
        }
    )


@dataclass
class LocalFederation(Programs):
    """The processes of a trial federation and their folder."""

    plan: Plan
    connection = "trial"
    port: int = field(default_factory=free_port)
    """The port of the SuperLink."""
    door: int = field(default_factory=free_port)
    """The port of the gate, to which the nodes connect."""

    @classmethod
    def prepare(
        cls, folder: Path, config: Config, nodes: int, data_dir: str | None = None, **federation: object
    ) -> LocalFederation:
        """Deal the data out to the nodes, make keys, and write the app."""
        folder = folder.resolve()
        if (folder / "app").exists():
            raise RunError(f"{folder} holds a federation already: choose another folder, or remove it")
        config = _fitted(config, nodes)
        shares = deal(config, data_dir)
        shape = shares.shape
        section = FederationSection.model_validate(
            {
                "shape": "x".join(map(str, shape.dims)),
                "classes": shares.data.classes,
                "class_names": list(shares.data.class_names),
                "vocabulary": shape.vocabulary,
                "nodes": nodes,
                "pin": True,
                "wait": 300.0,  # after a restart, Flower may take former nodes for connected for a minute, and refuse their keys
                "out": str(folder / "server"),
                **federation,
            }
        )
        largest = max(len(shard.train) for shard in shares.shards.values())
        plan = Plan(with_most_samples(config, 2 * largest), section).guarded()
        plan.blueprint.check(shares)
        data.export(shares, folder / "data")
        keys.certificates(folder / "keys")
        for number in range(nodes):
            keys.node_key(folder / "keys", node_name(number))
        write_project(folder / "app", plan, "federation")
        made = cls(folder, plan)
        made._configure_flower()
        return made

    @classmethod
    def open(cls, folder: Path) -> LocalFederation:
        """A federation that was prepared before."""
        folder = folder.resolve()
        made = cls(folder, read_plan(folder / "app"))
        made._configure_flower()
        return made

    def check_same(self, config: Config | None, nodes: int | None, timeout: float | None) -> None:
        """RunError if a prepared federation is asked for with other settings; None: not asked."""
        made = self.plan.federation
        there, here = flat(self.plan.config.model_dump()), {}
        if config is not None:
            here = flat(_fitted(config, made.nodes).model_dump())
            for key in {"norm_bound", "most_samples"} - config.guard.model_fields_set:
                del here[f"guard.{key}"]  # a federation has defaults of its own
        there |= {"--nodes": made.nodes, "--timeout": made.timeout}
        here |= {key: value for key, value in (("--nodes", nodes), ("--timeout", timeout)) if value is not None}
        for key, value in here.items():
            if there.get(key) != value:
                raise RunError(
                    f"{self.folder} holds a federation with its own settings: {key} is {there.get(key)!r} there and "
                    f"{value!r} here; leave it out to go on, or choose another folder"
                )

    def _configure_flower(self) -> None:
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.connect_to(self.port, self.folder / "keys" / "ca.crt")

    # --- processes

    def start_superlink(self) -> None:
        """Start the SuperLink and the gate; returns when both answer."""
        self.run_superlink(self.port, self.folder / "keys")
        self.run_gate(f"127.0.0.1:{self.door}", self.port, self.folder / "keys", self.folder / "signatures")
        until = time.monotonic() + programs.STARTS_WITHIN
        for name, port in (("superlink", self.port), ("gate", self.door)):
            while not programs.answers(port):
                if self.processes[name].poll() is not None or time.monotonic() > until:
                    raise RunError(f"the {name} did not start: see {self.folder / 'logs' / name}.log")
                time.sleep(0.2)

    def register(self, name: str) -> None:
        """Register a node's public key with the SuperLink, unless its database has it already."""
        try:
            self.register_key(self.folder / "keys" / f"{name}.pub")
        except RunError as error:
            if "already in use" not in str(error):
                raise

    def start_node(self, name: str, **node: str | int | bool) -> None:
        """Start a SuperNode with its own key and its own data."""
        about: dict[str, str | int | bool] = {
            "name": name,
            "path": str(self.folder / "data" / name),
            "state": str(self.folder / "state" / name),
            **node,
        }
        made = self.folder / "keys"
        helper = self.folder / "forks" / name
        self.start(name, *supernode(helper, f"127.0.0.1:{self.door}", made / "ca.crt", made / name, about))

    def submit(self) -> int:
        """Start the app; returns the number of the run."""
        return self.run_app(self.folder / "app")

    def follow(self, run: int, on_event: Callable[[Event], None]) -> str:
        """Report the events in the server's run folder until the run ends; returns what went wrong, or ""."""
        path, done = self.folder / "server" / "events.jsonl", 0
        summary = path.with_name("summary.json")
        before = written(summary)  # a run that is given more rounds has one already
        looked = time.monotonic()
        while True:
            status, details = "", ""
            if time.monotonic() - looked > (LOOK_EVERY if written(summary) == before else LOOK_AT_THE_END):
                (status, details), looked = self.status(run), time.monotonic()
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            done = min(done, len(lines))  # a resumed run cuts off what came after its last checkpoint
            for line in lines[done:]:
                if line.endswith("\n"):
                    on_event(from_json(line))
                    done, looked = done + 1, time.monotonic()
            self.revive()
            if status.startswith("finished"):
                return "" if status == "finished:completed" else f"{status.partition(':')[2]}: {details}"
            time.sleep(0.3)
