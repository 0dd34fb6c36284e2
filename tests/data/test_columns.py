"""Tables from CSV and parquet with any columns; arrays and data sets of torch; what is meant but not given is hinted at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from cwfed.core.errors import ConfigError, DataError
from cwfed.data import Dataset
from cwfed.data.from_hub import HUB, Hub, _open_online
from cwfed.data.sources import SourceSpec, load
from cwfed.data.store import cache_dir
from tests.conftest import small

IRIS = "length;width;kind;where\n5.1;3.5;setosa;north\n4.9;3.0;setosa;south\n6.3;3.3;virginica;north\n5.8;2.7;virginica;\n"


def csv(folder, text=IRIS, name="iris.csv"):
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_table_of_numbers_with_its_own_delimiter(tmp_path):
    path = csv(tmp_path)
    spec = SourceSpec("csv", path, label_column="kind", feature_columns=("width", "length"), delimiter=";")
    found = load(spec)
    assert found.inputs.tolist() == np.array([[3.5, 5.1], [3.0, 4.9], [3.3, 6.3], [2.7, 5.8]], np.float32).tolist()
    assert (found.class_names, found.labels.tolist()) == (("setosa", "virginica"), [0, 0, 1, 1])
    text = IRIS.replace(";\n", ";east\n")
    every = SourceSpec(
        "csv", csv(tmp_path, text), label_column="kind", feature_columns=("*",), client_column="where", delimiter=";"
    )
    owned = load(every)
    assert owned.inputs[:, ::-1].tolist() == found.inputs.tolist()  # all columns but those of labels and clients
    assert (owned.owner_names, owned.owners.tolist()) == (("east", "north", "south"), [1, 2, 1, 0])
    again = load(every)  # from the cache
    assert (again.owners.tolist(), again.owner_names) == (owned.owners.tolist(), owned.owner_names)


def test_damage_to_whose_samples_are_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("CWFED_CACHE", str(tmp_path / "cache"))
    text = IRIS.replace(";\n", ";east\n")
    spec = SourceSpec("csv", csv(tmp_path, text), "", "", "kind", 0, ("length",), "where", ";")
    owners = load(spec).owners.tolist()
    (folder,) = cache_dir().glob("iris-*")
    np.save(folder / "owners.npy", np.array([0, 0, 0, 0]))
    assert load(spec).owners.tolist() == owners


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"label_column": "kind"}, "has no column 'text': if its columns are separated by ';', set data.delimiter"),
        ({"label_column": "kind", "delimiter": ";"}, r'data.feature_columns = \["\*"\] takes columns of numbers'),
        ({"label_column": "sort", "delimiter": ";", "feature_columns": ("*",)}, "has no column 'sort'"),
        ({"label_column": "kind", "delimiter": ";", "feature_columns": ("height",)}, "has no column 'height'"),
        ({"label_column": "kind", "delimiter": ";", "feature_columns": ("*",)}, "column 'where' has 'north' at sample 0, which is not a number"),
        ({"label_column": "kind", "delimiter": ";", "feature_columns": ("length",), "client_column": "where"}, "sample 3 has no client in the column 'where'"),
        ({"label_column": "kind", "delimiter": ";", "feature_columns": ("length",), "client_column": "who"}, "has no column 'who'"),
        ({"label_column": "kind", "delimiter": ";;"}, "must be one character"),
        ({"label_column": "kind", "delimiter": ";", "feature_columns": ("*",), "text_column": "where"}, "not both"),
    ],
)  # fmt: skip
def test_what_a_table_lacks_is_one_sentence(tmp_path, spec, says):
    with pytest.raises((DataError, ConfigError), match=says):
        load(SourceSpec("csv", csv(tmp_path), **spec))


def test_a_delimiter_is_one_character():
    with pytest.raises(ConfigError, match=r"data.delimiter = '' must be one character"):
        small("data.delimiter=")


def parquet(folder, rows, name):
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / name))


ROWS = {
    "a": [0.0, 1.0, 2.0],
    "b": [5, 6, 7],
    "kind": ["x", "y", "x"],
    "who": [3, 1, 3],
    "said": ["hello", "bye", "yes"],
}


def test_a_hub_data_set_with_other_names_and_columns_by_config_alone(tmp_path):
    """A repository with two configurations, three splits and columns of its own."""
    root = tmp_path / "some" / "thing"
    parquet(root / "small", ROWS, "train-0.parquet")
    parquet(root / "small", ROWS, "validation-0.parquet")
    parquet(root / "large", {k: v * 2 for k, v in ROWS.items()}, "train-0.parquet")
    base = {"label_column": "kind", "client_column": "who"}
    vectors = SourceSpec("hub", "some/thing", feature_columns=("a", "b"), subset="small", splits=("train",), **base)
    found = load(vectors, tmp_path)
    assert found.inputs.tolist() == [[0, 5], [1, 6], [2, 7]]
    assert (found.owner_names, found.owners.tolist()) == (("1", "3"), [1, 0, 1])
    every = load(SourceSpec("hub", "some/thing", feature_columns=("a",), subset="small", **base), tmp_path)
    assert len(every.labels) == 6
    texts = load(SourceSpec("hub", "some/thing", text_column="said", subset="large", **base), tmp_path)
    assert (len(texts.labels), texts.owner_names) == (6, ("1", "3"))
    with pytest.raises(DataError, match=r"has no parquet files in a folder 'medium' \(data.subset\)"):
        load(SourceSpec("hub", "some/thing", text_column="said", subset="medium", **base), tmp_path)
    with pytest.raises(DataError, match="no parquet file for the split 'test'"):
        load(SourceSpec("hub", "some/thing", text_column="said", subset="large", splits=("test",), **base), tmp_path)
    with pytest.raises(DataError, match="has no column 'writer'"):
        load(
            SourceSpec("hub", "some/thing", text_column="said", label_column="kind", client_column="writer"), tmp_path
        )


def test_the_hub_s_own_library_is_asked_for_subset_and_splits(tmp_path, monkeypatch):
    """`datasets` opens a folder as it opens a repository."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    parquet(tmp_path / "repo", ROWS, "train.parquet")
    parquet(tmp_path / "repo", ROWS, "validation.parquet")
    hub = Hub(str(tmp_path / "repo"), "kind", splits=("validation",), features=("a",))
    (table,) = _open_online("repo", hub, None)
    assert table["a"][:] == ROWS["a"]
    with pytest.raises(DataError, match="has no split 'test'"):
        _open_online("repo", Hub(str(tmp_path / "repo"), splits=("test",)), None)


def test_keys_of_the_cache_are_those_of_before():
    """What came later is only part of a key where it is used: nobody's data are decoded again."""
    assert HUB["cifar10"].key() == [HUB["cifar10"]]
    assert repr(HUB["cifar10"]) == (
        "Hub(repository='uoft-cs/cifar10', label='label', image='img', text='', splits=('train', 'test'))"
    )


# --- arrays


def test_arrays_in_any_sensible_form():
    labels = ["b", "a", "b", "a"]
    bytes_ = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)
    assert (Dataset.from_arrays(bytes_, labels).inputs == bytes_).all()
    assert Dataset.from_arrays(bytes_[..., 0], labels).inputs.shape == (4, 5, 6, 1)  # grey, without a channel
    assert Dataset.from_arrays([[0.5, 1.0]] * 4, labels).inputs.dtype == np.float32
    tensor = torch.from_numpy(bytes_).permute(0, 3, 1, 2)
    assert (Dataset.from_arrays(tensor, torch.tensor([1, 0, 1, 0])).inputs == bytes_).all()
    named = Dataset.from_arrays(bytes_, [0, 2, 0, 2], class_names=["cat", "dog", "eel"])
    assert (named.labels.tolist(), named.class_names) == ([0, 2, 0, 2], ("cat", "dog", "eel"))


@pytest.mark.parametrize(
    ("inputs", "labels", "more", "says"),
    [
        (np.zeros((4, 3, 8, 8)), [0, 1, 0, 1], {}, r"look like N x C x H x W: give N x H x W x C, as inputs.transpose\(0, 2, 3, 1\)"),
        (np.zeros((4, 2)), np.eye(2)[[0, 1, 0, 1]], {}, r"they are one-hot, give labels.argmax\(1\)"),
        (np.zeros((4, 2)), np.zeros((4, 2)), {}, "give one column of them"),
        (np.zeros((4, 2)), [0.0, 1.0, 0.5, 1.0], {}, "labels are classes, and these are fractions such as 0.5"),
        (np.zeros((4, 2)), [0, 1, 0], {}, "4 samples but 3 labels"),
        (np.zeros((4, 2), np.int64), [0, 1, 0, 1], {}, r"pixels are bytes \(uint8\), other numbers floats"),
        (np.zeros((4, 2)), [0, 1, 0, 1], {"clients": ["a", "b"]}, "clients must name the client of each"),
        (np.zeros((4, 2)), ["x", "y", "x", "y"], {"class_names": ["x", "y"]}, "labels must be the numbers of these classes"),
        (np.zeros((4, 2)), [0, 5, 0, 5], {"class_names": ["x", "y"]}, "labels run from 0 to 5, outside the 2 classes"),
    ],
)  # fmt: skip
def test_arrays_that_are_something_else_get_a_hint(inputs, labels, more, says):
    with pytest.raises(DataError, match=says):
        Dataset.from_arrays(inputs, labels, **more)


def test_a_data_set_of_torch():
    images = torch.arange(6 * 3 * 4 * 5, dtype=torch.float32).reshape(6, 3, 4, 5)
    found = Dataset.from_torch(TensorDataset(images, torch.arange(6) % 3), name="toy")
    assert (found.inputs == images.permute(0, 2, 3, 1).numpy()).all()
    assert (found.name, found.labels.tolist()) == ("toy", [0, 1, 2, 0, 1, 2])


class Pictures(torch.utils.data.Dataset):
    """As torchvision's: pictures, and names of the classes."""

    classes = ("cat", "dog", "eel")

    def __len__(self):
        return 4

    def __getitem__(self, i):
        from PIL import Image

        if i >= 4:
            raise IndexError
        return Image.new("L", (5, 6), 10 * i), i % 2


def test_pictures_and_class_names_of_torch():
    found = Dataset.from_torch(Pictures())
    assert (found.inputs.shape, found.inputs.dtype, found.name) == ((4, 6, 5, 1), np.uint8, "Pictures")
    assert found.class_names == ("cat", "dog", "eel")


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])


class Single(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.zeros(3)


@pytest.mark.parametrize("given", [Endless(), Single()])
def test_what_torch_cannot_say_is_one_sentence(given):
    with pytest.raises(DataError, match=r"must have a length and samples \(input, label\) of one shape"):
        Dataset.from_torch(given)


def test_clients_that_bring_their_own_split_by_hand():
    def part(n, value):
        return np.full((n, 2), value, np.float32), [f"class {i % 2}" for i in range(n)]

    found = Dataset.from_clients({"ann": (part(3, 1), part(1, 2)), "ben": (part(2, 3), part(2, 4))}, name="two")
    assert [[p.tolist() for p in parts] for parts in found.fixed_split] == [[[0, 1, 2], [3]], [[4, 5], [6, 7]]]
    assert found.inputs[:, 0].tolist() == [1, 1, 1, 2, 3, 3, 4, 4]
    assert (found.owner_names, found.class_names) == (("ann", "ben"), ("class 0", "class 1"))


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ((), "its split has no clients"),
        ((([0], [1], [2], [3]),), "client 0 of its split must have"),
        ((([], [1]),), "client 0 of its split has no training samples"),
        ((([0], [1]), ([2], [4])), "client 1 of its split has a sample outside 0 to 3"),
        ((([0, 1], [1]),), "client 0 of its split has a sample twice"),
    ],
)
def test_a_split_that_cannot_be_is_one_sentence(split, says):
    split = tuple(tuple(np.array(part, dtype=np.int64) for part in parts) for parts in split)
    with pytest.raises(DataError, match=says):
        Dataset("x", np.zeros((4, 2), np.float32), np.arange(4) % 2, ("a", "b"), fixed_split=split)


def test_clients_without_two_parts_are_one_sentence():
    with pytest.raises(DataError, match=r"client 'ann' must have \(train, test\)"):
        Dataset.from_clients({"ann": (np.zeros((2, 2)), [0, 1])})


def test_a_client_without_test_samples_does_not_change_what_classes_are_called():
    """An empty list has no type: numpy takes it for floats, and class 0 was called 0.0, or refused where names are given."""
    one, none = (np.zeros((4, 2)), [0, 1, 0, 1]), (np.zeros((0, 2)), [])
    assert Dataset.from_clients([(one, none), (one, one)]).class_names == ("0", "1")
    assert Dataset.from_clients([(one, none), (one, one)], class_names=["cat", "dog"]).class_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Dataset.from_arrays([[1.0, 2.0], [3.0]], [0, 1]), "inputs cannot be made into an array"),
        (lambda: Dataset.from_arrays(5, [0]), "inputs must have an entry for each sample, and there is only 5"),
        (
            lambda: Dataset.from_arrays(torch.zeros(2, 3, dtype=torch.bfloat16), [0, 1]),
            "inputs cannot be made into an array: .*BFloat16",
        ),
        (lambda: Dataset.from_arrays(np.zeros((2, 3)), [[1], [2, 3]]), "labels cannot be made into an array"),
        (lambda: Dataset.from_arrays(np.zeros((2, 3)), None), "labels must have an entry for each sample"),
        (
            lambda: Dataset.from_arrays(np.zeros((2, 3)), [0, 1], clients=[[1], [2, 3]]),
            "clients cannot be made into an array",
        ),
        (lambda: Dataset.from_clients([]), "must be a list or a dict with one client or more"),
        (lambda: Dataset.from_clients(5), "must be a list or a dict with one client or more"),
    ],
)
def test_what_is_no_array_is_one_sentence(made, says):
    with pytest.raises(DataError, match=says):
        made()


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return {}["no such file"]


def test_a_data_set_of_torch_that_fails_is_one_sentence_with_the_line():
    with pytest.raises(DataError, match=r"KeyError: 'no such file', test_columns.py, line \d+"):
        Dataset.from_torch(Broken())
