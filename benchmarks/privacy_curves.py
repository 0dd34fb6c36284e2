"""The curves of docs/privacy.md: what uploads leak against accuracy, and accuracy against epsilon.

    python benchmarks/privacy_curves.py dial dp draw --data-dir DATA --runs runs/privacy --docs docs

CIFAR-10, 4,000 samples, 20 clients, the paper's CNN. Runs that are there are not run again; `cwfed privacy` shows any of them. `redraw` makes the
pictures of the dial and of DP from the tables in docs/privacy-evidence.md, without any run.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import cwfed
from cwfed.federation import config as configs
from cwfed.report.audit import audit, picture
from cwfed.report.drawing import save
from cwfed.report.finished import RunRecord, collect, read_run
from cwfed.report.style import looks
from cwfed.report.tables import markdown_table

BASE = ["data.name=cifar10", "data.samples=4000", "data.clients=20", "model.name=cnn", "run.save_models=none"]
DIRICHLET = ["data.partition=dirichlet", "data.alpha=0.1"]
PATHOLOGICAL = ["data.partition=pathological", "data.classes_per_client=2"]
METHODS = {
    "FedAvg": ["algorithm.name=fedavg"],
    "cwFedAvg without WDR": ["algorithm.name=cwfedavg", "algorithm.wdr=0"],
    "cwFedAvg": ["algorithm.name=cwfedavg"],
}
LEAK = [*DIRICHLET, "train.rounds=25", "train.lr=0.05"]
DIAL = {
    "noise 0.3": ["privacy.norms=noise", "privacy.norm_noise=0.3"],
    "noise 1": ["privacy.norms=noise", "privacy.norm_noise=1"],
    "levels 1": ["privacy.norms=coarse", "privacy.norm_levels=1"],
    "levels 2": ["privacy.norms=coarse", "privacy.norm_levels=2"],
    "noise 0.1": ["privacy.norms=noise", "privacy.norm_noise=0.1"],
}
# The noise's length grows with the root of the number of parameters and shrinks with the batch: a smaller network, larger batches.
DP = [
    *PATHOLOGICAL,
    "model.options.hidden=64",
    "train.batch_size=50",
    "train.lr=0.5",
    "train.rounds=20",
    "run.evaluate_every=5",
]
OFF = ["train.batch_size=10", "train.lr=0.05"]  # gradients that are not clipped diverge at 0.5
NOISES = (0.0, 1.0, 2.0, 4.0)


def dial(runs: Path, data_dir: str | None) -> None:
    for name, method in METHODS.items():
        run(runs / "audit" / name, LEAK + method, data_dir)
    for name, turned in DIAL.items():
        run(runs / "dial" / name, LEAK + METHODS["cwFedAvg"] + turned, data_dir)


def dp(runs: Path, data_dir: str | None) -> None:
    run(runs / "dp" / "off", DP + METHODS["cwFedAvg"] + OFF, data_dir)
    for noise in NOISES:
        private = ["privacy.dp=sample", f"privacy.dp_noise={noise}", "privacy.dp_histogram=1"]
        run(runs / "dp" / f"noise {noise:g}", DP + METHODS["cwFedAvg"] + private, data_dir)


def run(folder: Path, settings: list[str], data_dir: str | None) -> None:
    print(folder, flush=True)
    cwfed.run(configs.load(None, [*BASE, *settings]), folder, resume=True, data_dir=data_dir)


def draw(runs: Path, docs: Path) -> None:
    """The pictures and tables of docs/privacy.md, from the runs that are finished."""
    save(picture(collect([runs / "audit"])[0]), docs / "privacy-audit")
    print(draw_dial(runs, docs / "privacy-dial"))
    print(draw_dp(runs, docs / "privacy-dp"))


def draw_dial(runs: Path, stem: Path) -> str:
    """Accuracy against what the norms and the change of the bias give away: means over the last five rounds."""
    found = {}
    for name, folder in (
        {name: f"audit/{name}" for name in METHODS} | {n: f"dial/{n}" for n in sorted(DIAL)}
    ).items():
        if (runs / folder / "summary.json").exists():
            found[name] = read_run(runs / folder)
    rows = []
    for name, record in found.items():
        lines, _ = audit([record])
        cells = [name, f"{100 * record.summary['reported']['accuracy']:.1f}"]
        for estimate in ("norms", "change"):
            last = [line for line in lines if line.estimate == estimate][-5:]
            error, rank, auc = (np.mean([getattr(line, key) for line in last]) for key in ("error", "rank", "auc"))
            cells += [f"{error:.2f}", f"{rank:.2f}", f"{auc:.2f}"]
        rows.append(cells)
    dial_picture(rows, stem)
    estimates = [f"{what} ({name})" for name in ("norms", "change") for what in ("error", "rank", "AUC")]
    return markdown_table(["", "accuracy, %", *estimates], rows)


def dial_picture(rows: list[list[str]], stem: Path) -> None:
    """The dial's table as points; all that is not FedAvg is cwFedAvg, turned this way or that."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    drawn = looks(["fedavg" if cells[0] == "FedAvg" else "cwfedavg" for cells in rows])
    for (name, *numbers), look in zip(rows, drawn, strict=True):
        accuracy, error, _, auc, of_change, _, auc_of_change = map(float, numbers)
        for points, filled in (((error, auc), True), ((of_change, auc_of_change), False)):
            style = {
                "color": look.colour,
                "markerfacecolor": look.colour if filled else "none",
                "linestyle": "",
                "markersize": 9 if name == "FedAvg" else 6,
            }
            for axes, value in zip(panels, points, strict=True):
                label = name if filled and axes is panels[0] else None
                axes.plot(value, accuracy, look.marker, label=label, **style)
    panels[0].set(xlabel="error of the estimated class counts\n(further left: leaks more)", ylabel="test accuracy, %")
    panels[1].set(xlabel="telling absent classes from present ones, AUC\n(further right: leaks more)")
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False, title="filled: norms\nhollow: change of the bias")
    save(figure, stem)


def draw_dp(runs: Path, stem: Path) -> str:
    """Accuracy of the personal models against epsilon."""
    off = read_run(runs / "dp" / "off")
    largest = off.histogram.max(1).sum() / off.histogram.sum()
    rows = [["off", "–", "–", f"{100 * off.summary['reported']['accuracy']:.1f}", *last_leaks(off)]]
    for noise in sorted(NOISES):
        if not (runs / "dp" / f"noise {noise:g}" / "summary.json").exists():
            continue
        record = read_run(runs / "dp" / f"noise {noise:g}")
        spent, accuracy = record.summary["privacy"], 100 * record.summary["reported"]["accuracy"]
        shown = ["–"] * 2
        if spent["epsilon"] is not None:
            shown = [f"{spent['epsilon']:.1f}", f"{np.median(list(spent['per_client'].values())):.1f}"]
        rows.append([f"{noise:g}", *shown, f"{accuracy:.1f}", *last_leaks(record)])
    dp_picture(rows, 100 * largest, stem)
    header = [
        "`dp_noise`",
        "largest epsilon",
        "median",
        "accuracy, %",
        "error (norms)",
        "AUC (norms)",
        "AUC (change)",
    ]
    table = markdown_table(header, rows)
    return f"{table}\neach client's largest class, always: {100 * largest:.1f} %"


def dp_picture(rows: list[list[str]], largest: float, stem: Path) -> None:
    """Accuracy of cwFedAvg against epsilon, from the table."""
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes, colour, points = figure.subplots(), looks(["cwfedavg"])[0].colour, []
    for name, epsilon, _, accuracy, *_ in rows:
        if epsilon != "–":
            points.append((float(epsilon), float(accuracy)))
        else:
            label, stroke = ("off", "-.") if name == "off" else ("clipped, no noise", "--")
            axes.axhline(float(accuracy), color=colour, linestyle=stroke, label=label)
    axes.plot(*zip(*sorted(points), strict=True), "o-", color=colour, label="DP-SGD")
    axes.axhline(largest, color="0.5", linestyle=":", label="each client's largest class, always")
    axes.set(xscale="log", xlabel="epsilon of the client with the largest", ylabel="test accuracy, %")
    axes.set_xticks([e for e, _ in points], [f"{e:.1f}" for e, _ in points])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    save(figure, stem)


def redraw(docs: Path) -> None:
    """The pictures whose numbers are in the page's tables."""
    page = (docs / "privacy-evidence.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in page.splitlines() if line.startswith("|")]
    dial_picture([cells for cells in lines if cells[0] in METHODS | DIAL and len(cells) == 8], docs / "privacy-dial")
    largest = re.search(r"largest class would be right for ([\d.]+) %", page)
    assert largest
    named = {"off", *(f"{noise:g}" for noise in NOISES)}
    dp_picture(
        [cells for cells in lines if cells[0] in named and len(cells) == 7], float(largest[1]), docs / "privacy-dp"
    )


def last_leaks(record: RunRecord) -> list[str]:
    """Of the last round: error and AUC of the norms, AUC of the change."""
    norms, change = (
        [line for line in audit([record])[0] if line.estimate == name][-1] for name in ("norms", "change")
    )
    return [f"{norms.error:.2f}", f"{norms.auc:.2f}", f"{change.auc:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=["dial", "dp", "draw", "redraw"])
    parser.add_argument("--runs", type=Path, default=Path("runs/privacy"))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where `draw` puts its pictures")
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    if "dial" in options.what:
        dial(options.runs, options.data_dir)
    if "dp" in options.what:
        dp(options.runs, options.data_dir)
    if "draw" in options.what:
        draw(options.runs, options.docs)
    if "redraw" in options.what:
        redraw(options.docs)


if __name__ == "__main__":
    main()
