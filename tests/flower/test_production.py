"""The production section of docs/flower.md, carried out as it is printed, with real processes; and what strangers get."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")

from safetensors.torch import load_file

import cwfed
from cwfed.core.events import Note, Round, from_json
from cwfed.flower import keys
from cwfed.flower.programs import Programs, answers, marked, supernode
from cwfed.flower.project import read_plan
from cwfed.runs import session
from cwfed.runs.folder import RunFolder
from tests import processes
from tests.flower import page

pytestmark = pytest.mark.federation

FOREVER = ("serve", "join")
"""Commands that run until they are ended."""
PORTS = (9443, 9093)
REPORT = "cwfed report federation/server/run"


class Reader:
    """Who follows the page in an empty folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.server, self.run = folder / "federation" / "server", folder / "federation" / "server" / "run"
        self.commands = page.lines(page.section("In production"))
        self.running: list[subprocess.Popen[str]] = []
        self.environment = page.environment(folder)

    def follow(self, upto: str) -> None:
        """Carry out the next lines, up to the first that begins like this."""
        while True:
            line = self.commands.pop(0)
            command, options = ["bash", "-c", line], {"cwd": self.folder, "env": self.environment}
            if line.split()[2] in FOREVER:
                log = self.stack.enter_context(
                    (self.folder / f"{shlex.split(line)[-1].replace('/', '-')}.log").open("w")
                )
                options |= {"stdout": log, "stderr": subprocess.STDOUT}
                self.running.append(self.stack.enter_context(processes.running(command, **options)))
            else:
                processes.run(command, check=True, **options)
            if line.startswith(upto):
                return

    def end(self) -> None:
        """As systemd or Ctrl-C would end what runs for ever."""
        for process in self.running:
            os.killpg(process.pid, signal.SIGTERM)
        assert [process.wait(processes.LIMIT) for process in self.running] == [130] * len(self.running)

    def left(self) -> list[int]:
        """Processes of the server and the nodes, also where the test broke off."""
        nodes = self.server.parent / "nodes"
        names = [f"{self.server}:superlink", f"{self.server}:gate"]
        return [pid for name in [*names, *(f"{node}:supernode" for node in nodes.glob("*"))] for pid in marked(name)]

    def events(self) -> list:
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [from_json(line) for line in lines if line.endswith("\n")]

    def rounds(self) -> dict[int, Round]:
        return {event.round: event for event in self.events() if isinstance(event, Round)}

    def until(self, what) -> None:
        def said() -> str:
            return "\n".join(f"{log.name}\n{log.read_text()[-3000:]}" for log in self.folder.glob("*.log"))

        processes.until(what, lambda: all(p.poll() is None for p in self.running), said, pause=0.2)

    def kill(self, folder: Path, name: str, program: bytes) -> None:
        """SIGKILL for a program of the server or of a node, as soon as it runs."""
        found: list[int] = []

        def runs() -> bool:
            for pid in marked(f"{folder}:{name}"):
                with suppress(OSError):  # another process that has ended
                    found.extend([pid] if program in Path(f"/proc/{pid}/cmdline").read_bytes() else [])
            return bool(found)

        self.until(runs)
        for pid in found:
            os.kill(pid, signal.SIGKILL)


def test_the_page_works_as_it_is_printed_and_strangers_are_refused_at_every_door(tmp_path):
    processes.until(lambda: not any(map(answers, PORTS)))  # another run of this test may be using them
    with ExitStack() as stack:
        reader = Reader(tmp_path, stack)
        stack.callback(lambda: [os.kill(pid, signal.SIGKILL) for pid in reader.left()])
        clinic = tmp_path / "federation" / "nodes" / "clinic-1"
        reader.follow("cwfed flower join federation/nodes/clinic-2")
        reader.until(lambda: (reader.server / "admitted.json").exists() and all(map(answers, PORTS)))
        stranger = strangers_at_the_door(tmp_path, clinic, stack)

        # the SuperLink is killed, and with it the run: everything goes on by itself, to the simulator's bits
        reader.follow("cwfed flower start")
        reader.until(lambda: 1 in reader.rounds())
        reader.kill(reader.server, "superlink", b"flower-superlink")
        reader.until(lambda: (reader.run / "summary.json").exists())
        same_as_simulated(reader, tmp_path / "simulated")

        # status; back to round 1 with another key; a node and the process of the run are killed and come back
        old_key = (clinic / "node.pub").read_text()
        reader.follow("cwfed flower start")
        assert (clinic / "node.pub").read_text() != old_key
        reader.kill(tmp_path / "federation" / "nodes" / "clinic-2", "supernode", b"flower-supernode")
        reader.until(lambda: 2 in reader.rounds())  # one that dies before it has its task is started again by Flower
        reader.kill(reader.server, "superlink", b"flwr-serverapp")
        reader.until(lambda: (reader.run / "summary.json").exists())
        assert reader.rounds().keys() == {1, 2, 3}
        assert reader.rounds()[3].participants == [0, 1], "both are back, one with another key"
        told = [event.message for event in reader.events() if isinstance(event, Note)]
        assert not any("stranger" in message for message in told)
        assert "failed" in (tmp_path / "federation-server.log").read_text(), "the run whose process was killed"

        processes.run(["bash", "-c", REPORT], cwd=tmp_path, env=reader.environment, check=True)
        the_nodes_refuse_what_nobody_signed(reader)
        reader.follow("cwfed flower exclude")
        assert not reader.commands, "all of the page was carried out"
        reader.until(lambda: json.loads((reader.server / "admitted.json").read_text()).keys() == {"clinic-1"})
        assert "No SuperNode found" in (tmp_path / "federation-server.log").read_text()
        assert stranger.processes["stranger"].poll() is not None
        reader.end()
        assert not reader.left(), "no process is left"


def the_nodes_refuse_what_nobody_signed(reader: Reader) -> None:
    """Somebody who has the server itself, and so its control port, but not the key that signs: he starts an app of his own."""
    app, trace = reader.folder / "unsigned", reader.folder / "code-ran-on-a-node"
    shutil.copytree(reader.server / "app", app)
    client = app / "study" / "client_app.py"
    client.write_text(f"{client.read_text()}open({str(trace)!r}, 'w')\n")
    intruder = Programs(reader.folder / "intruder")
    intruder.connect_to(PORTS[1], reader.server / "ca.crt")
    run = intruder.run_app(app)
    logs = [reader.folder / f"federation-nodes-clinic-{number}.log" for number in (1, 2)]
    reader.until(lambda: all("The FAB could not be verified" in log.read_text() for log in logs))
    intruder.flwr("stop", str(run), intruder.connection)
    assert not trace.exists()


def strangers_at_the_door(folder: Path, clinic: Path, stack: ExitStack) -> Programs:
    """Somebody with the public CA file and the public address: he cannot register, run, or join."""
    stranger = Programs(folder / "stranger")
    stranger.logs = stranger.folder
    stranger.connect_to(PORTS[0], clinic / "ca.crt")
    stack.callback(stranger.close)
    key = keys.node_key(stranger.folder, "stranger")
    for command in (["supernode", "register", f"{key}.pub"], ["run", str(folder / "study")], ["supernode", "list"]):
        with pytest.raises(cwfed.CwfedError, match="failed"):
            stranger.ask(*command)
    node = {"name": "clinic-1", "path": str(clinic / "data")}
    stranger.start(
        "stranger", *supernode(stranger.folder / "forks", f"localhost:{PORTS[0]}", clinic / "ca.crt", key, node)
    )
    keys.certificates(stranger.folder)  # an authority that is not the federation's
    foreign = supernode(
        stranger.folder / "forks-2", f"localhost:{PORTS[0]}", stranger.folder / "ca.crt", clinic / "node", node
    )
    stranger.start("foreign", *foreign)
    said = {"stranger": "Failed to activate SuperNode", "foreign": "CERTIFICATE_VERIFY_FAILED"}
    logs = {name: stranger.folder / f"{name}.log" for name in said}
    processes.until(lambda: all(words in logs[name].read_text() for name, words in said.items()))
    return stranger


def same_as_simulated(reader: Reader, simulated: Path) -> None:
    config = read_plan(reader.server / "app").config
    two = config.model_copy(update={"data": config.data.model_copy(update={"clients": 2})})
    session.run(two.model_copy(update={"run": two.run.model_copy(update={"engine": "loop"})}), simulated)
    ours = {e.round: e for e in RunFolder(simulated).events() if isinstance(e, Round)}
    theirs = reader.rounds()
    assert theirs.keys() == {1, 2, 3}
    assert [e.client_loss for e in theirs.values()] == [e.client_loss for e in ours.values()]
    assert theirs[3].received.right == ours[3].received.right
    index = json.loads((simulated / "models" / "index.json").read_text())
    for number in range(2):
        state = reader.server.parent / "nodes" / f"clinic-{number + 1}" / "state"
        (model,) = state.glob("*/models/*.safetensors")
        mine, its = load_file(simulated / "models" / index[str(number)]), load_file(model)
        assert all(torch.equal(mine[name], its[name]) for name in mine)
