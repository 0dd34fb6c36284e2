"""A real federation's server and its nodes: each has a folder, and a command that keeps its programs running.

The server's folder holds the desired state: the public keys of the nodes to be admitted (nodes/NAME.pub), the app, and whether a run should be
under way (`wanted`). Commands only change these files; `Server.keep` brings Flower's programs into that state, again and again,
whatever dies in between. A node's folder holds its settings (node.toml), its key, and the keys that it trusts.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError, field_validator

from cwfed.core import files
from cwfed.core.errors import CwfedError, RunError
from cwfed.federation.settings import Section
from cwfed.flower import keys, logs, programs
from cwfed.flower.gate import signatures_of
from cwfed.flower.programs import Programs, answers, supernode, written
from cwfed.flower.project import bundle_of, read_plan
from cwfed.runs.folder import RunFolder

log = logging.getLogger("cwfed.flower")

LOOK_EVERY = 10.0
"""Seconds between two queries of the run's state (each takes a core for two seconds), after its last event, and between two starts of a run that failed."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


UNIT = """[Unit]
Description={what} of a federation of cwfed
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
WorkingDirectory={folder}
Restart=always
RestartSec=5
SuccessExitStatus=130
TimeoutStopSec=90
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


def unit(folder: Path) -> str:
    """A systemd unit for this folder on this machine, the server's or a node's."""
    is_server = (folder / "server.toml").exists()
    here = (Server(folder) if is_server else Node(folder)).folder
    beside = Path(sys.executable).with_name("cwfed")
    program = beside if beside.exists() else shutil.which("cwfed") or beside
    what, command = ("The server", "serve") if is_server else ("A node", "join")
    line = f"{_quoted(program)} flower {command} {_quoted(here)}"
    return UNIT.format(what=what, command=line, folder=str(here).replace("%", "%%"))


def _quoted(path: Path | str) -> str:
    """A path as one word of a systemd command line, where %, $, quotes and backslashes have meanings."""
    signs = {"\\": "\\\\", '"': '\\"', "%": "%%", "$": "$$"}
    return '"' + "".join(signs.get(sign, sign) for sign in str(path)) + '"'


def _is_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} must look like server.example:9443")
    return address


def _read(path: Path, kind: type[Section], what: str) -> Any:
    try:
        return kind.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CwfedError(f"{path.parent} is not the folder of {what} ({error.strerror}: {path.name})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise CwfedError(f"{path}: {where}: {reason}") from None
    except ValueError as error:
        raise CwfedError(f"{path} cannot be read: {error}") from None


def check_name(name: str) -> str:
    """The name of a node; CwfedError if it cannot be the name of a file."""
    if not NAME.fullmatch(name):
        raise CwfedError(f"{name!r} cannot be a node's name: take letters, digits, '.', '_' and '-', at most 100")
    return name


class ServerSettings(Section):
    """server.toml."""

    public: str
    """The address at which the gate listens, for nodes."""
    control: int
    """The SuperLink's port on the loopback, for the operator's commands."""
    hosts: list[str]
    """The names and addresses in the server's certificate."""

    _public = field_validator("public")(_is_address)


class NodeSettings(Section):
    """node.toml."""

    name: str
    server: str
    """The address of the gate, as the node reaches it."""
    about: dict[str, str | int | bool]
    """The node config of the app: path, data, state, histogram (docs/flower.md). Relative paths are in this folder."""

    _server = field_validator("server")(_is_address)


@dataclass
class Server(Programs):
    """The server: `keep` runs it; the other methods change the desired state in its folder."""

    settings: ServerSettings = field(init=False)
    run: int | None = field(default=None, init=False)
    _wish: str = field(default="", init=False)
    _next_look: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.settings = _read(self.folder / "server.toml", ServerSettings, "a federation's server")

    @property
    def app(self) -> Path:
        """The Flower project that nodes and server run."""
        return self.folder / "app"

    @property
    def run_folder(self) -> RunFolder:
        """Events, checkpoints, metrics."""
        return RunFolder(self.folder / "run")

    @property
    def admitted(self) -> dict[str, dict[str, Any]]:
        """By name, the node's key that the SuperLink knows, and the id that it has given the node."""
        path = self.folder / "admitted.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _spent(self) -> list[str]:
        """Keys that were admitted and are not any more."""
        path = self.folder / "nodes" / "spent"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def wished(self) -> dict[str, str]:
        """By name, the public keys that should be admitted."""
        return {path.stem: keys.public_key(path) for path in sorted((self.folder / "nodes").glob("*.pub"))}

    # --- the desired state

    def admit(self, name: str, key: Path) -> bool:
        """Admit a node by its public key, in place of the one that it had; returns whether it had one."""
        line, path = keys.public_key(key), self.folder / "nodes" / f"{check_name(name)}.pub"
        others = [other for other, known in self.wished().items() if known == line and other != name]
        if others:
            raise CwfedError(f"{key} is the key of {others[0]}: every node needs a key of its own")
        if line in self._spent():
            raise CwfedError(
                f"{key} was in use before, and Flower takes a key only once: make a new one (cwfed flower key)"
            )
        had = path.exists()
        files.write_whole(path, f"{line}\n")
        return had

    def exclude(self, name: str) -> None:
        """Do not admit a node any more."""
        path = self.folder / "nodes" / f"{check_name(name)}.pub"
        if not path.exists():
            known = ", ".join(self.wished()) or "none"
            raise CwfedError(f"{name} is not admitted here; admitted nodes: {known}")
        path.unlink()

    def want(self) -> None:
        """Ask for a run of the app, until it has completed."""
        if not answers(self.settings.control):
            raise CwfedError(f"the server is not running: cwfed flower serve {self.folder}")
        if self.is_done():
            raise CwfedError(
                f"all {self.run_folder.rounds_done()} rounds are done: set more train.rounds in {self.app / 'pyproject.toml'} and sign "
                "it, or go back (cwfed flower rollback)"
            )
        if not signatures_of(bundle_of(self.app), self.folder / "signatures"):
            raise CwfedError("the app was changed since it was signed, and nodes will refuse it: cwfed flower sign")
        files.write_whole(self.folder / "wanted", f"{logs.now()} {secrets.token_hex(8)}\n")

    def is_done(self) -> bool:
        """Whether the run has all rounds of the app's settings."""
        return self.run_folder.rounds_done() >= read_plan(self.app).config.train.rounds

    def wish(self) -> str:
        """The present request for a run, a different text for every request; "" if there is none."""
        with suppress(FileNotFoundError):
            return (self.folder / "wanted").read_text(encoding="utf-8")
        return ""

    def want_no_longer(self) -> None:
        """Ask for the run to end; it can be started again."""
        (self.folder / "wanted").unlink(missing_ok=True)

    def wait_for_end(self) -> None:
        """Wait until no run has the run folder locked."""
        until = time.monotonic() + programs.ANSWERS_WITHIN
        while True:
            try:
                with self.run_folder.locked():
                    return
            except RunError as error:
                if time.monotonic() > until:
                    raise RunError(f"the run does not end: {error}") from None
            time.sleep(0.5)

    # --- bringing Flower into that state

    def keep(self) -> None:
        """Keep the SuperLink, the gate and the run going, until this process is ended."""
        with RunFolder(self.folder).locked():
            self._keep()

    def _keep(self) -> None:
        control, here = self.settings.control, self.folder
        self.connect_to(control, here / "ca.crt")
        if not (here / "superlink.db").exists():
            (here / "admitted.json").unlink(missing_ok=True)  # a new SuperLink knows no nodes
        self.run_superlink(control, here)
        self.run_gate(self.settings.public, control, here, here / "signatures")
        rest = 0.0
        try:
            while True:
                for name in self.revive():
                    log.warning("%s had ended and was started again", name)
                    if name == "superlink":  # which ended the process of the run too
                        self.run, self._next_look = None, 0.0
                if time.monotonic() > rest and answers(control):
                    try:
                        self._keep_admitted()
                        self._keep_run()
                    except CwfedError as error:  # the SuperLink comes or goes, or a file is not what it should be
                        log.warning("%s", error)
                        rest = time.monotonic() + LOOK_EVERY
                time.sleep(0.5)
        finally:
            self.close()

    def _keep_admitted(self) -> None:
        wished, admitted = self.wished(), self.admitted
        for name in [n for n, known in admitted.items() if wished.get(n) != known["key"]]:
            node = str(admitted[name]["node"])
            if self.node_states().get(node, "unregistered") != "unregistered":
                self.flwr("supernode", "unregister", node, self.connection)
            files.write_whole(self.folder / "nodes" / "spent", "\n".join([*self._spent(), admitted[name]["key"]]))
            del admitted[name]
            self._write_admitted(admitted)
            log.info("%s is admitted no longer by the key it had", name)
        for name in wished.keys() - admitted.keys():
            number = self.register_key(self.folder / "nodes" / f"{name}.pub")
            admitted[name] = {"node": number, "key": wished[name]}
            self._write_admitted(admitted)
            log.info("%s is admitted", name)

    def _write_admitted(self, admitted: dict[str, dict[str, Any]]) -> None:
        files.write_whole(self.folder / "admitted.json", json.dumps(admitted, indent=1))

    def _keep_run(self) -> None:
        """Start, stop or query the run, as the desired state says."""
        wish = self.wish()
        if self.run is not None and wish != self._wish:
            run, self.run, self._next_look = self.run, None, 0.0
            with suppress(RunError):  # it has ended by itself
                self.flwr("stop", str(run), self.connection)
                log.info("run %d was stopped", run)
        if not wish or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY
        if self.run is None and self.is_done():  # it was killed after its last round
            self.want_no_longer()
        elif self.run is None:
            here = {"out": str(self.folder / "run"), "admitted": str(self.folder / "admitted.json")}
            overrides = self.folder / "run.toml"
            overrides.write_text(tomli_w.dumps({"federation": here}), encoding="utf-8")
            self.run, self._wish = self.run_app(self.app, f"--run-config={overrides}"), wish
            log.info("run %d was started", self.run)
        elif not 0 <= time.time_ns() - written(self.run_folder.path / "events.jsonl") <= LOOK_EVERY * 1e9:
            self._look_at(self.run, wish)

    def _look_at(self, run: int, wish: str) -> None:
        status, details = self.status(run)
        if status == "finished:failed":
            log.error("run %d failed: %s; it is started again", run, details)
            self.run = None
        elif status.startswith("finished"):
            log.info("run %d is %s", run, status.partition(":")[2])
            self.run = None
            if self.wish() == wish:
                self.want_no_longer()


@dataclass
class Node(Programs):
    """A node."""

    settings: NodeSettings = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.settings = _read(self.folder / "node.toml", NodeSettings, "a federation's node")

    @property
    def key(self) -> Path:
        """The node's private key."""
        return self.folder / "node"

    def new_key(self) -> Path:
        """Make a new key for the node; returns the file of the public key."""
        if self.key.exists():
            self.key.rename(self.key.with_name("node.old"))  # until the server has admitted the new one
        return keys.node_key(self.folder, "node").with_suffix(".pub")

    def command(self) -> list[str]:
        """The command of the SuperNode, which runs signed apps only, on this node's data."""
        about = dict(self.settings.about)
        for key in ("path", "state"):
            if key in about:
                about[key] = str(self.folder / Path(str(about[key])).expanduser())
        trusted = f"--trusted-entities={self.folder / 'trusted.yaml'}"
        node = {"name": self.settings.name, **about}
        return supernode(self.folder / "forks", self.settings.server, self.folder / "ca.crt", self.key, node, trusted)

    def keep(self) -> None:
        """Keep the SuperNode going, until this process is ended."""
        if not self.key.exists():
            raise CwfedError(f"this node has no key yet: cwfed flower key {self.folder}")
        self.home.mkdir(exist_ok=True)
        with RunFolder(self.folder).locked():
            self.start("supernode", *self.command())
            try:
                while True:
                    for name in self.revive():
                        log.warning("the %s had ended and was started again", name)
                    time.sleep(0.5)
            finally:
                self.close()
