"""cwfed export, leaderboard: runs that people share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cwfed.cli.app import JsonOption, app
from cwfed.cli.console import print_table
from cwfed.core.errors import CwfedError, RunError
from cwfed.core.terminal import err, escape, out


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder with runs below it.")],
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The archive, or a folder for it; of several runs, the folder for their archives, laid out as the runs are.",
        ),
    ] = None,
) -> None:
    """Write a small archive of a finished run: config, manifest, events, summary and their checksums; no models."""
    from cwfed.report.finished import folders, go_on
    from cwfed.report.tables import size
    from cwfed.runs import archive
    from cwfed.runs.folder import RunFolder

    found = list(folders([run]))
    if found == [run]:
        if archive.is_archive(run):
            raise RunError(f"{run} is an archive already")
        name = f"{run.resolve().name}{archive.ENDING}"
        is_folder = out_path and (out_path.is_dir() or not out_path.suffix)
        targets = {run: out_path / name if out_path and is_folder else out_path or Path(name)}
    else:
        place = out_path or Path(f"{run.resolve().name}-archives")
        done = [path for path in found if RunFolder(path).finished]
        targets = {path: (place / path.relative_to(run)).with_name(f"{path.name}{archive.ENDING}") for path in done}
        for path in found:
            if path not in targets and not archive.is_archive(path):
                out.print(
                    escape(f"left out: {path} is not finished; {go_on(path)} resumes it"),
                    highlight=False,
                    soft_wrap=True,
                )
        if not targets:
            raise RunError(f"{run} has no finished run: there is no result to share")
    for path, target in targets.items():
        if target.suffix != archive.ENDING:
            raise CwfedError(f"--out {target}: the name of an archive ends with {archive.ENDING}")
        archive.write(path, target)
        out.print(f"[bold]{escape(str(target))}[/bold] ({size(target.stat().st_size)})", highlight=False)
    out.print("cwfed report and cwfed leaderboard read archives as they read folders", highlight=False)


@app.command()
def leaderboard(
    places: Annotated[list[Path], typer.Argument(help="Folders with runs and archives of many people below them.")],
    out_file: Annotated[Path, typer.Option("--out", "-o", help="The page; the table goes beside it as .md.")] = Path(
        "leaderboard.html"
    ),
    title: Annotated[str, typer.Option(help="The page's title.")] = "Leaderboard",
    as_json: JsonOption = False,
) -> None:
    """Make tables and a page of many people's runs. Checksums are verified, and only comparable runs are ranked together."""
    from cwfed.report import leaderboard as boards

    found, left_out = boards.collect(places)
    for one in left_out:
        err.print(f"left out: {escape(str(one.path))}: {escape(one.why)}", highlight=False, soft_wrap=True)
    if not found:
        raise RunError("none of these folders holds a whole finished run: nothing to rank")
    tables = boards.boards(found)
    try:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        boards.write_page(out_file, title, tables, left_out)
        out_file.with_suffix(".md").write_text(boards.markdown(tables), encoding="utf-8", errors="replace")
    except OSError as error:
        raise CwfedError(f"the page {out_file} cannot be written: {error.strerror}") from None
    if as_json:
        print(json.dumps([board.as_dict() for board in tables]))
        return
    for board in tables:
        print_table(boards.terminal(board))
    out.print(boards.EXPLANATION, style="dim italic", highlight=False)
    out.print(f"\nPage: [bold]{escape(str(out_file))}[/bold], table: {escape(str(out_file.with_suffix('.md')))}")


hub = typer.Typer(help="Runs and personal models on the Hugging Face hub (extra hub).", no_args_is_help=True)
app.add_typer(hub, name="hub")
RepoArgument = Annotated[str, typer.Argument(help="The repository: owner/name.")]


@hub.command()
def push(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    repo: RepoArgument,
    models: Annotated[bool, typer.Option(help="With every client's personal model.")] = True,
    public: Annotated[bool, typer.Option("--public", help="A new repository is for everybody to see.")] = False,
) -> None:
    """Put a finished run, with its personal models, into a repository of the hub."""
    from cwfed.runs import hub as pushing

    out.print(escape(pushing.push(run, repo, models=models, private=not public)), highlight=False)


@hub.command()
def pull(
    repo: RepoArgument,
    out_dir: Annotated[Path | None, typer.Option("--out", "-o", help="The run's folder.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit; default: main.")] = None,
) -> None:
    """Get a run from the hub. Its numbers are checked; none of its code is run."""
    from cwfed.runs import hub as pulling

    found = pulling.pull(repo, out_dir or Path("runs") / repo.replace("/", "-"), revision=revision)
    out.print(f"[bold]{escape(str(found))}[/bold]", highlight=False)
