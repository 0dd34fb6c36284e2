"""A whole federation on this machine, to try it: a SuperLink and SuperNodes as real processes, TLS, a key a node.

`cwfed flower up` drives it. Everything it makes is in one folder: data/client-000 (what only that node reads),
state/client-000 (what that client keeps), server (the run folder), keys, app (the Flower project), logs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cwfed import data, files
from cwfed.config import Config
from cwfed.errors import RunError
from cwfed.events import Event, from_json
from cwfed.experiment import deal
from cwfed.flower import keys
from cwfed.flower.plan import FederationSection, Plan
from cwfed.flower.project import write_project
from cwfed.folder import flat

STARTS_WITHIN = 60.0
"""Seconds that Flower's processes may take to come up."""
ANSWERS_WITHIN = 120.0
"""Seconds that one of Flower's commands may take."""
ENDS_WITHIN = 10.0
MARK = "CWFED_TRIAL"
"""The environment variable by which processes of a trial are found again."""
LOOK_EVERY = 4.0
"""Seconds between two questions how a run is: each starts a process of Flower's."""


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def marked(mark: str) -> list[int]:
    """The processes that were started with this mark, and their children (Linux; elsewhere they end by themselves)."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def node_name(number: int) -> str:
    """The name of a trial federation's node, and of its folders."""
    return f"client-{number:03d}"


def _fitted(config: Config, nodes: int) -> Config:
    """The settings of a trial: a client is a node, and every round can be gone on from."""
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"clients": nodes}),
            "run": config.run.model_copy(update={"checkpoint_seconds": 0.0}),
        }
    )


@dataclass
class LocalFederation:
    """The processes of a trial federation and their folder."""

    folder: Path
    plan: Plan
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

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
                "out": str(folder / "server"),
                **federation,
            }
        )
        plan = Plan(config, section).guarded()
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
        try:
            table = tomllib.loads(files.read_text(folder / "app" / "pyproject.toml"))
            plan = Plan.of(flat(table["tool"]["flwr"]["app"]["config"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{folder} holds no federation of cwfed, or a damaged one ({error})") from None
        made = cls(folder, plan)
        made._configure_flower()
        return made

    def check_same(self, config: Config | None, nodes: int | None, timeout: float | None) -> None:
        """RunError where something is asked of a federation that it was not made with; None is not asked."""
        made = self.plan.federation
        there, here = flat(self.plan.config.model_dump()), {}
        if config is not None:
            here = flat(_fitted(config, made.nodes).model_dump())
        there |= {"--nodes": made.nodes, "--timeout": made.timeout}
        here |= {key: value for key, value in (("--nodes", nodes), ("--timeout", timeout)) if value is not None}
        for key, value in here.items():
            if there.get(key) != value:
                raise RunError(
                    f"{self.folder} holds a federation with its own settings: {key} is {there.get(key)!r} there and "
                    f"{value!r} here; leave it out to go on, or choose another folder"
                )

    def _configure_flower(self) -> None:
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        authority = self.folder / "keys" / "ca.crt"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "trial"\n\n[superlink.trial]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{authority}"\n'
        )

    # --- processes

    @property
    def environment(self) -> dict[str, str]:
        """For all of Flower's processes: a home of their own, and nothing sent anywhere."""
        return {
            **os.environ,
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A process in a group of its own, with a log of its own."""
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**self.environment, MARK: f"{self.folder}:{name}"},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def start_superlink(self) -> None:
        """The server's end of all connections; returns when it answers."""
        made = self.folder / "keys"
        self.start(
            "superlink",
            "flower-superlink",
            "--host=127.0.0.1",
            f"--port={self.port}",
            f"--ssl-certfile={made / 'server.crt'}",
            f"--ssl-keyfile={made / 'server.key'}",
            f"--ssl-ca-certfile={made / 'ca.crt'}",
            "--enable-supernode-auth",
            f"--database={self.folder / 'superlink.db'}",
            "--disable-runtime-dependency-installation",
        )
        until = time.monotonic() + STARTS_WITHIN
        while True:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.processes["superlink"].poll() is not None or time.monotonic() > until:
                raise RunError(f"the SuperLink did not start: see {self.folder / 'logs' / 'superlink.log'}")
            time.sleep(0.2)

    def register(self, name: str) -> None:
        """Let the SuperLink know a node's public key; its database may know it from before."""
        try:
            self.flwr("supernode", "register", str(self.folder / "keys" / f"{name}.pub"), "trial")
        except RunError as error:
            if "already in use" not in str(error):
                raise

    def start_node(self, name: str, **node: str | int | bool) -> None:
        """A SuperNode with its own key and its own data."""
        about: dict[str, str | int | bool] = {
            "name": name,
            "path": str(self.folder / "data" / name),
            "state": str(self.folder / "state" / name),
            **node,
        }
        self.start(
            name,
            "flower-supernode",
            f"--superlink=127.0.0.1:{self.port}",
            f"--root-certificates={self.folder / 'keys' / 'ca.crt'}",
            f"--auth-supernode-private-key={self.folder / 'keys' / name}",
            "--host=127.0.0.1",
            f"--port={free_port()}",
            "--node-config=" + " ".join(f"{key}={json.dumps(value)}" for key, value in about.items()),
        )

    def flwr(self, *command: str) -> str:
        """One of Flower's own commands; its output."""
        try:
            done = subprocess.run(
                ["flwr", *command],
                env=self.environment,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=ANSWERS_WITHIN,
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"flwr {' '.join(command[:2])} did not answer within {ANSWERS_WITHIN:g} seconds") from None
        if done.returncode:
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise RunError(f"flwr {' '.join(command[:2])} failed: {' '.join(said[-3:])}")
        return done.stdout

    def submit(self) -> int:
        """Start the app; the run's number."""
        answer = json.loads(self.flwr("run", str(self.folder / "app"), "trial", "--format=json"))
        if not answer.get("success"):
            raise RunError(f"flwr run failed: {answer.get('error-message', answer)}")
        return int(answer["run-id"])

    def status(self, run: int) -> tuple[str, str]:
        """pending, starting, running, or finished:completed, finished:failed, finished:stopped; and the details."""
        answer = json.loads(self.flwr("ls", f"--run-id={run}", "--format=json", "trial"))["runs"][0]
        return str(answer["status"]), str(answer.get("status-details", ""))

    def follow(self, run: int, on_event: Callable[[Event], None]) -> str:
        """Tell what happens in the server's run folder until the run ends; what went wrong, "" if nothing did."""
        path, done = self.folder / "server" / "events.jsonl", 0
        looked = time.monotonic()
        while True:
            status, details = "", ""
            if time.monotonic() - looked > LOOK_EVERY:
                (status, details), looked = self.status(run), time.monotonic()
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            done = min(done, len(lines))  # a resumed run cuts off what came after its last checkpoint
            for line in lines[done:]:
                if line.endswith("\n"):
                    on_event(from_json(line))
                    done += 1
            if status.startswith("finished"):
                return "" if status == "finished:completed" else f"{status.partition(':')[2]}: {details}"
            time.sleep(0.3)

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a process and what it started."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        self._tell(process, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if how == signal.SIGKILL else ENDS_WITHIN)
        self._tell(process, signal.SIGKILL)
        process.wait()
        for number in marked(f"{self.folder}:{name}"):  # Flower's own children have sessions of their own
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def _tell(self, process: subprocess.Popen[bytes], what: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, what)

    def close(self) -> None:
        """End everything, nodes first and all at once."""
        for name, process in self.processes.items():
            if name != "superlink":
                self._tell(process, signal.SIGTERM)
        for name in sorted(self.processes, key=lambda name: name == "superlink"):
            self.end(name)
