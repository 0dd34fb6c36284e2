"""Data made by an enemy, or by accident: what fuzzing found, kept by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cwfed.data import dataset
from cwfed.data.sources import SourceSpec, load
from cwfed.errors import DataError
from tests.fuzz.cases import Trap, npz
from tests.fuzz.data import EPS, PICTURES, parquet

X = np.zeros((4, 1, 2, 2), np.float32)


def pfllib(folder, config, payload=None):
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        (folder / part / "0.npz").write_bytes(npz(payload or {"x": X, "y": np.arange(4) % 2}))
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
    with pytest.raises(DataError, match="only named there"):
        load(SourceSpec("hub", str(tmp_path / "p.parquet"), image_column="img"))


@pytest.mark.parametrize("name", ["meta.json", "inputs.npy", "labels.npy"])
def test_a_cache_with_a_flipped_bit_is_made_again(name):
    """Also the names of the classes, which no digest of the samples covers."""
    data = dataset.Dataset("x", np.arange(8, dtype=np.uint8).reshape(4, 2), np.arange(4) % 2, ("cat", "dog"))
    dataset.cached("x", "1" * 64, lambda: data)
    path = dataset.cache_dir() / f"x-{'1' * 16}" / name
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found = dataset.cached("x", "1" * 64, lambda: data)
        assert (found.digest, found.class_names) == (data.digest, ("cat", "dog"))
