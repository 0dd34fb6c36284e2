"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cwfed.console import attribute_docs, err, out, print_bench, print_heat_map, print_summary, progress
from cwfed.errors import CwfedError, Interrupted

if TYPE_CHECKING:
    from cwfed.config import Config


app = typer.Typer(
    help="Personalised federated learning around class-wise federated averaging (cwFedAvg).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Data sets: what there is, who holds what, decode ahead of time.", no_args_is_help=True)
app.add_typer(data_app, name="data")

ConfigArgument = Annotated[Path | None, typer.Argument(help="A config file (TOML); none is the digits experiment.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Change a setting: section.key=value. May be repeated.")
]
DataDirOption = Annotated[
    str | None,
    typer.Option(help="A folder with the hub's parquet files, one folder per hub name.", envvar="CWFED_DATA"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command()
def run(
    config: ConfigArgument = None,
    set_: SetOption = None,
    out_dir: Annotated[Path | None, typer.Option("--out", "-o", help="The run's folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one experiment and leave its folder."""
    from cwfed import session

    if resume and out_dir is None:
        raise CwfedError("--resume needs the folder of the run: --out DIR")
    settings = set_ or []
    chosen = None
    if not (resume and config is None and not settings):
        chosen = _load(config, settings, out_dir if resume and config is None else None)
    folder = out_dir or _free_folder(chosen)
    with progress(folder, f"go on with: cwfed run --resume --out {folder}") as watch:
        summary = session.run(chosen, folder, resume=resume, data_dir=data_dir, on_event=watch("run"))
    if as_json:
        print(json.dumps(summary))
        return
    print_summary(summary)
    out.print(
        f"\nEverything is in [bold]{escape(str(folder))}[/bold]: summary.json, config.toml, events.jsonl, models"
    )


@app.command()
def bench(
    workloads: Annotated[list[str] | None, typer.Argument(help="Which workloads; none is all.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less data and fewer repeats: within three minutes.")
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", "-o", help="Where bench.json and bench.png go.")] = Path("bench"),
    as_json: JsonOption = False,
) -> None:
    """Measure the engines side by side with published-style code: ratios, JSON, one picture."""
    from cwfed import benchmark

    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CwfedError(f"--out {out_dir} cannot be made: {error.strerror}") from None
    with err.status("starting") as status:
        result = benchmark.bench(workloads or (), quick, tell=lambda title: status.update(f"measuring {title}"))
    (out_dir / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    benchmark.picture(result, out_dir / "bench.png")
    if as_json:
        print(json.dumps(result))
        return
    print_bench(result)
    out.print(f"\nThe numbers are in [bold]{escape(str(out_dir / 'bench.json'))}[/bold], the picture beside them")


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
    as_json: JsonOption = False,
) -> None:
    """Run several algorithms and seeds; one table, one page. Finished runs are reused, broken-off ones go on."""
    rows = _compare(_load(config, set_ or []), algorithms, seeds, out_dir, data_dir, as_json)
    if as_json:
        print(json.dumps(rows))


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs and the report.")] = Path("demo"),
) -> None:
    """FedAvg against cwFedAvg on the digits inside scikit-learn: about a minute, a table and a page."""
    from cwfed import config as configs

    out.print(
        "20 clients, each holding two of the ten digits. FedAvg gives everybody the same model; cwFedAvg averages\n"
        "once per class and mixes the class models by each client's class distribution, read from its weights.\n"
    )
    settings = ["train.rounds=40", "train.lr=0.05"]
    _compare(configs.load(None, settings), "fedavg,cwfedavg", "0", out_dir, None, False)


@data_app.command("list")
def data_list(as_json: JsonOption = False) -> None:
    """The data sets that have a name."""
    from cwfed.data.sources import HUB

    named = [("digits", "inside scikit-learn", "images 8 x 8, always there")]
    named += [(name, hub.repository, "text" if hub.text else "images") for name, hub in HUB.items()]
    if as_json:
        print(json.dumps([{"name": name, "from": origin, "kind": kind} for name, origin, kind in named]))
        return
    table = Table("name", "from", "kind")
    for row in named:
        table.add_row(*row)
    table.add_row(
        "hub", "data.path = a hub name or a folder of parquet files", "data.image_column or data.text_column"
    )
    table.add_row("imagefolder", "data.path/class/image.png", "images")
    table.add_row("csv", "data.path, columns text and label", "text")
    table.add_row("pfllib", "data.path/train/0.npz ...", "PFLlib's layout, its own split")
    table.add_row("module:function", "your code, returns (inputs, labels)", "anything")
    out.print(table)


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
    """Who holds what: samples of each class at each client."""
    from cwfed import data

    chosen = _load(config, set_ or [])
    dataset = data.load(chosen.data.source(), data_dir)
    federation = data.share_out(
        dataset, chosen.partition_spec(), chosen.run.seed, chosen.data.validation, chosen.data.samples
    )
    histogram = federation.histogram()
    if picture and not picture.suffix:
        raise CwfedError(f"the picture {picture} needs an ending: .png, .svg or .pdf")
    if picture:
        from cwfed.report import figures

        try:
            figures.distribution(histogram, picture, f"{dataset.name}, seed {chosen.run.seed}")
        except (OSError, ValueError) as error:
            raise CwfedError(f"the picture {picture} cannot be written: {error}") from None
    if as_json:
        sizes = [[len(s.train), len(s.validation), len(s.test)] for s in federation.shards]
        print(json.dumps({"histogram": histogram.tolist(), "sizes": sizes, "classes": dataset.class_names}))
        return
    print_heat_map(histogram.tolist(), dataset.class_names, dataset.name)
    nobody = [name for name, held in zip(dataset.class_names, histogram.sum(0), strict=True) if not held]
    if nobody:
        out.print(f"Held by nobody: {escape(', '.join(nobody))}")
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


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="One algorithm, to be explained.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The algorithms, or one of them: its equations and settings."""
    import dataclasses
    import inspect

    from cwfed import algorithms as known

    classes = known.ALGORITHMS if name is None else {name: known.find(name)}
    described: dict[str, dict[str, Any]] = {
        key: {
            "what": (cls.__doc__ or "").split("\n")[0],
            "reported_on": cls.phase,
            "travels": cls.travels,
            "costs": cls.work,
            "settings": known.describe(known.build(key), key),
        }
        for key, cls in classes.items()
    }
    if as_json:
        print(json.dumps(described))
        return
    if name is None:
        table = Table("name", "what it does", "reported on")
        for key, facts in described.items():
            table.add_row(key, facts["what"], facts["reported_on"])
        out.print(table)
        return
    cls, facts = classes[name], described[name]
    out.print(inspect.getdoc(sys.modules[cls.__module__]), markup=False, highlight=False)
    out.print(
        f"\nTravels: {facts['travels']}.\nCosts: {facts['costs']}.\nReported on: {facts['reported_on']}.\n",
        highlight=False,
    )
    if fields := dataclasses.fields(cls):
        table = Table("setting", "default", "meaning")
        meanings, default = attribute_docs(cls), known.build(name)
        for f in fields:
            table.add_row(
                f"algorithm.{known.setting(f.name)}",
                escape(str(getattr(default, f.name))),
                escape(meanings.get(f.name, "")),
            )
        out.print(table)


@app.command()
def cost(
    model: Annotated[str, typer.Option(help="cnn, resnet18, fasttext, mlp or module:function.")] = "resnet18",
    classes: Annotated[int, typer.Option(help="K, the number of classes.", min=2)] = 10,
    clients: Annotated[int, typer.Option(help="M, the number of clients.", min=1)] = 20,
    participants: Annotated[int, typer.Option(help="Clients in a round; 0 is all.", min=0)] = 0,
    shape: Annotated[str, typer.Option(help="One sample: 3x32x32 for images, 100 for vectors or words.")] = "3x32x32",
    vocabulary: Annotated[int, typer.Option(help="For text: the number of words.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """What each method costs: numbers the server stores and numbers that travel in a round."""
    import dataclasses

    from cwfed.cost import costs
    from cwfed.models import InputShape

    try:
        dims = tuple(int(part) for part in shape.split("x"))
    except ValueError:
        raise CwfedError(f"--shape {shape!r} must look like 3x32x32 or 100") from None
    if min(dims) < 1 or len(dims) not in (1, 3):
        raise CwfedError(f"--shape {shape!r} must look like 3x32x32 or 100")
    if participants > clients:
        raise CwfedError(f"--participants {participants}, but there are only {clients} clients")
    rows = costs(model, InputShape(dims, vocabulary), classes, clients, participants or clients, {})
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    table = Table("method", "server, millions", "down, millions a round", "up, millions a round", "")
    table.title = f"{model}, {classes} classes, {participants or clients} of {clients} clients (numbers of 4 bytes)"
    for row in rows:
        table.add_row(row.method, *(f"{n / 1e6:,.2f}" for n in (row.server, row.down, row.up)), row.note)
    out.print(table)


def main() -> None:
    """The console script: errors are one sentence on stderr and a non-zero exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except Interrupted as interrupt:
        err.print(f"interrupted: {escape(str(interrupt))}", highlight=False, soft_wrap=True)
        sys.exit(130)
    except CwfedError as error:
        err.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


# --- helpers ---------------------------------------------------------------------------------------------


def _load(path: Path | None, settings: list[str], resumed: Path | None = None) -> Config:
    """The config of a file, or of the run that is resumed, with settings on top."""
    from cwfed import config as configs
    from cwfed.folder import RunFolder

    if resumed and RunFolder(resumed).exists:
        return configs.with_settings(RunFolder(resumed).config(), settings)
    return configs.load(path, settings)


def _free_folder(config: Config | None) -> Path:
    """runs/<data>-<algorithm>-<seed>, numbered where that is taken."""
    assert config is not None
    name = f"{config.data.name}-{config.algorithm_name}-{config.run.seed}".replace(":", "-").replace("/", "-")
    base = Path("runs") / name
    candidates = (base, *(base.with_name(f"{name}.{i}") for i in range(2, 100_000)))
    return next(path for path in candidates if not path.exists())


def _compare(
    config: Config, names: str, seeds: str, folder: Path, data_dir: str | None, quiet: bool
) -> list[dict[str, Any]]:
    from cwfed import compare as comparing
    from cwfed.report import figures, page, tables
    from cwfed.report.runs import read_run

    entries, numbers = comparing.parse_entries(names, config), comparing.parse_seeds(seeds)
    with progress(folder, "the same command goes on with it") as watch:
        rows = comparing.compare(
            config,
            entries,
            numbers,
            folder,
            data_dir=data_dir,
            on_run=lambda label, seed: watch(label if len(numbers) == 1 else f"{label}, seed {seed}"),
        )
    title = f"{config.data.name}, {config.data.partition}, {config.data.clients} clients"
    records = [read_run(row["runs"][0], row["label"]) for row in rows]
    (folder / "comparison.json").write_text(json.dumps(rows, indent=1))
    (folder / "comparison.md").write_text(tables.markdown(rows))
    page.write(folder / "report.html", title, rows, records)
    figures.overview(records, folder / "overview.png")
    if not quiet:
        out.print(tables.terminal(rows, title))
        where = escape(str(folder))
        out.print(
            f"\nReport: [bold]{where}/report.html[/bold], picture: {where}/overview.png, table: {where}/comparison.md"
        )
    return rows
