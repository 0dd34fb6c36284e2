"""The audit: the real command on real run folders, and what it says of those it cannot audit."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from cwfed.report import audit
from cwfed.report.finished import read_run
from cwfed.runs import session
from tests.conftest import small
from tests.test_cli import cwfed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in {
        "wdr": [],
        "plain": ["algorithm.name=fedavg"],
        "local": ["algorithm.name=local"],
        "noise": ["privacy.norms=noise"],
    }.items():
        session.run(small("train.rounds=4", *settings), folder / name)
    return folder


def test_lines_are_means_of_the_events(runs):
    record = read_run(runs / "wdr")
    lines, left_out = audit.audit([record])
    assert not left_out
    assert [(line.round, line.estimate) for line in lines[:4]] == [
        (1, "norms"),
        (1, "lengths"),
        (1, "change"),
        (2, "norms"),
    ]
    errors = record.rounds[-1].leaks["norms"].error
    (last,) = [line for line in lines if line.round == 4 and line.estimate == "norms"]
    assert last.error == pytest.approx(sum(errors) / len(errors))
    assert last.guess == pytest.approx(
        0.8, abs=0.01
    )  # two of ten classes: 1/10 for each is wrong for 8/10 of the samples
    assert [line.round for line in audit.some_rounds(lines)] == 3 * [1, 2, 4]


def test_an_estimate_of_another_version_is_drawn_too(runs):
    record = read_run(runs / "wdr")
    rounds = [replace(r, leaks={f"guess {i}": r.leaks["norms"] for i in range(6)}) for r in record.rounds]
    assert (
        len(audit.picture([replace(record, rounds=rounds)]).axes[0].lines) == 6 + 1
    )  # and what 1/K for every class would have


def test_the_command_compares_runs_and_leaves_a_picture_and_tables(runs, tmp_path):
    done = cwfed("privacy", runs, "-o", tmp_path / "audit", cwd=tmp_path, env={"COLUMNS": "200"})
    assert "local uploads nothing" in done.stderr
    for text in ("fedavg", "privacy.norms=noise", "change", "norms"):
        assert text in done.stdout
    with (tmp_path / "audit" / "privacy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 3 * 4  # runs, estimates, rounds
    assert (tmp_path / "audit" / "privacy.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "audit" / "privacy.svg").read_text()
    assert "| run | accuracy | estimate |" in (tmp_path / "audit" / "privacy.md").read_text()
    found = json.loads(cwfed("privacy", runs / "plain", "--json", cwd=tmp_path).stdout)
    assert {line["estimate"] for line in found} == {"norms", "lengths", "change"}


def test_what_cannot_be_audited_is_named(runs, tmp_path):
    assert "is neither a folder nor an archive" in cwfed("privacy", "nowhere", cwd=tmp_path, code=1).stderr
    done = cwfed("privacy", runs / "local", cwd=tmp_path, code=1)
    assert "local uploads nothing" in done.stderr
    assert "none of these folders" in done.stderr


def test_unfinished_and_older_runs_are_named(runs, tmp_path):
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for name in ("config.toml", "manifest.json", "events.jsonl"):
        (unfinished / name).write_bytes((runs / "plain" / name).read_bytes())
    older = tmp_path / "older"
    older.mkdir()
    for name in ("config.toml", "manifest.json"):
        (older / name).write_bytes((runs / "wdr" / name).read_bytes())
    summary = json.loads((runs / "wdr" / "summary.json").read_text())
    unsealed = {key: value for key, value in summary.items() if key not in ("sha256", "events_sha256")}
    (older / "summary.json").write_text(json.dumps(unsealed))  # older versions sealed nothing
    lines = [json.loads(line) for line in (runs / "wdr" / "events.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("leaks", None)
        line.pop("spent", None)
    (older / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = cwfed("privacy", tmp_path, cwd=tmp_path, code=1)
    assert "not finished" in done.stderr
    assert "run it again" in done.stderr
