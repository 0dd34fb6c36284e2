"""The section of docs/results.md that is made from the published runs (benchmarks/results), and its picture.

python tools/results.py
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from cwfed.reproduce import Outcome, Workshop, find, judge

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
PLACE = re.compile(r"(?<=<!-- whole -->\n).*?(?=<!-- end -->)", re.DOTALL)
"""Where it stands on the page."""


def outcome() -> Outcome:
    """The table beyond the paper, of the settings from which there are runs."""
    settings = [name for name in find("beyond").settings if (RUNS / "whole" / name).exists()]
    return judge(find("beyond").part(settings, []), Workshop("whole", RUNS, changes=["train.precision=bf16"]))


def section(found: Outcome) -> str:
    """Its Markdown without the heading, which is the page's own."""
    text = found.markdown("results/").partition("\n")[2].strip()
    return text.replace(f"--out {RUNS}", f"--out {RUNS.relative_to(ROOT)}").replace(
        "results/beyond.png", "results/whole.png"
    )


def main() -> None:
    """Judge the runs, write the section, keep the picture."""
    found = outcome()
    text = section(found)
    PAGE.write_text(PLACE.sub(lambda _: f"\n{text}\n\n", PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        found.write(Path(scratch), ["png"])
        shutil.copy(Path(scratch) / "beyond.png", PAGE.parent / "results" / "whole.png")


if __name__ == "__main__":
    main()
