"""The leaderboard: who may be ranked with whom, and what is said of the others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cwfed.cli import share
from cwfed.core.errors import RunError
from cwfed.report import leaderboard
from cwfed.runs import archive, session
from tests.conftest import small

FEW = ("data.samples=400", "train.rounds=2", "data.validation=0.2", "run.save_models=none")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """alice: fedavg and fedfomo; bob: fedavg tuned otherwise and the same run as alice; carol: more rounds, another seed, other data."""
    made = tmp_path_factory.mktemp("made")
    wanted = {
        "alice/fedavg": ["algorithm.name=fedavg"],
        "alice/fedfomo": ["algorithm.name=fedfomo"],
        "bob/tuned": ["algorithm.name=fedavg", "train.lr=0.1", "train.batch_size=20"],
        "carol/longer": ["algorithm.name=fedavg", "train.rounds=3"],
        "carol/seed": ["algorithm.name=fedavg", "run.seed=1"],
        "carol/data": ["algorithm.name=fedavg", "data.samples=500"],
        "carol/dealt": ["algorithm.name=fedavg", "data.partition=iid"],
    }
    place = tmp_path_factory.mktemp("shared")
    for name, settings in wanted.items():
        session.run(small(*FEW, *settings), made / name)
        archive.write(made / name, place / f"{name}.cwfed")
    archive.write(made / "alice" / "fedavg", place / "bob" / "again.cwfed")
    shutil.copytree(made / "alice" / "fedavg", place / "alice" / "fedavg-folder")
    return place


def test_only_what_can_be_compared_is_ranked_together(shared):
    found, left_out = leaderboard.collect([shared])
    assert [one.path.name for one in left_out] == ["fedavg.cwfed"]  # alice has the same run as a folder
    assert "the same experiment and seed" in left_out[0].why
    boards = leaderboard.boards(found)
    first = boards[0]
    assert sorted((e.origin, e.method.first.started.algorithm) for e in first.entries) == [
        ("alice", "fedavg"),
        ("alice", "fedfomo"),  # holds a part of its training data out: another hash of its own, the same split
        ("bob", "fedavg"),
        ("bob", "fedavg"),  # tuned otherwise: the author's business
    ]
    assert [len(board.entries) for board in boards[1:]] == [1, 1, 1, 1]
    titles = " | ".join(board.title for board in boards)
    assert "rounds; train.rounds" not in titles, "said once"
    for words in ("3 rounds", "seed 1", "data.samples=500"):
        assert words in titles
    (told,) = [note for note in first.notes if note.startswith("train.lr")]
    assert told.startswith("train.lr is not the same for all: ")
    assert " 0.1: fedavg" in told
    values = [entry.value for entry in first.entries]
    assert values == sorted(values, reverse=True)
    for entry in first.entries:  # each by the phase that is reported for it
        phase = "trained" if entry.method.first.started.algorithm == "fedfomo" else "received"
        assert entry.value == entry.method.row["accuracy"][phase]["validated"]["mean"]


def test_the_same_run_of_two_people_is_said_to_agree_or_not(shared):
    found, _ = leaderboard.collect([shared])
    assert any("made the same run as" in n and "the same numbers" in n for n in leaderboard.boards(found)[0].notes)
    lied = []
    for origin, record in found:
        if record.path.name == "again.cwfed":
            accuracy = replace(record.summary.accuracy, received=replace(record.summary.accuracy.received, best=1.0))
            record = replace(record, summary=replace(record.summary, accuracy=accuracy))
        lied.append((origin, record))
    assert any("with other numbers" in note for note in leaderboard.boards(lied)[0].notes)


def test_the_same_run_is_compared_also_with_one_in_another_table(shared):
    """bob has made alice's run with one more seed, so that his mean is of other splits: another table, the same run."""
    found, _ = leaderboard.collect([shared])
    alice = next(r for _, r in found if r.path.name == "fedavg-folder")
    carol = next(r for _, r in found if r.path.name == "seed.cwfed")
    boards = leaderboard.boards([("alice", alice), ("bob", alice), ("bob", carol)])
    assert [[entry.origin for entry in board.entries] for board in boards] == [["alice"], ["bob"]]
    assert [note for board in boards for note in board.notes if "made the same run" in note] == [
        "fedavg, seed 0: bob made the same run as alice, with the same numbers"
    ]


def test_a_run_without_seals_is_marked_and_a_damaged_one_left_out(shared, tmp_path):
    place = shutil.copytree(shared, tmp_path / "shared")
    folder = place / "alice" / "fedavg-folder"
    table = json.loads((folder / "manifest.json").read_text())
    del table["sha256"]
    (folder / "manifest.json").write_text(json.dumps(table))
    damaged = bytearray((place / "bob" / "tuned.cwfed").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (place / "bob" / "tuned.cwfed").write_bytes(damaged)
    found, left_out = leaderboard.collect([place])
    assert "tuned.cwfed" in {one.path.name for one in left_out}
    cells = {
        entry.origin: entry.cells() for entry in leaderboard.boards(found)[0].entries if "fedavg" in entry.cells()[0]
    }
    assert cells["alice"][-1].startswith("no")
    assert cells["bob"][-1] == "yes"


def test_the_command_writes_a_page_and_a_table(shared, tmp_path, capsys):
    share.leaderboard([shared], tmp_path / "l.html")
    printed = " ".join(capsys.readouterr().out.split())
    assert "Numbers of different tables cannot" in printed
    html = (tmp_path / "l.html").read_text()
    assert html.count("class=leaderboard") == 5
    assert html.count("<tr class=best>") == 2, "the best of the one table with a contest, there and in detail"
    assert "differ in more than algorithm and seed" not in html, "a leaderboard's rows may: by learning rate"
    assert "That finds damage, not forgery" in html
    assert "| fedfomo | alice |" in (tmp_path / "l.md").read_text()
    share.leaderboard([shared], tmp_path / "l.html", as_json=True)
    boards = json.loads(capsys.readouterr().out)
    assert [len(board["entries"]) for board in boards] == [4, 1, 1, 1, 1]


def test_what_cannot_be_ranked_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match="neither a folder nor an archive"):
        share.leaderboard([tmp_path / "none"])
    (tmp_path / "bad.cwfed").write_bytes(b"x")
    with pytest.raises(RunError, match="nothing to rank"):
        share.leaderboard([Path(tmp_path)])
