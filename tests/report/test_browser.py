"""The report page in a real browser, without a driver: the test's script goes into a copy of the page."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cwfed.report import page
from cwfed.report.finished import LeftOut, read_run
from cwfed.report.groups import Group, Method
from cwfed.runs import compare
from tests import processes
from tests.conftest import small

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")

LONG = "cwfedavg (layers=all, distribution=empirical, "
EVIL = "<img src=x onerror=window.hacked=1>"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=15000",
)  # fmt: skip

ERRORS = """<script>window.problems = [];
window.addEventListener("error", (e) => problems.push(String(e.message || e.target.src || "error")), true);
window.addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
for (const kind of ["error", "warn"]) { const old = console[kind]; console[kind] = (...a) => { problems.push(kind + ": " + a.join(" ")); old(...a); }; }
</script>"""

ACT = """<script>(async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const found = {};
  await wait(500);
  const table = document.querySelector("table.sortable"), column = 1;
  const values = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[column].dataset.value));
  const head = table.querySelectorAll("thead button")[column];
  head.click(); found.down = values();
  head.click(); found.up = values(); found.aria = head.parentElement.getAttribute("aria-sort");
  const plot = document.querySelector("[data-plot=curves]");
  found.plots = document.querySelectorAll(".js-plotly-plot").length;
  found.before = plot.data.map((t) => t.visible);
  const part = (name) => document.querySelector(`[data-plot=${name}]`);
  found.colours = [plot.data.map((t) => t.line.color), part("clients").data.map((t) => t.marker.color), part("classes").data.map((t) => t.marker.color)];
  found.swatches = [...table.querySelectorAll(".swatch")].map((s) => s.style.color).length;
  found.rounds = [plot._fullLayout.xaxis.dtick, plot._fullLayout.xaxis.tickformat];
  found.clientTicks = [...part("clients").querySelectorAll(".xtick text")].map((t) => [t.textContent, t.getAttribute("transform") || ""]);
  const heat = (name) => { const t = part(name).data[0]; return { low: t.zmin, zero: t.colorscale[t.zmin < 0 ? 2 : 0][1], unit: t.colorbar.title.text }; };
  found.heat = Object.fromEntries(["data", "norms", "gains", "mixture"].filter((name) => part(name) && part(name).data).map((name) => [name, heat(name)]));
  found.dots = part("spread").data && [part("spread").data[1].marker.color, part("spread").layout.annotations[0].text];
  const covers = (div) => {
    const legend = div.querySelector(".legend"), drag = div.querySelector(".nsewdrag");
    if (!legend || !drag) return false;
    const a = legend.getBoundingClientRect(), b = drag.getBoundingClientRect();
    return a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  };
  found.covered = [...document.querySelectorAll(".js-plotly-plot")].filter(covers).map((div) => div.dataset.plot);
  found.gains = [part("gains").data[0].colorbar.orientation, [...part("gains").querySelectorAll(".xtick text")].map((t) => t.getAttribute("transform") || "")];
  const cell = table.querySelector("td .swatch").parentElement, label = cell.lastChild, told = label.textContent, range = document.createRange();
  label.textContent = "cwfedavg:objective=fedprox,wdr=0"; range.selectNodeContents(label);
  found.besideItsName = range.getClientRects()[0].top < cell.querySelector(".swatch").getBoundingClientRect().bottom;
  label.textContent = told;
  const box = document.querySelector(".scroll");
  found.overflows = [box.scrollWidth > box.clientWidth + 1, box.classList.contains("overflows"), getComputedStyle(box, "::before").content];
  const legend = plot.querySelector(".legendtoggle"), place = legend.getBoundingClientRect();
  for (const kind of ["mousedown", "mouseup"]) {
    legend.dispatchEvent(new MouseEvent(kind, { bubbles: true, clientX: place.x + 3, clientY: place.y + 3, view: window }));
  }
  await wait(1000);
  found.after = plot.data.map((t) => t.visible);
  const pick = (name, value) => { const s = document.querySelector(`[data-choice=${name}]`); s.value = value; s.dispatchEvent(new Event("change")); };
  pick("x", "bytes"); pick("y", "training loss"); await wait(200);
  found.axes = [plot.layout.xaxis.title.text, plot.layout.yaxis.title.text];
  found.bytes = plot.data[1].x;
  found.stillHidden = plot.data[0].visible === "legendonly" || plot._fullData[0].visible === "legendonly";
  for (const what of ["trained", "difference", "classes"]) { pick("norms", what); await wait(100); }
  found.norms = document.querySelector("[data-plot=norms]").textContent.length > 0;
  const bars = document.querySelector("[data-plot=traffic]").data;
  found.bars = bars[0].y; found.sums = bars[0].y.map((_, i) => bars.reduce((sum, b) => sum + b.x[i], 0));
  found.traffic = document.querySelector("[data-plot=traffic]").layout.xaxis.title.text;
  found.gained = document.querySelector("[data-plot=gains]").data[0].z.length;
  found.wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
  found.ink = getComputedStyle(document.body).color; found.font = plot._fullLayout.font.color;
  found.foreign = document.querySelectorAll("body img, body iframe, body a[href^=javascript], body svg [onload], body svg a").length;
  found.hacked = window.hacked === 1; found.problems = window.problems;
  const result = document.createElement("pre"); result.id = "result"; result.textContent = JSON.stringify(found);
  document.body.append(result);
})();</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    config = small("train.rounds=2")
    entries = compare.parse_entries("fedavg,cwfedavg,local", config)
    rows = compare.compare(config, entries, [0], folder / "cmp")
    labels = [EVIL, LONG + "wdr=0)", LONG + "wdr=5)"]
    methods = [Method(label, [read_run(row["runs"][0], label)]) for label, row in zip(labels, rows, strict=True)]
    page.write(folder / "r.html", "A report", [Group(EVIL, methods)], [LeftOut(Path(EVIL), EVIL)])
    return folder / "r.html"


def visit(report: Path, tmp_path: Path, *flags: str) -> dict:
    text = report.read_text()
    assert "</head>" in text
    acted = text.replace("</head>", ERRORS + "</head>", 1).removesuffix("</body></html>") + ACT + "</body></html>"
    (tmp_path / "acted.html").write_text(acted)
    command = [
        CHROMIUM,
        *FLAGS,
        *flags,
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
        f"file://{tmp_path}/acted.html",
    ]
    done = processes.run(command)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert found, f"the page's script did not finish: {done.stderr[-2000:]}"
    return json.loads(html.unescape(found[1]))


def test_the_page_works_in_light(report, tmp_path):
    found = visit(report, tmp_path, "--window-size=1200,900", "--blink-settings=preferredColorScheme=1")
    assert found["problems"] == []
    assert found["hacked"] is False
    assert found["down"] == sorted(found["down"], reverse=True)
    assert found["up"] == sorted(found["up"])
    assert found["up"] != found["down"]
    assert found["aria"] == "ascending"
    assert found["plots"] >= 8
    assert found["before"] == [True] * 3
    assert found["after"] == ["legendonly", True, True]
    assert re.fullmatch("data sent, [kM]B", found["axes"][0])
    assert found["axes"][1] == "training loss"
    assert found["bytes"] == sorted(found["bytes"])
    assert 0 < found["bytes"][0] < 1000
    assert re.fullmatch("data sent, [kM]B", found["traffic"])
    assert found["stillHidden"]
    assert found["norms"]
    assert found["bars"] == [0, 1, 2]  # long names that begin alike stay apart
    assert found["sums"][0] == found["sums"][1] > found["sums"][2] == 0
    assert found["gained"] == 2
    assert found["wide"]
    assert (found["ink"], found["font"]) == ("rgb(27, 27, 27)", "#1b1b1b")


def test_the_page_works_in_dark_on_a_phone(report, tmp_path):
    found = visit(report, tmp_path, "--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    assert found["problems"] == []
    assert found["wide"], "nothing sticks out of a narrow screen"
    assert (found["ink"], found["font"]) == ("rgb(233, 234, 236)", "#e9eaec")
    assert found["covered"] == [], "legends cover nothing"
    assert found["overflows"][:2] == [True, True]
    assert "scroll sideways" in found["overflows"][2]
    assert found["gains"][0] == "h", "the colour bar is below the heat map, which needs the width"
    assert not any("rotate(" in turned and "rotate(0" not in turned for turned in found["gains"][1])
    assert found["besideItsName"], "a method's dot and its name stay on one line"
    assert {kind["zero"] for kind in found["heat"].values()} == {"#1d2026"}, "nothing has the colour of the dark page"


def test_the_page_s_plots_agree_and_have_units(report, tmp_path):
    found = visit(report, tmp_path, "--window-size=1200,900", "--blink-settings=preferredColorScheme=1")
    lines, markers, recalls = found["colours"]
    assert lines == markers == recalls == ["#0072B2", "#D55E00", "#5F6368"]  # fedavg, cwfedavg, local
    assert found["swatches"] == 3
    assert found["rounds"] == [1, "d"]
    assert [name for name, _ in found["clientTicks"]] == [str(c) for c in range(len(found["clientTicks"]))]
    assert not any("rotate(" in turned and "rotate(0" not in turned for _, turned in found["clientTicks"])
    units = {name: kind["unit"] for name, kind in found["heat"].items()}
    assert units.items() >= {"data": "samples", "norms": "norm of the output row", "gains": "points"}.items()
    assert all(kind["low"] == 0 for name, kind in found["heat"].items() if name != "gains")
    assert found["dots"][0] in lines
    assert "||p - p~||" in found["dots"][1]
    assert found["covered"] == []


BAD = [EVIL, "</script><script>window.hacked=1</script>", "'\"><svg onload=window.hacked=1>", "javascript:window.hacked=1", "<!--<script>",
       "&lt;img src=x onerror=window.hacked=1&gt;", "%{x}", "<a href='javascript:window.hacked=1'>x</a>", "\u2028", "</title>"]  # fmt: skip


def test_names_from_data_stay_text_everywhere(report, tmp_path):
    """Classes, data set, labels, notes, machine, folders: each a piece of a page."""
    record = read_run(report.parent / "cmp" / "cwfedavg" / "seed-0", BAD[1])
    record.manifest["data"]["classes"] = BAD
    record.manifest["machine"] |= {"cpu": BAD[2], "instruction_set": EVIL}
    record.manifest["versions"][EVIL] = BAD[1]
    seconds = record.summary.seconds | {EVIL: 1.0, BAD[7]: 1.0}
    record = replace(record, summary=replace(record.summary, notes=BAD, seconds=seconds))
    methods = [Method(BAD[1], [record]), *(Method(name, [record]) for name in (BAD[2], BAD[7]))]
    path = tmp_path / "evil.html"
    page.write(path, BAD[9] + EVIL, [Group(BAD[4], methods)], [LeftOut(Path(BAD[5]), BAD[1])])
    found = visit(path, tmp_path, "--window-size=1200,900")
    assert found["hacked"] is False
    assert found["problems"] == []
    assert found["plots"] >= 8
    assert found["foreign"] == 0
