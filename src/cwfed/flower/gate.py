"""The gate of a federation: the public address of the SuperLink, which passes on the calls of nodes only.

Flower's SuperLink serves everything on one port: what nodes need (/v1/fleet), and what starts runs and registers keys (/v1/control,
/v1/runtime), for which Flower's free edition has no accounts. So the SuperLink listens on the loopback, and the gate, at the public
address, passes on the few calls of a SuperNode and nothing else. A node must still sign each call with a registered key, which Flower checks
behind the gate.

Nodes that run only signed apps (`flower-supernode --trusted-entities`) expect signatures with the app. The SuperLink has none for apps that
do not come from Flower's hub, so the gate adds those in its folder. It cannot make any.

A SuperNode (flwr 1.41) that asks for messages and gets none sleeps for three seconds, and that cannot be configured. So the gate does not answer
at once if there is no message: it repeats the node's own signed request when the server rings (`bell.py`), and at intervals, until there
is a message or `PATIENCE` seconds have passed. In the other direction, the gate rings when all parts of an answer have passed, so that
the server need not poll for answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from flwr.proto.fab_pb2 import GetFabResponse
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from cwfed.flower import bell

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

GET_APP, GET_MESSAGES = "/v1/fleet/get-fab", "/v1/fleet/pull-messages"
SEND_ANSWER, SEND_PART = "/v1/fleet/push-messages", "/v1/fleet/push-object"
PASSED_ON = {
    GET_APP,
    GET_MESSAGES,
    SEND_ANSWER,
    SEND_PART,
    *(
        f"/v1/fleet/{call}"
        for call in (
            "activate-node",
            "deactivate-node",
            "send-node-heartbeat",
            "get-run",
            "pull-object",
            "confirm-message-received",
        )
    ),
}
"""All calls of a SuperNode with a registered key (flwr 1.41)."""
MOST_BYTES = 32 * 2**20
"""The most bytes of a request; Flower sends arrays in pieces of 5 MiB."""
PATIENCE = 20.0
"""Seconds that a node is kept waiting for a message: it closes the connection after 30, and its signature is valid for 300."""
PAUSE, WITHOUT_A_BELL, PER_NODE = 2.0, 0.5, 0.05
"""Seconds between two repeated requests for a waiting node if the bell does not ring: PAUSE (or WITHOUT_A_BELL if there is no bell), but at least
PER_NODE times the number of waiting nodes, so that the SuperLink gets at most 20 requests a second. (With four nodes it gets two; 20 a second
took nearly half a core on a machine with two.)"""
MOST_ANSWERS = 10_000
"""The most answers that are incomplete: a node may never send the rest of one."""
OWN_TO_A_CONNECTION = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"content-length", b"host"}
UNCODED = {b"content-encoding", b"content-length", b"transfer-encoding", b"connection", b"date", b"server"}


class Gate:
    """An ASGI app that passes nodes' calls on to the SuperLink."""

    def __init__(self, superlink: httpx.AsyncClient, signatures: Path, hung: int | None = None) -> None:
        self.superlink, self.signatures = superlink, signatures
        self.is_ending: Callable[[], bool] = lambda: False
        self._waiting: set[asyncio.Event] = set()
        """For each waiting node, an event that is set when the bell rings."""
        self._bell, self._is_heard = hung, False
        self._coming = Coming()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # no websockets here
            return
        status, headers, body = await self._answer(scope, receive)
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        if scope["method"] != "POST" or scope["path"] not in PASSED_ON or scope["query_string"]:
            return 404, [], b"nothing here\n"
        asked = bytearray()
        while True:
            message = await receive()
            asked += message.get("body", b"")
            if len(asked) > MOST_BYTES:
                return 413, [], b"too much\n"
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                break
        passed = [(name, value) for name, value in scope["headers"] if name not in OWN_TO_A_CONNECTION]
        try:
            answer = await self.superlink.post(scope["path"], content=bytes(asked), headers=passed)
            if scope["path"] == GET_MESSAGES and is_empty(answer):
                answer = await self._wait(answer, receive)
        except httpx.HTTPError:  # nodes try again on this one
            return 503, [], b"the SuperLink does not answer\n"
        if answer.status_code == 200 and (
            whole := self._coming.is_whole(scope["path"], bytes(asked), answer.content)
        ):
            bell.ring("answers", whole)
        body = answer.content
        if scope["path"] == GET_APP and answer.status_code == 200:
            body = self._with_signatures(body)
        headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in UNCODED]
        return answer.status_code, headers, body

    async def _wait(self, answer: httpx.Response, receive: Receive) -> httpx.Response:
        """Repeat a request until there is a message. It is not repeated for a node that has closed the connection, whose message would be lost."""
        self._listen()
        until = time.monotonic() + PATIENCE
        gone = asyncio.ensure_future(receive())
        self._waiting.add(rung := asyncio.Event())
        try:
            while is_empty(answer) and time.monotonic() < until and not self.is_ending():
                heard = asyncio.ensure_future(rung.wait())
                pause = max(WITHOUT_A_BELL if self._bell is None else PAUSE, PER_NODE * len(self._waiting))
                await asyncio.wait([gone, heard], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                heard.cancel()
                rung.clear()
                if gone.done():
                    break
                answer = await self.superlink.send(answer.request)
        finally:
            self._waiting.remove(rung)
            gone.cancel()
        return answer

    def _listen(self) -> None:
        """Listen to the bell from the first request on, when the event loop exists."""
        if self._bell is not None and not self._is_heard:
            asyncio.get_running_loop().add_reader(self._bell, self._rung)
            self._is_heard = True

    def _rung(self) -> None:
        if self._bell is not None:
            bell.heard(self._bell)
        for rung in self._waiting:
            rung.set()

    def _with_signatures(self, body: bytes) -> bytes:
        answer = GetFabResponse.FromString(body)
        for key, text in signatures_of(answer.fab.content, self.signatures).items():
            answer.fab.verifications[key] = text
        return bytes(answer.SerializeToString())


class Coming:
    """The incomplete answers, of which parts are still to come."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[str, int]] = {}
        """By session: the number of the message that is answered, and how many parts are missing."""

    def is_whole(self, path: str, asked: bytes, answer: bytes) -> str:
        """After a successful call: the number (as the node says) of the message whose answer is now complete; "" if none is."""
        with suppress(DecodeError, IndexError, KeyError):
            if path == SEND_ANSWER:
                said, session = PushMessagesRequest.FromString(asked), PushMessagesResponse.FromString(answer)
                number, name = said.messages_list[0].metadata.reply_to_message_id, session.session_id
                left = len(session.objects_to_push)
            elif path == SEND_PART:
                name = PushObjectRequest.FromString(asked).session_id
                number, left = self._left.pop(name)
                left -= 1
            else:
                return ""
            if left <= 0:
                return number if number.isalnum() and len(number) <= 100 else ""
            self._left[name] = number, left
            if len(self._left) > MOST_ANSWERS:
                del self._left[next(iter(self._left))]
        return ""


def is_empty(answer: httpx.Response) -> bool:
    """Whether an answer says that there is no message."""
    return answer.status_code == 200 and not PullMessagesResponse.FromString(answer.content).messages_list


def signatures_of(bundle: bytes, folder: Path) -> dict[str, str]:
    """The signatures of an app, by signer, in the form that Flower's nodes read."""
    path = folder / f"{hashlib.sha256(bundle).hexdigest()}.json"
    if not path.exists():
        return {}
    signed: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return signed | {"valid_license": "Valid"}  # Flower expects this with every signed app


def serve(public: str, control: int, keys: Path, signatures: Path) -> None:
    """Be the gate at a public address, HOST:PORT, until the process is told to end."""
    host, _, port = public.rpartition(":")
    trust = ssl.create_default_context(cafile=keys / "ca.crt")
    superlink = httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{control}",
        verify=trust,
        timeout=60.0,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )
    gate = Gate(superlink, signatures, bell.hang("messages"))
    server = uvicorn.Server(
        uvicorn.Config(
            gate,
            host=host.strip("[]"),
            port=int(port),
            ssl_certfile=keys / "server.crt",
            ssl_keyfile=str(keys / "server.key"),
            lifespan="off",
            access_log=False,
            server_header=False,
            log_level="warning",
        )
    )
    gate.is_ending = lambda: server.should_exit
    server.run()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
