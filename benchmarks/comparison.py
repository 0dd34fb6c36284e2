"""All methods on a fifth of CIFAR-10 and CIFAR-100, and the leading ones on another split: the runs, and from them tables and pictures in docs/.

    python benchmarks/comparison.py FOLDER [cifar100] [--jobs 2] [--publish]

makes in FOLDER every method's run of seed 0, then seeds 1 and 2 of the ten best and of the controls. It takes some hours on two cores; whenever it is
stopped, the same command goes on. What docs/data/comparison.json has already, of whatever machine, is not run again.

With --publish it makes no runs: what is finished goes into docs/data/comparison.json, a record each, and of all records there the tables in
docs/comparison.md and docs/beyond.md and the pictures are made. (Then `make reference`, for the pages of the methods.)
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from cwfed.core.events import Round
from cwfed.core.types import PHASES
from cwfed.federation import config as configs
from cwfed.report.style import HATCHES, PARTS
from cwfed.report.tables import markdown_table, percent, size
from cwfed.runs.compare import parse_entries, plan, without_models
from cwfed.runs.folder import RunFolder
from cwfed.runs.series import Done, Planned, Series
from cwfed.runs.summary import spread

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NUMBERS = DOCS / "data" / "comparison.json"
METHODS = (
    "local", "fedavg", "fedprox", "fedper", "lg-fedavg", "fedrep", "fedbabu", "ditto", "apfl", "per-fedavg", "fedrod", "fedproto",
    "scaffold", "moon", "fedamp", "fedfomo", "ifca", "cfl", "fednh", "feduv", "fedpac", "fedala", "fedcp", "gpfl", "feddbe", "fedas", "fedcac", "pfedme", "cwfedavg",
    "fedavg+prior", "cwfedavg+prior", "fedavg+balanced", "fedavg+owners+prior", "fedavg+balanced+owners:owners=updates", "fedavg+balanced+owners",
    "fedavg+balanced+head_first+owners", "fedavg+balanced+dbe+owners", "fedavg+balanced+fedopt+owners", "cwrows:owners=updates",
    "fedavg+balanced+fedopt+owners:server_momentum=0.5", "cwrows",
    "fedavg+fedopt+prior:server_momentum=0.5", "fedrep+fedopt:server_momentum=0.5", "fedala+fedopt:server_momentum=0.5",
)  # fmt: skip
"""FedBN is not here: the CNN has no norm layer, so it would be FedAvg. `fedavg-ft` is `fedavg` after training."""
FINALISTS = (
    "cwrows", "fedavg+fedopt+prior:server_momentum=0.5", "fedavg+prior", "fedavg", "cwfedavg", "cwfedavg:wdr=250", "cwfedavg:wdr=500", "fedproto", "fedpac",
    "fedrep", "fedrep+fedopt:server_momentum=0.5", "fedala", "fedala+fedopt:server_momentum=0.5", "local",
    "fedavg+balanced+owners", "fedavg+balanced+head_first+owners",
)  # fmt: skip
"""Who leads on the other settings, the controls and the paper's method."""
BEST, SEEDS = 10, (0, 1, 2)
CONTROLS = ("fedavg", "fedavg+prior", "cwfedavg")
"""What one local epoch does, what a histogram does, and the paper's method: with as many seeds as the best."""
PLACE = re.compile(r"<!-- (comparison|search): ([\w-]+) -->.*?<!-- end -->", re.DOTALL)
"""Where a table stands on a page: of all methods, or of the search for a class-wise method that leads."""
SEARCHED = (
    "cwfedavg", "cwfedavg:wdr=250", "cwfedavg:wdr=500", "fedavg", "fedavg+prior", "feddbe", "fedala", "gpfl", "fedcp", "fedrep", "fedpac", "fedproto", *(m for m in METHODS if m.startswith("cwrows") or ("+" in m and m != "fedavg+prior")),
)  # fmt: skip
"""The paper's method, the controls, who leads elsewhere, and the candidates."""


class Setting(NamedTuple):
    """One experiment that every method is tried on."""

    title: str
    config: str
    options: dict[str, str]
    """What some method needs here: behind its name."""
    sets: tuple[str, ...]
    methods: tuple[str, ...] = METHODS

    def named(self, method: str) -> str:
        return method + self.options.get(method.partition("+")[0], "")

    def command(self, methods: str, seeds: Sequence[int] = (0,)) -> str:
        """For a reader."""
        more = [f"--seeds {','.join(map(str, seeds))}"] if tuple(seeds) != (0,) else []
        return " ".join(["cwfed compare", self.config, "-a", methods, *more, *(f"--set {one}" for one in self.sets)])


COMMON = ("data.samples=12000", "train.lr=0.05", "run.evaluate_every=5")
SETTINGS = {
    "cifar10": Setting(
        "CIFAR-10, 12,000 samples, 2 classes per client, 10 rounds",
        "examples/cifar10-pathological.toml",
        {"cwfedavg": ":wdr=5", "ifca": ":k=2"},
        (*COMMON, "train.rounds=10"),
    ),
    "cifar100": Setting(
        "CIFAR-100, 12,000 samples, Dirichlet(0.1), 20 rounds",
        "examples/cifar100-dirichlet.toml",
        {"cwfedavg": ":wdr=50", "ifca": ":k=8"},
        (*COMMON, "train.rounds=20"),
    ),
    "cifar100-pathological": Setting(
        "CIFAR-100, 12,000 samples, 10 classes per client, 20 rounds",
        "examples/cifar100-dirichlet.toml",
        {"cwfedavg": ":wdr=50"},
        (*COMMON, "train.rounds=20", "data.partition=pathological", "data.classes_per_client=10"),
        FINALISTS,
    ),
}
"""The weight of WDR was picked on held-out data (docs/beyond.md), once for all methods that have it: on CIFAR-10 the paper's, on CIFAR-100 a tenth of it."""


@dataclass(frozen=True)
class Record:
    """One run in the numbers that tables show; accuracies in per cent."""

    setting: str
    method: str
    seed: int
    phase: str
    """That is reported for the method."""
    received: float
    trained: float
    """Both on test data, in the phase's best round."""
    validated: float
    last: float
    """Of the reported phase, on test data: in the round that held-out data pick, and in the last one."""
    validation: float | None
    """Of the reported phase, on held-out training data, in the round that they pick. (None in records that were made without it.)"""
    worst: float
    """The mean of the worst tenth of the clients, in the reported phase's best round."""
    traffic: float
    """Bytes, of all clients and rounds, both ways."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.setting, self.method, self.seed


class Row(NamedTuple):
    """A method in a table: its runs, a seed each."""

    runs: list[Record]

    @property
    def method(self) -> str:
        return self.runs[0].method

    def of(self, name: str) -> dict[str, Any]:
        """Mean and standard deviation, as fractions."""
        values = [getattr(run, name) for run in self.runs]
        return spread([None if value is None else value / 100 for value in values])

    def phases(self) -> list[str]:
        """Both, a star at the one that is reported."""
        return [percent(self.of(phase)) + "*" * (phase == self.runs[0].phase) for phase in PHASES]

    @property
    def worth(self) -> float:
        """What decides who is best: the reported phase in the round that held-out data pick."""
        return float(self.of("validated")["mean"])


# --- runs


def plans(setting: Setting, methods: Iterable[str], seeds: Sequence[int], folder: Path) -> list[Planned]:
    """One core for each run: they go side by side, and their bits are the same with any engine."""
    config = configs.load(ROOT / setting.config, [*setting.sets, "run.engine=loop", "run.workers=1"])
    names = ",".join(map(setting.named, methods))
    return plan(without_models(config), parse_entries(names, config), seeds, folder) if names else []


def record(name: str, label: str, run: Path, seed: int) -> Record:
    """A finished run."""
    summary, events = RunFolder(run).result()
    phase = summary.reported.phase
    own = summary.accuracy.of(phase)
    held_out = [result.validation for e in events if isinstance(e, Round) and (result := getattr(e, phase))]

    def shown(value: float | None) -> float:
        return round(100 * (value or 0.0), 2)

    return Record(
        setting=name,
        method=label,
        seed=seed,
        phase=phase,
        received=shown(summary.accuracy.received.best),
        trained=shown(summary.accuracy.trained.best),
        validated=shown(own.validated),
        last=shown(own.last),
        validation=shown(max(held_out)),
        worst=shown(summary.per_client.worst_decile),
        traffic=summary.traffic.down + summary.traffic.up,
    )


def finished(name: str, folder: Path) -> list[Record]:
    """The records of the runs in a folder that are done."""
    planned = plans(SETTINGS[name], SETTINGS[name].methods, SEEDS, folder)
    return [record(name, one.label, one.folder, one.seed) for one in planned if one.is_done]


def missing(name: str, folder: Path, known: Sequence[Record]) -> list[Planned]:
    """What is to be run: seed 0 of all, and when that is there, the other seeds of the best and of the controls."""
    setting, keys = SETTINGS[name], {one.key for one in known}
    wanted = plans(setting, setting.methods, SEEDS[:1], folder)
    named = {setting.named(method): method for method in setting.methods}
    # seed 0 alone says who is best: with more seeds others might be, and the list would grow with every run
    rows = table_rows(name, [one for one in known if one.seed == SEEDS[0] and one.method in named])
    if len(rows) == len(setting.methods):
        chosen = dict.fromkeys([*(named[row.method] for row in rows[:BEST]), *CONTROLS])
        wanted = plans(setting, chosen, SEEDS[1:], folder)
    return [one for one in wanted if (name, one.label, one.seed) not in keys and not one.is_done]


def run(names: Sequence[str], folder: Path, jobs: int) -> None:
    """All that is missing."""

    def tell(done: Done) -> None:
        print(done.planned.folder, done.given_up or "done", flush=True)

    with Series(jobs, on_done=tell, lenient=True) as series:
        for name in names:
            while wanted := missing(name, folder / name, together(stored(), finished(name, folder / name))):
                if not any(done.summary for done in series.carry_out(wanted)):
                    break  # nothing more can be done here


# --- records


def stored() -> list[Record]:
    """Those that are published."""
    return [Record(**one) for one in json.loads(NUMBERS.read_text(encoding="utf-8"))["runs"]]


def together(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """One for each run, the new ones where there are both; in a fixed order."""
    return [one for _, one in sorted({one.key: one for one in (*old, *new)}.items())]


def table_rows(name: str, records: Iterable[Record]) -> list[Row]:
    """The best method first."""
    by_method: dict[str, list[Record]] = {}
    for one in records:
        if one.setting == name:
            by_method.setdefault(one.method, []).append(one)
    return sorted((Row(runs) for runs in by_method.values()), key=lambda row: (-row.worth, row.method))


# --- published


def as_table(setting: Setting, rows: Sequence[Row]) -> str:
    """For the page, with the command above it."""
    header = (setting.title, *PHASES, "validated", "last", "worst 10 %", "traffic", "seeds")
    lines = [
        (
            f"`{row.method}`",
            *row.phases(),
            *(percent(row.of(name)) for name in ("validated", "last", "worst")),
            size(row.runs[0].traffic),
            str(len(row.runs)),
        )
        for row in rows
    ]
    return f"```sh\n{setting.command('NAME')}\n```\n\n{markdown_table(header, lines)}"


def as_search(setting: Setting, rows: Sequence[Row]) -> str:
    """The candidates by what held-out training data say of them; test accuracy stands beside it for the reader."""
    header = (
        setting.title,
        "validation",
        "test, that round",
        *(f"{phase}, best" for phase in PHASES),
        "worst 10 %",
        "seeds",
    )
    searched = {setting.named(method) for method in SEARCHED}
    chosen = [row for row in rows if row.method in searched]
    lines = [
        (
            f"`{row.method}`",
            percent(row.of("validation")),
            percent(row.of("validated")),
            *row.phases(),
            percent(row.of("worst")),
            str(len(row.runs)),
        )
        for row in sorted(chosen, key=lambda row: row.of("validation")["mean"] or 0.0, reverse=True)
    ]
    return markdown_table(header, lines)


def as_numbers(setting: Setting, row: Row) -> dict[str, Any]:
    """A row for the page of its method (tools/methods.py)."""
    found = [row.of(phase) for phase in PHASES]
    return {
        "setting": setting.title,
        "method": row.method,
        **{phase: round(100 * one["mean"], 2) for phase, one in zip(PHASES, found, strict=True)},
        "std": [round(100 * one["std"], 2) for one in found] if len(row.runs) > 1 else None,
        "seeds": len(row.runs),
        "command": setting.command(row.method, [one.seed for one in row.runs]),
    }


def draw(title: str, rows: Sequence[Row]) -> Figure:
    """Two bars a method; a star marks the reported one, a line the spread over the seeds."""
    figure = Figure(figsize=(9, 0.42 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for i, phase in enumerate(PHASES):
        places = [at + 0.38 * i for at in range(len(rows))]
        found = [row.of(phase) for row in rows]
        values, spreads = [100 * one["mean"] for one in found], [100 * (one["std"] or 0) for one in found]
        drawn = axes.barh(
            places, values, 0.36, xerr=[s or float("nan") for s in spreads], color=PARTS[i], hatch=HATCHES[i],
            edgecolor="white", label=phase, error_kw={"elinewidth": 1, "ecolor": "#D55E00"},
        )  # fmt: skip
        texts = [f"{v:.1f}{'*' * (row.runs[0].phase == phase)}" for v, row in zip(values, rows, strict=True)]
        axes.bar_label(drawn, texts, padding=2, fontsize=7)
    axes.set_yticks([at + 0.19 for at in range(len(rows))], [row.method for row in rows])
    axes.invert_yaxis()
    spread_said = "; line: ± std over the seeds" if any(len(row.runs) > 1 for row in rows) else ""
    axes.set(
        xlabel=f"test accuracy, %, best round (sorted by the\nround that held-out data pick;\n* the phase that is reported{spread_said})",
        title=title,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.01)
    figure.legend(frameon=False, loc="outside upper right", ncols=2, fontsize=8)
    return figure


def filled(page: str, name: str, table: str) -> str:
    """The page with this table in its place."""
    return PLACE.sub(lambda found: table if found[2] == name else found[0], page)


def publish(name: str, folder: Path) -> None:
    """Records, tables, picture and one manifest."""
    setting, new = SETTINGS[name], finished(name, folder)
    records = together(stored(), new)
    rows = table_rows(name, records)
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    numbers["settings"][setting.title] = setting.command("NAME")
    others = [row for row in numbers["rows"] if row["setting"] != setting.title]
    numbers["rows"] = others + [as_numbers(setting, row) for row in rows]
    numbers["runs"] = [asdict(one) for one in records]
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    for page, what, table in (
        ("comparison", "comparison", as_table(setting, rows)),
        ("beyond", "search", as_search(setting, rows)),
    ):
        path, text = DOCS / f"{page}.md", f"<!-- {what}: {name} -->\n\n{table}\n<!-- end -->"
        path.write_text(filled(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    draw(setting.title, rows).savefig(DOCS / f"compare-{name}.png", dpi=110)
    done = {
        (one.label, one.seed): one.folder for one in plans(setting, setting.methods, SEEDS, folder) if one.is_done
    }
    if place := done.get((rows[0].method, 0)):
        shutil.copy(place / "manifest.json", DOCS / "manifests" / f"compare-{name}.json")
    print(as_table(setting, rows))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path)
    asked.add_argument("settings", nargs="*", default=list(SETTINGS), help=f"of {', '.join(SETTINGS)} (default: all)")
    asked.add_argument("--jobs", type=int, default=2, help="runs side by side, a core each (default: 2)")
    asked.add_argument("--publish", action="store_true", help="no runs: write what is finished into docs/")
    given = asked.parse_args()
    if unknown := [name for name in given.settings if name not in SETTINGS]:
        asked.error(f"unknown setting {unknown[0]}: known: {', '.join(SETTINGS)}")
    folder = given.folder.resolve()
    if not given.publish:
        run(given.settings, folder, given.jobs)
    else:
        for name in given.settings:
            publish(name, folder / name)


if __name__ == "__main__":
    main()
