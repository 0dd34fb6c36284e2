"""The clients' models on disk: of the last round, and of the round that validation picked.

index.json, client-00000.safetensors, ...   the last round: which client has which file
validated/                                  the same for the picked round, if that is another one
rounds.json                                 which rounds these are; folders of earlier versions have only the last models
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from cwfed.core import files
from cwfed.core.errors import MOST_NAMES, RunError
from cwfed.core.types import Params
from cwfed.runs.checkpoint import digest, read_tensors, write_tensors

Models: TypeAlias = Iterator[tuple[int, Params]]
Pick: TypeAlias = Literal["validated", "last"]
"""The round of a model: the one that was best on held-out training data, or the last."""

_VALIDATED = "validated"
_FILE = re.compile(r"client-\d+\.safetensors", re.ASCII)


class Found(NamedTuple):
    """A model that was read."""

    params: Params
    pick: Pick
    round: int
    """0 if it is not known."""


def write(folder: Path, last: Models, rounds: dict[str, int] | None, validated: Models | None) -> None:
    """Write a folder of models. `rounds` says which rounds they are from; without `validated`, both rounds are the same."""
    _write(folder, last)
    if validated is not None:
        _write(folder / _VALIDATED, validated)
    if rounds is not None:
        (folder / "rounds.json").write_text(json.dumps(files.seal_table(rounds), indent=1))


def _write(folder: Path, models: Models) -> None:
    """Write one safetensors file per personal model, and an index of clients and files."""
    folder.mkdir()
    index: dict[str, str] = {}
    names: dict[str, str] = {}  # by content: clients with the same model share its file
    for client, model in models:
        content = digest(model)
        if content not in names:
            names[content] = f"client-{client:05d}.safetensors"
            write_tensors(folder / names[content], {name: w.contiguous() for name, w in model.items()})
        index[str(client)] = names[content]
    (folder / "index.json").write_text(json.dumps(files.seal_table(index), indent=1))


def read(folder: Path, client: int, pick: Pick | None, rounds_done: int) -> Found:
    """A client's model; by default of the round that validation picked if there is one, else of the last."""
    rounds: dict[str, Any] = {}
    if (folder / "rounds.json").exists():
        rounds = files.read_table(folder / "rounds.json")
        if any(type(rounds.get(name, 0)) is not int for name in ("last", "validated")):
            raise RunError(f"{folder / 'rounds.json'} is damaged: rounds are numbers")
    chosen = pick or ("validated" if "validated" in rounds else "last")
    if chosen == "validated" and "validated" not in rounds:
        raise RunError(
            f"{folder} has no models of a round that validation picked (data.validation = 0, or they were not saved): "
            'pick = "last" loads those of the last round'
        )
    is_apart = chosen == "validated" and rounds["validated"] != rounds.get("last")
    place = folder / _VALIDATED if is_apart else folder
    index = files.read_table(place / "index.json")
    if str(client) not in index:
        raise RunError(f"{folder} has no model of client {client}: {_whose(index)}")
    name = str(index[str(client)])
    if not _FILE.fullmatch(name):  # an index of unknown origin must not make us read other files
        raise RunError(f"{place / 'index.json'} is damaged: {name!r} is not the name of a model file")
    return Found(read_tensors(place / name)[0], chosen, rounds.get(chosen, rounds_done))


def _whose(index: dict[str, Any]) -> str:
    """The clients that have models here: in a run's folder all, in the folder of a federation's node one."""
    if index.keys() == {str(client) for client in range(len(index))}:
        return f"its clients are 0 to {len(index) - 1}"
    return f"there {'are those' if len(index) > 1 else 'is that'} of {', '.join(list(index)[:MOST_NAMES])}"
