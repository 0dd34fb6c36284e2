"""Every way data come in, and what bad data get."""

from __future__ import annotations

import csv
import io
import json
import pickle
import zipfile

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from cwfed.core.errors import ConfigError, DataError
from cwfed.data import from_hub, text
from cwfed.data.dataset import Dataset
from cwfed.data.sources import SourceSpec, load
from cwfed.data.store import cache_dir
from cwfed.runs import session
from tests.conftest import all_digits

RNG = np.random.default_rng(0)


def png(array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(folder, splits, rows=12, column="img", label="label", shape=(6, 5, 3)):
    """Parquet files with the hub's schema: an image as {bytes, path}."""
    import datasets

    folder.mkdir(parents=True)
    pictures = {}
    for name in splits:
        arrays = [RNG.integers(0, 256, shape, dtype=np.uint8) for _ in range(rows)]
        pictures[name] = arrays
        features = datasets.Features(
            {column: datasets.Image(), label: datasets.ClassLabel(names=["cat", "dog", "eel"])}
        )
        table = datasets.Dataset.from_dict(
            {column: [{"bytes": png(a), "path": None} for a in arrays], label: [i % 3 for i in range(rows)]},
            features=features,
        )
        table.to_parquet(str(folder / f"{name}-00000-of-00001.parquet"))
    return pictures


def test_digits_are_always_there():
    found = load(SourceSpec("digits"))
    assert found.inputs.shape == (1797, 8, 8, 1)
    assert found.inputs.dtype == np.float32
    assert (found.inputs.min(), found.inputs.max()) == (-1.0, 1.0)
    assert found.classes == 10
    theirs = load_digits()  # the slow twin: our reading of its file does not import scikit-learn
    assert np.array_equal(found.inputs[..., 0], (theirs.images / 8 - 1).astype(np.float32))
    assert np.array_equal(found.labels, theirs.target)


def test_hub_parquet_offline_merges_both_splits_exactly(tmp_path):
    pictures = write_parquet(tmp_path / "uoft-cs" / "cifar10" / "plain_text", ["train", "test"])
    found = load(SourceSpec("cifar10"), tmp_path)
    assert found.class_names == ("cat", "dog", "eel")
    assert (found.inputs == np.stack(pictures["train"] + pictures["test"])).all()
    assert found.labels.tolist() == [i % 3 for i in range(12)] * 2


def test_the_second_start_reads_the_cache_and_damage_to_it_is_noticed(tmp_path, monkeypatch):
    write_parquet(tmp_path / "uoft-cs" / "cifar10", ["train", "test"])
    first, original = load(SourceSpec("cifar10"), tmp_path), from_hub._decode
    with monkeypatch.context() as patch:
        patch.setattr(from_hub, "_decode", lambda *_: pytest.fail("decoded again"))
        assert load(SourceSpec("cifar10"), tmp_path).digest == first.digest
    (folder,) = (
        f
        for f in cache_dir().glob("cifar10-*")
        if json.loads((f / "meta.json").read_text())["digest"] == first.digest
    )
    stored = bytearray((folder / "inputs.npy").read_bytes())
    stored[-1] ^= 1
    (folder / "inputs.npy").write_bytes(stored)
    decoded = []
    monkeypatch.setattr(from_hub, "_decode", lambda *args: decoded.append(1) or original(*args))
    assert load(SourceSpec("cifar10"), tmp_path).digest == first.digest
    assert decoded


def test_changed_files_are_another_data_set(tmp_path):
    folder = tmp_path / "uoft-cs" / "cifar10"
    write_parquet(folder, ["train", "test"])
    first = load(SourceSpec("cifar10"), tmp_path).digest
    for path in folder.glob("*"):
        path.unlink()
    folder.rmdir()
    write_parquet(folder, ["train", "test"], rows=9)
    assert load(SourceSpec("cifar10"), tmp_path).digest != first


def test_grey_and_colour_pictures_together_become_colour(tmp_path):
    import datasets

    folder = tmp_path / "zh-plus" / "tiny-imagenet"
    folder.mkdir(parents=True)
    grey, colour = np.full((4, 4), 7, np.uint8), np.full((4, 4, 3), 9, np.uint8)
    for name in ("train", "valid"):
        table = datasets.Dataset.from_dict(
            {"image": [{"bytes": png(a), "path": None} for a in (grey, colour)], "label": [0, 1]},
            features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}),
        )
        table.to_parquet(str(folder / f"{name}-0.parquet"))
    found = load(SourceSpec("tiny_imagenet"), tmp_path)
    assert found.inputs.shape == (4, 4, 4, 3)
    assert found.inputs[0, 0, 0].tolist() == [7, 7, 7]


def test_own_parquet_with_named_columns(tmp_path):
    write_parquet(tmp_path / "mine", ["part"], column="photo", label="kind")
    found = load(SourceSpec("hub", str(tmp_path / "mine"), image_column="photo", label_column="kind"))
    assert found.inputs.shape == (12, 6, 5, 3)
    (file,) = (tmp_path / "mine").iterdir()
    assert load(SourceSpec("hub", str(file), image_column="photo", label_column="kind")).digest == found.digest
    with pytest.raises(DataError, match="does not hold images"):
        load(SourceSpec("hub", str(file), image_column="kind", label_column="kind"))
    with pytest.raises(DataError, match="no column 'foto': did you mean photo"):
        load(SourceSpec("hub", str(tmp_path / "mine"), image_column="foto", label_column="kind"))


def test_a_folder_of_class_folders(tmp_path):
    for kind, value in (("cat", 10), ("dog", 200)):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (9, 7), (value, value, i)).save(tmp_path / "pets" / kind / f"{i}.png")
    found = load(SourceSpec("imagefolder", str(tmp_path / "pets")))
    assert found.class_names == ("cat", "dog")
    assert found.inputs.shape == (6, 7, 9, 3)
    assert load(SourceSpec("imagefolder", str(tmp_path / "pets"), image_size=4)).inputs.shape == (6, 4, 4, 3)
    Image.new("RGB", (3, 3)).save(tmp_path / "pets" / "cat" / "odd.png")
    with pytest.raises(DataError, match="different sizes"):
        load(SourceSpec("imagefolder", str(tmp_path / "pets")))
    (tmp_path / "pets" / "cat" / "odd.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"odd\.png cannot be decoded"):
        load(SourceSpec("imagefolder", str(tmp_path / "pets")))


def test_sixteen_bit_pictures_are_scaled_and_others_refused(tmp_path):
    (tmp_path / "x" / "a").mkdir(parents=True)
    (tmp_path / "x" / "b").mkdir()
    (tmp_path / "x" / ".hidden").mkdir()
    for kind, value in (("a", 0), ("b", 65535), (".hidden", 1)):
        Image.fromarray(np.full((4, 4), value, np.uint16)).save(tmp_path / "x" / kind / "1.png")
    found = load(SourceSpec("imagefolder", str(tmp_path / "x")))
    assert (found.inputs.min(), found.inputs.max(), found.class_names) == (0, 255, ("a", "b"))
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "x" / "a" / "1.tiff")
    with pytest.raises(DataError, match="no fixed range"):
        load(SourceSpec("imagefolder", str(tmp_path / "x")))


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "is empty"), ("text,label\nhello,\n", "sample 1 has no label"), ("text,label\n", "no samples")],
)
def test_odd_csv_files(tmp_path, content, says):
    (tmp_path / "odd.csv").write_text(content)
    with pytest.raises(DataError, match=says):
        load(SourceSpec("csv", str(tmp_path / "odd.csv")))


def test_a_csv_with_a_byte_order_mark(tmp_path):
    (tmp_path / "bom.csv").write_text("text,label\na b,x\nc d,y\n", encoding="utf-8-sig")
    assert load(SourceSpec("csv", str(tmp_path / "bom.csv"))).class_names == ("x", "y")


def test_a_csv_of_text_and_label(tmp_path):
    path = tmp_path / "news.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), ("Stocks fall, again", "money"), ("They won!", "sport")])
    found = load(SourceSpec("csv", str(path)))
    assert found.class_names == ("money", "sport")
    assert found.inputs.shape == (2, text.LENGTH)
    assert [found.words[t] for t in found.inputs[0] if t] == ["stocks", "fall", "again"]
    with pytest.raises(DataError, match="no column 'body'"):
        load(SourceSpec("csv", str(path), text_column="body"))


def test_vocabulary_is_by_frequency_and_unknown_words_have_a_token():
    words = text.vocabulary(["b b a", "c a b"])
    assert words == ("<padding>", "<unknown>", "b", "a", "c")
    assert text.encode(["a z", ""], words, length=3).tolist() == [[3, 1, 0], [0, 0, 0]]


def my_data():
    return RNG.normal(size=(60, 5)), ["x", "y", "z"] * 20


def bad_data():
    return RNG.normal(size=(60, 5))


def short_labels():
    return np.zeros((60, 5)), [0, 1]


def not_finite():
    return np.full((4, 2), np.nan), [0, 1, 0, 1]


def test_a_function_of_the_user():
    found = load(SourceSpec(f"{__name__}:my_data"))
    assert (found.inputs.dtype, found.class_names) == (np.float32, ("x", "y", "z"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bad_data", "must return"),
        ("short_labels", "60 samples but 2 labels"),
        ("not_finite", "not finite"),
        ("nowhere", "has no 'nowhere'"),
        ("RNG", "is not a function"),
    ],
)
def test_a_function_that_gives_something_else(name, says):
    with pytest.raises((DataError, ConfigError), match=says):
        load(SourceSpec(f"{__name__}:{name}"))


# --- PFLlib -----------------------------------------------------------------------------------------------


def write_pfllib(folder, clients=3, classes=2, shape=(1, 6, 6)):
    made = []
    for part, samples in (("train", 20), ("test", 8)):
        (folder / part).mkdir(parents=True)
        for client in range(clients):
            x = RNG.normal(size=(samples, *shape)).astype(np.float32)
            y = np.arange(samples) % classes
            made.append((part, client, x, y))
            with (folder / part / f"{client}.npz").open("wb") as file:
                np.savez_compressed(file, data={"x": x, "y": y})
    (folder / "config.json").write_text(json.dumps({"num_clients": clients, "num_classes": classes}))
    return made


def test_pfllib_folders_keep_their_exact_split(tmp_path):
    made = write_pfllib(tmp_path / "MNIST")
    found = load(SourceSpec("pfllib", str(tmp_path / "MNIST")))
    for part, client, x, y in made:
        indices = found.fixed_split[client][part == "test"]
        assert (found.inputs[indices] == x.transpose(0, 2, 3, 1)).all()
        assert (found.labels[indices] == y).all()


def test_a_run_on_a_pfllib_folder(tmp_path):
    write_pfllib(tmp_path / "MNIST")
    config = all_digits("data.name=pfllib", f"data.path={tmp_path / 'MNIST'}", "train.batch_size=5")
    summary = session.run(config)
    assert (summary["clients"], summary["dataset"]) == (3, "MNIST")
    with pytest.raises(ConfigError, match="has a split of its own"):
        session.run(all_digits("data.name=pfllib", f"data.path={tmp_path / 'MNIST'}", "data.samples=5"))


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch /tmp/cwfed-was-here",)


def test_a_hostile_pfllib_file_runs_no_code(tmp_path):
    from pathlib import Path

    write_pfllib(tmp_path / "MNIST")
    mark = Path("/tmp/cwfed-was-here")
    mark.unlink(missing_ok=True)
    with (tmp_path / "MNIST" / "train" / "1.npz").open("wb") as file:
        np.savez(file, data=np.array({"x": Evil(), "y": [0]}, dtype=object))
    with pytest.raises(
        DataError, match=r"1\.npz cannot be read .* wants to load (posix|nt)\.system, which is not allowed"
    ):
        load(SourceSpec("pfllib", str(tmp_path / "MNIST")))
    assert not mark.exists()


@pytest.mark.parametrize(
    "damage", ["truncated", "no data", "not a dict", "missing", "no config", "lengths", "nobody"]
)
def test_damaged_pfllib_folders_are_named(tmp_path, damage):
    folder = tmp_path / "MNIST"
    write_pfllib(folder)
    victim = folder / "test" / "2.npz"
    if damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:100])
    elif damage == "no data":
        with zipfile.ZipFile(victim, "w") as archive:
            archive.writestr("other.npy", b"")
    elif damage == "not a dict":
        np.savez(victim, data=np.zeros(3))
    elif damage == "missing":
        victim.unlink()
    elif damage == "lengths":
        np.savez(victim, data={"x": np.zeros((3, 1, 6, 6)), "y": [0, 1]})
    elif damage == "nobody":
        (folder / "config.json").write_text('{"num_clients": 0, "num_classes": 2}')
    else:
        (folder / "config.json").write_text("{}")
    with pytest.raises(DataError, match="PFLlib"):
        load(SourceSpec("pfllib", str(folder)))


def test_the_restricted_unpickler_refuses_classes_of_numpy_too(tmp_path):
    write_pfllib(tmp_path / "MNIST")
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|O", "fortran_order": False, "shape": ()})
    buffer.write(pickle.dumps(np.memmap))
    with zipfile.ZipFile(tmp_path / "MNIST" / "train" / "0.npz", "w") as archive:
        archive.writestr("data.npy", buffer.getvalue())
    with pytest.raises(DataError, match="memmap, which is not allowed"):
        load(SourceSpec("pfllib", str(tmp_path / "MNIST")))


# --- what is not there ------------------------------------------------------------------------------------


def test_a_missing_split_and_damaged_parquet(tmp_path):
    folder = tmp_path / "uoft-cs" / "cifar10"
    write_parquet(folder, ["train"])
    with pytest.raises(DataError, match="no parquet file for the split 'test'"):
        load(SourceSpec("cifar10"), tmp_path)
    (folder / "test-0.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="parquet files cannot be read"):
        load(SourceSpec("cifar10"), tmp_path)


def test_without_data_and_hub_the_error_says_what_to_do(tmp_path, monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match="pass its folder as --data-dir or CWFED_DATA"):
        load(SourceSpec("mnist"), tmp_path)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (SourceSpec("cifra10"), "did you mean cifar10"),
        (SourceSpec("csv"), "needs data.path"),
        (SourceSpec("csv", "/does/not/exist.csv"), "does not exist"),
        (SourceSpec("hub", "somewhere"), "needs one of data.image_column and data.text_column"),
        (SourceSpec("imagefolder", "."), "no images in class folders"),
    ],
)
def test_impossible_sources(spec, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError), match=says):
        load(spec)


def test_a_data_set_checks_itself():
    x, y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])
    for inputs, labels, names, says in [
        (x, y, ("a",), "outside the 1 classes"),
        (x, np.zeros(4, np.int64), ("a",), "at least two classes"),
        (x[:0], y[:0], ("a", "b"), "no samples"),
        (x.astype(np.int64), y, ("a", "b"), "neither images, vectors nor text"),
        (x.reshape(4, 3, 1), y, ("a", "b"), "a vector or an image"),
        (x, y.astype(np.int32), ("a", "b"), "whole number"),
    ]:
        with pytest.raises(DataError, match=says):
            Dataset("bad", inputs, labels, names)


def test_tokens_outside_the_vocabulary():
    with pytest.raises(DataError, match="tokens run from 0 to 7, outside the 7 words"):
        Dataset("words", np.array([[0, 7], [1, 2]], dtype=np.int32), np.array([0, 1]), ("a", "b"), tuple("0123456"))
