"""Settings are described once: the docs page, the hash of an experiment and the former names come from that."""

from __future__ import annotations

import re
import runpy
import tomllib
import warnings

import pytest

import cwfed
from cwfed import algorithms
from cwfed.core import files
from cwfed.core.errors import ConfigError, RenamedSetting
from cwfed.federation import config as configs
from cwfed.federation.config import FORMER_NAMES, SETTINGS, Config
from cwfed.federation.settings import Section, describe, hashed, setting
from cwfed.report.listing import look, select
from cwfed.runs import session
from tests.conftest import ROOT, all_digits
from tests.test_cli import cwfed as cli

PAGE = ROOT / "docs" / "configuration.md"


def test_the_page_says_what_the_code_does():
    page = PAGE.read_text(encoding="utf-8")
    current = runpy.run_path(str(ROOT / "tools" / "settings.py"))["current"]
    assert current(page) == page, "run: make settings"
    sections = dict.fromkeys(key.partition(".")[0] for key in SETTINGS)
    assert re.findall(r"<!-- settings: (\w+) -->", page) == list(sections)


def test_the_tool_notices_a_page_that_is_not_current():
    page = PAGE.read_text(encoding="utf-8")
    current = runpy.run_path(str(ROOT / "tools" / "settings.py"))["current"]
    assert current(page.replace("The learning rate.", "Something else.")) == page


def test_a_setting_that_is_not_described_is_noticed():
    class Bare(Section):
        with_a_word: int = setting(1)
        """A word."""
        bare: int = 1

    class Silent(Section):
        silent: int = setting(1)

    for section, key in ((Bare, "bare"), (Silent, "silent")):
        whole = type("Whole", (Section,), {"__annotations__": {"one": section}, "one": section()})
        with pytest.raises(TypeError, match=f"one.{key} is not described"):
            describe(whole)


def test_kinds_and_bounds_in_words():
    kinds = {
        key: SETTINGS[key].kind
        for key in ("train.decay", "data.clients", "run.metrics", "privacy.dp", "data.balanced")
    }
    assert kinds == {
        "train.decay": "number > 0, ≤ 1",
        "data.clients": "whole number ≥ 1",
        "run.metrics": "list of texts",
        "privacy.dp": '"off" or "sample"',
        "data.balanced": "true or false",
    }


@pytest.mark.parametrize("key", SETTINGS)
def test_what_changes_results_is_in_the_hash(key):
    section, name = key.split(".")
    before = algorithms.before()
    table = Config().model_dump()
    whole = hashed(table, SETTINGS, before)
    table[section] = table[section] | {name: "another value"}
    assert (hashed(table, SETTINGS, before) != whole) == (SETTINGS[key].changes == "results")


def test_hyper_parameters_that_came_later_are_known_by_their_fields():
    assert algorithms.before() == {"algorithm.class_cap": 1.0, "algorithm.robust": "mean", "algorithm.trim": 0.1}


# --- former names


def test_a_former_name_works_and_says_the_new_one(tmp_path):
    (tmp_path / "old.toml").write_text("[train]\ndropout = 0.25\n")
    ways = {
        "file": lambda: configs.load(tmp_path / "old.toml"),
        "--set": lambda: configs.load(None, ["train.dropout=0.25"]),
        "table": lambda: configs.from_table({"train": {"dropout": 0.25}}),
        "on top": lambda: configs.with_settings(Config(), ["train.dropout=0.25"]),
        "over the file's": lambda: configs.load(tmp_path / "old.toml", ["train.client_dropout=0.25"]),
        "both former": lambda: configs.load(tmp_path / "old.toml", ["train.dropout=0.25"]),
    }
    for way in ways.values():
        with pytest.warns(RenamedSetting, match=r"train\.dropout is called train\.client_dropout now"):
            assert way().train.client_dropout == 0.25


def test_the_new_name_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert configs.load(None, ["train.client_dropout=0.25"]).train.client_dropout == 0.25


def test_both_names_at_once_are_refused():
    with pytest.raises(ConfigError, match=r"train\.dropout is the former name of train\.client_dropout: give only"):
        configs.from_table({"train": {"dropout": 0.25, "client_dropout": 0.5}})


def test_a_section_that_is_none_gets_its_usual_sentence():
    with pytest.raises(ConfigError, match=r"^train = 3 is not possible"):
        configs.from_table({"train": 3})


def test_former_names_are_of_settings_that_are_gone():
    assert dict(FORMER_NAMES) == {"train.dropout": "train.client_dropout"}
    assert not FORMER_NAMES.keys() & SETTINGS.keys()


def as_version_0_1(folder):
    """The config of a run as version 0.1 wrote it: the former names."""
    config = folder / "config.toml"
    text = "\n".join(config.read_text().splitlines()[1:]) + "\n"  # without the checksum
    config.write_text(files.seal_text(text.replace("client_dropout", "dropout")))
    assert "dropout" in tomllib.loads(config.read_text())["train"]


def test_a_run_folder_with_former_names_is_resumed_and_read(tmp_path):
    config = all_digits("train.rounds=2", "train.client_dropout=0.3", "run.checkpoint_seconds=0")
    session.run(config, tmp_path / "old")
    whole = session.run(all_digits("train.rounds=3", "train.client_dropout=0.3"), tmp_path / "whole")
    as_version_0_1(tmp_path / "old")
    with pytest.warns(RenamedSetting):
        assert look([tmp_path / "old"])[0].state == "finished"
    longer = all_digits("train.rounds=3", "train.client_dropout=0.3")
    with pytest.warns(RenamedSetting):
        assert session.run(longer, tmp_path / "old", resume=True)["accuracy"] == whole["accuracy"]
    assert "client_dropout" in (tmp_path / "old" / "config.toml").read_text()
    with pytest.warns(RenamedSetting):
        assert len(select(look([tmp_path / "old"]), ["train.dropout=0.3"], "folder")) == 1


def test_the_hash_is_that_of_the_first_name():
    """Computed by the version that knew train.dropout, for this config."""
    golden = "2a9172a37dac14e7eb5ddfe31aa13adad7552c13acad26dc2301a562435bec6a"
    assert all_digits("train.client_dropout=0.25").fingerprint == golden


def test_the_command_line_says_it_as_a_note(tmp_path):
    done = cli("run", "--set", "train.dropout=2", cwd=tmp_path, code=1)
    said = " ".join(done.stderr.split())
    assert said.count("note: the setting train.dropout is called train.client_dropout now") == 1
    assert "train.client_dropout = 2 is not possible" in said
    assert "RenamedSetting" not in said


def test_python_users_are_told_too():
    with pytest.warns(RenamedSetting):
        cwfed.run({"train": {"dropout": 0.1, "rounds": 1}, "data": {"clients": 5}, "model": {"name": "mlp"}})
