"""A federation in production, without its processes: the gate, folders, keys and names, going back, how it is."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import ssl
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml

pytest.importorskip("flwr", reason="the extra flower is not installed")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fab_pb2 import Fab, GetFabResponse
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message as FlowerMessage
from flwr.proto.message_pb2 import Metadata, PushObjectRequest
from flwr.supercore.fab import Fab as StoredFab
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.main import create_app
from flwr.supernode.start_client_internal import _verify_fab
from typer.main import get_command

import cwfed
from cwfed.cli import app
from cwfed.core.errors import CwfedError, RunError
from cwfed.core.events import Note, Round
from cwfed.federation.experiment import deal
from cwfed.flower import PersonalisedStrategy, bell, gate, keys, local, logs, post, programs, status, wire
from cwfed.flower.deploy import certify, deploy, sign
from cwfed.flower.gate import Gate, signatures_of
from cwfed.flower.local import LocalFederation
from cwfed.flower.plan import FederationSection
from cwfed.flower.programs import Programs, free_port
from cwfed.flower.project import bundle_of, read_plan, write_project
from cwfed.flower.server import run_federation
from cwfed.flower.service import Node, Server, unit
from cwfed.runs.folder import RunFolder
from tests import processes
from tests.conftest import ROOT, leaves, small
from tests.flower.helpers import Loopback, carry_out, plan_of


def notes(events) -> list[str]:
    return [event.message for event in events if isinstance(event, Note)]


@pytest.fixture
def deployed(tmp_path) -> Path:
    write_project(tmp_path / "study", plan_of(small(), 2))
    deploy(tmp_path / "study", tmp_path / "out", f"localhost:{free_port()}", ["clinic-1", "clinic-2"], free_port())
    return tmp_path / "out"


# --- the gate


def ask(app: Gate, method: str, path: str, **more) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="https://gate") as client:
            return await client.request(method, path, **more)

    return asyncio.run(once())


def superlink() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app()), base_url="https://superlink")


def test_the_gate_passes_on_what_a_node_needs_and_nothing_else(tmp_path):
    """Behind it is Flower's own SuperLink, with all its routes."""
    paths = set(create_app().openapi()["paths"])
    assert paths >= gate.PASSED_ON, "flwr still has these"
    assert len([path for path in paths if path.startswith("/v1/control/")]) > 20
    app = Gate(superlink(), tmp_path)
    for path in paths | {"/docs", "/openapi.json", "/", "/v1/fleet/", "/v1/fleet/../control/start-run"}:
        for method in ("POST", "GET", "PUT", "OPTIONS"):
            answer = ask(app, method, path)
            if method == "POST" and path in gate.PASSED_ON:
                assert answer.status_code != 404, "it came through, to be refused by Flower"
            else:
                assert (answer.status_code, answer.text) == (404, "nothing here\n")
    for path in ("/v1/control/register-node", "/v1/fleet/register-node", "/v1/control/start-run"):
        assert ask(app, "POST", path, content=b"").status_code == 404
    assert ask(app, "POST", "/v1/fleet/get-run?x=/v1/control/start-run").status_code == 404
    answer = ask(app, "POST", "/v1/fleet/pull-messages", headers={"content-type": PROTOBUF_MEDIA_TYPE})
    assert answer.status_code == 401, "Flower asks for a signature"


def test_the_gate_bounds_a_request_and_says_when_the_superlink_is_away(tmp_path, monkeypatch):
    nobody = httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port()}")
    assert ask(Gate(nobody, tmp_path), "POST", "/v1/fleet/get-run").status_code == 503, "which nodes try again on"
    monkeypatch.setattr(gate, "MOST_BYTES", 1000)
    assert ask(Gate(superlink(), tmp_path), "POST", "/v1/fleet/get-run", content=bytes(1001)).status_code == 413


def slow_superlink(asked: list[httpx.Request], empty: int) -> httpx.AsyncClient:
    """One that has a message after so many times that it had none."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        there = PullMessagesResponse(messages_list=[FlowerMessage()] if len(asked) > empty else [])
        return httpx.Response(200, content=there.SerializeToString())

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="https://superlink")


def test_the_gate_asks_in_a_waiting_nodes_place_until_there_is_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "WITHOUT_A_BELL", 0.001)
    asked: list[httpx.Request] = []
    app = Gate(slow_superlink(asked, 5), tmp_path)
    answer = ask(app, "POST", gate.GET_MESSAGES, content=b"who I am", headers={"signature": "mine"})
    assert len(PullMessagesResponse.FromString(answer.content).messages_list) == 1
    assert len(asked) == 6
    assert all((r.content, r.headers["signature"]) == (b"who I am", "mine") for r in asked), "the node's own words"

    asked.clear()
    assert ask(app, "POST", "/v1/fleet/get-run").status_code == 200
    assert len(asked) == 1, "nothing else is asked twice"

    asked.clear()
    monkeypatch.setattr(gate, "PATIENCE", 0.0)
    assert ask(app, "POST", gate.GET_MESSAGES).content == b"", "the node asks again by itself"
    assert len(asked) == 1


def test_the_gate_takes_no_message_for_a_node_that_has_hung_up(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "WITHOUT_A_BELL", 0.001)
    asked: list[httpx.Request] = []
    scope = {"type": "http", "method": "POST", "path": gate.GET_MESSAGES, "query_string": b"", "headers": []}
    words = iter([{"type": "http.request", "body": b""}])

    async def receive() -> dict:
        for word in words:
            return word
        while len(asked) < 3:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        pass

    asyncio.run(Gate(slow_superlink(asked, 20), tmp_path)(scope, receive, send))
    assert 3 <= len(asked) < 20, "the message is there when the node comes back"


def test_the_gate_asks_at_once_when_the_server_rings(tmp_path, monkeypatch):
    monkeypatch.setenv(bell.FOLDER, str(tmp_path / "bells"))
    bell.ring("messages")  # nobody is there
    bells = bell.hang("messages"), bell.hang("messages")  # a gate that was started again
    assert stat.S_IMODE((tmp_path / "bells" / "messages").stat().st_mode) == 0o600
    monkeypatch.setattr(gate, "PAUSE", 3600.0)
    monkeypatch.setattr(gate, "PATIENCE", 3600.0)
    asked: list[httpx.Request] = []
    app = Gate(slow_superlink(asked, 3), tmp_path, bells[1])

    async def served() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://gate") as client:
            node = asyncio.ensure_future(client.post(gate.GET_MESSAGES))
            while not node.done():
                seen = len(asked)
                bell.ring("messages")
                while len(asked) == seen and not node.done():
                    await asyncio.sleep(0.001)
            return await node

    assert len(PullMessagesResponse.FromString(asyncio.run(served()).content).messages_list) == 1
    assert len(asked) == 4
    for _ in range(100_000):  # more than a pipe holds
        bell.ring("messages")
    for end in bells:
        os.close(end or 0)


def answer_in_parts(session: str, number: str, parts: int) -> tuple[str, bytes, bytes]:
    """A node begins to answer a message."""
    said = FlowerMessage(metadata=Metadata(reply_to_message_id=number))
    left = PushMessagesResponse(objects_to_push=[str(i) for i in range(parts)], session_id=session)
    request = PushMessagesRequest(messages_list=[said])
    return gate.SEND_ANSWER, request.SerializeToString(), left.SerializeToString()


def part(session: str) -> tuple[str, bytes, bytes]:
    return gate.SEND_PART, PushObjectRequest(session_id=session, object_content=b"x").SerializeToString(), b""


def test_the_gate_knows_when_all_of_an_answer_has_come(monkeypatch):
    coming = gate.Coming()
    calls = [answer_in_parts("s", "a1", 2), answer_in_parts("t", "b2", 1), part("s"), part("t"), part("s"), part("s")]
    assert [coming.is_whole(*call) for call in calls] == ["", "", "", "b2", "a1", ""]
    assert coming.is_whole(*answer_in_parts("u", "c3", 0)) == "c3"
    for odd in ("", "two\nwords", "x" * 101):  # a node says what it likes
        assert coming.is_whole(*answer_in_parts("u", odd, 0)) == ""
    for path, asked, answer in (
        (gate.SEND_ANSWER, b"\xff", b""),
        (gate.SEND_ANSWER, b"", b""),
        (gate.GET_APP, b"", b""),
    ):
        assert coming.is_whole(path, asked, answer) == ""
    monkeypatch.setattr(gate, "MOST_ANSWERS", 2)
    for session in "xyz":
        coming.is_whole(*answer_in_parts(session, session, 1))
    assert [coming.is_whole(*part(session)) for session in "xyz"] == ["", "y", "z"], (
        "who never sends the rest is forgotten"
    )


def test_the_server_looks_for_the_answers_that_the_gate_names(tmp_path, monkeypatch):
    monkeypatch.setenv(bell.FOLDER, str(tmp_path / "bells"))
    monkeypatch.setattr(post, "WITH_A_BELL", processes.LIMIT)
    names, looks = iter(["b", "stranger", "a"]), []

    def select(*arguments):
        bell.ring("answers", next(names))
        return really(*arguments)

    def pull(_, waiting):
        looks.append(sorted(waiting))
        return {number: number.upper() for number in waiting} if len(looks) > 1 else {}

    really = post.select.select
    monkeypatch.setattr(post.select, "select", select)
    here = post.Post(FederationSection(shape="1x8x8", classes=10, timeout=2 * processes.LIMIT))
    monkeypatch.setattr(here, "push", lambda *_: {"a": None, "b": None})
    here.pull = pull
    assert list(here.exchange(None, [])) == ["B", "A"]
    assert looks == [["a", "b"], ["b"], ["a"]]
    os.close(here._bell)


def test_without_pipes_there_is_no_bell(tmp_path, monkeypatch):
    monkeypatch.setenv(bell.FOLDER, str(tmp_path / "no" / "where"))
    assert bell.hang("messages") is None
    bell.ring("messages")
    monkeypatch.delenv(bell.FOLDER)
    assert bell.hang("messages") is None
    bell.ring("messages")


def test_nodes_run_what_was_signed_and_nothing_else(deployed):
    """By Flower's own check at the node, of what comes out of the gate."""
    trusted = json.loads((deployed / "nodes" / "clinic-1" / "trusted.yaml").read_text())
    signatures = deployed / "server" / "signatures"
    here = Gate(superlink(), signatures)

    def verified(bundle: bytes, trusted=trusted) -> bool:
        body = here._with_signatures(GetFabResponse(fab=Fab(content=bundle)).SerializeToString())
        answer = GetFabResponse.FromString(body).fab
        told = dict(answer.verifications)
        return bool(told.get("valid_license")) and _verify_fab(StoredFab("", answer.content, told), trusted)

    bundle = bundle_of(deployed / "server" / "app")
    assert verified(bundle)
    assert not verified(bundle + b"\0")
    (name,) = trusted
    other = keys.signing_key(deployed / "other")
    assert not verified(bundle, {name: other})
    assert not verified(bundle, {"fpk_other": trusted[name]})

    client = deployed / "server" / "app" / "study" / "client_app.py"
    client.write_text(client.read_text() + "# changed\n")
    changed = bundle_of(deployed / "server" / "app")
    assert not verified(changed)
    sign(deployed)
    assert verified(changed)
    (signatures / f"{sign(deployed)}.json").write_text((next(signatures.glob("*.json"))).read_text())
    assert signatures_of(b"another app", signatures) == {}


# --- folders


def test_a_deployment_keeps_secrets_where_they_belong(deployed):
    secrets = [path for path in deployed.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert {str(path.relative_to(deployed)) for path in secrets} == {
        "authority/ca.key",
        "authority/app.key",
        "server/server.key",
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets)
    public = Node(deployed / "nodes" / "clinic-1").new_key()
    assert stat.S_IMODE(public.with_suffix("").stat().st_mode) == 0o600
    load_ssh_private_key(public.with_suffix("").read_bytes(), None)


def test_the_containers_start_commands_that_exist_on_folders_that_are_there(tmp_path, deployed):
    """A node may be called anything, also like the server. (The file was checked once against the schema of the Compose
    Specification; no container was ever started.)"""
    deploy(tmp_path / "study", tmp_path / "other", "localhost:1", ["server"])
    for out, names in (
        (deployed, {"server", "node-clinic-1", "node-clinic-2"}),
        (tmp_path / "other", {"server", "node-server"}),
    ):
        services = yaml.safe_load((out / "compose.yaml").read_text())["services"]
        assert services.keys() == names
        for service in services.values():
            assert service.keys() == {"build", "command", "volumes", "network_mode", "restart"}
            assert (service["restart"], service["network_mode"]) == ("always", "host")
            program, *words, folder = service["command"]
            at = get_command(app)
            for word in words:
                at = at.commands[word]
            assert (program, [parameter.param_type_name for parameter in at.params]) == ("cwfed", ["argument"])
            (mounted,) = service["volumes"]
            here, there = mounted.split(":")
            assert there == folder
            settings = (out / here / "server.toml").exists(), (out / here / "node.toml").exists()
            assert settings == (words[-1] == "serve", words[-1] == "join")
            assert (out / service["build"] / "Dockerfile").exists()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f'"cwfed[flower]=={cwfed.__version__}"' in (deployed / "Dockerfile").read_text()
    assert "flower" in version["optional-dependencies"]


@pytest.mark.skipif(not Path("/usr/bin/systemd-analyze").exists(), reason="systemd is not installed")
@pytest.mark.parametrize("name", ["federation", '100 % "of" $HOME \\ all'])
def test_the_units_are_good_systemd(deployed, name):
    """Checked by systemd itself; and the command, as systemd would split it, is the program on the folder."""
    where = deployed.rename(deployed.with_name(name))
    units = [where.parent / "cwfed-serve.service", where.parent / "cwfed-join.service"]
    for path, folder, word in zip(units, ("server", "nodes/clinic-1"), ("serve", "join"), strict=True):
        text = unit(where / folder)
        path.write_text(text)
        assert "Restart=always" in text
        (line,) = [line.removeprefix("ExecStart=") for line in text.splitlines() if line.startswith("ExecStart=")]
        program, *words = [part.replace("%%", "%").replace("$$", "$") for part in shlex.split(line)]
        assert words == ["flower", word, str(where / folder)]
        assert os.access(program, os.X_OK)
    done = processes.run(["systemd-analyze", "verify", *units])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_new_certificate_is_of_the_same_authority(deployed):
    server = deployed / "server"
    before = (server / "server.crt").read_bytes()
    certify(deployed)
    assert (server / "server.crt").read_bytes() != before
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=server / "ca.crt")
    context.load_cert_chain(server / "server.crt", server / "server.key")  # they belong together
    made, authority = (
        x509.load_pem_x509_certificate((server / f"{name}.crt").read_bytes()) for name in ("server", "ca")
    )
    made.verify_directly_issued_by(authority)
    assert keys.days_left(server / "server.crt") == pytest.approx(365, abs=1)


def test_keys_are_admitted_replaced_and_excluded(deployed):
    server, node = Server(deployed / "server"), Node(deployed / "nodes" / "clinic-1")
    assert not server.admit("clinic-1", node.new_key())
    first = server.wished()
    assert server.admit("clinic-1", node.new_key()), "another key in place of the first"
    assert first.keys() == server.wished().keys()
    assert first != server.wished()
    with pytest.raises(CwfedError, match="is the key of clinic-1: every node needs a key of its own"):
        server.admit("clinic-2", node.folder / "node.pub")
    with pytest.raises(CwfedError, match="is not a public key"):
        server.admit("clinic-2", node.folder / "node.toml")
    with pytest.raises(CwfedError, match="is not an ECDSA key: Flower's nodes need"):
        server.admit("clinic-2", deployed / "authority" / "app.pub")
    with pytest.raises(CwfedError, match="cannot be a node's name"):
        server.admit("../evil", node.folder / "node.pub")
    with pytest.raises(CwfedError, match="clinic-2 is not admitted here; admitted nodes: clinic-1"):
        server.exclude("clinic-2")
    (server.folder / "nodes" / "spent").write_text(server.wished()["clinic-1"])
    server.exclude("clinic-1")
    assert server.wished() == {}
    with pytest.raises(CwfedError, match="was in use before, and Flower takes a key only once"):
        server.admit("clinic-1", node.folder / "node.pub")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "server: Field required"),
        ('name = "a"\nserver = "nowhere"\n[about]\n', "server: 'nowhere' must look like server.example:9443"),
        ("name = ", "cannot be read"),
    ],
)
def test_wrong_node_settings_get_a_sentence(deployed, text, sentence):
    folder = deployed / "nodes" / "clinic-1"
    (folder / "node.toml").write_text(text if text else 'name = "a"')
    with pytest.raises(CwfedError, match=sentence):
        Node(folder)


def test_wrong_folders_get_a_sentence(tmp_path, deployed):
    with pytest.raises(CwfedError, match=r"is not the folder of a federation's node .*node.toml"):
        Node(tmp_path)
    with pytest.raises(CwfedError, match="this node has no key yet: cwfed flower key"):
        Node(deployed / "nodes" / "clinic-2").keep()
    with pytest.raises(CwfedError, match="holds no Flower app"):
        deploy(tmp_path / "nowhere", tmp_path / "new", "localhost:1", ["a"])
    with pytest.raises(CwfedError, match=r"must look like server.example:9443"):
        deploy(tmp_path / "study", tmp_path / "new", "localhost", ["a"])
    with pytest.raises(CwfedError, match="is there already"):
        deploy(tmp_path / "study", deployed, "localhost:1", ["a"])
    with pytest.raises(CwfedError, match="the server is not running: cwfed flower serve"):
        Server(deployed / "server").want()


def test_what_dies_is_started_again_and_what_it_left_is_ended(tmp_path, monkeypatch):
    """As a node whose key is refused for a while: it fails twice, then stays."""
    monkeypatch.setattr(programs, "SOONEST", 0.1)
    monkeypatch.setattr(programs, "LATEST", 0.1)
    monkeypatch.setattr(programs, "ENDS_WITHIN", processes.LIMIT)
    kept, successor = Programs(tmp_path), Programs(tmp_path)
    script = "echo x >> tries; test $(wc -l < tries) -gt 2 || exit 1; exec sleep 1000"
    kept.start("node", "sh", "-c", script)
    try:
        revived: list[str] = []

        def stays() -> bool:
            revived.extend(kept.revive())
            return len(revived) >= 2 and sleeps(kept.processes["node"])

        processes.until(stays)
        assert revived == ["node"] * 2
        killed = kept.processes["node"]
        killed.kill()
        killed.wait()
        processes.until(lambda: kept.revive() == ["node"])
        processes.until(lambda: sleeps(kept.processes["node"]))  # a process that becomes another has no mark then
        again = kept.processes["node"].pid
        successor.start("node", "sleep", "1000")  # as if the keeper itself had been killed and had come back
        processes.until(lambda: kept.processes["node"].poll() is not None)
        assert again not in programs.marked(f"{tmp_path}:node")
    finally:
        kept.close()
        successor.close()


def sleeps(process: subprocess.Popen) -> bool:
    """Whether it has become `sleep`; the script that ends in that has the word in its command too."""
    return Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sleep\0")


# --- names, protocols


def federation(tmp_path, *settings: str, **section):
    plan = plan_of(small("run.engine=loop", "data.clients=4", "train.rounds=3", *settings), 3, clients=8, **section)
    grid = Loopback(plan, tmp_path)
    for client in range(3):
        grid.join(client)
    return PersonalisedStrategy(plan), grid


def test_a_name_belongs_to_the_key_that_the_operator_admitted(tmp_path):
    admitted = tmp_path / "admitted.json"
    strategy, grid = federation(tmp_path, admitted=str(admitted))
    nodes = {f"client-{client:03d}": node for client, node in enumerate(grid.nodes)}
    admitted.write_text(json.dumps({name: {"node": node} for name, node in nodes.items()}))
    thief = grid.join(3, node=6666, name="client-003")  # nobody has used that name yet, and it is not admitted
    events = []
    for _, event in strategy.rounds(grid, strategy.first()):
        events.append(event)
        if isinstance(event, Round) and event.round == 1:  # client-001 gets another key
            grid.leave(nodes["client-001"])
            admitted.write_text(
                json.dumps({name: {"node": 7777 if name == "client-001" else node} for name, node in nodes.items()})
            )
            grid.join(1, node=7777)
    assert "client-001 came back as client 1" in notes(events)
    assert any("client-003 was left out: the name was not admitted with this node's key" in n for n in notes(events))
    assert thief in strategy.members.refused
    assert [e.participants for e in events if isinstance(e, Round)] == [[0, 1, 2]] * 3
    assert strategy.members.keys[1] == strategy.members.public_keys.get(7777, "7777")


def test_a_client_is_excluded_by_name_whatever_it_did_before(tmp_path):
    strategy, grid = federation(tmp_path)
    reached, _ = carry_out(strategy, grid)
    longer = small("run.engine=loop", "data.clients=4", "train.rounds=4")
    again = PersonalisedStrategy(plan_of(longer, 2, clients=8, exclude="someone, client-001"))
    _, events = carry_out(again, grid, reached)
    assert "client-001 was left out: it is excluded (federation.exclude)" in notes(events)
    assert [e.participants for e in events if isinstance(e, Round)] == [[0, 2]]


def test_versions_of_one_protocol_go_together(tmp_path):
    strategy, grid = federation(tmp_path)
    odd = {next(iter(grid.nodes)): {"version": "99.0.0"}, grid.join(3): {"protocol": "0.9"}}

    def other(node, reply):
        if "hello" in reply.content:
            reply.content["hello"].update(odd.get(node, {}))
        return reply

    grid.change = other
    _, events = carry_out(strategy, grid)
    assert f"client-003 was left out: it has messages of protocol 0.9, the federation {wire.PROTOCOL}" in notes(
        events
    )
    assert all(e.participants == [0, 1, 2] for e in events if isinstance(e, Round))


# --- the server's run


def recorded(tmp_path, *settings: str, out: str = "run", **section) -> RunFolder:
    strategy, grid = federation(tmp_path, *settings, **section)
    run_federation(strategy, grid, tmp_path / out)
    return RunFolder(tmp_path / out)


def test_a_federation_says_when_and_who(tmp_path, caplog, monkeypatch):
    logs.show()
    monkeypatch.setattr(logs.log, "propagate", True)
    strategy, grid = federation(tmp_path)
    lost = list(grid.nodes)[1]
    grid.change = lambda node, reply: None if node == lost and "model" in reply.content else reply
    strategy.plan.federation.__dict__["timeout"] = 0.5
    with caplog.at_level(logging.INFO, "cwfed.flower"):
        run_federation(strategy, grid, tmp_path / "run")
    told = [event for event in RunFolder(tmp_path / "run").events() if isinstance(event, Note | Round)]
    now = time.strftime("%Y-%m-%dT%H", time.gmtime())
    assert all(event.at[:13] <= now and event.at.endswith("Z") for event in told)
    assert "round 1: client-001 (client 1) did not answer" in caplog.text
    assert 'client-000 is client 0; its model of round 1: cwfed.load_model("' in caplog.text


def test_going_back_to_a_round_gives_the_same_bits_again(tmp_path):
    folder = recorded(tmp_path, "train.rounds=4")
    before, summary = folder.checkpoints.newest()[0], folder.summary()
    assert folder.checkpoints.rounds() == [4, 3, 2, 1, 0], "more than the two of a simulation"
    with pytest.raises(RunError, match=r"no checkpoint of round 9; there are those of 0, 1, 2, 3, 4"):
        folder.rollback(9)
    aside = folder.rollback(2)
    assert sorted(path.name for path in aside.iterdir()) == [
        "events.jsonl",
        "round-000003.safetensors",
        "round-000004.safetensors",
        "summary.json",
    ]
    assert [e.round for e in folder.events() if isinstance(e, Round)] == [1, 2]
    folder = recorded(tmp_path, "train.rounds=4")
    assert leaves(folder.checkpoints.newest()[0]["server"]) == leaves(before["server"])
    assert folder.summary()["reported"] == summary["reported"]


def test_trackers_follow_the_server(tmp_path):
    pytest.importorskip("tensorboardX", reason="no tensorboard here")
    recorded(tmp_path, track="tensorboard")
    assert list((tmp_path / "run").rglob("*tfevents*"))


def test_status_of_a_server_that_is_not_running(deployed):
    server = Server(deployed / "server")
    found = status.health(server)
    assert not found.running
    assert any("the server is not running: cwfed flower serve" in line for line in found.lines())
    program = Path(sys.executable).parent / "cwfed"
    done = processes.run([program, "flower", "status", server.folder, "--json"])
    assert done.returncode == 1
    assert json.loads(done.stdout)["nodes"] == {}


def test_status_names_what_needs_an_operator(tmp_path, deployed, monkeypatch):
    """A server that runs, as far as its ports say: who is away, a certificate that ends, a round that changed nothing."""
    server = Server(deployed / "server")
    run_folder = recorded(tmp_path, "guard.least=4", out="out/server/run")
    (server.folder / "wanted").write_text("now")
    (server.folder / "admitted.json").write_text(json.dumps({"clinic-1": {"node": 5}, "clinic-2": {"node": 6}}))
    monkeypatch.setattr(status, "answers", lambda port: True)
    monkeypatch.setattr(Server, "node_states", lambda self: {"5": "online", "6": "offline"})
    monkeypatch.setattr(keys, "days_left", lambda path: 29.0)
    found = status.health(server)
    assert found.nodes == {"clinic-1": "online", "clinic-2": "offline"}
    assert found.problems == [
        "not connected: clinic-2",
        "the certificate ends in 29 days: cwfed flower certify",
        "round 3 changed nothing: 3 good updates, and guard.least = 4",
    ]
    assert f"round 3 of 3 done at {found.at}" in "".join(found.lines())
    assert found.at == [e.at for e in run_folder.events() if isinstance(e, Round)][-1]
    monkeypatch.setattr(keys, "days_left", lambda path: 31.0)
    (server.folder / "wanted").unlink()
    assert status.health(server).problems == [], "nobody wants a run now"


def test_a_line_of_the_log_has_the_time(capsys, monkeypatch):
    monkeypatch.setattr(logs.log, "handlers", [])
    logs.show()
    logs.log.warning("hello")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ WARNING hello\n", capsys.readouterr().err)


# --- what is written


def test_new_projects_have_guards_for_strangers(tmp_path):
    program = Path(sys.executable).parent / "cwfed"
    for name, more in {"one": [], "two": ["--most-samples=77", "--set=guard.norm_bound=5"]}.items():
        processes.run([program, "flower", "new", tmp_path / name, *more], check=True)
    plans = [read_plan(tmp_path / name) for name in ("one", "two")]
    assert all(plan.federation.pin for plan in plans)
    assert [(p.config.guard.norm_bound, p.config.guard.most_samples) for p in plans] == [(2.0, 10_000), (5.0, 77)]


def test_a_trial_federation_has_the_same_guards(tmp_path):
    """A client may claim twice what the largest one has: 1,797 digits for two, less those kept apart."""
    made = LocalFederation.prepare(tmp_path / "trial", small(), 2)
    written = read_plan(tmp_path / "trial" / "app")
    largest = max(len(shard.train) for shard in deal(made.plan.config).shards.values())
    for plan in (made.plan, written):
        assert plan.federation.pin
        assert "pin" in plan.federation.model_fields_set
        assert (plan.config.guard.norm_bound, plan.config.guard.most_samples) == (2.0, 2 * largest)


def test_the_summary_of_before_is_no_end_of_a_trial_that_is_given_more_rounds(tmp_path, monkeypatch):
    """Every question starts a process of Flower's, so it is asked where the server has written a summary since."""
    monkeypatch.setattr(local, "LOOK_EVERY", 1e9)
    monkeypatch.setattr(local, "LOOK_AT_THE_END", -1.0)
    summary = tmp_path / "server" / "summary.json"
    summary.parent.mkdir()
    summary.touch()
    os.utime(summary, (1, 1))
    looks = []

    class Trial(LocalFederation):
        def revive(self):
            looks.append("")
            if len(looks) == 3:
                os.utime(summary, (2, 2))
            return []

        def status(self, run):
            looks.append("asked")
            return "finished:completed", ""

    assert Trial(tmp_path, plan_of(small(), 2)).follow(1, print) == ""
    assert looks == ["", "", "", "asked", ""]
