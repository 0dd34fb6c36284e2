from __future__ import annotations

import re

import pytest

from cwfed import algorithms
from cwfed.errors import ConfigError
from cwfed.reproduce import pictures, spec, tables
from cwfed.reproduce.runner import Workshop
from cwfed.reproduce.verdict import parse
from tests.conftest import ROOT

PAPER = ROOT.parent / "shared" / "paper" / "cwfedavg.tex"


@pytest.mark.parametrize("item", spec.items().values(), ids=lambda item: item.name)
def test_every_spec_is_whole(item):
    assert item.kind in tables.KINDS | pictures.KINDS
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
        for row in item.rows:
            wanted = [tuple(number.split("±")) for number in row.published]
            assert not wanted or wanted in lines, (item.name, row.label)
        for numbers in item.options.get("published", {}).values():
            assert all(re.search(rf"[^\d.]{re.escape(number)}[^\d]", text) for number in numbers)


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
