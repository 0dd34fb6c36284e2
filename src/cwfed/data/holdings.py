"""Notes about missing data: classes that no client holds, clients without test samples. The results do not show either."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cwfed.data.clients import Federation

NAMED = 10
"""The most classes or clients that are named; of more, the others are counted."""


def missing_classes(
    histogram: NDArray[np.int64], names: Sequence[object], samples: int, room: int | None = None
) -> list[str]:
    """A sentence if no client holds some classes; an empty list if every class has a client.

    `histogram` is clients x classes, `samples` the number of samples in the data, `room` how many classes all clients together can
    hold, if the partition limits that.
    """
    absent = [name for name, held in zip(names, histogram.sum(0), strict=True) if not held]
    if not absent:
        return []
    unused = samples - int(histogram.sum())
    what = f"{unused:,} of {samples:,} samples are not used" if unused > 0 else "the data have no such sample"
    why = f"; the clients have room for {room} of {len(names)} classes" if room and room < len(names) else ""
    left = len(names) - len(absent)
    return [f"no client holds {_named('class', absent)}: {what}, the results are about the other {left}{why}"]


def missing_data(
    federation: Federation, members: Sequence[int], samples: int, room: int | None, validation: float
) -> list[str]:
    """All such notes of an experiment; `members` are the clients that may take part."""
    names, shards = federation.data.class_names, federation.shards
    histogram = federation.histogram()
    trained = np.sum([federation.class_counts(client) for client in members], axis=0)
    only = [name for name, held, n in zip(names, histogram.sum(0), trained, strict=True) if held and not n]
    untested = [client for client, shard in shards.items() if not len(shard.test)]
    unpicked = [client for client, shard in shards.items() if validation and not len(shard.validation)]
    found = [*federation.notes, *missing_classes(histogram, names, samples, room)]
    if only:
        found.append(f"no client that takes part has training samples of {_named('class', only)}")
    if untested:
        found.append(
            f"{_named('client', untested, 'has', 'have')} no test samples: they do not count in any accuracy"
        )
    if unpicked:
        have = _named("client", unpicked, "has", "have")
        found.append(f"{have} no validation samples: the validated round is picked without them")
    return found


def _named(what: str, names: Sequence[object], one: str = "", several: str = "") -> str:
    """ "client 6 has", "clients 6, 7 have"."""
    shown = ", ".join(map(str, names[:NAMED])) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    plural = what + ("es" if what.endswith("s") else "s")
    return f"{what} {shown} {one}".rstrip() if len(names) == 1 else f"{plural} {shown} {several}".rstrip()
