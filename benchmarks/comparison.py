"""All methods on a fifth of CIFAR-10 and CIFAR-100: the runs, and from them the tables and pictures of docs/comparison.md.

    python benchmarks/comparison.py FOLDER [cifar100] [--publish]

makes in FOLDER every method's run of seed 0, then seeds 1 and 2 of the ten best. It takes some hours on two cores; whenever it is stopped, the same
command goes on. With --publish it makes no runs: of those that are finished it writes docs/data/comparison.json, the tables in
docs/comparison.md and the pictures, with the manifest of one run. (Then `make reference`, for the pages of the methods.)
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from cwfed.core.events import Round
from cwfed.core.types import PHASES
from cwfed.federation.config import Config
from cwfed.report.style import HATCHES, PARTS
from cwfed.report.tables import markdown_table, percent, size
from cwfed.runs.compare import parse_entries
from cwfed.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NUMBERS = DOCS / "data" / "comparison.json"
METHODS = (
    "local", "fedavg", "fedprox", "fedper", "lg-fedavg", "fedrep", "fedbabu", "ditto", "apfl", "per-fedavg", "fedrod", "fedproto",
    "fedamp", "fedfomo", "ifca", "cfl", "fednh", "feduv", "fedpac", "fedala", "fedcp", "gpfl", "feddbe", "fedas", "fedcac", "pfedme", "cwfedavg",
    "fedavg+prior", "cwfedavg+prior", "fedavg+balanced", "fedavg+owners+prior", "fedavg+balanced+owners:owners=updates", "fedavg+balanced+owners",
    "fedavg+balanced+head_first+owners", "fedavg+balanced+dbe+owners",
)  # fmt: skip
"""FedBN is not here: the CNN has no norm layer, so it would be FedAvg. `fedavg-ft` is `fedavg` after training."""
BEST, SEEDS = 10, (0, 1, 2)
PLACE = re.compile(r"<!-- (comparison|search): (\w+) -->.*?<!-- end -->", re.DOTALL)
"""Where a table stands on a page: of all methods, or of the search for a class-wise method that leads."""
SEARCHED = (
    "cwfedavg", "fedavg", "fedavg+prior", "feddbe", "fedala", "gpfl", "fedcp", *(m for m in METHODS if "+" in m and m != "fedavg+prior"),
)  # fmt: skip
"""The paper's method, the controls, who leads elsewhere, and the candidates."""


class Setting(NamedTuple):
    """One experiment that every method is tried on."""

    title: str
    config: str
    options: dict[str, str]
    """What some method needs here: behind its name."""
    sets: tuple[str, ...]

    def named(self, method: str) -> str:
        return method + self.options.get(method.partition("+")[0], "")

    def command(self, methods: str, seeds: str) -> list[str]:
        sets = [word for one in self.sets for word in ("--set", one)]
        more = ["--seeds", seeds] if seeds != "0" else []
        return ["cwfed", "compare", self.config, "-a", methods, *more, *sets]


COMMON = ("data.samples=12000", "train.lr=0.05", "run.evaluate_every=5")
SETTINGS = {
    "cifar10": Setting(
        "CIFAR-10, 12,000 samples, 2 classes per client, 10 rounds",
        "examples/cifar10-pathological.toml",
        {"cwfedavg": ":wdr=0.5", "ifca": ":k=2"},
        (*COMMON, "train.rounds=10"),
    ),
    "cifar100": Setting(
        "CIFAR-100, 12,000 samples, Dirichlet(0.1), 20 rounds",
        "examples/cifar100-dirichlet.toml",
        {"cwfedavg": ":wdr=50", "ifca": ":k=8"},
        (*COMMON, "train.rounds=20"),
    ),
}
"""The weight of WDR is a tenth of the paper's, because the learning rate is ten times as large: its step stays the same."""


def made(setting: Setting, methods: list[str], seeds: tuple[int, ...], folder: Path) -> list[dict[str, Any]]:
    """The rows of `cwfed compare`; what is not finished is run."""
    command = setting.command(",".join(map(setting.named, methods)), ",".join(map(str, seeds)))
    told = [sys.executable, "-m", *command, "--set", "run.engine=processes", "-o", str(folder), "--json"]
    rows: list[dict[str, Any]] = json.loads(subprocess.run(told, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    return [row | {"method": method} for row, method in zip(rows, methods, strict=True)]


def finished(setting: Setting, seeds: tuple[int, ...], folder: Path) -> list[str]:
    """The methods whose runs of these seeds are all there."""

    def place(method: str) -> Path:
        return folder / parse_entries(setting.named(method), Config())[0].folder

    return [m for m in METHODS if all((place(m) / f"seed-{seed}" / "summary.json").exists() for seed in seeds)]


def worth(row: dict[str, Any]) -> float:
    """What decides who is best: the reported phase in the round that validation picks."""
    return float(row["accuracy"][row["reported"]["phase"]]["validated"]["mean"])


def best(rows: list[dict[str, Any]]) -> list[str]:
    """The methods that are run with more seeds."""
    return [row["method"] for row in sorted(rows, key=worth, reverse=True)[:BEST]]


def rows_of(setting: Setting, folder: Path, only_finished: bool) -> list[dict[str, Any]]:
    """All rows, the best with all seeds; the best method first."""
    rows = made(setting, finished(setting, SEEDS[:1], folder) if only_finished else list(METHODS), SEEDS[:1], folder)
    chosen = best(rows)
    if only_finished:
        chosen = [method for method in finished(setting, SEEDS, folder) if method in chosen]
    again = {row["method"]: row for row in (made(setting, chosen, SEEDS, folder) if chosen else [])}
    return sorted((again.get(row["method"], row) for row in rows), key=worth, reverse=True)


# --- published


def as_table(setting: Setting, rows: list[dict[str, Any]]) -> str:
    """For the page, with the command above it and what was measured below."""
    header = (setting.title, *PHASES, "validated", "last", "worst 10 %", "traffic", "seeds")
    lines = []
    for row in rows:
        phase, accuracy = row["reported"]["phase"], row["accuracy"]
        lines.append(
            (
                f"`{row['label']}`",
                *(percent(accuracy[p]["best"]) + ("*" if p == phase else "") for p in PHASES),
                *(percent(accuracy[phase][picking]) for picking in ("validated", "last")),
                percent(row["worst_decile"]),
                size(row["traffic"]["mean"]),
                str(row["n"]),
            )
        )
    command = " ".join(setting.command("NAME", "0"))
    return f"```sh\n{command}\n```\n\n{markdown_table(header, lines)}"


def on_validation(row: dict[str, Any]) -> list[float]:
    """Of each run, the accuracy on held-out training data in the round that it picks, in the reported phase."""
    phase = row["reported"]["phase"]
    rounds = ([e for e in RunFolder(Path(run)).events() if isinstance(e, Round)] for run in row["runs"])
    return [max(found.validation for e in run if (found := getattr(e, phase))) for run in rounds]


def as_search(setting: Setting, rows: list[dict[str, Any]]) -> str:
    """The candidates by what held-out training data say of them; test accuracy stands beside it for the reader."""
    header = (
        setting.title,
        "validation",
        "test, that round",
        *(f"{phase}, best" for phase in PHASES),
        "worst 10 %",
        "seeds",
    )
    found = [(fmean(on_validation(row)), row) for row in rows if row["method"] in SEARCHED]
    lines = [
        (
            f"`{row['label']}`",
            f"{100 * validation:.2f}",
            percent(row["accuracy"][row["reported"]["phase"]]["validated"]),
            *(percent(row["accuracy"][p]["best"]) + ("*" if p == row["reported"]["phase"] else "") for p in PHASES),
            percent(row["worst_decile"]),
            str(row["n"]),
        )
        for validation, row in sorted(found, key=lambda pair: pair[0], reverse=True)
    ]
    return markdown_table(header, lines)


def as_numbers(setting: Setting, row: dict[str, Any]) -> dict[str, Any]:
    """A row of docs/data/comparison.json."""
    found = [row["accuracy"][phase]["best"] for phase in PHASES]
    seeds = ",".join(map(str, row["seeds"]))
    return {
        "setting": setting.title,
        "method": row["label"],
        **{phase: round(100 * one["mean"], 2) for phase, one in zip(PHASES, found, strict=True)},
        "std": [round(100 * one["std"], 2) for one in found] if row["n"] > 1 else None,
        "seeds": row["n"],
        "command": " ".join(setting.command(row["label"], seeds)),
    }


def draw(title: str, rows: list[dict[str, Any]]) -> Figure:
    """Two bars a method; a star marks the reported one, a line the spread over the seeds."""
    figure = Figure(figsize=(9, 0.42 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for i, phase in enumerate(PHASES):
        places = [at + 0.38 * i for at in range(len(rows))]
        found = [row["accuracy"][phase]["best"] for row in rows]
        values, spreads = [100 * one["mean"] for one in found], [100 * (one["std"] or 0) for one in found]
        drawn = axes.barh(
            places, values, 0.36, xerr=[s or float("nan") for s in spreads], color=PARTS[i], hatch=HATCHES[i],
            edgecolor="white", label=phase, error_kw={"elinewidth": 1, "ecolor": "#D55E00"},
        )  # fmt: skip
        texts = [f"{v:.1f}{'*' * (row['reported']['phase'] == phase)}" for v, row in zip(values, rows, strict=True)]
        axes.bar_label(drawn, texts, padding=2, fontsize=7)
    axes.set_yticks([at + 0.19 for at in range(len(rows))], [row["label"] for row in rows])
    axes.invert_yaxis()
    spread = "; line: ± std over the seeds" if any(row["n"] > 1 for row in rows) else ""
    axes.set(xlabel=f"test accuracy, %, best round\n(* the phase that is reported{spread})", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.01)
    figure.legend(frameon=False, loc="outside upper right", ncols=2, fontsize=8)
    return figure


def filled(page: str, name: str, table: str) -> str:
    """The page with this table in its place."""
    return PLACE.sub(lambda found: table if found[2] == name else found[0], page)


def publish(name: str, setting: Setting, rows: list[dict[str, Any]]) -> None:
    """Table, numbers, picture and one manifest."""
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    numbers["settings"][setting.title] = " ".join(setting.command("NAME", "0"))
    others = [row for row in numbers["rows"] if row["setting"] != setting.title]
    numbers["rows"] = others + [as_numbers(setting, row) for row in rows]
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    for page, what, table in (
        ("comparison", "comparison", as_table(setting, rows)),
        ("beyond", "search", as_search(setting, rows)),
    ):
        path, new = DOCS / f"{page}.md", f"<!-- {what}: {name} -->\n\n{table}\n<!-- end -->"
        old = path.read_text(encoding="utf-8")
        path.write_text(filled(old, name, new), encoding="utf-8")
    draw(setting.title, rows).savefig(DOCS / f"compare-{name}.png", dpi=110)
    shutil.copy(Path(rows[0]["runs"][0]) / "manifest.json", DOCS / "manifests" / f"compare-{name}.json")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path)
    asked.add_argument("settings", nargs="*", default=list(SETTINGS), help=f"of {', '.join(SETTINGS)} (default: all)")
    asked.add_argument("--publish", action="store_true", help="no runs: write what is finished into docs/")
    given = asked.parse_args()
    for name in given.settings:
        if name not in SETTINGS:
            asked.error(f"unknown setting {name}: known: {', '.join(SETTINGS)}")
        rows = rows_of(SETTINGS[name], given.folder.resolve() / name, given.publish)
        if given.publish:
            publish(name, SETTINGS[name], rows)
        print(as_table(SETTINGS[name], rows))


if __name__ == "__main__":
    main()
