"""cwfed sweep: the best settings, picked on held-out data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cwfed.cli.app import (
    ConfigArgument,
    DataDirOption,
    JobsOption,
    JsonOption,
    LogOption,
    QuietOption,
    SetOption,
    app,
    load_config,
)
from cwfed.cli.console import disk_use, print_table
from cwfed.cli.progress import progress
from cwfed.core.errors import ConfigError, CwfedError, did_you_mean
from cwfed.core.terminal import escape, out


@app.command()
def sweep(
    config: ConfigArgument = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", "-g", help="Values of a setting: section.key=1,5,25. May be repeated."),
    ] = None,
    range_: Annotated[
        list[str] | None,
        typer.Option("--range", help="With optuna: section.key=0.001..0.1, with :log behind it for that scale."),
    ] = None,
    search: Annotated[
        str, typer.Option(help="grid: all combinations; optuna: its sampler chooses (extra sweep).")
    ] = ("grid"),
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="How many settings optuna tries.")] = 20,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas; the mean over them decides.")] = "0",
    set_: SetOption = None,
    out_dir: Annotated[Path, typer.Option("--out", "-o", help="Folder for all runs, table, page and best.toml.")] = (
        Path("runs/sweep")
    ),
    data_dir: DataDirOption = None,
    jobs: JobsOption = 0,
    quiet: QuietOption = False,
    log: LogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best settings, by held-out data only. Finished runs are reused; the best setting is written as a config."""
    from cwfed.report import sweep as reporting
    from cwfed.runs import compare
    from cwfed.runs import sweep as sweeping
    from cwfed.runs.series import Series

    searches = ("grid", "optuna")
    if search not in searches:
        raise ConfigError(f"--search {search!r}: {did_you_mean(search, searches)}")
    base, numbers = load_config(config, set_ or []), compare.parse_seeds(seeds)
    sweeping.check(base)
    space = sweeping.parse_space(grid or [], range_ or [])
    for text in set_ or []:
        if (key := text.partition("=")[0].strip()) in space:
            raise ConfigError(f"--set {text}: {key} is swept; leave one of them out")
    if search == "grid":
        candidates = sweeping.grid(space)
        settings, asking = len(candidates), sweeping.all_of(candidates)
    else:
        settings, asking = trials, sweeping.optuna(space, trials, base.run.seed)

    runs = settings * len(numbers)
    again = "the same command resumes it"
    with (
        progress(out_dir, again, whole=("sweep", runs), quiet=quiet, log=log) as watch,
        Series(
            jobs,
            data_dir=data_dir,
            on_run=lambda planned: watch(planned.title(len(numbers))),
            on_done=lambda done: watch.done(done.planned.title(len(numbers))),
            lenient=True,
        ) as series,
    ):
        found = sweeping.sweep(base, asking, numbers, out_dir, series, runs)
    try:
        title = reporting.write(found, out_dir)
    except OSError as error:
        raise CwfedError(f"the results cannot be written to {out_dir}: {error.strerror}") from None
    if as_json:
        print(json.dumps(reporting.as_dict(found)))
        return
    print_table(reporting.terminal(found, title))
    where = escape(str(out_dir))
    out.print(
        f"\nBest by validation: [bold]{escape(found.best.candidate.label)}[/bold]; run it: cwfed run {where}/best.toml\n"
        f"Page: {where}/report.html, table: {where}/sweep.md\nOn disk: {disk_use([out_dir])}",
        highlight=False,
    )
