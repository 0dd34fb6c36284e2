"""Real processes over the loopback: a SuperLink with TLS and keys, SuperNodes, and what goes wrong with them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")


from cwfed.core.events import Note, Round, from_json
from cwfed.federation import config as configs
from cwfed.flower import programs
from cwfed.flower.clientapp_shim import FALLBACK
from cwfed.flower.local import LocalFederation, node_name
from cwfed.flower.programs import free_port, marked
from cwfed.runs.folder import RunFolder
from tests import processes
from tests.flower import page

pytestmark = pytest.mark.federation

CLIENT = '''
"""A client app that misbehaves as its node config says: deed="hang", "slow", or "lie" until the server has seen every lie."""
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord

from cwfed.flower import client_app


def misbehave(message, context, call_next):
    deed, events = context.node_config.get("deed", ""), Path(context.node_config.get("events", "."))
    number, state = message.content["told"]["round"], Path(context.node_config["state"])
    done = state / "did"  # in which round
    if deed in ("hang", "slow") and number > 1 and not done.exists():
        state.mkdir(parents=True, exist_ok=True)
        done.write_text(str(number))
        while deed == "hang":  # until it is killed
            time.sleep(1)
        while f'"round": {number},' not in events.read_text():  # slower than the round, whatever its timeout is
            time.sleep(0.2)
    reply = call_next(message, context)
    lies = [lie for complaint, lie in LIES.items() if complaint not in events.read_text()] if deed == "lie" else []
    if lies:
        model = dict(reply.content["model"])
        lies[0](model)
        reply.content["model"] = ArrayRecord(model)
    return reply


def put(model, values):
    model["output.weight"] = Array(values)


LIES = {
    "not finite": lambda model: put(model, model["output.weight"].numpy() * np.float32("nan")),
    "shape (10, 15)": lambda model: put(model, model["output.weight"].numpy()[:, :-1].copy()),
    "float16": lambda model: put(model, model["output.weight"].numpy().astype(np.float16)),
    "more than": lambda model: model.update(more=Array(np.zeros(5_000_000))),
}

app = client_app(mods=[misbehave])
'''

SETTINGS = ["model.name=mlp", "model.options.hidden=16", "train.lr=0.05", "run.engine=loop"]


def prepare(folder: Path, nodes: int, *more: str, client: str = "", **federation) -> LocalFederation:
    config = configs.load(None, [*SETTINGS, *more])
    made = LocalFederation.prepare(folder, config, nodes, **federation)
    if client:
        (folder / "app" / "federation" / "client_app.py").write_text(client)
    return made


def events(federation: LocalFederation) -> list:
    path = federation.folder / "server" / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [from_json(line) for line in lines if line.endswith("\n")]


def rounds(federation: LocalFederation) -> dict[int, Round]:
    return {event.round: event for event in events(federation) if isinstance(event, Round)}


def notes(federation: LocalFederation) -> list[str]:
    return [event.message for event in events(federation) if isinstance(event, Note)]


def until(what, federation: LocalFederation):
    """Wait for something to be true, while the SuperLink lives."""

    def said() -> str:
        return (federation.folder / "logs" / "superlink.log").read_text()[-3000:]

    return processes.until(what, lambda: federation.processes["superlink"].poll() is None, said, pause=0.2)


@pytest.fixture
def closing(monkeypatch):
    """Ends federations, however the test ends."""
    monkeypatch.setattr(programs, "STARTS_WITHIN", processes.LIMIT)
    monkeypatch.setattr(programs, "ANSWERS_WITHIN", processes.LIMIT)
    open_ones: list[LocalFederation] = []
    yield lambda federation: open_ones.append(federation) or federation
    for federation in open_ones:
        federation.close()


@pytest.mark.slow  # minutes of timeouts
def test_nodes_that_die_lie_are_slow_or_come_late_do_not_stop_a_federation(tmp_path, closing):
    """0 and 2 are honest, and the fork server of 0 is killed; 1 is slow once; 3 is killed while it trains and comes back; 4 sends
    NaN, a wrong shape, a wrong type, too much; 5 joins late with its label histogram.

    A busy machine may make any node late in any round, so nothing is said about a particular round: there are as many as it takes
    until all of this was seen.
    """
    here = tmp_path / "federation"
    federation = closing(prepare(here, 6, "train.rounds=10000", "run.evaluate_every=2", client=CLIENT, timeout=60.0))
    began = time.monotonic()
    federation.start_superlink()
    for number in range(6):
        federation.register(node_name(number))
    # Two rounds last as long as the timeout, so it is no longer than this machine needs, also if it gets busier: seven starts of
    # Flower's programs took a third of it one after the other, and an answer of an honest node takes a tenth of that.
    timeout = max(60.0, 3 * (time.monotonic() - began))
    # the data are dealt out to six, the rounds begin with five
    pyproject = here / "app" / "pyproject.toml"
    changes = {"nodes = 6\nclients = 0": "nodes = 5\nclients = 6", "timeout = 60.0": f"timeout = {timeout}"}
    text = pyproject.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    pyproject.write_text(text)
    deeds = {1: "slow", 3: "hang", 4: "lie"}
    for number in range(5):
        federation.start_node(
            node_name(number), deed=deeds.get(number, ""), events=str(here / "server" / "events.jsonl")
        )
    federation.submit()

    def did(name: str) -> int:
        return int(text) if (path := here / "state" / name / "did").exists() and (text := path.read_text()) else 0

    def seen(what) -> None:
        until(what, federation=federation)

    seen(lambda: did("client-003"))
    federation.processes["client-003"].kill()  # the SuperNode alone
    federation.processes["client-003"].wait()  # what it has started looks whether it is there, and a zombie is
    seen(lambda: not marked(f"{here}:client-003"))  # all that it had started ends by itself
    killed = did("client-003")
    seen(lambda: killed in rounds(federation))
    assert 3 in rounds(federation)[killed].dropped, "the round closed without the killed node"
    # before anything else is waited for: a round needs five nodes, and there are four
    federation.start_node("client-005", histogram=True)
    for process in fork_servers(here, "client-000"):
        os.kill(process, signal.SIGKILL)
    seen(lambda: FALLBACK in (here / "logs" / "client-000.log").read_text())
    without = max(rounds(federation)) + 1
    seen(lambda: came_back(federation, "client-003", 3, killed))
    seen(lambda: took_part(federation, 0, without) and took_part(federation, 5, 0))
    seen(lambda: did("client-001") in rounds(federation))
    assert 1 in rounds(federation)[did("client-001")].dropped, "who is slower than the timeout is left out"
    seen(lambda: took_part(federation, 1, did("client-001")))
    # when the liar has nothing left to say it is as good as any
    seen(lambda: took_part(federation, 4, 0))
    refusals = [event.refused["4"] for event in rounds(federation).values() if "4" in event.refused]
    for complaint in ("not finite", "shape (10, 15)", "float16", "more than"):
        assert any(complaint in refusal for refusal in refusals)
    everybody = [0, 1, 2, 3, 4, 5]
    seen(lambda: any(event.received and event.received.clients == everybody for event in rounds(federation).values()))
    assert any("client-005 joined as client 5" in note for note in notes(federation))

    # the killed one's class distribution was kept while it was away, and it has its personal model on its disk
    tree, _ = RunFolder(here / "server").checkpoints.newest()
    assert tree["server"]["prior"].sum(1).allclose(torch.ones(6, dtype=torch.float64))
    models = list((here / "state" / "client-003").glob("*/models/client-00003.safetensors"))
    assert len(models) == 1
    assert not list((here / "server").rglob("*.npy")), "the server has no data"
    assert not (here / "server" / "models").exists()


def took_part(federation: LocalFederation, client: int, after: int) -> bool:
    """Whether its model was aggregated in a round after this one."""
    return any(client in event.participants for number, event in rounds(federation).items() if number > after)


def came_back(federation: LocalFederation, name: str, client: int, after: int) -> bool:
    """Until the SuperLink has noticed that a node is gone, its key is refused: it is started until it stays."""
    if name not in federation.processes or federation.processes[name].poll() is not None:
        federation.processes.pop(name, None)
        federation.start_node(name)
    time.sleep(1)
    return took_part(federation, client, after)


def fork_servers(folder: Path, name: str) -> list[int]:
    """The processes of a node that wait for messages: the fork server, and who starts it again."""
    found = marked(f"{folder}:{name}")
    return [pid for pid in found if b"fork_server.keep" in Path(f"/proc/{pid}/cmdline").read_bytes()]


TRIAL, SIMULATED = page.lines(page.section("The same numbers"))
PROJECT = page.blocks(page.section("Two lines in your own app"))[0]
INSTALL = page.lines()[0]
ON_RAY = "cwfed run CONFIG --backend flower"
CONFIG = """
[data]
clients = 2
[model]
name = "mlp"
options = { hidden = 16 }
[train]
rounds = 2
lr = 0.05
[run]
evaluate_every = 2
"""


def test_a_trial_as_it_is_printed_is_ended_with_ctrl_c_and_goes_on_to_the_simulators_numbers(tmp_path):
    (tmp_path / "CONFIG").write_text(CONFIG)
    reader = {"cwd": tmp_path, "env": page.environment(tmp_path)}
    log = tmp_path / "federation" / "server" / "events.jsonl"
    with processes.running(shlex.split(TRIAL), **reader, stderr=subprocess.STDOUT) as process:
        processes.until(
            lambda: log.exists() and '"event": "round"' in log.read_text(), lambda: process.poll() is None
        )
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=processes.LIMIT)
    assert process.returncode == 130, said
    assert "the same command resumes it" in said
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert not left.split(), "no process is left"

    done = processes.run(["bash", "-c", TRIAL], check=True, **reader)  # the same command
    assert "2 rounds" in done.stdout
    said = [path.read_text() for path in (tmp_path / "federation" / "logs").glob("client-*.log")]
    assert len(said) == 2
    assert all("Received successfully" in text and FALLBACK not in text for text in said), "fork servers did the work"
    assert "Traceback" not in done.stderr
    processes.run(["bash", "-c", SIMULATED], check=True, **reader)
    processes.run(["bash", "-c", ON_RAY], check=True, **reader)
    theirs, ours, on_ray = (
        {event.round: event for event in RunFolder(tmp_path / name).events() if isinstance(event, Round)}
        for name in ("federation/server", "simulated", "runs/digits-cwfedavg-0")
    )
    assert theirs.keys() == ours.keys() == on_ray.keys() == {1, 2}
    assert [event.client_loss for event in theirs.values()] == [event.client_loss for event in ours.values()]
    assert theirs[2].received.right == ours[2].received.right


def test_a_new_project_as_it_is_printed_runs_with_plain_flwr_run(tmp_path):
    """What `cwfed flower new` writes, in Flower's own hands: its local SuperLink, its simulation runtime."""
    ports = {f"FLWR_LOCAL_{name}_PORT": str(free_port()) for name in ("SUPERLINK_HTTP_API", "CONTROL_API")}
    environment = page.environment(tmp_path) | ports | {"PIP_NO_INDEX": "1"}  # what is installed is enough
    new, *then = PROJECT.splitlines()
    processes.run(["bash", "-ec", f"{INSTALL}\n{new}"], cwd=tmp_path, env=environment, check=True)
    late = "Failed to start local SuperLink within"  # 15 s, Flower's own limit: a busy machine needs another try
    try:
        while True:
            done = processes.run(["bash", "-ec", "\n".join(then)], cwd=tmp_path, env=environment)
            if late not in done.stdout + done.stderr:
                break
            shutil.rmtree(tmp_path / ".flwr")  # Flower killed it while it made its database
        assert done.returncode == 0, done.stdout + done.stderr
        assert "round 10 of 10: 2 clients, received" in done.stdout + done.stderr
        assert "round 12 of 12: 2 clients, received" in done.stdout + done.stderr
    finally:  # a managed local SuperLink stays running
        subprocess.run(["pkill", "-f", str(tmp_path)])
    summary = RunFolder(tmp_path / ".cwfed" / "DIR").read_json("summary.json", "reported")
    assert summary["rounds"] == 12
    assert summary["reported"]["accuracy"] > 0.5
