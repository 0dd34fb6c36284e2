"""The logs of the server and of a node, for their operators: lines with the time."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

log = logging.getLogger("cwfed.flower")


def show() -> None:
    """Send our log to stderr, which Flower shows; other libraries' logs are not changed."""
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
