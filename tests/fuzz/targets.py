"""Where input from outside comes in. A target is a strategy and a function of (world, case): it does what a user would do with the case.

It may raise a CwfedError and nothing else, and must stay inside the world's folder (`watch.py`). To add one: a function with
`@target(strategy, cost)`; `cost` is how much slower than the others a case is, so that the long job does fewer of them.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from cwfed import checkpoint, compare, config, events, files, session
from cwfed.data import dataset, pfllib, sources
from cwfed.errors import ConfigError, CwfedError
from cwfed.experiment import Experiment
from cwfed.folder import RunFolder, experiment, flat
from cwfed.predict import load_model
from cwfed.report import figures, listing, page, runs, tables
from tests.conftest import small
from tests.fuzz.cases import (
    ARRAYS,
    JSON,
    MOMENTS,
    MUTATIONS,
    NAMES,
    NUMBERS,
    OBJECTS,
    PLACES,
    dump,
    mutate,
    npz,
    replace,
)

SMALLER = ("data.clients=3", "data.samples=200")


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


# --- settings

KEYS = sorted(
    {*flat(config.Config().model_dump()), "algorithm.layers", "algorithm.mu", "model.options.hidden", "x.y", "data"}
)
VALUES = (
    NAMES
    | NUMBERS
    | st.booleans()
    | MOMENTS
    | st.lists(NAMES | NUMBERS, max_size=3)
    | st.dictionaries(NAMES, NUMBERS, max_size=2)
)
SETTINGS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)


def check_config(found: config.Config) -> None:
    """What is accepted can be written, read back as the same, and has a hash."""
    assert config.loads(found.to_toml()) == found
    experiment(found)


@target(SETTINGS)
def config_tables(world: World, settings: dict[str, Any]) -> None:
    """A config whose keys exist and whose values are strange."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        at = table
        *sections, last = key.split(".")
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise ConfigError("not a section")
        at[last] = value
    check_config(config.from_table(table))


NEARLY = st.dictionaries(
    st.sampled_from(
        [k for k in KEYS if k.startswith(("data.", "train.", "model.", "algorithm.")) and k != "data.name"]
    ),
    NUMBERS
    | st.sampled_from(["", "iid", "dirichlet", "mlp", "cnn", "resnet18", "fedprox", "ifca", "all", [1], ["fc"]]),
    max_size=3,
)


@target(NEARLY, cost=4)
def experiments(world: World, settings: dict[str, Any]) -> None:
    """A config that may pass, made ready: data dealt out, network built and tried."""
    words = [f"{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in settings.items()]
    Experiment(small(*words))


CONFIG_TEXT = config.Config().to_toml().encode()


@target(
    MUTATIONS.map(lambda m: mutate(CONFIG_TEXT, m))
    | st.binary(max_size=60)
    | NAMES.map(lambda n: n.encode(errors="replace"))
)
def config_files(world: World, content: bytes) -> None:
    """Anything as a config file."""
    path = world.fresh() / "c.toml"
    path.write_bytes(content)
    check_config(config.load(path))


@target(
    st.lists(
        st.builds(
            "{}{}{}".format, st.sampled_from(KEYS) | NAMES, st.sampled_from(["=", "", "==", "."]), VALUES | NAMES
        ),
        max_size=3,
    )
)
def set_options(world: World, words: list[str]) -> None:
    """`--set` with anything."""
    check_config(config.load(None, words))


PARTS = (
    st.sampled_from(
        ["fedavg", "cwfedavg", "fedprox", ":", ",", "=", "wdr", "mu", "0", "[", "]", "..", "/", "'", "trap:boom"]
    )
    | NAMES
)


@target(st.lists(PARTS, max_size=8).map("".join))
def compare_entries(world: World, text: str) -> None:
    """`compare -a` with anything: no label is a way out of the folder."""
    for parse in (lambda: compare.parse_seeds(text), lambda: compare.parse_entries(text, world.config)):
        try:
            found = parse()
        except CwfedError:
            continue
        for entry in found:
            if isinstance(entry, compare.Entry):
                assert (world.folder / entry.folder).resolve().parent == world.folder.resolve()


COMMANDS = [["run", "-s", "train.rounds=1", "-s", "model.name=mlp", "-s", "data.clients=2", "-s", "data.samples=60"], ["cost"], ["data", "list"],
            ["data", "show"], ["data", "prepare"], ["algorithms"], ["report"], ["runs"], ["figures"], ["reproduce"], ["compare", "-a"], ["nothing"], []]  # fmt: skip
OPTIONS = st.sampled_from(["--json", "--resume", "--out", "-o", "--set", "-s", "--data-dir", "--where", "--sort", "--seeds", "--formats", "--shape",
                           "--scale", "--help", "--track", "--title", "--dry-run", "--classes", "--model", "--differ", "whole", "case"])  # fmt: skip


@target(
    st.tuples(
        st.sampled_from(COMMANDS),
        st.lists(OPTIONS | NAMES.filter(lambda n: "\0" not in n and n[:1] != "/"), max_size=4),
    ),
    cost=8,
)
def command_lines(world: World, case: tuple[list[str], list[str]]) -> None:
    """The application with any arguments; paths that the user names himself stay in the folder here."""
    from typer.testing import CliRunner

    from cwfed.cli import app, check_text

    world.fresh()
    arguments = [word.replace("..", "_") for word in case[1]]
    check_text(arguments)
    done = CliRunner().invoke(app, [*case[0], *arguments], catch_exceptions=True)
    if isinstance(done.exception, Exception) and not isinstance(done.exception, SystemExit | OSError):
        raise done.exception


# --- data

GOOD_NPZ = npz({"x": np.zeros((4, 1, 2, 2), np.float32), "y": np.arange(4) % 2})
PFLLIB_CONFIG = {"num_clients": 1, "num_classes": 2}


@target(
    st.tuples(
        MUTATIONS.map(lambda m: mutate(GOOD_NPZ, m))
        | st.dictionaries(st.sampled_from(["x", "y"]), ARRAYS | OBJECTS, min_size=1).map(npz)
        | OBJECTS.map(npz)
        | st.just(GOOD_NPZ),
        st.just(dump(PFLLIB_CONFIG))
        | st.tuples(PLACES, JSON).map(lambda c: dump(replace(PFLLIB_CONFIG, *c)))
        | MUTATIONS.map(lambda m: mutate(dump(PFLLIB_CONFIG), m)),
    )
)
def pfllib_folders(world: World, case: tuple[bytes, bytes]) -> None:
    """PFLlib's pickles and its config, damaged or made by an enemy."""
    folder = world.fresh()
    for part, content in (("train", case[0]), ("test", GOOD_NPZ)):
        (folder / part).mkdir()
        (folder / part / "0.npz").write_bytes(content)
    (folder / "config.json").write_bytes(case[1])
    pfllib.load(folder)


def picture(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(stream, kind)
    return stream.getvalue()


PICTURES = {kind: picture(kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")}
DAMAGED = st.tuples(st.sampled_from(sorted(PICTURES)), MUTATIONS).map(lambda c: mutate(PICTURES[c[0]], c[1]))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n(trap) run\n%%EOF"
FILE_NAMES = NAMES.filter(lambda n: 0 < len(n) < 80 and not {"/", "\0"} & set(n) and n not in (".", ".."))


@target(st.tuples(FILE_NAMES, DAMAGED | st.sampled_from([EPS, *PICTURES.values()])), cost=2)
def image_folders(world: World, case: tuple[str, bytes]) -> None:
    """Class folders with any name, pictures with any content."""
    folder = world.fresh() / "data"
    try:
        for name, content in (("good", PICTURES["PNG"]), (case[0], case[1])):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "1.png").write_bytes(content)
    except (OSError, ValueError):  # no such file can exist
        return
    found = sources.load(sources.SourceSpec("imagefolder", str(folder), image_size=4))
    figures.distribution(np.zeros((1, len(found.class_names)), np.int64), found.name)


CSV = b"text,label\nhello world,a\nbye,b\n,a\n"


@target(
    MUTATIONS.map(lambda m: mutate(CSV, m))
    | st.binary(max_size=80)
    | st.text(max_size=80).map(lambda t: t.encode(errors="replace"))
)
def csv_files(world: World, content: bytes) -> None:
    """Any bytes as CSV."""
    path = world.fresh() / "data.csv"
    path.write_bytes(content)
    sources.load(sources.SourceSpec("csv", str(path)))


def parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    try:
        pyarrow.parquet.write_table(pyarrow.table(columns), stream)
    except (pyarrow.ArrowException, UnicodeError, OverflowError, TypeError):  # no such table can exist
        return b""
    return stream.getvalue()


PARQUET = parquet({"text": ["a b", "c"], "img": [{"bytes": PICTURES["PNG"], "path": None}] * 2, "label": [0, 1]})
PATHS = st.builds(lambda name: {"bytes": None, "path": name}, NAMES)
IMAGE_VALUES = PATHS | DAMAGED.map(lambda b: {"bytes": b, "path": None}) | st.none()
TEXT_VALUES = st.none() | NAMES | NUMBERS


@target(
    st.tuples(
        st.booleans(),
        MUTATIONS.map(lambda m: mutate(PARQUET, m))
        | st.fixed_dictionaries({"img": st.lists(IMAGE_VALUES, min_size=2, max_size=2), "label": st.lists(TEXT_VALUES, min_size=2, max_size=2)}).map(parquet)
        | st.fixed_dictionaries({"text": st.lists(TEXT_VALUES, min_size=2, max_size=2), "label": st.lists(TEXT_VALUES, min_size=2, max_size=2)}).map(parquet),
    ),
    cost=16,
)  # fmt: skip
def parquet_files(world: World, case: tuple[bool, bytes]) -> None:
    """Parquet files, damaged or with strange columns; a picture that is only named is not read from the disk."""
    is_text, content = case
    path = world.fresh() / "data.parquet"
    path.write_bytes(content)
    column = {"text_column": "text"} if is_text else {"image_column": "img"}
    sources.load(sources.SourceSpec("hub", str(path), image_size=4, **column))


@target(st.tuples(st.integers(0, 2), MUTATIONS, NAMES), cost=2)
def data_cache(world: World, case: tuple[int, Any, str]) -> None:
    """A damaged cache gives what is decoded again, under any name."""
    which, mutations, name = case
    data = dataset.Dataset("x", np.arange(8, dtype=np.uint8).reshape(4, 2), np.arange(4) % 2, ("a", "b"))
    try:
        name.encode()
        dataset.cached(name, "0" * 64, lambda: data)
    except (UnicodeEncodeError, ValueError):  # no such name can exist
        return
    entry = dataset.cache_dir() / f"{name.replace('/', '--')}-{'0' * 16}"
    assert entry.resolve().parent == dataset.cache_dir().resolve()
    path = sorted(entry.iterdir())[which]
    path.write_bytes(mutate(path.read_bytes(), mutations))
    found = dataset.cached(name, "0" * 64, lambda: data)
    assert (found.digest, found.class_names) == (data.digest, data.class_names)


# --- what runs leave


def look(folder: Path) -> dict[str, Any]:
    """Everything that only reads a run: what each way gives, or its refusal."""
    found: dict[str, Any] = {}
    readers: dict[str, Callable[[], Any]] = {
        "report": lambda: vars(runs.read_run(folder)) | {"path": None},
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


RUN_FILES = [
    "config.toml",
    "events.jsonl",
    "manifest.json",
    "summary.json",
    "models/index.json",
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
    record = runs.read_run(folder)
    (group,) = runs.group([record])
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
    """A checkpoint with a right checksum and wrong contents."""
    folder = RunFolder(world.copy())
    name = next(n for n in world.files if n.startswith("checkpoints/"))
    try:
        checkpoint.save(folder.path / name, replace(checkpoint.load(world.whole / name), *case))
    except (TypeError, ValueError, UnicodeError):  # no such file can be made
        return
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


def check_page(path: Path, group: runs.Group, title: str) -> None:
    try:
        page.write(path, title, [group], [runs.LeftOut(Path(title.replace("\0", "")), title)])
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
    record = runs.read_run(world.whole, label)
    record.manifest["data"]["classes"] = [name] * 10
    record.manifest["machine"]["cpu"] = name
    record.summary["notes"] = [name]
    group = runs.Group(title, [runs.Method(label, [record])])
    check_page(world.fresh() / "r.html", group, title)
    rows = [group.methods[0].row]
    for text in (tables.markdown(rows), tables.latex(rows), tables.csv(rows)):
        text.encode(errors="replace")
    figures.overview(group)
