"""The tables of docs/configuration.md: every setting as `cwfed/federation/sections.py` describes it.

    python tools/settings.py

What stands between `<!-- settings: SECTION -->` and `<!-- end -->` is made anew; all else stays as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from cwfed.federation.config import SETTINGS
from cwfed.federation.settings import rows

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


def current(page: str) -> str:
    """The page with its tables as they should be."""

    def table(found: re.Match[str]) -> str:
        return "\n".join([f"<!-- settings: {found[1]} -->", "", *rows(SETTINGS, found[1]), "", "<!-- end -->"])

    return re.sub(r"<!-- settings: (\w+) -->.*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
