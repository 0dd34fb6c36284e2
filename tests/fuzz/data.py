"""Data from somewhere."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from cwfed.data import Dataset, pfllib, sources, split_file, store
from cwfed.report import heatmaps
from tests.fuzz.base import World, target
from tests.fuzz.cases import (
    ARRAYS,
    FORGED,
    JSON,
    MUTATIONS,
    NAMES,
    NUMBERS,
    OBJECTS,
    PLACES,
    dump,
    mutate,
    npz,
    packed,
    replace,
    unpacked,
)

GOOD_NPZ = npz({"x": np.zeros((4, 1, 2, 2), np.float32), "y": np.arange(4) % 2})
PICKLES = {protocol: unpacked(npz({"x": np.zeros((4, 1, 2, 2), np.float32), "y": np.arange(4) % 2}, protocol)) for protocol in range(2, 6)}  # fmt: skip
PFLLIB_CONFIG = {"num_clients": 1, "num_classes": 2}


@target(
    st.tuples(
        MUTATIONS.map(lambda m: mutate(GOOD_NPZ, m))
        | st.builds(lambda m, p: packed(mutate(PICKLES[p], m)), MUTATIONS, st.integers(2, 5))
        | st.builds(npz, st.dictionaries(st.sampled_from(["x", "y"]), FORGED | ARRAYS, min_size=2), st.integers(2, 5))
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
    heatmaps.distribution(np.zeros((1, len(found.class_names)), np.int64), found.name)


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


SPLIT_CSV, SPLIT_JSON = (
    b"client,sample,part\na,0,train\nb,1,train\na,2,test\n",
    dump({"a": {"train": [0], "test": [2]}, "b": {"train": [1]}}),
)


@target(
    st.tuples(st.just(".csv"), MUTATIONS.map(lambda m: mutate(SPLIT_CSV, m)) | st.binary(max_size=80))
    | st.tuples(
        st.just(".json"), MUTATIONS.map(lambda m: mutate(SPLIT_JSON, m)) | JSON.map(dump) | st.binary(max_size=80)
    )
)
def split_files(world: World, case: tuple[str, bytes]) -> None:
    """Any bytes as a split file: nobody holds what is not there, or what somebody else holds."""
    path = world.fresh() / f"split{case[0]}"
    path.write_bytes(case[1])
    found = split_file.read(path, 3)
    held = [n for parts in (*found.parts, found.shares) for part in parts for n in part.tolist()]
    assert sorted(held) == sorted({*held} & {0, 1, 2})


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
    data = Dataset("x", np.arange(8, dtype=np.uint8).reshape(4, 2), np.arange(4) % 2, ("a", "b"))
    try:
        name.encode()
        store.cached(name, "0" * 64, lambda: data)
    except (UnicodeEncodeError, ValueError):  # no such name can exist
        return
    entry = store.cache_dir() / f"{name.replace('/', '--')}-{'0' * 16}"
    assert entry.resolve().parent == store.cache_dir().resolve()
    path = sorted(entry.iterdir())[which]
    path.write_bytes(mutate(path.read_bytes(), mutations))
    found = store.cached(name, "0" * 64, lambda: data)
    assert (found.digest, found.class_names) == (data.digest, data.class_names)
