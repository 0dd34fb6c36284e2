"""Quantity, shards, extended Dirichlet, label plus quantity; natural clients; a split from a file; feature shift."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cwfed.cli import app
from cwfed.core.errors import ConfigError, CwfedError, DataError
from cwfed.data import Dataset, share_out, shift, split_file
from cwfed.data.partition import PARTITIONS, PartitionSpec, fit_sums, natural, partition
from cwfed.federation.experiment import deal
from tests.conftest import all_digits

LABELS = np.repeat(np.arange(10), 300)
NEW = ("quantity", "shards", "extended_dirichlet", "label_quantity")


def counts(shares, labels=LABELS, classes=10):
    return np.stack([np.bincount(labels[share], minlength=classes) for share in shares])


def digest(shares):
    sha = hashlib.sha256()
    for share in shares:
        sha.update(len(share).to_bytes(8, "little") + share.astype("<i8").tobytes())
    return sha.hexdigest()[:16]


# --- the maths, by hand


def test_quantity_is_the_least_and_a_share_of_the_rest_by_hand():
    # N = 3000, M = 20, batch 10: least m = min(40, 75) = 40; the rest, 3000 - 20 * 40 = 2200, by one Dirichlet draw
    from cwfed.core.rng import stream

    rng = stream(3, "partition")
    rng.permutation(3000)
    ends = np.floor(np.cumsum(rng.dirichlet(np.full(20, 0.5)))[:-1] * 2200).astype(int)
    expected = 40 + np.diff(ends, prepend=0, append=2200)
    shares = partition(LABELS, PartitionSpec("quantity", 20), seed=3, classes=10)
    assert [len(share) for share in shares] == expected.tolist()
    assert sum(map(len, shares)) == 3000
    assert max(map(len, shares)) > 3 * min(map(len, shares))


def test_quantity_keeps_the_classes_of_all_and_grows_equal_with_alpha():
    def sizes(alpha):
        return [len(s) for s in partition(LABELS, PartitionSpec("quantity", 10, quantity_alpha=alpha), 0, 10)]

    assert np.std(sizes(0.1)) > np.std(sizes(1)) > np.std(sizes(1000))
    biggest = max(partition(LABELS, PartitionSpec("quantity", 10), 0, 10), key=len)
    assert abs(np.bincount(LABELS[biggest]) / len(biggest) - 0.1).max() < 0.05


def test_the_least_of_everybody_can_be_asked_for():
    shares = partition(LABELS, PartitionSpec("quantity", 20, quantity_alpha=0.01, least_samples=120), 0, 10)
    assert min(map(len, shares)) == 120
    with pytest.raises(
        ConfigError, match="least_samples = 151 for each of 20 clients are more than the 3000 samples"
    ):
        partition(LABELS, PartitionSpec("quantity", 20, least_samples=151), 0, 10)


def test_shards_of_mcmahan_by_hand():
    # 12 samples of 3 classes, 3 clients with 2 shards each: 6 shards of 2 samples, and every shard has one class
    labels = np.array([2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1])
    shares = partition(labels, PartitionSpec("shards", 3), seed=0, classes=3)
    assert [len(share) for share in shares] == [4, 4, 4]
    assert all((row % 2 == 0).all() for row in counts(shares, labels, 3))
    assert sorted(np.concatenate(shares).tolist()) == list(range(12))


def test_shards_of_the_paper_hold_at_most_two_classes_per_client():
    """100 clients, 200 shards of 300 in MNIST's 60,000: here a tenth of it, and a shard never straddles two classes."""
    labels = np.repeat(np.arange(10), 600)
    held = counts(partition(labels, PartitionSpec("shards", 100), 0, 10), labels)
    assert (held.sum(1) == 60).all()
    assert ((held > 0).sum(1) <= 2).all()
    assert ((held > 0).sum(1) == 2).any()


def test_extended_dirichlet_by_hand():
    # 4 clients, 4 classes, 2 each: 8 places for 4 classes, so every class has 2 holders, whatever is drawn
    labels = np.repeat(np.arange(4), 100)
    for seed in range(10):
        held = counts(partition(labels, PartitionSpec("extended_dirichlet", 4, alpha=0.1), seed, 4), labels, 4)
        assert ((held > 0).sum(1) == 2).all()
        assert ((held > 0).sum(0) == 2).all()
        # least = min(40, 400 / 4 / 2) = 40, so 20 of each class; N_k / h / 2 = 25 allows it
        assert held[held > 0].min() >= 20
        assert held.sum() == 400


def test_extended_dirichlet_leaves_no_class_out_where_there_is_room():
    held = counts(partition(LABELS, PartitionSpec("extended_dirichlet", 5, classes_per_client=2), 0, 10))
    assert ((held > 0).sum(0) == 1).all()  # 10 places for 10 classes
    left_out = counts(partition(LABELS, PartitionSpec("extended_dirichlet", 3, classes_per_client=2), 0, 10))
    assert ((left_out > 0).sum(0) == 1).sum() == 6
    with pytest.raises(ConfigError, match="classes_per_client = 11, but the data have only 10"):
        partition(LABELS, PartitionSpec("extended_dirichlet", 3, classes_per_client=11), 0, 10)


def test_sums_are_fitted_by_hand():
    # [[1, 1], [1, 3]] with row sums (4, 4) and column sums (4, 4): a * b * p with p01 p10 / p00 p11 = 1/3 kept:
    # x / (4 - x) = sqrt(3) -> x = 4 sqrt(3) / (1 + sqrt(3)) = 2.5359 on the diagonal
    table = np.array([[1.0, 1.0], [1.0, 3.0]])
    fitted = fit_sums(table, np.array([4, 4]), np.array([4, 4]))
    for _ in range(50):
        fitted = fit_sums(fitted, np.array([4, 4]), np.array([4, 4]))
    x = 4 * 3**0.5 / (1 + 3**0.5)
    assert np.allclose(fitted, [[x, 4 - x], [4 - x, x]])


def test_label_plus_quantity_has_the_sizes_of_quantity_and_skewed_labels():
    spec = PartitionSpec("label_quantity", 12, alpha=0.3)
    shares = partition(LABELS, spec, 5, 10)
    held = counts(shares)
    assert held.sum(0).tolist() == [300] * 10  # every sample is used
    from cwfed.core.rng import stream

    least = 40  # min(4 * 10, 3000 / 12 / 2)
    q = stream(5, "partition").dirichlet(np.full(12, 0.5))
    wanted = least + (3000 - 12 * least) * q
    assert (
        abs(held.sum(1) - wanted).max() < 12
    )  # half a sample of the fit, less than one for each class and for n_i itself
    p = held / held.sum(1, keepdims=True)
    assert p.max(1).mean() > 0.35  # of ten classes, one alone has more than a third


def test_a_class_without_samples_is_no_obstacle():
    labels = np.repeat([0, 2, 3], 100)
    for kind in NEW:
        shares = partition(labels, PartitionSpec(kind, 4), 0, classes=5)
        assert sorted(np.concatenate(shares).tolist()) == list(range(300)) or kind == "extended_dirichlet"


def test_too_many_shards_is_one_sentence():
    with pytest.raises(ConfigError, match="= 3 are 30 shards, but there are only 20 samples"):
        partition(np.arange(20) % 2, PartitionSpec("shards", 10, shards_per_client=3), 0, 2)


# --- properties


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(NEW),
    st.integers(1, 12),
    st.integers(2, 8),
    st.integers(1, 8),
    st.floats(0.01, 100),
    st.integers(0, 1000),
)
def test_no_sample_twice_nobody_empty_sizes_add_up_and_a_pure_function(kind, clients, classes, many, alpha, seed):
    labels = np.random.default_rng(seed).integers(classes, size=400)
    spec = PartitionSpec(kind, clients, min(many, classes), alpha=alpha, shards_per_client=many, quantity_alpha=alpha)
    try:
        shares = partition(labels, spec, seed, classes)
    except DataError:  # a client without a sample
        return
    everything = np.concatenate(shares)
    assert len(shares) == clients
    assert len(set(everything.tolist())) == len(everything)
    assert min(map(len, shares)) > 0
    if kind != "extended_dirichlet" or clients * spec.classes_per_client >= classes:
        assert len(everything) == 400  # every sample has an owner
    again = partition(labels.copy(), spec, seed, classes)
    assert digest(shares) == digest(again)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 99))
def test_natural_clients_are_whole_and_drawn_once(owners, clients, seed):
    column = np.random.default_rng(seed).integers(owners, size=200)
    _, column = np.unique(column, return_inverse=True)
    chosen = natural(column, PartitionSpec("column", clients), seed)
    assert len(chosen) == len(set(chosen)) == min(clients, column.max() + 1)
    assert chosen == natural(column, PartitionSpec("column", clients), seed)


# --- bits


def test_the_new_partitions_are_the_same_on_every_machine():
    """Frozen: whoever changes this changes everybody's results."""
    specs = {kind: PartitionSpec(kind, 8, classes_per_client=3, alpha=0.3) for kind in NEW}
    assert {kind: digest(partition(LABELS, spec, 1, 10)) for kind, spec in specs.items()} == FROZEN


FROZEN = {
    "quantity": "0e58dad575ee475c",
    "shards": "0cb4dae908a4116b",
    "extended_dirichlet": "223addf16397daae",
    "label_quantity": "8c2e18f03e18ae0d",
}


def test_partitions_of_earlier_versions_have_their_bits():
    """Hashes of version 0.1: nothing that came since moves a sample."""
    specs = [
        PartitionSpec("pathological", 20),
        PartitionSpec("pathological", 7, 3, shuffled=True),
        PartitionSpec("pathological", 7, 3, balanced=True),
        PartitionSpec("dirichlet", 20),
        PartitionSpec("dirichlet", 5, alpha=1.0),
        PartitionSpec("iid", 6),
    ]
    assert [digest(partition(LABELS, spec, 2, 10)) for spec in specs] == BEFORE
    assert set(PARTITIONS) == {"pathological", "dirichlet", "iid", *NEW}


BEFORE = [
    "587bda7d51df8e0d",
    "39b8ce6795dca75b",
    "362b8f30310d9ebf",
    "f9a38a8bd7f942d7",
    "787ecf701a9e6787",
    "46245e40d7a512f6",
]


# --- natural clients


WRITERS = ["ann", "ben", "cem", "ben", "ann", "ben", "ben", "cem", "ann", "ben", "dot", "ben"]


def letters(clients=WRITERS):
    inputs = np.arange(24, dtype=np.float32).reshape(12, 2)
    return Dataset.from_arrays(inputs, np.arange(12) % 2, name="letters", clients=clients)


def whole(shard):
    return sorted(np.concatenate([shard.train, shard.validation, shard.test]).tolist())


def test_natural_clients_by_hand():
    federation = share_out(letters(), PartitionSpec("column", 20, column="writer"), seed=0, validation=0.1)
    assert federation.names == ("ann", "ben", "cem", "dot")
    assert [whole(federation.shards[i]) for i in range(4)] == [[0, 4, 8], [1, 3, 5, 6, 9, 11], [2, 7], [10]]
    assert federation.notes == ()


def test_natural_clients_may_be_drawn_and_small_ones_left_out():
    federation = share_out(letters(), PartitionSpec("column", 20, least_samples=3, column="writer"), 0, 0.1)
    assert federation.names == ("ann", "ben")
    (note,) = federation.notes
    assert note.startswith("2 of the 4 clients in the column 'writer' take part")
    drawn = {share_out(letters(), PartitionSpec("column", 2), seed, 0.1).names for seed in range(8)}
    assert {len(names) for names in drawn} == {2}
    assert len(drawn) > 1  # which ones is drawn from the seed
    with pytest.raises(ConfigError, match=r"no client in the column 'writer' has data.least_samples = 7 samples"):
        share_out(letters(), PartitionSpec("column", 20, least_samples=7, column="writer"), 0, 0.1)


def test_data_without_a_column_have_no_natural_clients():
    with pytest.raises(ConfigError, match=r"digits has none: name their column as data.client_column"):
        deal(all_digits("data.partition=column"))


# --- a split from a file


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_split_file_by_hand(tmp_path):
    text = "client,sample,part\n10,0,train\n9,3,train\n10,1,test\n9,4,test\n9,5,train\n"
    found = split_file.read(write(tmp_path / "who.csv", text), 6)
    assert found.names == ("9", "10")  # numbers in their order, not as texts
    assert [[part.tolist() for part in parts] for parts in found.parts] == [[[3, 5], [4]], [[0], [1]]]
    table = {"10": {"train": [0], "test": [1]}, "9": {"train": [5, 3], "test": [4]}}
    same = split_file.read(write(tmp_path / "who.json", table), 6)
    assert str(same) == str(found)


def test_a_split_file_without_parts(tmp_path):
    found = split_file.read(write(tmp_path / "who.json", [[5, 0], [2]]), 6)
    assert found.names == ("0", "1")
    assert [share.tolist() for share in found.shares] == [[0, 5], [2]]
    same = split_file.read(write(tmp_path / "who.csv", "client,sample\n0,0\n1,2\n0,5\n"), 6)
    assert str(same) == str(found)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "client,sample\nann,6\n", "client 'ann' has the sample 6, and the samples are 0 to 5"),
        ("a.csv", "client,sample\nann,-1\n", "has the sample -1, and the samples are 0 to 5"),
        ("a.csv", "client,sample\nann,one\n", "has the sample 'one', which is not a whole number"),
        ("a.csv", "client,sample\nann,2\nben,2\n", "gives sample 2 twice, to 'ann' and to 'ben'"),
        ("a.csv", "client,sample\nann,2\nann,2\n", "gives sample 2 twice, to 'ann' and to 'ann'"),
        ("a.csv", "client,index\nann,2\n", "has no column 'sample'"),
        ("a.csv", "", "it is empty"),
        ("a.csv", "client,sample\n", "names no samples"),
        ("a.csv", "client,sample,part\nann,1,tset\n", "has a part 'tset': did you mean test"),
        ("a.csv", "client,sample,part\nann,1,train\nben,2,\n", "say|gives a part for some samples"),
        ("a.csv", "client,sample,part\nann,1,train\nben,2,test\n", "gives client 'ben' no training samples"),
        ("a.json", "{", "cannot be read as JSON"),
        ("a.json", "3", "must be a table or a list of clients"),
        ("a.json", {"ann": 3}, "client 'ann' must have a list of sample numbers"),
        ("a.json", {"ann": [1.5]}, "has the sample 1.5, which is not a whole number"),
        ("a.json", {"ann": [True]}, "which is not a whole number"),
    ],
)
def test_what_is_no_split_is_one_sentence(tmp_path, name, content, says):
    with pytest.raises(DataError, match=says):
        split_file.read(write(tmp_path / name, content), 6)


def test_an_experiment_with_a_split_file(tmp_path):
    path = write(tmp_path / "who.json", {"left": list(range(0, 200, 2)), "right": list(range(1, 200, 2))})
    federation = deal(all_digits("data.partition=file", f"data.split_file={path}"))
    assert federation.names == ("left", "right")
    assert whole(federation.shards[1]) == list(range(1, 200, 2))
    with pytest.raises(DataError, match=r"nowhere\.csv cannot be read"):
        deal(all_digits("data.partition=file", "data.split_file=nowhere.csv"))
    with pytest.raises(ConfigError, match=r"needs data.split_file"):
        deal(all_digits("data.partition=file"))
    with pytest.raises(ConfigError, match=r'is read with data.partition = "file"'):
        all_digits(f"data.split_file={path}")
    with pytest.raises(ConfigError, match=r"data.samples = 50 cannot be taken"):
        deal(all_digits("data.partition=file", f"data.split_file={path}", "data.samples=50"))


# --- feature shift


def test_quarter_turns_are_numpy_s():
    images = np.arange(2 * 5 * 5 * 3).reshape(2, 5, 5, 3)
    for quarter in range(4):
        assert (shift.rotated(images, quarter / 4) == np.rot90(images, quarter, axes=(1, 2))).all()


def test_a_turn_by_hand():
    # a third of a turn is no quarter: the middle stays, and a row through it becomes a line 120 degrees further
    image = np.zeros((1, 9, 9, 1), np.uint8)
    image[0, 4, 4:] = 1  # from the middle to the right
    turned = shift.rotated(image, 1 / 3)[0, :, :, 0]
    # the pixel 2 to the right comes to (cos 120, sin 120) * 2 = (-1, 1.73): one to the left, two up
    assert turned[4, 4] == 1
    assert turned[2, 3] == 1
    assert turned[4, 6] == 0


def test_tints_by_hand():
    grey = np.full((1, 1, 1, 3), 200, np.uint8)
    # hue 0: w = (1, (1 + cos(-120)) / 2, the same) = (1, 1/4, 1/4); hue 1/3 gives green what red had
    assert shift.tinted(grey, 0, 0).tolist() == [[[[200, 50, 50]]]]
    assert shift.tinted(grey, 1 / 3, 0).tolist() == [[[[50, 200, 50]]]]
    floats = np.full((1, 1, 1, 3), 1.0, np.float32)
    assert np.allclose(shift.tinted(floats, 0, -1.0), [1.0, -0.5, -0.5])  # -1 is black: -1 + 2/4


def test_groups_are_of_equal_size_and_drawn_from_the_seed():
    assert sorted(np.bincount(shift.groups(10, 4, 0)).tolist()) == [2, 2, 3, 3]
    assert (shift.groups(10, 4, 0) == shift.groups(10, 4, 0)).all()
    assert any((shift.groups(10, 4, 0) != shift.groups(10, 4, seed)).any() for seed in (1, 2))


def test_a_shift_changes_the_images_of_its_clients_and_nothing_else():
    plain, turned = deal(all_digits()), deal(all_digits("data.shift=rotation"))
    assert turned.digest() == plain.digest()  # who holds what
    assert turned.data.digest != plain.data.digest
    groups = shift.groups(6, 4, 0)
    for client, shard in turned.shards.items():
        own = whole(shard)
        assert (turned.data.inputs[own] == shift.rotated(plain.data.inputs[own], groups[client] / 4)).all()
    assert list(turned.shifts.values()) == [f"{90 * g}°" for g in groups]
    coloured = deal(all_digits("data.shift=colour", "data.shift_groups=3"))
    assert coloured.data.inputs.shape == (1797, 8, 8, 3)
    assert coloured.shape.dims == (3, 8, 8)


def vectors():
    return np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 2


def test_what_cannot_be_shifted_is_one_sentence():
    with pytest.raises(CwfedError, match=r"is for images, and these samples have the shape \(5,\)"):
        deal(all_digits(f"data.name={__name__}:vectors", "data.partition=iid", "data.shift=rotation"))
    four = Dataset.from_arrays(np.zeros((8, 5, 5, 4), np.float32), np.arange(8) % 2)
    with pytest.raises(ConfigError, match="grey or RGB images, and these have 4 channels"):
        shift.shifted(share_out(four, PartitionSpec("iid", 2), 0, 0), "colour", 2, 0)
    shared = Dataset(
        "x", np.zeros((4, 5, 5, 1), np.float32), np.arange(4) % 2, ("a", "b"), fixed_split=(([0, 1], [3]), ([2], [3]))
    )
    with pytest.raises(ConfigError, match="some samples of x belong to several clients"):
        shift.shifted(share_out(shared, PartitionSpec("iid", 2), 0, 0), "rotation", 2, 0)


# --- words


def test_reports_have_words_for_every_partition():
    for kind in NEW:
        assert "Dirichlet" in all_digits(f"data.partition={kind}").data.how_split() or kind == "shards"
    assert all_digits("data.partition=shards").data.how_split() == "2 shards a client"
    assert all_digits("data.shift=rotation").data.how_split() == "2 classes per client, rotation in 4 groups"


# --- cwfed data show


def show(*words):
    done = CliRunner().invoke(app, ["data", "show", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("kind", NEW)
def test_data_show_prints_every_partition(kind):
    found = json.loads(show("--set=data.clients=5", f"--set=data.partition={kind}", "--json"))
    assert sum(map(sum, found["histogram"])) == 1797
    assert found["clients"] == ["0", "1", "2", "3", "4"]
    assert "samples of each class at each client" in show("--set=data.clients=5", f"--set=data.partition={kind}")


def test_data_show_names_clients_and_shifts_and_draws_them(tmp_path):
    path = write(tmp_path / "who.json", {"left": list(range(0, 90, 2)), "right": list(range(1, 90, 2))})
    words = [
        "--set=data.partition=file",
        f"--set=data.split_file={path}",
        "--set=data.shift=rotation",
        "--set=data.shift_groups=2",
    ]
    found = json.loads(show(*words, "--json"))
    assert (found["clients"], sorted(found["shifts"])) == (["left", "right"], ["0°", "180°"])
    text = show(*words, "--out", str(tmp_path / "who.png"))
    assert "left" in text
    assert "180°" in text
    assert (tmp_path / "who.png").read_bytes()[:4] == b"\x89PNG"
