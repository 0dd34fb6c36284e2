"""cwfed privacy: what the server could learn about its clients' classes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from cwfed.cli.app import JsonOption, app
from cwfed.cli.console import print_table
from cwfed.cli.report import RunsArgument
from cwfed.core.errors import CwfedError, RunError
from cwfed.core.terminal import err, escape, out
from cwfed.report.fitting import FittedTable


@app.command()
def privacy(
    runs: RunsArgument,
    out_dir: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for a picture and tables of all rounds.")
    ] = None,
    formats: Annotated[str, typer.Option(help="Of the picture: png, pdf, svg; separated by commas.")] = "png,svg",
    as_json: JsonOption = False,
) -> None:
    """Measure how well the server can rebuild each client's class counts from what it received, round by round."""
    from cwfed.report import audit as auditing
    from cwfed.report import drawing, finished

    wanted = [ending.strip() for ending in formats.split(",")]
    drawing.check_formats(wanted)
    records, left_out = finished.collect(runs)
    lines, silent = auditing.audit(records)
    for folder in [*left_out, *silent]:
        err.print(f"left out: {escape(str(folder.path))}: {escape(folder.why)}", highlight=False, soft_wrap=True)
    if not lines:
        raise RunError("none of these folders holds a finished run that can be audited")
    if out_dir:
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            (out_dir / "privacy.csv").write_text(auditing.as_csv(lines), encoding="utf-8")
            (out_dir / "privacy.md").write_text(auditing.markdown(auditing.some_rounds(lines)), encoding="utf-8")
            drawing.save(auditing.picture(records), out_dir / "privacy", wanted)
        except OSError as error:
            raise CwfedError(f"{out_dir} cannot be written: {error.strerror}") from None
    if as_json:
        print(json.dumps([dataclasses.asdict(line) for line in lines]))
        return
    table = FittedTable(auditing.HEADER, names=("estimate", "round"), caption=auditing.EXPLANATION)
    for line in auditing.some_rounds(lines):
        table.add_row(*line.cells())
    print_table(table)
    if out_dir:
        files = ", ".join(["privacy.md", "privacy.csv", *(f"privacy.{ending}" for ending in wanted)])
        out.print(f"[bold]{escape(str(out_dir))}[/bold]: {files}", highlight=False)
