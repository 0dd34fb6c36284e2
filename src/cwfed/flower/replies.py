"""What nodes answer, read and checked: an answer is as good as the algorithm needs it, or it is refused with a reason.

Nobody trusts a node. An answer belongs to the node that was asked, whatever the answer itself says of its sender, and whatever
goes wrong while it is read is that node's: `pull` and `read` are the only places where answers are touched.
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
    """What a participant sent."""

    update: Update
    model: Params
    hello: Hello
    """What it says of itself now."""
    epsilon: float | None
    """What its own account says that differential privacy has cost it."""


def is_gone(reply: Message) -> bool:
    """Flower answers for a node that went away: that is no answer of the client."""
    return reply.has_error() and reply.error.code in GONE


def pull(grid: Grid, sent: Mapping[str, Message]) -> dict[str, Message]:
    """The answers that are there, by the message that they answer.

    One at a time: Flower unpacks what a node sent while it is pulled, and what cannot be unpacked would take the others with it.
    """
    found = {}
    for number, message in sent.items():
        try:
            answers = list(grid.pull_messages([number]))
        except (httpx.HTTPError, OSError):
            raise  # the connection to the SuperLink, no node's fault
        except Exception as error:
            answers = [Message(Error(ErrorCode.UNKNOWN, f"its answer is malformed ({error!r})"), reply_to=message)]
        for reply in answers:
            # Flower takes these from what the node sent
            reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
            reply.metadata.__dict__["_reply_to_message_id"] = number
            found[number] = reply
    return found


def pull_all(grid: Grid, sent: Mapping[str, Message]) -> dict[str, Message]:
    """The same in a simulation, where nothing is unpacked and every reply is Flower's own: all at once, which is much cheaper."""
    return {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(list(sent))}


def read(reply: Message, use: Callable[[RecordDict], T]) -> T:
    """What `use` makes of an answer; anything that goes wrong is a BadMessage with a reason."""
    try:
        return use(_content(reply))
    except wire.BadMessage as error:
        reason = wire.said(error)
    except Exception as error:
        reason = wire.said(f"its answer cannot be read ({error!r})")
    raise wire.BadMessage(reason or "its app does not say why")


def _content(reply: Message) -> RecordDict:
    """What a node answered; where it could not, why."""
    if reply.has_error():
        lines = (reply.error.reason or "").strip().splitlines() or [f"error {reply.error.code}"]
        raise wire.BadMessage(f"its app failed: {lines[-1]}")
    content = wire.unwrapped(reply.content)
    if "problem" in content.config_records:
        raise wire.BadMessage(str(content.config_records["problem"].get("reason", "")))
    return content


def read_hello(node: int, content: RecordDict) -> Hello:
    """What a node says of itself."""
    sizes = wire.metrics(content, SIZES)
    return Hello.read(node, dict(wire.texts(content, "hello")), sizes)


def read_upload(hello: Hello, client: int, content: RecordDict, guard: Guard, own: Sequence[Own] = ()) -> Upload:
    """A participant's update, of the form that it must have; whether its numbers are good is for the round to say."""
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
    """By phase, how good a client says its models are; one of them is the model that it received."""
    phases: tuple[Phase, ...] = PHASES if "trained-right" in wire.metrics(content, ()) else ("received",)
    return {phase: read_score(hello, phase, content, own) for phase in phases}


def read_score(hello: Hello, phase: str, content: RecordDict, own: Sequence[Own] = ()) -> Score:
    """What a client says of itself must at least be possible."""
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
    """What was counted on a client's test or held-out data: all sums, or only the metrics; an older node says neither."""
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
