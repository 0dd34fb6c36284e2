"""Envelopes: the messages of many clients in one, which a simulation hands to a worker and gets back from it.

A message through Flower's engine and Ray costs milliseconds, whatever its content. So the messages of several clients go in one envelope, in
which common tensors are stored once. The worker answers each message as if it had come alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from cwfed.flower import replies
from cwfed.flower.numbers import Numbers, Packer
from cwfed.flower.plan import FederationSection
from cwfed.flower.post import Post, message_to

EACH = 4
"""Envelopes per worker: a worker that is done takes the next one, and the server reads the first answers while others work."""
LARGEST = 2**26
"""The most bytes of models in an envelope with more than one client."""
LOOK = 0.1
"""Seconds until Flower's engine looks for messages if it is not told that there is one."""


class Envelope(RecordDict):
    """The content of a message that has others in it."""

    def __init__(self, messages: Sequence[Message]) -> None:
        super().__init__()
        self.__dict__["messages"] = list(messages)

    def __reduce__(self) -> tuple[type[Envelope], tuple[list[Message]]]:
        return Envelope, (self.__dict__["messages"],)


def inside(content: RecordDict) -> list[Message]:
    """The messages in an envelope."""
    messages: list[Message] = content.__dict__["messages"]
    return messages


def seal(messages: Sequence[Message], workers: int) -> list[Message]:
    """Put messages of one kind into envelopes, each of which goes to the node of its first client.

    Long and short tasks are spread evenly, so that all envelopes take about the same time.
    """
    if not messages:
        return []
    for number, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = str(number)
    most = max(1, LARGEST // max(1, *map(_size, messages)))
    parts = max(min(EACH * workers, len(messages)), -(-len(messages) // most))
    by_work = sorted(messages, key=lambda message: -_samples(message))
    return [_sealed(by_work[part::parts]) for part in range(parts)]


def _sealed(messages: Sequence[Message]) -> Message:
    about = messages[0].metadata
    return message_to(about.dst_node_id, about.message_type, about.group_id, Envelope(messages))


def _samples(message: Message) -> int:
    told = message.content.config_records["told"]
    return int(told["samples"])  # type: ignore[arg-type]  # the strategy has put it there


def _numbers(message: Message) -> list[Numbers]:
    records = message.content.array_records.values()
    return [array for record in records for array in record.values() if isinstance(array, Numbers)]


def _size(message: Message) -> int:
    return sum(array.numbers.nbytes for array in _numbers(message))


def answer(app: ClientAppCallable, message: Message, context: Context) -> Message:
    """An app's answer to a message, which may be an envelope; an error in it belongs to one client."""
    if not isinstance(message.content, Envelope):
        return app(message, context)
    return Message(Envelope([_answer(app, each, context) for each in inside(message.content)]), reply_to=message)


def _answer(app: ClientAppCallable, message: Message, context: Context) -> Message:
    client = message.content.config_records["told"]["client"]
    its = {**context.node_config, "partition-id": client}
    try:
        reply = app(message, Context(context.run_id, context.node_id, its, RecordDict(), context.run_config))  # type: ignore[arg-type]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, why), reply_to=message)
    message.content = RecordDict()  # what was answered need not be kept
    return reply


def unseal(sent: Message, reply: Message) -> list[Message]:
    """The answers to the messages in an envelope; an error of the envelope is an error of each."""
    if reply.has_error():
        return [Message(reply.error, reply_to=message) for message in inside(sent.content)]
    return inside(reply.content)


class EnvelopePost(Post):
    """Messages to the virtual nodes of a simulation, in envelopes; both sides are woken, so that none polls."""

    def __init__(self, federation: FederationSection, workers: Callable[[], int]) -> None:
        super().__init__(federation)
        self._workers = workers
        self._sent, self._answered = threading.Event(), threading.Event()
        self.pack = Packer()
        """How tensors go into these messages."""
        self.pull = replies.pull_all

    def push(self, grid: Grid, messages: list[Message]) -> dict[str, Message]:
        sent = super().push(grid, messages)
        self._sent.set()
        return sent

    def exchange(self, grid: Grid, messages: list[Message]) -> Iterator[Message]:
        sealed = seal(messages, self._workers()) if messages else []
        self.pack.forget()
        for reply in super().exchange(grid, sealed):
            (sent,) = (one for one in sealed if one.metadata.message_id == reply.metadata.reply_to_message_id)
            yield from unseal(sent, reply)

    def sleep(self, seconds: float) -> None:
        super().sleep(0)
        self._answered.wait(seconds)
        self._answered.clear()

    def listen(self, grid: Grid) -> None:
        """Wake Flower's engine when there is a message, and be woken when there is an answer.

        Ten times a second the engine checks every message under way, once for every node, delivered or not: with 100 nodes that takes a
        third of a core. Here nodes without a message are skipped, and the first check waits for a message.
        """
        state = grid.state  # type: ignore[attr-defined]  # of the grid that Flower's engine has
        look, store = state.get_message_ins, state.store_message_res
        first = next(iter(state.nodes), None)  # in the order in which the engine looks

        def get_message_ins(node_id: int, limit: int | None, **more: Any) -> list[Message]:
            if node_id == first:
                self._sent.wait(LOOK)
                self._sent.clear()
            under_way = (message.metadata for message in list(state.message_ins_store.values()))
            waits = any(about.dst_node_id == node_id and not about.delivered_at for about in under_way)
            return look(node_id, limit, **more) if waits else []

        def store_message_res(message: Message) -> str | None:
            stored: str | None = store(message)
            self._answered.set()
            return stored

        state.get_message_ins, state.store_message_res = get_message_ins, store_message_res
