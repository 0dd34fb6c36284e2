from __future__ import annotations

import dataclasses
import re

import pytest

from cwfed import algorithms
from cwfed.core.errors import ConfigError
from cwfed.reproduce import paper_tables, pictures, spec
from cwfed.reproduce.runner import Workshop
from cwfed.reproduce.verdict import Cell, Value, parse
from tests.conftest import ROOT

PAPER = ROOT.parent / "shared" / "paper" / "cwfedavg.tex"


@pytest.mark.parametrize("item", spec.items().values(), ids=lambda item: item.name)
def test_every_spec_is_whole(item):
    assert item.kind in paper_tables.KINDS | pictures.KINDS
    for scale in spec.SCALES:
        for name in item.settings:
            setup = spec.Setup(name, scale)
            for row in item.rows:
                algorithms.build(setup.entry(row).settings)
    if item.kind == "accuracy":
        assert all(len(row.published) == len(item.settings) for row in item.rows)
    if item.leader:
        assert item.leader in [row.label for row in item.rows]


def test_all_tables_and_figures_of_the_paper_are_there():
    where = " ".join(item.where for item in spec.items().values())
    numbers = re.findall(r"(Table|Figures?) (\d+)(?: and (\d+))?", where)
    assert sorted(int(n) for kind, n, _ in numbers if kind == "Table") == list(range(1, 8))
    figures = [int(n) for kind, *both in numbers if kind != "Table" for n in both if n]
    assert sorted(figures) == list(range(1, 15))


def test_published_numbers_are_the_paper_s():
    if not PAPER.exists():
        pytest.skip(f"the paper's source is not on this machine ({PAPER})")
    text = re.sub(r"\\textbf\{([^}]*)\}", r"\1", PAPER.read_text(encoding="utf-8"))
    lines = [re.findall(r"([\d.]+) ?\$\\pm ?\$ ?([\d.]+)", row) for row in text.split(r"\\")]
    for item in spec.items().values():
        if item.name == "ag-news":  # one line for all methods
            assert [(f"{v.mean}", f"{v.std}") for row in item.rows for v in map(parse, row.published)] in lines
            continue
        if item.beyond:  # the paper's numbers of Table 1
            known = [row.label for row in item.rows if row.published]
            named = item.part(rows=known)
            assert named.rows == spec.find("main-comparison").part(item.settings, known).rows
            continue
        for row in item.rows:
            wanted = [tuple(number.split("±")) for number in row.published]
            assert not wanted or wanted in lines, (item.name, row.label)
        for numbers in item.options.get("published", {}).values() if item.kind == "memory" else ():
            assert all(re.search(rf"[^\d.]{re.escape(number)}[^\d]", text) for number in numbers)


def test_the_scale_whole_is_the_papers_but_for_rounds_and_how_often_is_measured():
    for name in spec.settings().settings:
        whole, paper = (spec.Setup(name, scale) for scale in ("whole", "paper"))
        assert whole.config.train.rounds < paper.config.train.rounds
        same = {"train": {"rounds": 1}, "run": {"evaluate_every": 1, "save_models": "none"}}
        changed = [
            setup.config.model_copy(
                update={part: getattr(setup.config, part).model_copy(update=values) for part, values in same.items()}
            )
            for setup in (whole, paper)
        ]
        assert changed[0] == changed[1], name
        assert whole.algorithms == paper.algorithms


def test_a_part_of_a_table_keeps_its_published_numbers():
    part = spec.find("main-comparison").part(["cifar100", "cifar10"], ["FedAMP", "FedAvg"])
    assert part.settings == ["cifar100", "cifar10"]
    assert [(row.label, row.published) for row in part.rows] == [
        ("FedAMP", ["47.65±0.62", "89.46±0.11"]),
        ("FedAvg", ["32.44±0.42", "61.94±0.56"]),
    ]
    assert part.leader == "", "the leader is not among them"
    by_name = spec.find("beyond").part(["cifar100"], ["fedamp", "fedavg+prior"])
    assert [row.label for row in by_name.rows] == ["FedAMP", "FedAvg + prior (control)"]
    with pytest.raises(ConfigError, match="'cwfedavg' is not a method of selective-layers"):  # four rows are
        spec.find("selective-layers").part(rows=["cwfedavg"])
    assert spec.find("main-comparison").part() == spec.find("main-comparison")
    with pytest.raises(ConfigError, match=r"'FedAMPP' is not a method of main-comparison: did you mean FedAMP"):
        spec.find("main-comparison").part(rows=["FedAMPP"])
    command = Workshop("whole", ROOT / "out").command(part)
    assert "--scale whole --settings cifar100,cifar10 --methods FedAMP,FedAvg" in command


def test_scales_override_settings_and_settings_override_scales():
    assert spec.Setup("cifar100", "paper").config.train.rounds == 1000
    assert spec.Setup("cifar100", "paper").config.data.samples == 0
    assert spec.Setup("cifar100", "small").config.data.name == "cifar100"
    assert spec.Setup("cifar100", "smoke").config.data.name == "digits"
    assert spec.Setup("cifar100", "smoke").config.data.alpha == 0.1
    row = spec.Row(label="x", algorithm={"name": "cwfedavg"})
    assert spec.Setup("cifar100", "paper").entry(row).settings["wdr"] == 500
    assert spec.Setup("cifar100", "smoke").entry(row).settings["wdr"] == 5
    ten = row.model_copy(update={"wdr_times": 10.0})
    assert spec.Setup("cifar100", "paper").entry(ten).settings["wdr"] == 5000


def test_the_paper_s_scale_trains_on_all_data_and_one_split():
    for name in spec.settings().settings:
        config = spec.Setup(name, "paper").config
        assert config.data.validation == 0
        assert config.data.samples == 0
        assert config.data.split_seed >= 0
    small = spec.Setup("cifar10", "small").config.data
    assert (small.validation, small.split_seed) == (0.1, -1)


def test_every_setting_is_checked_against_the_paper(tmp_path):
    table = {label: cell for label, (cell,) in _settings_table(tmp_path).rows}
    assert set(spec.find("hyperparameters").settings) == set(spec.settings().settings)
    for label in ("train: lr", "train: batch_size", "train: epochs", "train: rounds", "train: participation"):
        assert table[label].verdict == "same", label
    assert (table["data: validation"].ours, table["data: validation"].verdict) == (Value(0.0), "same")
    assert table["data: clients (CIFAR-100, 50 clients)"].ours == Value(50.0)
    assert table["train: batch_norm (Tiny ImageNet, ResNet-18)"] == Cell("local", "not named")
    assert table["cwfedavg: wdr (AG News, fastText)"] == Cell(Value(5.0), "not named")
    for name in ("fedprox", "fedamp", "fedfomo", "cfl", "ifca", "fednh", "feduv", "cwfedavg"):
        for f in dataclasses.fields(algorithms.ALGORITHMS[name]):  # also those that come later
            key = f"{name}: {algorithms.setting(f.name)}"
            assert key in table or f.name == "objective", key
    assert table["fednh: scale"].published == "not named"


@pytest.mark.parametrize(
    ("key", "value", "row"),
    [
        ("train.lr", 0.01, "train: lr"),
        ("data.validation", 0.1, "data: validation"),
        ("cfl.eps1", 0.5, "cfl: eps1"),
        ("cfl.no_such_setting", 3, "cfl: no_such_setting"),
        ("ifca.k", {"others": 8, "cifar10": 3, "mnist": ""}, "ifca: k (CIFAR-10, Dirichlet 0.1)"),
    ],
)
def test_a_setting_that_is_not_the_paper_s_is_named(key, value, row, tmp_path):
    result = _settings_table(tmp_path, **{key: value})
    (claim,) = result.claims
    assert claim.holds is False
    assert claim.detail.startswith("not: ")
    assert row in claim.detail
    assert dict(result.rows)[row][0].verdict == "differs"


def _settings_table(folder, **published):
    item = spec.find("hyperparameters")
    options = item.options | {"published": item.options["published"] | published}
    return paper_tables.hyperparameters(item.model_copy(update={"options": options}), Workshop("smoke", folder))


def test_equal_runs_of_different_tables_share_a_folder(tmp_path):
    workshop = Workshop("small", tmp_path)
    main = {job.folder for job in workshop.jobs(spec.find("main-comparison"))}
    selective = {job.folder for job in workshop.jobs(spec.find("selective-layers"))}
    assert len(main) == 63
    assert len(main & selective) == 10  # FedAvg and cwFedAvg (Output) in five settings
    ablation = {job.folder for job in workshop.jobs(spec.find("ablation"))}
    assert len(ablation & selective) == 2  # all layers with WDR


def test_unknown_names_get_the_nearest():
    with pytest.raises(ConfigError, match="did you mean ablation"):
        spec.find("ablatoin")
    with pytest.raises(ConfigError, match="unknown setting 'cifar': did you mean cifar10"):
        spec.Setup("cifar", "small")
