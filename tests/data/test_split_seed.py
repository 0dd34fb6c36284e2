"""`data.split_seed`: one split for all training seeds, or, unset, a split for each."""

from __future__ import annotations

import json
import tomllib

import pytest

from cwfed.core import files
from cwfed.core.errors import ConfigError, RunError
from cwfed.federation.experiment import Experiment
from cwfed.report import page
from cwfed.report.finished import collect
from cwfed.report.groups import group
from cwfed.runs import compare, session
from cwfed.runs.folder import RunFolder
from tests.conftest import all_digits

SHARDS = ("train", "validation", "test", "holdout")


def dealt(*settings: str) -> tuple[object, ...]:
    """Who holds what, who is a newcomer, who is evaluated."""
    made = Experiment(all_digits("data.newcomers=2", "run.evaluate_clients=2", *settings))
    shards = [[getattr(s, part).tolist() for part in SHARDS] for s in made.federation.shards.values()]
    return shards, made.newcomers, made.evaluated


def first_model(*settings: str) -> list[float]:
    weights = Experiment(all_digits(*settings)).initial
    return [float(w.sum()) for w in weights.values()]


@pytest.mark.parametrize("method", ["fedavg", "fedfomo"])
def test_one_split_for_all_training_seeds(method):
    name = f"algorithm.name={method}"
    fixed = [dealt(name, "data.split_seed=7", f"run.seed={seed}") for seed in (0, 1, 7)]
    assert fixed[0] == fixed[1] == fixed[2]
    assert fixed[0] == dealt(name, "run.seed=7")  # unset, the split is that of run.seed
    assert fixed[0] != dealt(name, "data.split_seed=8", "run.seed=7")


def test_all_that_is_no_split_follows_the_training_seed():
    assert first_model("data.split_seed=7", "run.seed=1") == first_model("run.seed=1")
    assert first_model("data.split_seed=7", "run.seed=1") != first_model("data.split_seed=7", "run.seed=2")


def test_unset_a_run_has_the_bits_and_the_hash_of_before(tmp_path):
    summary = session.run(all_digits("run.seed=3"), tmp_path / "unset")
    named = session.run(all_digits("run.seed=3", "data.split_seed=3"), tmp_path / "named")
    assert summary["accuracy"] == named["accuracy"]
    # computed by the version before the setting existed
    assert all_digits().fingerprint == "b2d21ea168fe5cd1e8c9b082e41ca5138dd4ae6068a5f299ad62ed26a25fe899"
    assert all_digits("data.split_seed=0").fingerprint != all_digits().fingerprint


def test_runs_of_before_go_on(tmp_path):
    config = all_digits("train.rounds=2")
    session.run(config, tmp_path / "run")
    table = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert table["data"].pop("split_seed") == -1
    old = "\n".join(
        line for line in config.to_toml().splitlines() if not line.startswith("split_seed")
    )  # as a version without the setting wrote it
    (tmp_path / "run" / "config.toml").write_text(files.seal_text(old))
    whole = session.run(all_digits("train.rounds=3"))
    assert session.run(all_digits("train.rounds=3"), tmp_path / "run", resume=True)["accuracy"] == whole["accuracy"]


def test_another_split_is_another_experiment(tmp_path):
    session.run(all_digits("data.split_seed=1"), tmp_path / "run")
    with pytest.raises(RunError, match=r"holds another experiment: data\.split_seed is 1 there and 2 here"):
        session.run(all_digits("data.split_seed=2"), tmp_path / "run", resume=True)


def test_compare_over_seeds_on_one_split(tmp_path):
    config = all_digits("data.split_seed=5")
    entries = compare.parse_entries("fedavg,local", config)
    compare.compare(config, entries, [0, 1], tmp_path)
    digests = [json.loads(path.read_text())["split"]["digest"] for path in tmp_path.rglob("manifest.json")]
    assert len(digests) == 4
    assert len(set(digests)) == 1
    records, left_out = collect([tmp_path])
    assert left_out == []
    (one,) = group(records)
    assert [len(method.records) for method in one.methods] == [2, 2]
    assert len({record.split for record in records}) == 1
    page.write(tmp_path / "report.html", "", [one])
    assert "training seeds on one split" in (tmp_path / "report.html").read_text()


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match=r"data\.split_seed = -2 is not possible"):
        all_digits("data.split_seed=-2")


def test_a_run_folder_says_it(tmp_path):
    session.run(all_digits("data.split_seed=5", "run.seed=2"), tmp_path / "run")
    assert RunFolder(tmp_path / "run").config().split_seed == 5
