"""A run says what it cannot say anything about: classes that nobody holds, clients that are not tested."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cwfed.core.events import Note
from cwfed.data import Dataset, Federation, Shard, missing_classes, missing_data
from cwfed.report.finished import read_run
from cwfed.runs import session
from tests.conftest import all_digits


def test_missing_classes_by_hand():
    histogram = np.array([[5, 3, 0, 0], [0, 2, 0, 0]])
    said = "no client holds classes c, d: 20 of 30 samples are not used, the results are about the other 2"
    assert missing_classes(histogram, "abcd", 30) == [said]
    assert missing_classes(histogram, "abcd", 30, room=2) == [said + "; the clients have room for 2 of 4 classes"]
    assert missing_classes(histogram[:, :2], "ab", 10, room=4) == []
    (never,) = missing_classes(histogram[:, :3], "abc", 10)
    assert never.startswith("no client holds class c: the data have no such sample")


def test_many_names_are_counted():
    (said,) = missing_classes(np.eye(1, 100, dtype=np.int64), range(100), 1000)
    assert said.startswith("no client holds classes 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 89 more: 999 of 1,000")


def test_clients_without_a_test_and_classes_that_nobody_trains_on():
    data = Dataset("x", np.zeros((6, 2), np.float32), np.array([0, 0, 1, 1, 2, 2]), ("a", "b", "c"))
    none = np.zeros(0, dtype=np.int64)
    shards = [
        Shard(np.array([0, 2]), none, np.array([1])),
        Shard(np.array([3]), none, none),
        Shard(np.array([4]), none, np.array([5])),
    ]
    found = missing_data(Federation(data, shards), [0, 1], samples=6, room=None, validation=0)
    assert found == [
        "no client that takes part has training samples of class c",
        "client 1 has no test samples: they do not count in any accuracy",
    ]
    *_, picked = missing_data(Federation(data, shards), [0, 1, 2], samples=6, room=None, validation=0.1)
    assert picked == "clients 0, 1, 2 have no validation samples: the validated round is picked without them"


SAID = "no client holds classes 6, 7, 8, 9: 714 of 1,797 samples are not used"


def test_a_run_says_it_in_an_event_and_its_summary_once(tmp_path):
    settings = ("data.clients=3", "train.rounds=1")
    heard = []
    summary = session.run(all_digits(*settings), tmp_path / "r", on_event=heard.append)
    (note,) = [event.message for event in heard if isinstance(event, Note)]
    assert note.startswith(SAID)
    assert summary["notes"] == [note]
    more = session.run(all_digits("data.clients=3", "train.rounds=2"), tmp_path / "r", resume=True)
    assert more["notes"] == [note]
    assert session.run(all_digits(*settings))["notes"] == [note]  # in memory too
    assert session.run(all_digits("train.rounds=1"))["notes"] == []  # six clients have room for all ten


def test_reports_of_earlier_runs_say_it_too(tmp_path):
    """They have no note, but their manifest knows who holds what."""
    session.run(all_digits("data.clients=3", "train.rounds=1"), tmp_path / "r")
    record = read_run(tmp_path / "r")
    (said,) = record.notes
    assert replace(record, summary=replace(record.summary, notes=[])).notes == [said]
