"""What runs leave, and the pages made from it."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from cwfed.core import events, files
from cwfed.core.errors import CwfedError
from cwfed.report import figures, finished, groups, page, tables
from cwfed.runs import checkpoint, session
from cwfed.runs.folder import RunFolder
from tests.conftest import small
from tests.fuzz.base import SMALLER, World, look, target
from tests.fuzz.cases import (
    JSON,
    MUTATIONS,
    NAMES,
    PLACES,
    dump,
    mutate,
    replace,
)

RUN_FILES = [
    "config.toml",
    "events.jsonl",
    "manifest.json",
    "summary.json",
    "models/index.json",
    "models/rounds.json",
    "models/client-00000.safetensors",
]


@target(st.tuples(st.sampled_from(RUN_FILES), MUTATIONS), cost=8)
def damaged_runs(world: World, case: tuple[str, Any]) -> None:
    """A finished run with one damaged file: what is read from it is what was written, or it is refused."""
    name, mutations = case
    seen = look(world.copy(**{name: mutate(world.files[name], mutations)}))
    for way in ("report", "client 0", "client 2"):
        same = isinstance(seen[way], CwfedError) or seen[way] == world.seen[way]
        assert same, f"{name}: something else was read without a word ({way})"
    refusals = [found for found in seen.values() if isinstance(found, CwfedError)]
    if refusals:
        raise refusals[0]


@target(st.tuples(st.sampled_from([n for n in RUN_FILES if n.endswith(".json")]), PLACES, JSON), cost=8)
def forged_runs(world: World, case: tuple[str, list[int], Any]) -> None:
    """A run folder made by somebody else, without seals: it may be refused or shown, and shown it is harmless."""
    name, places, value = case
    tables_ = {n: json.loads(world.files[n]) for n in RUN_FILES if n.endswith(".json")}
    for table in tables_.values():
        table.pop(files.SEAL, None)
        table.pop("events_sha256", None)
    tables_[name] = replace(tables_[name], places, value)
    code = world.files["config.toml"].partition(b"\n")[2].replace(b'"cwfedavg"', b'"trap:boom"')
    look(world.copy(**{"config.toml": code}))
    folder = world.copy(**{n: dump(table) for n, table in tables_.items()})
    look(folder)
    assert not (world.folder / "trapped").exists(), "to look at a run imported the code it names"
    record = finished.read_run(folder)
    (group,) = groups.group([record])
    check_page(folder.parent / "r.html", group, record.label)


@target(st.tuples(st.sampled_from([0, 1, 2]), PLACES, JSON) | MUTATIONS)
def event_lines(world: World, case: Any) -> None:
    """Lines of events.jsonl: an event, or damage with its line."""
    lines = world.files["events.jsonl"].split(b"\n")[:-1]
    if isinstance(case, tuple):
        lines[case[0]] = dump(replace(json.loads(lines[case[0]]), *case[1:]))
        content = b"\n".join(lines) + b"\n"
    else:
        content = mutate(world.files["events.jsonl"], case)
    for event in events.parse(content, Path("events.jsonl")):
        assert events.from_json(events.to_json(event)) == event


@target(MUTATIONS)
def damaged_checkpoints(world: World, mutations: Any) -> None:
    """A checkpoint is what was saved, or damaged."""
    name = next(n for n in world.files if n.startswith("checkpoints/"))
    path = world.fresh() / "c.safetensors"
    path.write_bytes(mutate(world.files[name], mutations))
    tree = checkpoint.load(path)
    assert str(tree) == str(checkpoint.load(world.whole / name)), "something else was read without a word"


@target(st.tuples(PLACES, JSON), cost=16)
def forged_checkpoints(world: World, case: tuple[list[int], Any]) -> None:
    """A checkpoint with a right checksum and wrong contents: refused, or gone on from to the end of a longer run."""
    folder = RunFolder(world.copy())
    name = next(n for n in world.files if n.startswith("checkpoints/"))
    try:
        checkpoint.save(folder.path / name, replace(checkpoint.load(world.whole / name), *case))
    except (TypeError, ValueError, UnicodeError):  # no such file can be made
        return
    (folder.path / "summary.json").unlink()
    session.run(small("train.rounds=3", *SMALLER), folder.path, resume=True)


# --- pages


class Tags(HTMLParser):
    """Counts what a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts, self.handlers, self.images = 0, 0, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.images += tag in ("img", "iframe", "object", "embed")
        self.handlers += any(name.startswith("on") for name, _ in attrs)


def check_page(path: Path, group: groups.Group, title: str) -> None:
    try:
        page.write(path, title, [group], [finished.LeftOut(Path(title.replace("\0", "")), title)])
    except UnicodeEncodeError as error:
        raise AssertionError("a name cannot be written") from error
    text = path.read_text(encoding="utf-8")
    tags = Tags()
    head, _, rest = text.partition("<script id=data")
    tags.feed(head)
    assert (tags.scripts, tags.handlers, tags.images) == (0, 0, 0), title
    payload = rest.partition(">")[2].partition("</script>")[0]
    json.loads(payload)
    assert "<" not in payload


@target(st.tuples(NAMES, NAMES, NAMES), cost=8)
def page_names(world: World, case: tuple[str, str, str]) -> None:
    """Labels, data sets, classes and notes with any text."""
    label, title, name = case
    record = finished.read_run(world.whole, label)
    record.manifest["data"]["classes"] = [name] * 10
    record.manifest["machine"]["cpu"] = name
    record = dataclasses.replace(record, summary=dataclasses.replace(record.summary, notes=[name]))
    group = groups.Group(title, [groups.Method(label, [record])])
    check_page(world.fresh() / "r.html", group, title)
    rows = [group.methods[0].row]
    for text in (tables.markdown(rows), tables.latex(rows), tables.csv(rows)):
        text.encode(errors="replace")
    figures.overview(group)
