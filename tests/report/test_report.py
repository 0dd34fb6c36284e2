from __future__ import annotations

import io
import json

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from cwfed.core.errors import ConfigError, RunError
from cwfed.core.events import Note
from cwfed.report import drawing, figures, heatmaps, page, tables
from cwfed.report.finished import LeftOut, read_run
from cwfed.report.groups import Group, Method
from cwfed.runs import compare, session, summary
from tests.conftest import small
from tests.runs.test_summary import STARTED, result, round_


@pytest.fixture
def compared(tmp_path):
    config = small()
    rows = compare.compare(config, compare.parse_entries("fedavg,cwfedavg", config), [0], tmp_path / "cmp")
    return rows, [read_run(row["runs"][0], row["label"]) for row in rows]


def test_page_is_self_contained_and_escapes_names(compared, tmp_path):
    _, records = compared
    evil = "</script><script>alert(1)</script>"
    methods = [Method(evil, [read_run(records[0].path, evil)]), Method("cwfedavg", [records[1]])]
    page.write(tmp_path / "r.html", evil, [Group(evil, methods)], [LeftOut(tmp_path, evil)])
    text = (tmp_path / "r.html").read_text()
    assert evil not in text
    assert "&lt;script&gt;alert(1)" in text
    assert 'src="http' not in text
    assert "Plotly" in text


def test_overview_and_distribution_are_drawn(compared, tmp_path):
    _, records = compared
    group = Group("x", [Method(record.label, [record]) for record in records])
    paths = drawing.save(figures.overview(group), tmp_path / "o", ["png", "svg"])
    assert [path.name for path in paths] == ["o.png", "o.svg"]
    assert paths[0].stat().st_size > 5_000
    with pytest.raises(ConfigError, match="unknown picture format 'bmp'"):
        drawing.save(figures.overview(group), tmp_path / "o", ["bmp"])


def test_table_by_hand():
    row = {
        "label": "x", "accuracy": {p: {k: {"mean": 0.5, "std": 0.01} for k in summary.PICKINGS} for p in ("received", "trained")},
        "reported": {"phase": "trained"}, "worst_decile": {"mean": 0.25, "std": None},
        "correlation": {"mean": None, "std": None}, "distance": {"mean": 0.25}, "traffic": {"mean": 2_500_000.0}, "seconds": {"mean": 75.0}, "memory": {"mean": 1.5e9},
    }  # fmt: skip
    expected = (
        "x",
        "50.00 ± 1.00",
        "50.00 ± 1.00*",
        "50.00 ± 1.00",
        "50.00 ± 1.00",
        "25.00",
        "–",
        "0.250",
        "2.5 MB",
        "1 min 15 s",
        "1.5 GB",
    )
    assert tables.cells(row) == expected
    assert tables.markdown([row]).splitlines()[2] == "| " + " | ".join(expected) + " |"


def test_times_are_rounded_before_they_are_split():
    assert [tables.duration(s) for s in (59.94, 59.96, 119.7, 3599.6)] == [
        "59.9 s",
        "1 min 0 s",
        "2 min 0 s",
        "1 h 0 min",
    ]


def test_a_comparison_of_several_seeds_has_one_line_a_method_in_a_terminal():
    spread = {"mean": 0.9755, "std": 0.1267}
    row = {
        "label": "cwfedavg", "accuracy": {p: dict.fromkeys(summary.PICKINGS, spread) for p in ("received", "trained")},
        "reported": {"phase": "trained"}, "worst_decile": spread, "correlation": {"mean": 0.98},
        "traffic": {"mean": 4.53e8}, "seconds": {"mean": 3.9}, "memory": {"mean": 5.08e8},
    }  # fmt: skip
    console = Console(width=128, file=io.StringIO())
    console.print(tables.terminal([row], "digits"))
    assert "97.55±12.67*" in console.file.getvalue()
    assert sum(line.startswith("│") for line in console.file.getvalue().splitlines()) == 1


def test_shades_of_large_heat_maps_are_those_of_the_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "LARGE_PNG", 0)
    panel = heatmaps.Panel("x", np.array([[-1.0, 0.0, 1.0]]), "points", diverging=True)
    drawing.save(heatmaps.heat_maps([[panel]]), tmp_path / "h", ["png"])
    with Image.open(tmp_path / "h.png") as image:
        colours = {colour[:3] for _, colour in image.convert("RGB").getcolors(maxcolors=10**6)}
    ends = matplotlib.colormaps["BrBG"]([0.0, 1.0])[:, :3]
    assert {tuple(int(v) for v in np.round(255 * end)) for end in ends} <= colours


def test_no_difference_at_all_is_drawn_on_a_plain_scale():
    image = heatmaps.draw_heat_map(
        Figure().subplots(), heatmaps.Panel("x", np.zeros((2, 2)), "points", diverging=True)
    )
    assert image.get_clim() == (-1.0, 1.0)


def test_bars_in_a_name_do_not_end_a_cell():
    assert tables.markdown_table(["", "||p||"], [["a|b", "1"]]).splitlines()[2] == r"| a\|b | 1 |"


def test_spread_over_seeds_by_hand():
    summaries = [
        summary.summarise([STARTED, round_(1, result(a, a, [1, 1]), correlation=None), *map(Note, notes)])
        for a, notes in ((0.5, ["a"]), (0.7, ["a", "b"]))
    ]
    row = summary.aggregate("a", summaries)
    assert row["accuracy"]["received"]["best"]["mean"] == pytest.approx(0.6)
    assert row["accuracy"]["received"]["best"]["std"] == pytest.approx(0.02**0.5)  # sample std of 0.5, 0.7
    assert row["correlation"] == {"mean": None, "std": None}
    assert row["traffic"]["mean"] == 15  # 10 down, 5 up
    reported = {"phase": "received", "picking": "best", "mean": pytest.approx(0.6), "std": pytest.approx(0.02**0.5)}
    assert row["reported"] == reported
    assert row["notes"] == ["a", "b"]


def test_footnotes_say_which_methods_they_are_about():
    rows = [{"label": "x", "notes": ["of all", "of one"]}, {"label": "y", "notes": ["of all"]}]
    assert tables.footnotes(rows) == ["of all", "x: of one"]


def test_entries_take_settings_and_the_config_s_own():
    config = small("algorithm.wdr=7")
    entries = compare.parse_entries("cwfedavg, cwfedavg:wdr=0:layers=all, fedprox:mu=0.1", config)
    assert [e.settings.get("wdr") for e in entries] == [7.0, 0, None]
    assert entries[1].settings["layers"] == "all"
    (one,) = compare.parse_entries("cwfedavg:layers=['fc','output']", config)
    assert one.settings["layers"] == ["fc", "output"]
    assert entries[2].settings == {"name": "fedprox", "mu": 0.1}
    for bad in ("cwfedavg:wdr", "nothing", "fedprox:nu=1"):
        with pytest.raises(ConfigError):
            compare.parse_entries(bad, config)


def test_broken_runs_are_refused(tmp_path):
    session.run(small(), tmp_path / "run")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "events.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(RunError, match="do not match its summary"):
        read_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(RunError, match="not a finished run"):
        read_run(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())
