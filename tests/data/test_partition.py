from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cwfed.core.errors import ConfigError, DataError
from cwfed.data.partition import PartitionSpec, partition, split
from tests.conftest import small

LABELS = np.repeat(np.arange(10), 300)


def held(shares, labels=LABELS):
    return [sorted(set(labels[share].tolist())) for share in shares]


def test_pathological_is_the_diagonal_of_the_paper_s_heat_map():
    shares = partition(LABELS, PartitionSpec("pathological", 20), seed=0, classes=10)
    assert held(shares) == [[k, k + 1] for k in (0, 2, 4, 6, 8) for _ in range(4)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(3000))  # every sample has one owner


def test_pathological_shares_are_unequal_and_within_their_bounds():
    # class of 300 for 4 clients: share 75; least = min(40, 3000/20/2) = 40; at least max(7.5, 4), so 8
    shares = partition(LABELS, PartitionSpec("pathological", 20), seed=0, classes=10)
    counts = np.stack([np.bincount(LABELS[s], minlength=10) for s in shares])
    for k in range(10):
        takers = counts[counts[:, k] > 0, k]
        assert len(takers) == 4
        assert all(8 <= n < 75 for n in takers[:-1])
        assert takers[-1] == 300 - takers[:-1].sum()
    assert len(set(counts[counts > 0].tolist())) > 10


def test_everybody_gets_something_of_its_classes_even_when_shares_are_small():
    """The least size is rounded up: rounded down, it was 0 and clients went without."""
    labels = np.repeat(np.arange(10), 180)
    for seed in range(20):
        shares = partition(labels, PartitionSpec("pathological", 100), seed, classes=10)
        assert {len(classes) for classes in held(shares, labels)} == {2}


def test_pathological_on_a_hundred_classes():
    labels = np.repeat(np.arange(100), 60)
    shares = partition(labels, PartitionSpec("pathological", 20, classes_per_client=10), seed=0, classes=100)
    assert held(shares, labels)[0] == held(shares, labels)[1] == list(range(10))
    assert held(shares, labels)[19] == list(range(90, 100))


def test_balanced_and_shuffled_variants():
    equal = partition(LABELS, PartitionSpec("pathological", 20, balanced=True), seed=0, classes=10)
    assert {len(s) for s in equal} == {150}
    mixed = held(partition(LABELS, PartitionSpec("pathological", 20, shuffled=True), seed=0, classes=10))
    assert mixed[0] != [0, 1]
    assert {len(classes) for classes in mixed} == {2}


@pytest.mark.parametrize(
    ("classes", "per_class", "per_client", "frozen"),
    [(10, 300, 2, "7ef03fff78e219b4"), (100, 60, 10, "ed497d770b75a6cb"), (200, 30, 20, "133ac47525f9b10b")],
)
def test_the_paper_s_pathological_splits_are_frozen(classes, per_class, per_client, frozen):
    """Hashes of the version before no class was left out: 20 clients and these classes never left one out."""
    labels = np.repeat(np.arange(classes), per_class)
    sha = hashlib.sha256()
    for share in partition(labels, PartitionSpec("pathological", 20, per_client), seed=0, classes=classes):
        sha.update(len(share).to_bytes(8, "little") + share.astype("<i8").tobytes())
    assert sha.hexdigest()[:16] == frozen


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 25), st.integers(2, 40), st.integers(1, 40), st.booleans(), st.booleans())
def test_no_class_is_left_out_where_the_clients_have_room_for_all(clients, classes, per_client, balanced, shuffled):
    labels = np.repeat(np.arange(classes), 60)
    spec = PartitionSpec("pathological", clients, min(per_client, classes), balanced=balanced, shuffled=shuffled)
    shares = partition(labels, spec, seed=0, classes=classes)
    room = clients * spec.classes_per_client
    assert len({k for of_client in held(shares, labels) for k in of_client}) == min(classes, room)
    assert max(map(len, held(shares, labels))) <= spec.classes_per_client


def test_six_clients_hold_all_ten_classes_by_hand():
    # 12 places for 10 classes, two takers a class: after class 1 there are 8 places for 8 classes, one each
    shares = partition(LABELS, PartitionSpec("pathological", 6), seed=0, classes=10)
    assert held(shares) == [[0, 1], [0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_classes_left_over_go_to_nobody():
    shares = partition(LABELS, PartitionSpec("pathological", 3), seed=0, classes=10)
    assert held(shares) == [[0, 1], [2, 3], [4, 5]]


def test_dirichlet_covers_everything_and_respects_the_least():
    shares = partition(LABELS, PartitionSpec("dirichlet", 20, alpha=0.1), seed=0, classes=10)
    assert sorted(np.concatenate(shares).tolist()) == list(range(3000))
    assert min(map(len, shares)) >= 40


def test_dirichlet_heterogeneity_falls_with_alpha():
    def spread(alpha):
        shares = partition(LABELS, PartitionSpec("dirichlet", 10, alpha=alpha), seed=0, classes=10)
        rows = np.stack([np.bincount(LABELS[s], minlength=10) / len(s) for s in shares])
        return rows.std(0).mean()

    assert spread(0.05) > spread(0.5) > spread(50)


@pytest.mark.parametrize(("clients", "draws"), [(20, 20_000), (50, 50)])
def test_a_dirichlet_split_that_cannot_be_drawn_ends_in_an_error(clients, draws):
    """After few draws where these leave dozens of clients with too little: 20,000 of 1,000 clients take most of a minute."""
    labels = np.repeat(np.arange(2), 100)
    with pytest.raises(
        DataError,
        match=rf"no Dirichlet\(0.01\) split over {clients} clients .* in {draws} draws \(the best gave 0\): .* data\.least_samples",
    ):
        partition(labels, PartitionSpec("dirichlet", clients, alpha=0.01), seed=0, classes=2)


def test_iid_gives_everybody_the_same_number():
    shares = partition(LABELS, PartitionSpec("iid", 7), seed=0, classes=10)
    assert sorted({len(s) for s in shares}) == [428, 429]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["pathological", "dirichlet", "iid"]),
    st.integers(1, 12),
    st.integers(2, 8),
    st.integers(1, 8),
    st.integers(0, 1000),
)
def test_no_sample_twice_nobody_empty_and_a_pure_function(kind, clients, classes, per_client, seed):
    labels = np.random.default_rng(seed).integers(classes, size=600)
    spec = PartitionSpec(kind, clients, min(per_client, classes), alpha=0.7)
    try:
        shares = partition(labels, spec, seed, classes)
    except DataError:
        return
    everything = np.concatenate(shares)
    assert len(set(everything.tolist())) == len(everything)
    assert min(map(len, shares)) > 0
    again = partition(labels.copy(), spec, seed, classes)
    assert all((a == b).all() for a, b in zip(shares, again, strict=True))


def test_the_split_is_the_same_on_every_machine():
    """Frozen: whoever changes this changes everybody's results."""
    shares = partition(LABELS, PartitionSpec("dirichlet", 5, alpha=0.3), seed=1, classes=10)
    assert [len(s) for s in shares] == [750, 717, 553, 503, 477]
    assert [int(s.sum()) for s in shares] == [1416968, 769282, 1291282, 559602, 461366]


def test_the_paper_s_pathological_split_is_the_same_on_every_machine():
    shares = partition(LABELS, PartitionSpec("pathological", 20), seed=1, classes=10)
    assert [len(s) for s in shares[:8]] == [71, 58, 77, 394, 47, 83, 64, 406]
    assert [int(s.sum()) for s in shares[-4:]] == [276025, 291574, 230024, 822077]
    mixed = partition(LABELS, PartitionSpec("pathological", 20, balanced=True, shuffled=True), seed=1, classes=10)
    assert [int(s.sum()) for s in mixed[:5]] == [89186, 90562, 89413, 90539, 224533]
    even = partition(LABELS, PartitionSpec("iid", 4), seed=1, classes=10)
    assert [int(s.sum()) for s in even] == [1108836, 1125166, 1142462, 1122036]


def test_split_is_the_same_on_every_machine():
    train, validation, test = split(np.arange(10, 30), seed=1, client=2, validation=0.2)
    assert train.tolist() == [11, 12, 15, 16, 18, 19, 21, 22, 23, 24, 25, 26]
    assert (validation.tolist(), test.tolist()) == ([14, 17, 20], [10, 13, 27, 28, 29])


def test_the_least_a_client_may_hold_by_hand():
    assert PartitionSpec("dirichlet", 20, batch_size=10).least(3000) == 40  # a batch of 10 is a quarter of it
    assert PartitionSpec("dirichlet", 50, batch_size=10).least(3000) == 30  # half of an even share


def test_a_class_that_falls_on_full_clients_only_goes_to_the_emptiest():
    """With alpha so small, a draw is one client; whoever is full gets nothing more."""
    spec = PartitionSpec("dirichlet", 3, alpha=1e-4, batch_size=1)
    labels = np.repeat(np.arange(3), 100)
    for seed in range(5):
        shares = partition(labels, spec, seed, classes=3)
        assert sorted(map(tuple, held(shares, labels))) == [(0,), (1,), (2,)]


def test_a_client_without_a_sample_is_an_error():
    labels = np.array([0] * 20 + [1])
    with pytest.raises(DataError, match=r"leaves client \d without a sample"):
        partition(labels, PartitionSpec("pathological", 4, classes_per_client=1), seed=0, classes=2)


def test_split_is_75_25_with_the_validation_part_from_the_training_data():
    train, validation, test = split(np.arange(100, 300), seed=0, client=3, validation=0.1)
    assert (len(train), len(validation), len(test)) == (135, 15, 50)
    assert sorted(np.concatenate([train, validation, test])) == list(range(100, 300))
    whole, nothing, same_test = split(np.arange(100, 300), seed=0, client=3, validation=0)
    assert (len(whole), len(nothing)) == (150, 0)
    assert (test == same_test).all()


@pytest.mark.parametrize("samples", range(1, 9))
def test_tiny_clients_always_have_something_to_train_on(samples):
    train, _, _ = split(np.arange(samples), seed=0, client=0, validation=0.5)
    assert len(train) >= 1


def test_what_two_samples_are_for():
    train, validation, test = split(np.arange(2), seed=0, client=0, validation=0.5)
    assert (len(train), len(validation), len(test)) == (1, 1, 0)


def test_balanced_shares_of_a_class_that_does_not_divide():
    spec = PartitionSpec("pathological", 6, classes_per_client=1, balanced=True)
    shares = partition(np.repeat(np.arange(2), 10), spec, seed=0, classes=2)
    assert [len(share) for share in shares] == [3, 3, 4, 3, 3, 4]


def test_what_is_not_said_is_the_paper_s():
    spec = PartitionSpec("dirichlet", 20)
    assert (spec.alpha, spec.classes_per_client, spec.batch_size) == (0.1, 2, 10)
    assert not spec.balanced
    assert not spec.shuffled


def test_impossible_partitions():
    with pytest.raises(ConfigError, match="classes_per_client = 11, but the data have only 10"):
        partition(LABELS, PartitionSpec("pathological", 20, classes_per_client=11), 0, 10)
    with pytest.raises(ConfigError, match="only 3000 samples"):
        partition(LABELS, PartitionSpec("iid", 3001), 0, 10)


# --- one's own


def every_third(labels, clients, classes, rng):
    """Client c holds a third of the samples c, c + clients, ..."""
    return [np.arange(client, len(labels), 3 * clients) for client in range(clients)]


def bad(labels, clients, classes, rng):
    return {"too few": [[0]], "twice": [[0, 1], [1]], "beyond": [[0], [len(labels)]], "empty": [[0], []]}[bad.how]


def test_a_partition_of_ones_own():
    labels = np.arange(60) % 4
    shares = partition(labels, PartitionSpec(f"{__name__}:every_third", 2), 0, 4)
    assert [share.tolist() for share in shares] == [list(range(0, 60, 6)), list(range(1, 60, 6))]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("too few", "gives 1 clients, and data.clients = 2"),
        ("twice", "each once at most"),
        ("beyond", "from 0 to 59"),
        ("empty", "client 1 has none"),
        ("nothing", "KeyError"),
    ],
)
def test_what_cannot_be_a_partition_is_one_sentence(how, sentence, monkeypatch):
    monkeypatch.setattr(bad, "how", how, raising=False)
    with pytest.raises(ConfigError, match=sentence):
        partition(np.arange(60) % 4, PartitionSpec(f"{__name__}:bad", 2), 0, 4)


def test_an_unknown_partition_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown partition 'dirichle': did you mean dirichlet"):
        small("data.partition=dirichle")
