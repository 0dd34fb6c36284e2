"""cwfed report, figures, runs: what has been run, for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cwfed.cli.app import JsonOption, app
from cwfed.cli.console import print_table
from cwfed.core.errors import CwfedError, RunError
from cwfed.core.terminal import err, escape, out
from cwfed.report.fitting import FittedTable

if TYPE_CHECKING:
    from cwfed.report.finished import LeftOut
    from cwfed.report.groups import Group

RunsArgument = Annotated[
    list[Path], typer.Argument(help="Run folders, archives of runs, or folders with such below them.")
]


@app.command()
def report(
    runs: RunsArgument,
    out_file: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's title.")] = "",
) -> None:
    """Write one page about finished runs: table, curves, clients, heat maps. It works offline, in one file."""
    from cwfed.report import page
    from cwfed.report.groups import APART

    groups, left_out = _groups(runs)
    heading = title or (groups[0].title if len(groups) == 1 else f"{len(groups)} experiments")
    try:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        page.write(out_file, heading, groups, left_out)
    except OSError as error:
        raise CwfedError(f"the page {out_file} cannot be written: {error.strerror}") from None
    out.print(f"Report: [bold]{escape(str(out_file))}[/bold] ({_count(groups)})", highlight=False)
    if len(groups) > 1:
        out.print(APART, highlight=False)
        for found in groups:
            out.print(f"  {escape(found.title)}", highlight=False)


@app.command()
def figures(
    runs: RunsArgument,
    out_dir: Annotated[Path, typer.Option("--out", "-o", help="Folder for pictures and tables.")] = Path("figures"),
    formats: Annotated[str, typer.Option(help="png, pdf, svg; separated by commas.")] = "pdf,png",
) -> None:
    """Draw pictures of finished runs for a paper, and write tables as LaTeX, Markdown and CSV."""
    from cwfed.report import drawing, tables
    from cwfed.report.figures import everything

    wanted = [ending.strip() for ending in formats.split(",")]
    drawing.check_formats(wanted)
    groups, _ = _groups(runs)
    for number, group in enumerate(groups, start=1):
        folder = out_dir / f"experiment-{number}" if len(groups) > 1 else out_dir
        rows = [method.row for method in group.methods]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for ending, text in (("tex", tables.latex), ("md", tables.markdown), ("csv", tables.csv)):
                (folder / f"table.{ending}").write_text(text(rows), encoding="utf-8", errors="replace")
            drawn = everything(group)
            for name, figure in drawn.items():
                drawing.save(figure, folder / name, wanted)
        except OSError as error:
            raise CwfedError(f"{folder} cannot be written: {error.strerror}") from None
        out.print(f"[bold]{escape(str(folder))}[/bold]: {escape(group.title)}", highlight=False)
        out.print(f"  table.tex, table.md, table.csv; as {', '.join(wanted)}: {', '.join(drawn)}", highlight=False)


@app.command("runs")
def list_runs(
    folders: Annotated[list[Path] | None, typer.Argument(help="Where to look; default: runs.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", "-w", help="Only runs with this setting: section.key=value, or state=finished."),
    ] = None,
    sort: Annotated[
        str, typer.Option(help="Sort by folder, accuracy, rounds, seconds, started, bytes or a setting.")
    ] = "folder",
    differ: Annotated[bool, typer.Option("--differ", help="Also show the settings in which they differ.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List, filter and compare run folders, finished or not."""
    from cwfed.report import listing

    found = listing.select(listing.look(folders or [Path("runs")]), where or [], sort)
    if as_json:
        print(json.dumps([run.as_dict() for run in found]))
        return
    if not found:
        raise CwfedError("no run has these settings: cwfed runs without --where shows all")
    header = ["folder", "data", "algorithm", "seed", "rounds", "accuracy", "state", "time", "on disk"]
    lines = [run.cells() for run in found]
    if differ:
        header.append("differs in")
        lines = [(*cells, text) for cells, text in zip(lines, listing.differing(found), strict=True)]
    table = FittedTable(header, words=("data", "algorithm", "state", "differs in"))
    for cells in lines:
        table.add_row(*cells)
    print_table(table)
    for run in found:
        if run.why:
            out.print(f"{escape(str(run.path))}: {escape(run.why)}", highlight=False, soft_wrap=True)


def _groups(paths: list[Path]) -> tuple[list[Group], list[LeftOut]]:
    from cwfed.report import finished, groups

    records, left_out = finished.collect(paths)
    for folder in left_out:
        err.print(f"left out: {escape(str(folder.path))}: {escape(folder.why)}", highlight=False, soft_wrap=True)
    if not records:
        raise RunError("none of these folders holds a whole finished run: nothing to report")
    return groups.group(records), left_out


def _count(groups: list[Group]) -> str:
    runs: Any = sum(len(method.records) for group in groups for method in group.methods)
    return f"{runs} {'run' if runs == 1 else 'runs'}, {len(groups)} {'experiment' if len(groups) == 1 else 'experiments'}"
