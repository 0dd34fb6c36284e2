"""What the server and a node say to their operators, line by line with the time."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

log = logging.getLogger("cwfed.flower")


def show() -> None:
    """Have the log on stderr, which Flower shows; other libraries' words stay where they are."""
    if log.handlers:
        return
    handler, lines = logging.StreamHandler(), logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%FT%TZ")
    lines.converter = time.gmtime
    handler.setFormatter(lines)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def now() -> str:
    """The time for an event, in UTC."""
    return datetime.now(UTC).strftime("%FT%TZ")
