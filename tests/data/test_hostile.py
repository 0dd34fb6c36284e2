"""Data made by an enemy, or by accident: what fuzzing found, kept by hand."""

from __future__ import annotations

import codecs
import json

import numpy as np
import pytest

from cwfed.core.errors import MOST_TEXT, DataError, plain
from cwfed.data import Dataset, store
from cwfed.data.sources import SourceSpec, load
from tests.conftest import make_endless
from tests.fuzz.cases import POINTERS, Trap, forged_array, forged_type, npz
from tests.fuzz.data import EPS, PICTURES, parquet

X = np.zeros((4, 1, 2, 2), np.float32)


def pfllib(folder, config, payload=None, protocol=3):
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        (folder / part / "0.npz").write_bytes(npz(payload or {"x": X, "y": np.arange(4) % 2}, protocol))
    (folder / "config.json").write_text(config)
    return SourceSpec("pfllib", str(folder))


@pytest.mark.parametrize("number", ["1e999", "1000000000000", "[" * 100_000])
def test_a_pfllib_folder_cannot_ask_for_any_number_of_names(tmp_path, number):
    spec = pfllib(tmp_path / "p", f'{{"num_clients": 1, "num_classes": {number}}}')
    with pytest.raises(DataError, match="not a PFLlib folder"):
        load(spec)


def test_a_pfllib_token_cannot_ask_for_any_number_of_words(tmp_path):
    texts = [([1, 2**31 - 1], 2), ([0, 3], 2)]
    spec = pfllib(
        tmp_path / "p", json.dumps({"num_clients": 1, "num_classes": 2}), {"x": texts, "y": np.array([0, 1])}
    )
    with pytest.raises(DataError, match="beyond any vocabulary"):
        load(spec)


def test_a_pickle_in_a_pfllib_file_calls_nothing(tmp_path):
    trap = {"x": Trap(open, str(tmp_path / "written"), "w"), "y": np.array([0, 1])}
    with pytest.raises(DataError, match="not allowed"):
        load(pfllib(tmp_path / "p", json.dumps({"num_clients": 1, "num_classes": 2}), trap))
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (forged_array(forged_type(), POINTERS), "in a way that numpy does not"),
        (forged_array(np.dtype("O"), POINTERS), "no plain numeric type"),
        (forged_array(np.dtype("f8"), POINTERS, (3,)), "has 16 bytes"),
        (forged_array(np.dtype("f8"), POINTERS, (2**62, 4)), "impossible shape"),
        (forged_array(np.dtype("f8"), POINTERS, (-2,)), "impossible shape"),
        (forged_array(np.dtype("O"), [1, 2], (3,)), "has 2 values"),
        (np.array(["a", "b"]), "in a way that numpy does not"),
        (np.zeros(2, "M8[s]"), "in a way that numpy does not"),
    ],
)
def test_a_forged_array_reaches_no_memory_of_ours(tmp_path, payload, says):
    """numpy's own `__setstate__` takes the first for an array without objects and follows the bytes AAAAAAAA as a pointer."""
    with pytest.raises(DataError, match=says):
        load(pfllib(tmp_path / "p", '{"num_clients": 1, "num_classes": 2}', {"x": payload, "y": np.array([0, 1])}))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "x",
    [
        np.arange(32, dtype=np.float64).reshape(4, 2, 2, 2),
        np.asfortranarray(np.arange(12, dtype=">i2").reshape(4, 3)),
        np.arange(8, dtype=np.uint8).reshape(4, 2) > 3,
    ],
)
def test_pfllib_arrays_are_read_as_numpy_reads_them(tmp_path, x, protocol):
    y = np.array([0, 1, 1, 0])
    found = load(pfllib(tmp_path / "p", '{"num_clients": 1, "num_classes": 2}', {"x": x, "y": y}, protocol))
    expected = x.transpose(0, 2, 3, 1) if x.ndim == 4 else x
    assert (found.inputs[:4] == expected).all()
    assert found.labels[:4].tolist() == y.tolist()


@pytest.mark.parametrize("protocol", [2, 4])
def test_pfllib_texts_are_read_without_their_lengths(tmp_path, protocol):
    texts = np.array([([1, 2, 5], 3), ([3, 4, 0], 2)], dtype=object)
    data = {"x": texts, "y": np.array([0, 1])}
    found = load(pfllib(tmp_path / "p", '{"num_clients": 1, "num_classes": 2}', data, protocol))
    assert found.inputs[:2].tolist() == [[1, 2, 5], [3, 4, 0]]


def test_a_pickle_cannot_grow_by_repeating_itself(tmp_path):
    """One list under a thousand names, one text that becomes bytes a thousand times: 100 KB would be 100 MB, or any number."""
    text = list(range(20_000))
    data = {"x": [text] * 1000, "y": np.zeros(1000, np.int64)}
    with pytest.raises(DataError, match="repeats its texts"):
        load(pfllib(tmp_path / "p", '{"num_clients": 1, "num_classes": 2}', data))
    long = "a" * 1000
    data = {"x": [Trap(codecs.encode, long, "latin1") for _ in range(100)], "y": [0]}
    with pytest.raises(DataError, match="repeats the same bytes without end"):
        load(pfllib(tmp_path / "q", '{"num_clients": 1, "num_classes": 2}', data))


def test_an_archive_cannot_say_that_it_holds_anything(tmp_path, monkeypatch):
    monkeypatch.setattr("cwfed.data.pfllib.MOST_BYTES", 100)
    with pytest.raises(DataError, match="unpacked it would have"):
        load(pfllib(tmp_path / "p", '{"num_clients": 1, "num_classes": 2}'))


def test_a_picture_that_would_start_another_program_is_not_opened(tmp_path):
    """Pillow hands Encapsulated PostScript to Ghostscript; such a file is not decoded, whatever it is called."""
    for name, content in (("a", PICTURES["PNG"]), ("b", EPS)):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "1.png").write_bytes(content)
    with pytest.raises(DataError, match=r"1\.png cannot be decoded"):
        load(SourceSpec("imagefolder", str(tmp_path / "d")))


def test_a_parquet_file_cannot_choose_what_is_read_from_this_disk(tmp_path):
    (tmp_path / "private.png").write_bytes(PICTURES["PNG"])
    named = {"bytes": None, "path": str(tmp_path / "private.png")}
    (tmp_path / "p.parquet").write_bytes(parquet({"img": [named, named], "label": [0, 1]}))
    with pytest.raises(DataError, match="which may only name it"):
        load(SourceSpec("hub", str(tmp_path / "p.parquet"), image_column="img"))


@pytest.mark.parametrize("name", ["meta.json", "inputs.npy", "labels.npy"])
def test_a_cache_with_a_flipped_bit_is_made_again(name):
    """Also the names of the classes, which no digest of the samples covers."""
    data = Dataset("x", np.arange(8, dtype=np.uint8).reshape(4, 2), np.arange(4) % 2, ("cat", "dog"))
    store.cached("x", "1" * 64, lambda: data)
    path = store.cache_dir() / f"x-{'1' * 16}" / name
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found = store.cached("x", "1" * 64, lambda: data)
        assert (found.digest, found.class_names) == (data.digest, ("cat", "dog"))


def test_an_empty_class_folder_is_a_class_although_no_picture_changed(tmp_path):
    """The cache is keyed by all that decides the data set: with another class in between, labels move."""
    for name in ("a", "c"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "1.png").write_bytes(PICTURES["PNG"])
    spec = SourceSpec("imagefolder", str(tmp_path / "d"))
    before = load(spec)
    (tmp_path / "d" / "b").mkdir()
    after = load(spec)
    assert (before.class_names, before.labels.tolist()) == (("a", "c"), [0, 1])
    assert (after.class_names, after.labels.tolist()) == (("a", "b", "c"), [0, 2])


@pytest.mark.parametrize("way", ["pipe", "device"])
@pytest.mark.parametrize("what", ["csv", "picture", "parquet", "pfllib", "pfllib config", "arrays"])
def test_a_pipe_or_a_device_is_no_data_file(tmp_path, what, way):
    """Nobody writes to the pipe and the device has no end: whoever opens either one waits for ever, or fills the memory."""
    folder = tmp_path / "d"
    if what.startswith("pfllib"):
        spec = pfllib(folder, '{"num_clients": 1, "num_classes": 2}')
        path = folder / "config.json" if what.endswith("config") else folder / "train" / "0.npz"
    elif what == "arrays":
        data = Dataset("x", np.arange(8, dtype=np.uint8).reshape(4, 2), np.arange(4) % 2, ("a", "b"))
        store.write(data, folder)
        spec, path = SourceSpec("arrays", str(folder)), folder / "labels.npy"
    else:
        path = folder / "a" / {"csv": "1.csv", "picture": "1.png", "parquet": "1.parquet"}[what]
        path.parent.mkdir(parents=True)
        spec = {
            "csv": SourceSpec("csv", str(path)),
            "picture": SourceSpec("imagefolder", str(folder)),
            "parquet": SourceSpec("hub", str(path.parent), text_column="text"),
        }[what]
    path.unlink(missing_ok=True)
    make_endless(path, way)
    with pytest.raises(DataError, match="a pipe, a device or a socket"):
        load(spec)


def test_names_from_a_data_folder_have_no_control_characters(tmp_path):
    for name in ("cat\x1b[31m", "d" * 200, "fa\u202eke"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "1.png").write_bytes(PICTURES["PNG"])
    found = load(SourceSpec("imagefolder", str(tmp_path / "d")))
    assert found.class_names == ("cat�[31m", plain("d" * 200, 100), "fa�ke")
    assert all(len(name) <= 100 for name in found.class_names)


def test_a_csv_header_cannot_fill_or_paint_the_terminal(tmp_path):
    columns = ["\x1b]0;title\x07", "x" * 100_000, *(f"column {i}" for i in range(5000))]
    (tmp_path / "d.csv").write_text(",".join(columns) + "\n1,2\n")
    with pytest.raises(DataError, match="no column 'text'") as caught:
        load(SourceSpec("csv", str(tmp_path / "d.csv")))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= MOST_TEXT
