"""Sweeps: what is tried, what decides, and that nothing is done twice."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import replace

import pytest

import cwfed
from cwfed.cli import sweep as command
from cwfed.core.errors import ConfigError, RunError
from cwfed.core.events import PhaseResult, Round, Started
from cwfed.federation import config as configs
from cwfed.runs import sweep as sweeping
from cwfed.runs.folder import RunFolder
from cwfed.runs.series import Series
from cwfed.runs.sweep import Candidate, Range
from tests.conftest import small

FEW = ("data.samples=400", "train.rounds=2", "data.validation=0.2")
SETTINGS = ["model.name=mlp", "model.options.hidden=16", "data.clients=6", "data.samples=400", "train.rounds=2"]


# --- what is tried


def test_a_grid_is_all_combinations():
    space = sweeping.parse_space(["algorithm.wdr=1,5", "train.lr=0.1,0.01", "algorithm.layers=[1,2],[3]"], [])
    assert space == {"algorithm.wdr": [1, 5], "train.lr": [0.1, 0.01], "algorithm.layers": [[1, 2], [3]]}
    found = sweeping.grid({key: space[key] for key in ("algorithm.wdr", "train.lr")})
    assert [one.label for one in found] == [
        "wdr=1, train.lr=0.1",
        "wdr=1, train.lr=0.01",
        "wdr=5, train.lr=0.1",
        "wdr=5, train.lr=0.01",
    ]


def test_ranges():
    space = sweeping.parse_space([], ["train.lr=0.001..0.1:log", "algorithm.wdr=1..25"])
    assert space == {"train.lr": Range(0.001, 0.1, True), "algorithm.wdr": Range(1, 25, False)}


def test_another_algorithm_does_not_take_over_settings_of_the_one_before():
    config = Candidate({"algorithm.name": "fedprox", "algorithm.mu": 0.5}).applied(small("algorithm.wdr=3"))
    assert config.algorithm["name"] == "fedprox"
    assert config.algorithm["mu"] == 0.5


BAD = [
    ((["algorithm.wdr"], []), "must look like"),
    ((["wdr=1,5"], []), "must look like"),
    ((["train.lr=0.1,,0.2"], []), "separated by commas"),
    ((["train.lr=0.1,0.1"], []), "each is another one"),
    ((["train.lr=0.1", "train.lr=0.2"], []), "given twice"),
    ((["run.seed=0,1"], []), "give them as --seeds"),
    ((["run.engine=loop,vmap"], []), "does not change what is learned"),
    ((["data.alpha=0.1,1"], []), "not comparable"),
    ((["train.rounds=10,20"], []), "need not be swept"),
    (([], ["train.lr=0.1..0.01"]), "the smaller number first"),
    (([], ["train.lr=0..0.1:log"]), "both above 0"),
    (([], ["train.lr=a..b"]), "must look like"),
    (([], ["train.lr=true..3"]), "must look like"),
    (([], []), "nothing to sweep"),
]


@pytest.mark.parametrize(("given", "says"), BAD)
def test_what_cannot_be_swept_is_one_sentence(given, says):
    with pytest.raises(ConfigError, match=says):
        sweeping.parse_space(*given)


def test_a_range_is_not_for_a_grid_and_a_grid_has_an_end():
    with pytest.raises(ConfigError, match="--search optuna"):
        sweeping.grid({"train.lr": Range(0.1, 1.0, False)})
    with pytest.raises(ConfigError, match="more than 10,000"):
        sweeping.grid({f"algorithm.a{i}": list(range(101)) for i in range(2)})


# --- what decides


def phase(test, validation):
    return PhaseResult(test, validation, 1.0, [], validation_metrics={"loss": 1 - validation})


def happened(rounds, reported="received", pick="accuracy"):
    started = Started("fedavg", "digits", 0, len(rounds), 2, 10, 1, reported, [], [], pick=pick)
    empty = Round(0, [], [], None, None, [], None, None, None, None, 0, 0)
    return [
        started,
        *(
            replace(empty, round=number, received=phase(*received), trained=phase(*trained))
            for number, (received, trained) in enumerate(rounds, start=1)
        ),
    ]


def test_a_run_is_worth_its_best_validation_in_its_own_phase():
    rounds = [((0.9, 0.5), (0.1, 0.7)), ((0.2, 0.6), (0.9, 0.4))]  # (test, validation) received, and trained
    assert sweeping.held_out(happened(rounds)) == (0.6, 0.6)
    assert sweeping.held_out(happened(rounds, "trained")) == (0.7, 0.7)
    value, worth = sweeping.held_out(happened(rounds, pick="loss"))
    assert value == pytest.approx(0.4)  # of the losses 0.5 and 0.4 the smaller one
    assert worth == -value


def test_test_accuracy_never_decides(tmp_path, monkeypatch):
    """Of real runs: whatever is changed about test results, the same setting is picked; with other validation, the other."""
    config = small(*FEW, "train.rounds=1")
    candidates = [Candidate({"train.lr": lr}) for lr in (0.5, 0.001)]
    found = sweeping.sweep(config, sweeping.all_of(candidates), [0, 1], tmp_path, Series())
    assert found.best.candidate.values == {"train.lr": 0.5}  # 0.001 learns next to nothing in a round
    real = RunFolder.result

    def turned(which):
        """All test accuracies, or all validation accuracies, become 1 - themselves."""

        def change(result):
            return replace(result, **{which: 1 - getattr(result, which)})

        def result(folder):
            summary, events = real(folder)
            return summary, [
                replace(e, received=change(e.received), trained=change(e.trained)) if isinstance(e, Round) else e
                for e in events
            ]

        return result

    for which, best in (("accuracy", 0.5), ("validation", 0.001)):
        monkeypatch.setattr(RunFolder, "result", turned(which))
        again = sweeping.sweep(config, sweeping.all_of(candidates), [0, 1], tmp_path, Series())
        assert again.best.candidate.values == {"train.lr": best}


def test_the_mean_over_seeds_decides(tmp_path):
    found = sweeping.sweep(small(*FEW), sweeping.all_of([Candidate({"train.lr": 0.05})]), [0, 1], tmp_path, Series())
    values = [sweeping.held_out(RunFolder(run).result()[1])[0] for run in found.best.row["runs"]]
    assert values[0] != values[1]
    assert found.best.worth == pytest.approx(sum(values) / 2)
    assert found.best.row["validation"]["mean"] == pytest.approx(sum(values) / 2)


def test_finished_runs_are_found_by_the_hash_of_their_experiment(tmp_path):
    """Also when other settings are swept, in another order; with another base config they are other runs."""
    config, lr, wdr = small(*FEW), Candidate({"train.lr": 0.02}), Candidate({"algorithm.wdr": 5.0, "train.lr": 0.02})
    first = sweeping.sweep(config, sweeping.all_of([lr]), [0], tmp_path, Series())
    assert first.best.row["reused"] == []
    again = sweeping.sweep(config, sweeping.all_of([lr]), [0], tmp_path, Series())
    assert again.best.row["reused"] == [0]
    assert sweeping._plan(config, lr, [0], tmp_path)[0].config.fingerprint == (
        sweeping._plan(config, wdr, [0], tmp_path)[0].config.fingerprint  # 5 is the default
    )
    other = sweeping._plan(small(*FEW, "data.clients=5"), lr, [0], tmp_path)
    assert not other[0].folder.exists()


def test_a_setting_that_diverges_is_named_and_the_others_go_on(tmp_path):
    candidates = [Candidate({"train.lr": lr}) for lr in (1e30, 0.05)]
    found = sweeping.sweep(small(*FEW), sweeping.all_of(candidates), [0], tmp_path, Series(lenient=True))
    assert found.best.candidate.values == {"train.lr": 0.05}
    assert "diverged" in found.tried[1].why_not
    with pytest.raises(RunError, match=r"no setting .* has a result"):
        sweeping.sweep(small(*FEW), sweeping.all_of(candidates[:1]), [0], tmp_path, Series(lenient=True))


# --- the command


def sweep(tmp_path, capsys, *grid, **options):
    command.sweep(
        grid=list(grid), set_=options.pop("set_", SETTINGS), out_dir=tmp_path / "s", as_json=True, **options
    )
    return json.loads(capsys.readouterr().out)


def test_the_command_leaves_a_table_a_page_and_a_config_that_runs(tmp_path, capsys):
    result = sweep(tmp_path, capsys, "train.lr=0.5,0.001,1e30,2e30", seeds="0,1", jobs=1)
    assert result["best"] == {"train.lr": 0.5}
    assert [one["values"]["train.lr"] for one in result["tried"]] == [0.5, 0.001, 1e30, 2e30]
    names = {p.name for p in (tmp_path / "s").iterdir() if p.is_file()}
    assert names == {"sweep.json", "sweep.md", "best.toml", "report.html"}
    table = (tmp_path / "s" / "sweep.md").read_text()
    assert "test accuracy never decides" in table
    assert table.index("| train.lr=0.5 ") < table.index("| train.lr=0.001 ")
    assert table.count("no result") == 1, "one reason is said once"
    assert "train.lr=1e+30; train.lr=2e+30: no result" in table
    html = (tmp_path / "s" / "report.html").read_text()
    assert "never decides" in html
    assert html.count("class=best") == 2  # in the sweep's table, and the same setting in the table of the report
    assert "<h2>The 2 best settings</h2>" in html
    looks = [
        m["look"]["colour"]
        for m in json.loads(re.search(r'application/json">(.*?)</script>', html)[1])["groups"][0]["methods"]
    ]
    assert len(set(looks)) == 2, "all are cwfedavg: its one colour would tell nothing"
    best = configs.load(tmp_path / "s" / "best.toml")
    assert best.train.lr == 0.5
    assert best.run.seed == 0
    assert best.run.save_models == "auto"  # the sweep's own runs have none, the one that is made of it has
    assert not list((tmp_path / "s").rglob("models"))  # only numbers were wanted
    summary = cwfed.run(best)
    assert summary.accuracy == RunFolder(result["tried"][0]["runs"][0]).summary().accuracy
    assert tomllib.loads((tmp_path / "s" / "best.toml").read_text())["train"]["lr"] == 0.5
    again = sweep(tmp_path, capsys, "train.lr=0.5,0.001,1e30", seeds="0,1", jobs=1)
    assert [one.get("reused") for one in again["tried"]] == [[0, 1], [0, 1], None]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"set_": [*SETTINGS, "data.validation=0"]}, "data.validation is 0"),
        ({"search": "optun"}, "did you mean optuna"),
        ({"seeds": "0,0"}, "must be different"),
    ],
)
def test_bad_input_is_one_sentence_and_runs_nothing(tmp_path, capsys, options, says):
    with pytest.raises(ConfigError, match=says):
        sweep(tmp_path, capsys, "train.lr=0.1,0.2", **options)
    assert not (tmp_path / "s").exists()


def test_a_bad_value_is_found_before_anything_runs(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"train\.lr = -1"):
        sweep(tmp_path, capsys, "train.lr=0.1,-1")
    assert not (tmp_path / "s").exists()


def test_without_optuna_one_sentence_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r'pip install "cwfed\[sweep\]"'):
        sweep(tmp_path, capsys, "train.lr=0.1,0.2", search="optuna")
    assert not (tmp_path / "s").exists()


# --- Optuna, where it is installed


def asked(space, trials, worth, seed=0):
    """What the sampler asks for, when it is told what `worth` says."""
    search, found = sweeping.optuna(space, trials, seed), []
    candidates = next(search)
    while candidates:
        found.append(candidates[0].values)
        candidates = sweeping._told(search, [worth(candidates[0].values)])
    return found


def test_optuna_comes_near_the_best_and_asks_the_same_again():
    """worth = -(log10 lr + 2)^2, so lr = 0.01 is best; the second choice adds 1 where it is "b"."""
    pytest.importorskip("optuna", reason="the extra sweep is not installed")
    from math import log10

    space = sweeping.parse_space(["algorithm.kind=a,b"], ["train.lr=0.0001..1.0:log"])

    def worth(values):
        return -((log10(values["train.lr"]) + 2) ** 2) + (values["algorithm.kind"] == "b")

    found = asked(space, 40, worth)
    best = max(found, key=worth)
    assert best["algorithm.kind"] == "b"
    assert 0.003 < best["train.lr"] < 0.03
    assert asked(space, 40, worth) == found
    assert asked(space, 10, worth) == found[:10]  # more trials go on behind the first ones
    assert asked(space, 3, worth, seed=1) != found[:3]
    assert len(asked(space, 5, lambda values: None)) == 5  # runs that were given up do not stop it


def test_optuna_sweeps_real_runs_and_resumes(tmp_path, capsys):
    pytest.importorskip("optuna", reason="the extra sweep is not installed")
    options = {"range_": ["train.lr=0.001..0.1:log"], "search": "optuna", "jobs": 1}
    first = sweep(tmp_path, capsys, "algorithm.wdr=1,5", trials=2, **options)
    assert len(first["tried"]) == 2
    more = sweep(tmp_path, capsys, "algorithm.wdr=1,5", trials=3, **options)
    assert len(more["tried"]) == 3
    assert sum(one["reused"] == [0] for one in more["tried"]) == 2
