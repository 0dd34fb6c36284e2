"""cwfed reproduce: the paper's tables and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cwfed.cli.app import DataDirOption, JsonOption, LogOption, QuietOption, SetOption, app
from cwfed.cli.console import print_table
from cwfed.cli.progress import progress
from cwfed.core.errors import ConfigError, CwfedError
from cwfed.core.terminal import err, escape, out
from cwfed.report.fitting import FittedTable

if TYPE_CHECKING:
    from cwfed.reproduce import Item, Outcome, Workshop


@app.command()
def reproduce(
    names: Annotated[
        list[str], typer.Argument(help="Names of tables and figures; `list` shows them, `all` is all of the paper.")
    ],
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: digits, seconds; small: real data, reduced; whole: all data, fewer rounds; paper: the full setting."
        ),
    ] = "small",
    out_dir: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs and results.")] = Path("reproduced"),
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas; default: those of the scale.")] = "",
    settings: Annotated[
        str, typer.Option(help="Only these experimental settings (columns), separated by commas (default: all).")
    ] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Only these methods (rows), by label or algorithm, in this order, separated by commas (default: all)."
        ),
    ] = "",
    set_: SetOption = None,
    formats: Annotated[str, typer.Option(help="Picture formats: png, pdf, svg.")] = "png,pdf",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would run, and what it costs.")] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Only judge and draw what has been run.")] = False,
    data_dir: DataDirOption = None,
    quiet: QuietOption = False,
    log: LogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reproduce the paper's tables and figures: run what they need, compare our numbers with the published ones, judge."""
    from cwfed import reproduce as reproducing
    from cwfed.report.drawing import check_formats
    from cwfed.runs import compare

    if names == ["list"]:
        _print_list(as_json)
        return
    if scale not in reproducing.SCALES:
        raise ConfigError(f"--scale {scale!r} must be one of {', '.join(reproducing.SCALES)}")
    known = {name: [reproducing.find(name)] for name in names if name != "all"}
    known["all"] = [item for item in reproducing.items().values() if not item.beyond]
    chosen = list({item.name: item for name in names for item in known[name]}.values())
    chosen = [item.part(_names(settings), _names(methods)) for item in chosen]
    numbers = compare.parse_seeds(seeds) if seeds else None
    workshop = reproducing.Workshop(scale, out_dir, numbers, data_dir, set_ or [])
    if dry_run:
        _print_estimates(chosen, workshop, as_json)
        return
    wanted = [ending.strip() for ending in formats.split(",")]
    check_formats(wanted)
    outcomes = []
    for item in chosen:
        if not no_run:
            _carry_out(item, workshop, quiet, log)
        outcome = reproducing.judge(item, workshop)
        outcomes.append(outcome)
        try:
            written = outcome.write(workshop.folder / "results", wanted)
            reproducing.write_overview(workshop)
        except OSError as error:
            raise CwfedError(f"the results cannot be written to {workshop.folder}: {error.strerror}") from None
        if not as_json:
            _print_outcome(outcome, written)
    if as_json:
        print(json.dumps([outcome.as_dict() for outcome in outcomes]))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def _print_list(as_json: bool) -> None:
    from cwfed import reproduce as reproducing

    items = reproducing.items().values()
    if as_json:
        print(json.dumps([{"name": item.name, "where": item.where, "title": item.title} for item in items]))
        return
    table = FittedTable(("name", "in the paper", "what it shows"), words=("in the paper", "what it shows"))
    for item in items:
        table.add_row(item.name, item.where, item.title)
    print_table(table)
    out.print(
        "cwfed reproduce NAME --scale smoke|small|whole|paper; --dry-run says what that costs here", highlight=False
    )


def _carry_out(item: Item, workshop: Workshop, quiet: bool, log: Path | None) -> None:
    jobs = workshop.jobs(item)
    again = f"{workshop.command(item)} resumes it"
    with progress(workshop.folder, again, whole=(item.name, len(jobs)), quiet=quiet, log=log) as watch:
        workshop.carry_out(item, lambda job: watch(job.title), lambda job: watch.done(job.title))


def _print_outcome(outcome: Outcome, written: list[Path]) -> None:
    if outcome.rows:
        print_table(outcome.terminal())
    else:
        out.print(f"[bold]{escape(outcome.item.where)}: {escape(outcome.item.title)}[/bold]")
    out.print(f"Claim: {escape(outcome.item.claim)}.", highlight=False)
    colours = {True: "green", False: "red", None: "yellow"}
    for claim in outcome.claims:
        mark = f"[{colours[claim.holds]}]{claim.verdict}[/]"
        out.print(f"  {mark}: {escape(claim.words)}", highlight=False)
    for note in outcome.notes:
        out.print(f"  note: {escape(note)}", highlight=False)
    out.print(f"Written: {escape(', '.join(str(path) for path in written))}\n", highlight=False)


def _print_estimates(chosen: list[Item], workshop: Workshop, as_json: bool) -> None:
    """One short round of every different run; runs that several tables share are counted once."""
    from cwfed import reproduce as reproducing
    from cwfed.report.tables import duration, size

    jobs = {job.folder: (item, job, job.state) for item in chosen for job in workshop.jobs(item)}
    found = []
    measured: dict[tuple[str, str], reproducing.Estimate] = {}
    with err.status("starting") as status:
        for item, job, state in jobs.values():
            if state == "finished":
                found.append((item, job, state, reproducing.Estimate(0.0, 0.0, 0)))
                continue
            key = (job.setup.name, job.entry.label)  # seeds cost the same
            if key not in measured:
                status.update(f"one short round of {escape(job.title)}")
                measured[key] = reproducing.estimate(job, workshop.data_dir)
            found.append((item, job, state, measured[key].for_job(job)))
    if as_json:
        rows = [{"item": i.name, "run": str(j.folder), "state": state, **e.as_dict()} for i, j, state, e in found]
        print(json.dumps(rows))
        return
    left = [estimate for _, _, state, estimate in found if state != "finished"]
    if not left:
        out.print("nothing to run: " + ("all runs are finished" if found else "it is computed when it is drawn"))
        return
    header = ("table or figure", "run", "seed", "state", "time", "traffic")
    table = FittedTable(
        header, words=("run", "state"), names=("run", "seed"), title=f"what would run ({workshop.scale})"
    )
    for item, job, state, e in found:
        costs = ("–", "–") if state == "finished" else (duration(e.seconds), size(e.traffic))
        table.add_row(item.name, f"{job.setup.title}: {job.entry.label}", str(job.seed), state, *costs)
    print_table(table)
    seconds, traffic = sum(e.seconds for e in left), sum(e.traffic for e in left)
    out.print(
        f"{len(left)} {'run' if len(left) == 1 else 'runs'}; about {duration(seconds)} on this machine, {size(traffic)} of simulated traffic, "
        f"{size(max(e.memory for e in left))} of memory at the peak",
        highlight=False,
    )
