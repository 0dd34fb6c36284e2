"""cwfed run, compare, demo, bench: what computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from cwfed.cli.app import (
    ConfigArgument,
    DataDirOption,
    JobsOption,
    JsonOption,
    LogOption,
    QuietOption,
    SetOption,
    TrackOption,
    app,
    load_config,
)
from cwfed.cli.console import disk_use, print_against, print_bench, print_summary, print_table
from cwfed.cli.progress import Watch, progress
from cwfed.core.errors import CwfedError, GivenUp
from cwfed.core.terminal import err, escape, out

if TYPE_CHECKING:
    from cwfed.federation.config import Config


@app.command()
def run(
    config: ConfigArgument = None,
    set_: SetOption = None,
    out_dir: Annotated[Path | None, typer.Option("--out", "-o", help="The run's folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    data_dir: DataDirOption = None,
    track: TrackOption = None,
    backend: Annotated[
        str, typer.Option(help="simulator, or flower: through Flower's simulation engine on Ray (extra flower).")
    ] = "simulator",
    quiet: QuietOption = False,
    log: LogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one experiment and leave its folder."""
    from cwfed import api
    from cwfed.runs import resuming
    from cwfed.runs.folder import RunFolder

    if resume and out_dir is None:
        raise CwfedError("--resume needs the folder of the run: --out DIR")
    settings = set_ or []
    chosen = None
    if not (resume and config is None and not settings):
        chosen = load_config(config, settings, out_dir if resume and config is None else None)
    for note in [] if quiet else resuming.not_alone(config):
        err.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    folder = out_dir or _free_folder(chosen)
    with progress(folder, f"resume it: cwfed run --resume --out {folder}", quiet=quiet, log=log) as watch:
        summary = api.run(
            chosen,
            folder,
            resume=resume,
            data_dir=data_dir,
            on_event=watch("run"),
            progress=False,
            track=track or (),
            backend=backend,
        )
    if as_json:
        print(summary.to_json())
        return
    print_summary(summary, list(map(str, RunFolder(folder).facts().data.classes)))
    names = ("summary.json", "config.toml", "events.jsonl", "models")
    there = ", ".join(name for name in names if (folder / name).exists())  # models may be too large to save
    out.print(f"\nEverything is in [bold]{escape(str(folder))}[/bold]: {there}")
    out.print(f"On disk: {disk_use([folder])}", highlight=False)


@app.command()
def compare(
    config: ConfigArgument = None,
    algorithms: Annotated[
        str, typer.Option("--algorithms", "-a", help="Names, separated by commas; name:key=value changes a setting.")
    ] = "fedavg,cwfedavg",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    set_: SetOption = None,
    out_dir: Annotated[Path, typer.Option("--out", "-o", help="Folder for all runs and the report.")] = Path(
        "runs/compare"
    ),
    data_dir: DataDirOption = None,
    track: TrackOption = None,
    jobs: JobsOption = 1,
    quiet: QuietOption = False,
    log: LogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run several algorithms and seeds, for one table and one page. Finished runs are reused, interrupted ones are resumed."""
    show = Show(quiet, log, as_json)
    _compare(
        load_config(config, set_ or []), algorithms, seeds, out_dir, show, data_dir, track or (), jobs, set_ or []
    )


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs and the report.")] = Path("demo"),
) -> None:
    """Compare FedAvg with cwFedAvg on the digits of scikit-learn: about a minute, a table and a page."""
    from cwfed.federation import config as configs

    out.print(
        "20 clients, each holding two of the ten digits. FedAvg gives everybody the same model; cwFedAvg averages\n"
        "once per class and mixes the class models by each client's class distribution, read from its weights.\n"
        "Read both phases: as received, class-wise averaging is far ahead; after one local epoch FedAvg catches up.\n"
    )
    settings = ["train.rounds=40", "train.lr=0.05"]
    _compare(configs.load(None, settings), "fedavg,cwfedavg", "0", out_dir, Show())


@app.command()
def bench(
    workloads: Annotated[list[str] | None, typer.Argument(help="Which workloads (default: all).")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less data and fewer repeats: within three minutes.")
    ] = False,
    against: Annotated[
        tuple[str, Path] | None,
        typer.Option(metavar="pfllib DIR", help="pfllib DIR: measure against the checkout of PFLlib in DIR instead."),
    ] = None,
    python: Annotated[
        str, typer.Option(help="With --against: the Python that has what PFLlib needs (default: ours).")
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            help="With --against: a config file (TOML); default: CIFAR-10, 6,000 samples, two classes per client."
        ),
    ] = None,
    set_: SetOption = None,
    algorithms: Annotated[
        str,
        typer.Option(
            "--algorithms",
            "-a",
            help="With --against: fedavg, ditto or both (default); name:key=value changes a setting.",
        ),
    ] = "",
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="With --against: processes of either program for each method (default: 2)."),
    ] = None,
    data_dir: DataDirOption = None,
    out_dir: Annotated[
        Path, typer.Option("--out", "-o", help="Where bench.json and bench.png go, or pfllib.json and logs.")
    ] = Path("bench"),
    as_json: JsonOption = False,
) -> None:
    """Compare the speed of the engines with code written as published code is, or with PFLlib: ratios, JSON, one picture.

    Against PFLlib: the same split, model, initial weights and settings, five rounds unless --set train.rounds=N, each program in processes
    of its own, in turn; seconds per round, peak memory and accuracy of both. The checkout is only read.
    """
    from cwfed import benchmark
    from cwfed.benchmark import against_pfllib

    if against and against[0] != "pfllib":
        raise CwfedError(f"--against {against[0]!r} is not known: it is --against pfllib DIR")
    if against and (workloads or quick):
        raise CwfedError("--against has no workloads and no --quick: choose its data with --config and --set")
    if not against and (python or config or set_ or algorithms or repeats):
        raise CwfedError("--python, --config, --set, --algorithms and --repeats go with --against pfllib DIR")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CwfedError(f"--out {out_dir} cannot be made: {error.strerror}") from None
    with err.status("starting") as status:
        if against:
            result = against_pfllib.bench(
                against[1],
                out_dir,
                config,
                set_ or [],
                algorithms or "fedavg,ditto",
                repeats or 2,
                python,
                data_dir,
                tell=lambda what: status.update(escape(what)),
                report=lambda needed: err.print(escape(needed), highlight=False, soft_wrap=True),
            )
        else:
            result = benchmark.bench(workloads or (), quick, tell=lambda title: status.update(f"measuring {title}"))
    numbers = out_dir / ("pfllib.json" if against else "bench.json")
    numbers.write_text(json.dumps(result, indent=1) + "\n")
    if not against:
        benchmark.picture(result, out_dir / "bench.png")
    if as_json:
        print(json.dumps(result))
        return
    if against:
        print_against(result)
    else:
        print_bench(result)
    beside = "what both printed" if against else "the picture"
    out.print(f"\nThe numbers are in [bold]{escape(str(numbers))}[/bold], {beside} beside them")


def _free_folder(config: Config | None) -> Path:
    """runs/<data>-<algorithm>-<seed>, numbered where that is taken."""
    assert config is not None
    name = f"{config.data.name}-{config.algorithm_name}-{config.run.seed}".replace(":", "-").replace("/", "-")
    base = Path("runs") / name
    candidates = (base, *(base.with_name(f"{name}.{i}") for i in range(2, 100_000)))
    return next(path for path in candidates if not path.exists())


class Show(NamedTuple):
    """What a command lets people see."""

    quiet: bool = False
    log: Path | None = None
    as_json: bool = False


def _compare(
    config: Config,
    names: str,
    seeds: str,
    folder: Path,
    show: Show,
    data_dir: str | None = None,
    track: Sequence[str] = (),
    jobs: int = 1,
    settings: Sequence[str] = (),
) -> None:
    from cwfed.report import drawing, figures, page, tables
    from cwfed.report.finished import read_run
    from cwfed.report.groups import Group, Method, describe
    from cwfed.runs import compare as comparing
    from cwfed.runs.series import Done, Series

    config = comparing.without_models(config)
    entries, numbers = comparing.parse_entries(names, config), comparing.parse_seeds(seeds)
    comparing.check_settings(settings, config, entries)
    left_out: list[str] = []

    def done_with(done: Done, watch: Watch) -> None:
        watch.done(done.planned.title(len(numbers)))
        if done.given_up:
            left_out.append(f"{done.planned.label}, seed {done.planned.seed}: {done.given_up}")

    with (
        progress(folder, "the same command resumes it", quiet=show.quiet, log=show.log) as watch,
        Series(
            jobs,
            data_dir=data_dir,
            track=track,
            on_run=lambda planned: watch(planned.title(len(numbers))),
            on_done=lambda done: done_with(done, watch),
            lenient=True,
        ) as series,
    ):
        rows = comparing.compare(config, entries, numbers, folder, series)
    if not rows:
        raise GivenUp(left_out[0])
    methods = [Method(row["label"], [read_run(run, row["label"]) for run in row["runs"]]) for row in rows]
    rows = [row | method.row for row, method in zip(rows, methods, strict=True)]
    title = describe(methods[0].first)  # what was run, not what the config says: data may come split
    group = Group(title, methods)
    (folder / "comparison.json").write_text(json.dumps(rows, indent=1))
    notes = "".join(f"\nLeft out: {one}\n" for one in left_out)
    (folder / "comparison.md").write_text(tables.markdown(rows) + notes)
    page.write(folder / "report.html", title, [group])
    drawing.save(figures.overview(group), folder / "overview")
    if show.as_json:
        print(json.dumps(rows))
        return
    print_table(tables.terminal(rows, title))
    for one in left_out:
        out.print(f"left out: {escape(one)}", highlight=False, soft_wrap=True)
    where = escape(str(folder))
    out.print(
        f"\nReport: [bold]{where}/report.html[/bold], picture: {where}/overview.png, table: {where}/comparison.md"
    )
    out.print(f"On disk: {disk_use([folder])}", highlight=False)
