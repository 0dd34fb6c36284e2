"""The terminal: where words for people go, and how any text becomes harmless there."""

from __future__ import annotations

import os
import sys

from rich import markup
from rich.console import Console

from cwfed.core.errors import plain

out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
err = Console(stderr=True)
FEW_CLASSES = 20
"""So many classes have a column each."""


def escape(text: str) -> str:
    """Any text for our consoles: neither markup nor control characters of it have an effect."""
    return markup.escape(plain(text, keep="\n"))
