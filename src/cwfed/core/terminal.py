"""The consoles for people (stdout and stderr), and how any text is made harmless for them."""

from __future__ import annotations

import os
import sys

from rich import markup
from rich.console import Console

from cwfed.core.errors import plain

out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
err = Console(stderr=True)
FEW_CLASSES = 20
"""Up to so many classes get a column each."""


def escape(text: str) -> str:
    """Any text for our consoles, with its markup and control characters made ineffective."""
    return markup.escape(plain(text, keep="\n"))
