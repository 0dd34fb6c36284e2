"""Presets: they are configs, the best of what was tried, and say how they were found."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cwfed
from cwfed.cli import app
from cwfed.core.errors import ConfigError
from cwfed.federation import preset
from cwfed.federation.preset import Preset, Tried

SHIPPED = preset.shipped()
MADE = Preset(
    name="digits/fedprox",
    title="digits, some clients",
    config={"data": {"clients": 6}, "train": {"rounds": 2}},
    method="fedprox",
    command="cwfed sweep --grid train.lr=0.1,0.2,0.4 --grid algorithm.mu=0.1,1,10",
    seeds=(0, 1),
    phase="received",
    version="0.2.0",
    tried=(
        Tried({"train.lr": 0.1, "algorithm.mu": 1}, 91.5, 0.25, 90.0),
        Tried({"train.lr": 0.2, "algorithm.mu": 10}, 80.0, 1.0, 92.0),
        Tried({"train.lr": 0.1, "algorithm.mu": 0.1}, 70.0, 1.0, 70.0),
    ),
    failed=("train.lr=0.4, algorithm.mu=1",),
)


def test_a_preset_is_a_config_that_says_how_it_was_found():
    text = MADE.to_toml()
    assert tomllib.loads(text) == {
        "data": {"clients": 6},
        "train": {"rounds": 2, "lr": 0.1},
        "algorithm": {"name": "fedprox", "mu": 1},
    }
    assert "the best of 4 by accuracy (received) on held-out training data, seeds 0, 1." in text
    assert "# 91.50 ± 0.25 %, 90.00 %: train.lr=0.1, algorithm.mu=1\n" in text
    assert "# no result: train.lr=0.4, algorithm.mu=1\n" in text
    assert "# Tuned: train.lr, algorithm.mu. All other settings have their defaults.\n" in text
    assert MADE.command in text


def test_beyond_what_diverged_lies_nothing():
    diverged = replace(MADE, failed=("train.lr=0.05, algorithm.mu=1",))
    assert diverged.at_the_end == []
    assert "At the end" not in diverged.to_toml()


def test_a_best_value_at_the_end_of_what_was_tried_is_named():
    assert MADE.at_the_end == ["train.lr"], "0.1 is the smallest; mu = 1 lies between 0.1 and 10"
    assert "At the end of what was tried: train.lr." in MADE.to_toml()


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_is_the_best_by_held_out_data_and_can_be_run(name):
    found = SHIPPED[name]
    config = cwfed.load_config(f"preset:{name}", settings=["train.epochs=3"])
    assert config.algorithm["name"] == found.method == name.partition("/")[2]
    for key, value in found.best.settings.items():
        section, _, rest = key.partition(".")
        assert config.model_dump()[section][rest] == value
    assert config.train.epochs == 3, "settings stand above it, as above a file"
    assert found.best.validation == max(one.validation for one in found.tried)
    assert config.data.validation > 0, "something was held out"
    assert found.command.startswith("cwfed sweep ")


def test_an_unknown_one_is_a_sentence():
    with pytest.raises(
        ConfigError, match=r"unknown preset 'digits/fedvag': did you mean digits/fedavg.*cwfed presets"
    ):
        cwfed.load_config("preset:digits/fedvag")


def test_the_command_lists_them_and_prints_one_as_a_config():
    listed = CliRunner().invoke(app, ["presets"])
    assert listed.exit_code == 0
    assert "digits/fedavg" in listed.output
    one = CliRunner().invoke(app, ["presets", "digits/fedavg"])
    assert tomllib.loads(one.output)["algorithm"] == {"name": "fedavg"}
    asked = json.loads(CliRunner().invoke(app, ["presets", "--json"]).output)
    assert [found["name"] for found in asked] == list(SHIPPED)


def test_the_script_that_makes_them(tmp_path):
    """A sweep's JSON becomes a file that `shipped` reads; what stood there of other methods stays."""
    making = _script()
    setting = making.Setting("few", {"data": {"clients": 3}}, [0.1, 0.2], {"fedprox": "mu=0.001,0.1"}, "0,1")
    assert making.command(setting, "fedavg", [0.1, 0.2])[-4:] == ["--grid", "train.lr=0.1,0.2", "--seeds", "0,1"]
    assert "algorithm.mu=0.001,0.1" in making.command(setting, "fedprox", [0.1])
    found = {"seeds": [0, 1], "tried": [_tried(0.2, 0.9, 0.8), {"values": {"train.lr": 9}, "given_up": "diverged"}]}
    for method in ("fedprox", "fedavg"):
        words = making.command(setting, method, setting.lr)
        making.write("few", setting, method, making.as_preset(words, found), tmp_path)
    read = preset._of_setting("few", tomllib.loads((tmp_path / "few.toml").read_text()))
    assert [one.name for one in read] == ["few/fedavg", "few/fedprox"]
    assert read[0].best == Tried({"train.lr": 0.2}, 90.0, 1.0, 80.0)
    assert read[0].failed == ("train.lr=9",)


def test_rates_are_made_wider_where_the_best_is_at_their_end():
    making = _script()

    def best(rate):
        return {"tried": [_tried(rate, 0.9, 0.8)]}

    assert making.wider([0.1, 0.2, 0.4], best(0.1)) == [0.05, 0.1, 0.2, 0.4]
    assert making.wider([0.1, 0.2, 0.4], best(0.4)) == [0.1, 0.2, 0.4, 0.8]
    assert making.wider([0.1, 0.2, 0.4], best(0.2)) == [0.1, 0.2, 0.4]


def test_what_is_made_is_made_again_only_where_it_is_named():
    making = _script()
    made = {"digits/fedavg", "digits/ditto"}
    missing = making.asked(["digits"], made)
    assert ("digits", "fedprox") in missing
    assert ("digits", "fedavg+prior") in missing
    assert ("digits", "fedavg") not in missing
    assert making.asked(["digits/fedavg"], made) == [("digits", "fedavg")]


def _tried(lr: float, validation: float, test: float) -> dict:
    return {
        "values": {"train.lr": lr},
        "given_up": "",
        "validation": {"mean": validation, "std": 0.01},
        "reported": {"phase": "received"},
        "accuracy": {"received": {"validated": {"mean": test}}},
    }


def _script():
    path = Path(__file__).parents[2] / "benchmarks" / "presets.py"
    spec = importlib.util.spec_from_file_location("presets_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
