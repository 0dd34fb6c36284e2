"""Nodes' answers, read and checked: an answer has the form that the algorithm needs, or it is refused with a reason.

Nodes are not trusted. An answer belongs to the node that was asked, whatever it says about its sender, and any error while it is read is
that node's: `pull` and `read` are the only functions that handle raw answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, TypeVar

import httpx
import numpy as np
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from cwfed.core.metrics import BUILT_IN, LOSS, PER_CLASS, RIGHT, Own, Sums, Tally, everything
from cwfed.core.types import PHASES, Params, Phase
from cwfed.engine import Score
from cwfed.federation.guard import Guard
from cwfed.federation.open_round import Update
from cwfed.flower import wire
from cwfed.flower.members import SIZES, Hello

T = TypeVar("T")

GONE = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


@dataclass(frozen=True)
class Upload:
    """A participant's answer."""

    update: Update
    model: Params
    hello: Hello
    """What the client tells about itself now."""
    epsilon: float | None
    """What differential privacy has cost it, by its own account."""


def is_gone(reply: Message) -> bool:
    """Whether a reply is Flower's, for a node that has gone, and not the client's."""
    return reply.has_error() and reply.error.code in GONE


def pull(grid: Grid, sent: Mapping[str, Message]) -> dict[str, Message]:
    """The answers that have arrived, by the number of the message that they answer.

    They are pulled one at a time, because Flower unpacks answers meanwhile, and one that cannot be unpacked would lose the others.
    """
    found = {}
    for number, message in sent.items():
        try:
            answers = list(grid.pull_messages([number]))
        except (httpx.HTTPError, OSError):
            raise  # the connection to the SuperLink: not a fault of the node
        except Exception as error:
            answers = [Message(Error(ErrorCode.UNKNOWN, f"its answer is malformed ({error!r})"), reply_to=message)]
        for reply in answers:
            # Flower takes these two from the answer, where a node could lie
            reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
            reply.metadata.__dict__["_reply_to_message_id"] = number
            found[number] = reply
    return found


def pull_all(grid: Grid, sent: Mapping[str, Message]) -> dict[str, Message]:
    """The same in a simulation, where nothing is unpacked: all at once, which is much cheaper."""
    return {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(list(sent))}


def read(reply: Message, use: Callable[[RecordDict], T]) -> T:
    """Apply `use` to the content of an answer; any error becomes a BadMessage with a reason."""
    try:
        return use(_content(reply))
    except wire.BadMessage as error:
        reason = wire.said(error)
    except Exception as error:
        reason = wire.said(f"its answer cannot be read ({error!r})")
    raise wire.BadMessage(reason or "its app does not say why")


def _content(reply: Message) -> RecordDict:
    """The content of a reply; BadMessage with the reason if the node could not answer."""
    if reply.has_error():
        lines = (reply.error.reason or "").strip().splitlines() or [f"error {reply.error.code}"]
        raise wire.BadMessage(f"its app failed: {lines[-1]}")
    content = wire.unwrapped(reply.content)
    if "problem" in content.config_records:
        raise wire.BadMessage(str(content.config_records["problem"].get("reason", "")))
    return content


def read_hello(node: int, content: RecordDict) -> Hello:
    """Read what a node tells about itself."""
    sizes = wire.metrics(content, SIZES)
    return Hello.read(node, dict(wire.texts(content, "hello")), sizes)


def read_upload(hello: Hello, client: int, content: RecordDict, guard: Guard, own: Sequence[Own] = ()) -> Upload:
    """Read a participant's update, whose form is checked here; the round checks its numbers."""
    wire.check_size(content.array_records.values(), (guard.model, guard.extras_spec))
    told = wire.metrics(content, ("samples",), ("penalty",), optional=("loss", "epsilon"))
    model = wire.from_record(wire.arrays(content, "model"), "the model", guard.model)
    extras = wire.from_record(wire.arrays(content, "beside"), "what comes beside the model", guard.extras_spec)
    if told["samples"] != hello.samples:
        raise wire.BadMessage(f"{told['samples']} training samples, it said {hello.samples} before")
    score = read_score(hello, "trained", content, own) if "trained-right" in told else None
    update = Update(client, told["samples"], told["penalty"], told.get("loss"), extras, score=score)
    return Upload(update, model, hello, told.get("epsilon"))


def read_scores(hello: Hello, content: RecordDict, own: Sequence[Own] = ()) -> dict[Phase, Score]:
    """Read a client's scores by phase; there is always one for the received model."""
    phases: tuple[Phase, ...] = PHASES if "trained-right" in wire.metrics(content, ()) else ("received",)
    return {phase: read_score(hello, phase, content, own) for phase in phases}


def read_score(hello: Hello, phase: str, content: RecordDict, own: Sequence[Own] = ()) -> Score:
    """Read a client's score, which must at least be possible."""
    told = wire.metrics(content, (f"{phase}-right", f"{phase}-validation"), (f"{phase}-loss",))
    right, held_out, loss = (told[f"{phase}-{name}"] for name in ("right", "validation", "loss"))
    if right > hello.test or held_out > hello.validation:
        raise wire.BadMessage("more right answers than it has samples")
    return Score(
        _read_tally(told, f"{phase}-test", own, hello.classes, hello.test, right, loss),
        _read_tally(told, f"{phase}-held-out", own, hello.classes, hello.validation, held_out, None),
    )


def _read_tally(
    told: dict[str, Any], what: str, own: Sequence[Own], classes: int, samples: int, right: int, loss: float | None
) -> Tally:
    """Read the counts on a client's test or held-out data: all sums, or only the metrics, or neither (an older node)."""
    shapes = {PER_CLASS: (4, classes)} | {name: shape for name, _, shape in own}
    sums: dict[str, Sums] = {}
    if f"{what}-sums-{PER_CLASS}" in told:
        sums = {name: _read_sums(told, f"{what}-sums-{name}", shape) for name, shape in shapes.items()}
        _check_table(sums[PER_CLASS], what, samples, right)
    values: dict[str, float | None] = {}
    for name, _, metric in everything(own) if not sums else ():
        value = told.get(f"{what}-{name}")
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= wire.LARGEST
        if not is_number or (name in BUILT_IN and not 0 <= value <= (inf if metric.lower_is_better else 1)):
            raise wire.BadMessage(f"the metric {what}-{name} is {value!r}, which is not possible")
        values[name] = float(value)
    if loss is None:
        loss = float(sums[PER_CLASS][LOSS].sum()) if sums else samples * (values.get("loss") or 0.0)
    elif loss < 0:  # beyond all bounds
        loss = inf
    return Tally(right, loss, sums, values)


def _read_sums(told: dict[str, Any], name: str, shape: tuple[int, ...]) -> Sums:
    found = told.get(name)
    if not isinstance(found, list) or len(found) != prod(shape):
        raise wire.BadMessage(f"the metric {name} must have {prod(shape)} numbers")
    try:
        sums = np.array(found, dtype=float) if {*map(type, found)} <= {int, float, bool} else np.array([np.nan])
    except OverflowError:  # a whole number beyond all bounds
        sums = np.array([np.nan])
    if not (np.abs(sums) <= wire.LARGEST).all():  # NaN is not <= either
        raise wire.BadMessage(f"the metric {name} has numbers that are not possible")
    return sums.reshape(shape)


def _check_table(table: Sums, what: str, samples: int, right: int) -> None:
    whole = table[:LOSS]
    table[LOSS][table[LOSS] < 0] = inf  # beyond all bounds
    possible = (whole >= 0).all() and (whole == np.floor(whole)).all() and (table[RIGHT] <= table[:LOSS].min(0)).all()
    if not possible or [samples, right, samples] != whole.sum(1).tolist():
        raise wire.BadMessage(f"the counts of each class in {what} do not fit its {samples} samples")
