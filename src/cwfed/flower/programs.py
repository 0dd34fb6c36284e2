"""Runs Flower's programs as processes: starts them, restarts them when they die, and ends them with everything that they started.

It is used for a trial on one machine (`local.py`), and for the server and the nodes of a real federation (`service.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cwfed.core.errors import RunError
from cwfed.flower import bell

STARTS_WITHIN = 60.0
"""Seconds that Flower's processes may take to come up."""
ANSWERS_WITHIN = 120.0
"""Seconds that one of Flower's commands may take."""
ENDS_WITHIN = 30.0
"""Seconds that a process may take to end: a node that is killed before it has signed off still counts as connected."""
SOONEST, LATEST = 5.0, 15.0
"""Seconds until a program that has ended is started again: the first time, and the most; they double every time."""
STAYS = 60.0
"""Seconds after which a program counts as running."""
MODULE = (sys.executable, "-P", "-m")
"""Starts a module; nothing is imported from the folder in which it is started."""
MARK = "CWFED_TRIAL"
"""The environment variable by which the processes of a folder are found again."""


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Whether a process listens on this port of the loopback."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def written(path: Path) -> int:
    """When a file was last written; 0 if it does not exist."""
    return path.stat().st_mtime_ns if path.exists() else 0


def marked(mark: str) -> list[int]:
    """The processes that were started with this mark, and their children (Linux; elsewhere they end by themselves)."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


@dataclass
class Programs:
    """The programs of a folder, by name."""

    folder: Path
    connection: ClassVar[str] = "server"
    """What Flower's commands call the SuperLink."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)
    logs: Path | None = field(default=None, init=False)
    """The folder in which every program has a log; None: they write to the output of this process."""
    _commands: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)
    _started: dict[str, float] = field(default_factory=dict, init=False)
    _pauses: dict[str, float] = field(default_factory=dict, init=False)

    @property
    def home(self) -> Path:
        """Flower's own folder, with the address of the SuperLink."""
        return self.folder / "flwr"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of Flower's processes: a home of their own, and no reports to anybody."""
        return {
            **os.environ,
            "FLWR_HOME": str(self.home),
            bell.FOLDER: str(self.folder / "bells"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }

    def connect_to(self, port: int, authority: Path) -> None:
        """Tell Flower's commands where the SuperLink is; otherwise they would start one of their own."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{self.connection}"\n\n[superlink.{self.connection}]\n'
            f'address = "127.0.0.1:{port}"\n'
            f"root-certificates = {json.dumps(str(authority))}\n"
        )

    def start(self, name: str, *command: str) -> None:
        """Start a process in a group of its own."""
        self._sweep(name)  # a process may be left if the one that started it was killed
        self._commands[name], self._started[name] = command, time.monotonic()
        log = (self.logs / f"{name}.log").open("ab") if self.logs else None
        try:
            self.processes[name] = subprocess.Popen(
                command,
                env={**self.environment, MARK: f"{self.folder}:{name}"},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            if log:
                log.close()

    def revive(self) -> list[str]:
        """Restart the processes that have ended by themselves; returns their names.

        The key of a node that was killed is refused until Flower notices that it is gone, for up to a minute.
        """
        ended = []
        for name, process in list(self.processes.items()):
            lived, pause = time.monotonic() - self._started[name], self._pauses.get(name, SOONEST)
            if process.poll() is None or lived < pause:
                continue
            self.end(name)
            self.start(name, *self._commands[name])
            self._pauses[name] = SOONEST if lived > STAYS else min(2 * pause, LATEST)
            ended.append(name)
        return ended

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a process and everything that it started."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        _tell(process, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if how == signal.SIGKILL else ENDS_WITHIN)
        _tell(process, signal.SIGKILL)
        process.wait()
        self._sweep(name)  # Flower's own children have sessions of their own

    def _sweep(self, name: str) -> None:
        for number in marked(f"{self.folder}:{name}"):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def close(self) -> None:
        """End all processes; nodes first, because they sign off through the gate, then the gate, the SuperLink last."""
        last = ["", "gate", "superlink"]
        order = sorted(self.processes, key=lambda name: last.index(name if name in last else ""))
        for name in order:
            if name not in last:
                _tell(self.processes[name], signal.SIGTERM)
        for name in order:
            self.end(name)

    def run_superlink(self, port: int, keys: Path) -> None:
        """Start the SuperLink, which only this machine can reach."""
        self.start(
            "superlink",
            "flower-superlink",
            "--host=127.0.0.1",
            f"--port={port}",
            f"--ssl-certfile={keys / 'server.crt'}",
            f"--ssl-keyfile={keys / 'server.key'}",
            f"--ssl-ca-certfile={keys / 'ca.crt'}",
            "--enable-supernode-auth",
            f"--database={self.folder / 'superlink.db'}",
            "--disable-runtime-dependency-installation",
        )

    def run_gate(self, public: str, port: int, keys: Path, signatures: Path) -> None:
        """Start the gate at HOST:PORT, for nodes, to the SuperLink at this port of the loopback."""
        self.start("gate", *MODULE, "cwfed.flower.gate", public, str(port), str(keys), str(signatures))

    def flwr(self, *command: str) -> str:
        """Run one of Flower's commands; returns its output."""
        what = f"flwr {' '.join(command[:2])}"
        until = time.monotonic() + ANSWERS_WITHIN
        with subprocess.Popen(
            ["flwr", *command],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as asked:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    said, complaints = asked.communicate(timeout=1)
                    break
                superlink = self.processes.get("superlink")
                if time.monotonic() > until or (superlink and superlink.poll() is not None):
                    asked.kill()
                    is_gone = superlink and superlink.poll() is not None
                    why = "the SuperLink has ended" if is_gone else f"no answer within {ANSWERS_WITHIN:g} seconds"
                    raise RunError(f"{what} failed: {why}")
        if asked.returncode:
            lines = [line for line in (complaints + said).splitlines() if line.strip()]
            raise RunError(f"{what} failed: {' '.join(lines[-3:])}")
        return said

    def ask(self, *command: str) -> dict[str, Any]:
        """Run one of Flower's commands; returns its JSON answer."""
        said = self.flwr(*command, self.connection, "--format=json")
        try:
            answer: dict[str, Any] = json.loads(said)
            problem = "" if answer.get("success") else str(answer.get("error-message", answer))
        except (ValueError, AttributeError):
            problem = said[-300:]
        if problem:
            raise RunError(f"flwr {' '.join(command[:2])} failed: {problem}")
        return answer

    def register_key(self, key: Path) -> int:
        """Register a node's public key with the SuperLink; returns the node's id."""
        return int(self.ask("supernode", "register", str(key))["node-id"])

    def node_states(self) -> dict[str, str]:
        """The state of each node by id: online, offline, registered (never seen) or unregistered."""
        return {str(node["node-id"]): str(node["status"]) for node in self.ask("supernode", "list")["nodes"]}

    def run_app(self, app: Path, *options: str) -> int:
        """Start the app; returns the number of the run."""
        return int(self.ask("run", *options, str(app))["run-id"])

    def status(self, run: int) -> tuple[str, str]:
        """The state of a run (pending, starting, running, finished:completed, finished:failed or finished:stopped), and details."""
        found = self.ask("ls", f"--run-id={run}")["runs"][0]
        return str(found["status"]), str(found.get("status-details", ""))


def supernode(
    helper: Path, server: str, authority: Path, key: Path, about: dict[str, str | int | bool], *more: str
) -> list[str]:
    """The command that starts a SuperNode. `helper` is the folder of its fork server, `about` its node config."""
    return [
        *(*MODULE, "cwfed.flower.fork_server", str(helper)),
        "flower-supernode",
        f"--superlink={server}",
        f"--root-certificates={authority}",
        f"--auth-supernode-private-key={key}",
        "--host=127.0.0.1",
        f"--port={free_port()}",
        "--node-config=" + " ".join(f"{name}={json.dumps(value)}" for name, value in about.items()),
        *more,
    ]


def _tell(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, what)
