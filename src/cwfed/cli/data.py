"""cwfed data: what there is, who holds what, decode ahead of time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cwfed.cli.app import ConfigArgument, DataDirOption, JsonOption, SetOption, app, load_config
from cwfed.cli.console import print_heat_map, print_table
from cwfed.core.errors import CwfedError
from cwfed.core.terminal import err, escape, out
from cwfed.report.fitting import FittedTable

data_app = typer.Typer(help="Data sets: what there is, who holds what, decode ahead of time.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list(as_json: JsonOption = False) -> None:
    """List the data sets that have a name."""
    from cwfed.data.from_hub import HUB

    named = [("digits", "inside scikit-learn", "images 8 x 8, always there")]
    named += [(name, hub.repository, "text" if hub.text else "images") for name, hub in HUB.items()]
    if as_json:
        print(json.dumps([{"name": name, "from": origin, "kind": kind} for name, origin, kind in named]))
        return
    table = FittedTable(("name", "from", "kind"), words=("from", "kind"))
    for row in named:
        table.add_row(*row)
    table.add_row(
        "hub",
        "data.path = a hub name or a folder of parquet files",
        "data.image_column, data.text_column or data.feature_columns",
    )
    table.add_row("imagefolder", "data.path/class/image.png", "images")
    table.add_row("csv", "data.path, columns text and label, or data.feature_columns", "text, or vectors")
    table.add_row("pfllib", "data.path/train/0.npz ...", "PFLlib's layout, its own split")
    table.add_row("arrays", "data.path, as cwfed data export writes it", "anything, one client's with its split")
    table.add_row("module:function", "your code, returns (inputs, labels)", "anything")
    print_table(table)


@data_app.command("show")
def data_show(
    config: ConfigArgument = None,
    set_: SetOption = None,
    picture: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also draw it: a .png, .svg or .pdf file.")
    ] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which client holds what: samples of each class at each client."""
    from cwfed.data import missing_data
    from cwfed.federation.experiment import deal

    chosen = load_config(config, set_ or [])
    federation = deal(chosen, data_dir)
    dataset = federation.data
    histogram = federation.histogram()
    clients = list(federation.names) or [str(client) for client in federation.shards]
    shifts = list(federation.shifts.values())
    if picture and not picture.suffix:
        raise CwfedError(f"the picture {picture} needs a file extension: .png, .svg or .pdf")
    if picture:
        from cwfed.report import drawing, heatmaps

        rows = [f"{client}, {shift}" for client, shift in zip(clients, shifts, strict=True)] if shifts else clients
        title = f"{dataset.name}, {chosen.data.how_split()}, seed {chosen.split_seed}"
        drawn = heatmaps.distribution(histogram, title, dataset.class_names, rows)
        try:
            drawing.save(drawn, picture.with_suffix(""), [picture.suffix[1:]])
        except OSError as error:
            raise CwfedError(f"the picture {picture} cannot be written: {error.strerror or error}") from None
    if as_json:
        sizes = [[len(s.train), len(s.validation), len(s.test)] for s in federation.shards.values()]
        facts = {"histogram": histogram.tolist(), "sizes": sizes, "classes": dataset.class_names}
        print(json.dumps(facts | {"clients": clients, "shifts": shifts}))
        return
    print_heat_map(histogram.tolist(), dataset.class_names, dataset.name, clients, shifts)
    samples, settings = chosen.data.samples or len(dataset.labels), chosen.data
    for note in missing_data(federation, list(federation.shards), samples, settings.room, settings.validation):
        out.print(f"note: {escape(note)}", highlight=False)
    if picture:
        out.print(f"Drawn in {escape(str(picture))}")


@data_app.command("prepare")
def data_prepare(
    names: Annotated[list[str], typer.Argument(help="Names of data sets.")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decode data sets into the cache, so that runs start at once."""
    from cwfed import data

    for name in names:
        with err.status(f"decoding {name}"):
            found = data.load(data.SourceSpec(name), data_dir)
        if as_json:
            facts = {"samples": len(found.labels), "shape": found.inputs.shape[1:], "classes": found.classes}
            print(json.dumps({"name": name, **facts, "digest": found.digest}))
            continue
        shape = " x ".join(map(str, found.inputs.shape[1:]))
        out.print(f"{name}: {len(found.labels):,} samples of {shape}, {found.classes} classes, {found.digest[:12]}")


@data_app.command("export")
def data_export(
    config: ConfigArgument = None,
    set_: SetOption = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Gets a folder for each client.")] = Path("nodes"),
    layout: Annotated[
        str, typer.Option(help="nodes: for a federation, a folder for each client; pfllib: all in PFLlib's layout.")
    ] = "nodes",
    data_dir: DataDirOption = None,
) -> None:
    """Write each client's share into a folder of its own, for the nodes of a real federation; or the whole split for PFLlib."""
    from cwfed import data
    from cwfed.federation.experiment import deal

    if layout not in ("nodes", "pfllib"):
        raise CwfedError(f"--layout {layout!r} is not known: it is nodes or pfllib")
    dealt = deal(load_config(config, set_ or []), data_dir)
    if layout == "pfllib":
        data.pfllib.write(dealt, folder)
        out.print(
            f"{len(dealt):,} clients in {escape(str(folder))}, as PFLlib reads them: dataset/{escape(folder.name)}"
        )
        return
    written = data.export(dealt, folder)
    out.print(f"{len(written):,} clients in {escape(str(folder))}, from {written[0].name} to {written[-1].name}")
