"""Combinations of a method with plug-ins: their names, their settings, and a sentence for those that make no sense."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from cwfed import load_model
from cwfed.algorithms import ALGORITHMS, PLUGINS, FedAvg, build, canonical, describe, find, foreign, name_of, parts_of
from cwfed.algorithms.fedprox import FedProx
from cwfed.cli import app
from cwfed.core.errors import ConfigError, RunError
from cwfed.federation import config as configs
from cwfed.federation.experiment import Blueprint
from cwfed.models import InputShape
from cwfed.report.finished import read_run
from cwfed.runs import session
from cwfed.runs.compare import parse_entries
from tests.conftest import small


@dataclass(frozen=True)
class Louder(FedAvg):
    """A plug-in of the user's own: the penalty gains a constant."""

    plugin: ClassVar[str] = "louder"
    work: ClassVar[str] = "client: an addition"
    loudness: float = 1.0
    """How much is added."""

    def penalty(self, params, output, labels, start):
        return super().penalty(params, output, labels, start) + self.loudness


@dataclass(frozen=True)
class Quieter(FedAvg):
    """A method that is no plug-in."""

    loudness: float = 0.0


@dataclass(frozen=True)
class Own(FedProx):
    """A method that derives from one that is a plug-in too, and replaces a hook."""

    def loss(self, network, params, batch, start, stage):
        return super().loss(network, params, batch, start, stage)


LOUDER, QUIETER = f"{__name__}:Louder", f"{__name__}:Quieter"


def test_a_combination_has_the_settings_of_its_parts_and_one_name():
    given = {"name": "fedprox+owners+balanced", "mu": 0.5, "owners": "updates", "prior_tau": 2}
    algorithm = build(given)
    assert name_of(algorithm) == algorithm.name == canonical(given["name"]) == "fedprox+balanced+owners"
    assert (algorithm.mu, algorithm.owners, algorithm.prior_tau, algorithm.class_cap) == (0.5, "updates", 2.0, 1.0)
    assert type(algorithm) is find("fedprox+balanced+owners")
    assert [cls.__name__ for cls in parts_of(type(algorithm))] == ["FedProx", "Balanced", "Owners"]
    table = describe(algorithm, name_of(algorithm))
    assert build(table) == algorithm
    config = configs.from_table({"algorithm": given})
    assert config.algorithm == table
    assert configs.loads(config.to_toml()).algorithm == table
    assert "the distance to the received model" in algorithm.work
    assert "K logarithms" not in FedAvg.work
    assert "K label counts up" in algorithm.travels


def test_settings_stay_with_the_same_set_of_plug_ins():
    """`--set algorithm.name=...` drops the file's hyper-parameters for another algorithm only."""
    table = '[algorithm]\nname = "fedavg+owners+prior"\nprior_tau = 3\n'
    assert configs.loads(table, settings=["algorithm.name=fedavg+prior+owners"]).algorithm["prior_tau"] == 3
    assert configs.loads(table, settings=["algorithm.name=fedavg+prior"]).algorithm["prior_tau"] == 1


def test_hooks_of_all_parts_act():
    """FedProx's penalty over 2 numbers that are 1 and 3 away, mu / 2 (1 + 9) = 5, and 7 of the plug-in."""
    algorithm = build({"name": f"fedprox+{LOUDER}", "mu": 1.0, "loudness": 7.0})
    from cwfed.core.types import Output, Start

    start = Start({}, {"w": torch.zeros(2)})
    output = Output(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(2, 2))
    assert float(algorithm.penalty({"w": torch.tensor([1.0, 3.0])}, output, torch.zeros(1), start)) == 12.0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fedavg+nothing", "unknown plug-in 'nothing': known: "),
        ("fedavg+ownrs", "unknown plug-in 'ownrs': did you mean owners"),
        ("fedavgg+prior", "unknown algorithm 'fedavgg': did you mean fedavg"),
        ("fedavg+fedprox", "unknown plug-in 'fedprox'"),
        ("fedavg+prior+prior", "prior is named twice"),
        ("fedavg+balanced+prior", "balanced already contains prior"),
        ("fedala+ala", "fedala already contains ala"),
        ("cwfedavg+owners", "owners cannot be added to cwfedavg: both are ways to average output layers"),
        ("ifca+owners", "owners cannot be added to ifca: .* aggregates in a way of its own"),
        ("fedrep+head_first", "head_first cannot be added to fedrep: .* passes of its own"),
        ("ditto+tune", "tune cannot be added to ditto: .* loss of its own"),
        ("ditto+offset", "offset cannot be added to ditto: .* has changed its network"),
        ("fedamp+ala", "ala cannot be added to fedamp: its clients start from their own model"),
        ("fedavg+ala+tune", "tune cannot be added to ala: both change the received output layer"),
        ("fedala+tune", "tune cannot be added to fedala: both change the received output layer"),
        ("ditto+prox", "prox cannot be added to ditto: its term is added to FedAvg's loss"),
        ("fedamp+prox", "prox cannot be added to fedamp: its clients have a pull of their own"),
        ("fedproto+prox", "prox cannot be added to fedproto: its clients receive no model"),
        ("feduv+prox", "both have a setting 'mu'"),
        ("fedprox+prox", "fedprox already contains prox"),
        ("fedcac+bn", "bn cannot be added to fedcac: its masks are of every parameter"),
        ("fedpac+bn", "bn cannot be added to fedpac: its statistics are those of the received model"),
        ("local+bn", "bn cannot be added to local: .* of whole models"),
        ("fedcp+bn", "bn cannot be added to fedcp: .* has changed its network"),
        ("fedprox+programme", "programme can only be added to cwfedavg"),
        ("cwfedavg+balanced", "the prior would count twice: set algorithm.wdr = 0"),
        (f"{__name__}:Own+tune", "tune cannot be added to .*Own: .* has a loss of its own"),
        (f"fedavg+{QUIETER}", "Quieter is not a plug-in: its class does not set `plugin`"),
        (f"{QUIETER}+{LOUDER}", "both have a setting 'loudness': it would not be clear which one is meant"),
        (f"fedavg+{__name__}:pytest", "plug-in .* must be a dataclass that derives from cwfed's FedAvg"),
        ("fedavg+prior:prior_tau=1", "plug-in 'prior:prior_tau=1'"),
    ],
)
def test_one_sentence_for_what_cannot_be(name, says):
    with pytest.raises(ConfigError, match=says):
        build(name)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["algorithm.name=fedper+ala"], "ala: the top layers of fedper.ala never leave their client"),
        (["algorithm.name=fedper+owners"], "owners averages uploaded output layers, and fedper.owners uploads none"),
        (["algorithm.name=fedper+offset"], "offset: the output layer of fedper.offset stays with its client"),
        (
            ["algorithm.name=fednh+prior"],
            "prior raises the output bias, and the output layer 'output' of fednh.prior",
        ),
        (["algorithm.name=cwfedavg+programme", "algorithm.robust=median"], "programme mixes uploads"),
        (["algorithm.name=cwfedavg+programme", "algorithm.rho=-1"], "programme: rho must not be negative"),
        (["algorithm.name=fedavg+prior", "algorithm.prior_eps=-1"], "prior_eps must not be negative"),
        (["algorithm.name=fedavg+tune", "algorithm.tune_steps=-1"], "tune_steps must not be negative"),
        (["algorithm.name=fedavg+owners", "algorithm.class_cap=0"], "class_cap must be above 0"),
        (["algorithm.name=fedavg+head_first", "algorithm.head_epochs=-1"], "head_epochs must not be negative"),
        (["algorithm.name=fedavg+prior", "algorithm.kappa=1"], "unknown setting algorithm.kappa for fedavg.prior"),
        (["algorithm.name=fedprox+prior", "algorithm.mu=-1"], "fedprox: mu must not be negative"),
        (["algorithm.name=fedavg+balanced", "privacy.dp=sample"], "fedavg.balanced has a loss of its own"),
    ],
)
def test_one_sentence_for_what_a_network_or_a_setting_does_not_allow(settings, says):
    with pytest.raises(ConfigError, match=says):
        Blueprint(small(*settings), InputShape((4,)), 3, 4).first_state()


@pytest.mark.parametrize("base", list(ALGORITHMS))
def test_every_pair_is_refused_in_a_sentence_or_makes_a_round(base):
    """Without training; the conformance suite has runs."""
    sentences: list[str] = []
    for plugin in PLUGINS:
        more = ["algorithm.wdr=0"] if (base, plugin) == ("cwfedavg", "balanced") else []
        try:
            config = small(f"algorithm.name={base}+{plugin}", "data.clients=4", *more)
            blueprint = Blueprint(config, InputShape((4,)), 3, 4)
            state = blueprint.first_state()
        except ConfigError as error:
            sentences.append(str(error))
            continue
        blueprint.try_state(state, range(4))
    assert not [said for said in sentences if "\n" in said or base not in said]


def test_the_users_own_plug_in_is_code_that_is_named(tmp_path):
    assert foreign({"name": f"{QUIETER}+prior+{LOUDER}"}) == [QUIETER, LOUDER]
    config = small(f"algorithm.name=fedavg+{LOUDER}", "train.rounds=1", "data.samples=150", "data.clients=3")
    assert config.code() == [LOUDER]
    (entry,) = parse_entries(f"fedavg+{LOUDER}:loudness=3", config)
    assert entry.settings == config.algorithm | {"loudness": 3}
    (entry,) = parse_entries(f"{QUIETER}+prior:prior_tau=3", small())
    assert entry.settings == {"name": f"{QUIETER}+prior", "prior_tau": 3}
    session.run(config, tmp_path / "run")
    with pytest.raises(RunError, match=r"names code, .*Louder"):
        load_model(tmp_path / "run", client=0)
    assert load_model(tmp_path / "run", client=0, trust=True)


def test_the_command_line_knows_them(tmp_path):
    run = CliRunner().invoke
    listed = run(app, ["algorithms"]).output
    assert "+owners" in listed
    assert "Each row of the shared output layer" in listed
    explained = run(app, ["algorithms", "cwfedavg+prior"]).output
    for said in ("w^G_j", "log pi_ck", "algorithm.wdr", "algorithm.prior_tau", "Bayes' rule"):
        assert said in explained
    rows = json.loads(run(app, ["cost", "--model", "mlp", "--json", "-a", "fedavg,fedavg+owners"]).output)
    assert [row["method"] for row in rows] == ["fedavg", "fedavg+owners"]
    assert rows[1]["up"] - rows[0]["up"] == 20 * 10  # ten counts of twenty clients
    tiny = ["data.samples=150", "data.clients=3", "train.rounds=1", "model.name=mlp", "model.options.hidden=4"]
    settings = [part for setting in tiny for part in ("--set", setting)]
    names = "fedavg+prior,fedavg+prior:prior_tau=0.5"
    done = run(app, ["compare", "-a", names, "--out", str(tmp_path / "out"), "--json", *settings])
    assert done.exit_code == 0, done.output
    assert [row["label"] for row in json.loads(done.stdout)] == names.split(",")
    assert read_run(tmp_path / "out" / "fedavg_prior" / "seed-0").started.algorithm == "fedavg+prior"
