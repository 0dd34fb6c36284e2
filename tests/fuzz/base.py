"""Where input from outside comes in. A target is a strategy and a function of (world, case): it does what a user would do with the case.

It may raise a CwfedError and nothing else, and must stay inside the world's folder (`watch.py`). To add one: a function with
`@target(strategy, cost)` in `settings.py`, `data.py` or `runs.py`; `cost` is how much slower than the others a case is, so that the long job does fewer of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from cwfed.core.errors import CwfedError
from cwfed.report import finished, listing
from cwfed.runs import session
from cwfed.runs.predict import load_model
from tests.conftest import small

SMALLER = ("data.clients=3", "data.samples=200")


def look(folder: Path) -> dict[str, Any]:
    """Everything that only reads a run: what each way gives, or its refusal."""
    found: dict[str, Any] = {}
    readers: dict[str, Callable[[], Any]] = {
        "report": lambda: vars(finished.read_run(folder)) | {"path": None},
        "list": lambda: listing.look([folder])[0].as_dict(),
    }
    for client in (0, 2):
        readers[f"client {client}"] = lambda c=client: str(load_model(folder, c).network.state_dict())
    for name, read in readers.items():
        try:
            found[name] = read()
        except CwfedError as error:
            found[name] = error
    return found


class World:
    """A folder for the cases, and whole things to damage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole = folder / "whole"
        session.run(small("train.rounds=2", *SMALLER), self.whole)
        self.files = {str(p.relative_to(self.whole)): p.read_bytes() for p in self.whole.rglob("*") if p.is_file()}
        self.files = {name: content for name, content in self.files.items() if not name.startswith(".")}
        self.seen = look(self.whole)
        self.config = small()

    def fresh(self) -> Path:
        """An empty folder."""
        path = self.folder / "case"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def copy(self, **changed: bytes) -> Path:
        """The whole run with files changed."""
        folder = self.fresh() / "run"
        for name, content in (self.files | changed).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


@dataclass(frozen=True)
class Target:
    cases: st.SearchStrategy[Any]
    act: Callable[[World, Any], object]
    cost: int


TARGETS: dict[str, Target] = {}


def target(cases: st.SearchStrategy[Any], cost: int = 1) -> Callable[[Callable[[World, Any], object]], None]:
    def add(act: Callable[[World, Any], object]) -> None:
        TARGETS[act.__name__] = Target(cases, act, cost)

    return add
