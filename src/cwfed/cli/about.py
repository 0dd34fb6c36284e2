"""cwfed algorithms, cwfed presets, cwfed cost: what there is and what it costs."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from cwfed.cli.app import JsonOption, app
from cwfed.cli.console import attribute_docs, print_table
from cwfed.core.errors import CwfedError
from cwfed.core.terminal import out
from cwfed.report.fitting import FittedTable


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="One algorithm, to be explained.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the algorithms and plug-ins, or explain one (such as fedavg+prior): its equations and settings."""
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
        table = FittedTable(("name", "what it does", "reported on"), words=("what it does", "reported on"))
        for key, facts in sorted(described.items()):
            table.add_row(key, facts["what"], facts["reported_on"])
        print_table(table)
        plugins = FittedTable(
            ("plug-in", "what it adds, as in fedavg+prior"), words=("what it adds, as in fedavg+prior",)
        )
        for key, plugin in sorted(known.PLUGINS.items()):
            plugins.add_row(f"+{key}", (plugin.__doc__ or "").split("\n")[0])
        print_table(plugins)
        return
    cls, facts = classes[name], described[name]
    docs = (inspect.getdoc(sys.modules[part.__module__]) or "" for part in known.parts_of(cls))
    out.print("\n\n".join(docs), markup=False, highlight=False)
    out.print(
        f"\nTravels: {facts['travels']}.\nCosts: {facts['costs']}.\nReported on: {facts['reported_on']}.\n",
        highlight=False,
    )
    if fields := dataclasses.fields(cls):
        table = FittedTable(("setting", "default", "meaning"), words=("meaning",))
        meanings, default = attribute_docs(cls), known.build(name)
        for f in fields:
            table.add_row(
                f"algorithm.{known.setting(f.name)}",
                str(getattr(default, f.name)),
                meanings.get(f.name, ""),
            )
        print_table(table)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="One preset, such as digits/fedavg: as a config file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List tuned settings that come with cwfed, and how they were found; each can be run: cwfed run preset:NAME."""
    import dataclasses

    from cwfed.federation import preset

    chosen = [preset.find(name)] if name else list(preset.shipped().values())
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in chosen]))
        return
    if name:
        print(chosen[0].to_toml(), end="")
        return
    header = ("preset", "settings", "validation", "test", "tried", "seeds")
    caption = (
        "validation: accuracy on held-out training data, which alone decided; test: accuracy in that round. "
        "cwfed presets NAME says how one was found, cwfed run preset:NAME runs it."
    )
    table = FittedTable(header, words=("settings",), caption=caption)
    for one in chosen:
        best, count = one.best, len(one.tried) + len(one.failed)
        table.add_row(one.name, best.label, best.held_out, f"{best.test:.2f} %", str(count), str(len(one.seeds)))
    print_table(table)


@app.command()
def cost(
    model: Annotated[str, typer.Option(help="cnn, resnet18, fasttext, mlp or module:function.")] = "resnet18",
    classes: Annotated[int, typer.Option(help="K, the number of classes.", min=2)] = 10,
    clients: Annotated[int, typer.Option(help="M, the number of clients.", min=1)] = 20,
    participants: Annotated[int, typer.Option(help="Clients in a round; 0: all.", min=0)] = 0,
    shape: Annotated[str, typer.Option(help="One sample: 3x32x32 for images, 100 for vectors or words.")] = "3x32x32",
    vocabulary: Annotated[int, typer.Option(help="For text: the number of words.", min=0)] = 0,
    algorithms: Annotated[
        str,
        typer.Option(
            "--algorithms",
            "-a",
            help="Names, separated by commas, such as fedavg+owners or fedfomo:m=5; default: all.",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show what each method costs: numbers that the server stores, and numbers that are sent in a round."""
    import dataclasses

    from cwfed.algorithms import ALGORITHMS
    from cwfed.federation.config import Config
    from cwfed.federation.cost import costs
    from cwfed.models import InputShape
    from cwfed.runs.compare import parse_entries

    try:
        dims = tuple(int(part) for part in shape.split("x"))
    except ValueError:
        raise CwfedError(f"--shape {shape!r} must look like 3x32x32 or 100") from None
    if min(dims) < 1 or len(dims) not in (1, 3):
        raise CwfedError(f"--shape {shape!r} must look like 3x32x32 or 100")
    if participants > clients:
        raise CwfedError(f"--participants {participants}, but there are only {clients} clients")
    rows = []
    for entry in parse_entries(algorithms or ",".join(ALGORITHMS), Config()):
        sizes = (model, InputShape(dims, vocabulary), classes, clients, participants or clients)
        told = entry.label.removeprefix(entry.settings["name"])
        rows += [dataclasses.replace(row, method=row.method + told) for row in costs(*sizes, {}, [entry.settings])]
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    title = f"{model}, {classes} classes, {participants or clients:,} of {clients:,} clients (numbers of 4 bytes)"
    header = ("method", "server, millions", "down, millions a round", "up, millions a round", "note")
    table = FittedTable(header, words=("note",), title=title)
    for row in rows:
        table.add_row(row.method, *(f"{n / 1e6:,.2f}" for n in (row.server, row.down, row.up)), row.note)
    print_table(table)
