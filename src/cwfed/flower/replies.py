"""What nodes answer, read and checked: an answer is as good as the algorithm needs it, or it is refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode

from cwfed.engine import Score
from cwfed.flower import wire
from cwfed.flower.client import score_from
from cwfed.flower.members import Hello
from cwfed.guard import Guard
from cwfed.types import Params, nbytes

GONE = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


@dataclass(frozen=True)
class Upload:
    """What a participant sent, checked."""

    client: int
    model: Params
    beside: Params
    metrics: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """The traffic of this message."""
        return nbytes(self.model) + nbytes(self.beside)


def is_gone(reply: Message) -> bool:
    """Flower answers for a node that went away: that is no answer of the client."""
    return reply.has_error() and reply.error.code in GONE


def content_of(reply: Message) -> RecordDict:
    """What a node answered; where it could not, why."""
    if reply.has_error():
        lines = (reply.error.reason or f"error {reply.error.code}").strip().splitlines()
        raise wire.BadMessage(f"its app failed: {lines[-1][:300]}")
    if "problem" in reply.content.config_records:
        raise wire.BadMessage(str(reply.content.config_records["problem"].get("reason", ""))[:500])
    return reply.content


def read_upload(hello: Hello, client: int, reply: Message, guard: Guard) -> tuple[Upload, Score | None]:
    """A participant's update, and how good it says its model is."""
    content = content_of(reply)
    wire.check_size(content.array_records.values(), (guard.model, guard.beside))
    metrics = wire.metrics(content, ("samples",), ("penalty",), optional=("loss", "epsilon"))
    upload = Upload(
        client,
        wire.from_record(wire.arrays(content, "model"), "the model", guard.model),
        wire.from_record(wire.arrays(content, "beside"), "what comes beside the model", guard.beside),
        metrics,
    )
    if problem := guard.problem(upload.model, upload.beside, metrics["samples"]):
        raise wire.BadMessage(problem)
    if metrics["samples"] != hello.samples:
        raise wire.BadMessage(f"{metrics['samples']} training samples, it said {hello.samples} when it joined")
    return upload, read_score(hello, "trained", content) if "trained-right" in metrics else None


def read_score(hello: Hello, phase: str, content: RecordDict) -> Score:
    """What a client says of itself must at least be possible."""
    score = score_from(phase, wire.metrics(content, (f"{phase}-right", f"{phase}-validation"), (f"{phase}-loss",)))
    if score.test_right > hello.test or score.validation_right > hello.validation:
        raise wire.BadMessage("more right answers than it has samples")
    return score
