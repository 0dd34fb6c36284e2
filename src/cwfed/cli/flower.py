"""cwfed flower: the same algorithms in a real federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cwfed.cli.app import ConfigArgument, DataDirOption, SetOption, app, load_config
from cwfed.console import err, escape, out, print_summary, progress
from cwfed.errors import CwfedError, Interrupted

if TYPE_CHECKING:
    from cwfed.flower.local import LocalFederation

NODES, TIMEOUT = 4, 600.0
"""What `flower up` takes where nothing is said."""

flower_app = typer.Typer(help="Real federations on Flower (extra flower).", no_args_is_help=True)
app.add_typer(flower_app, name="flower")


@flower_app.command("new")
def flower_new(
    folder: Annotated[Path, typer.Argument(help="The project's folder; its name is the app's name.")],
    config: Annotated[Path | None, typer.Option("--config", help="A config file to take the settings from.")] = None,
    set_: SetOption = None,
    shape: Annotated[str, typer.Option(help="The shape of one sample: channels x height x width.")] = "1x8x8",
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    nodes: Annotated[int, typer.Option(help="Nodes that a round needs.")] = 2,
) -> None:
    """Write a Flower app that is ready for `flwr run`."""
    from cwfed.flower.plan import Plan
    from cwfed.flower.project import write_project
    from cwfed.folder import flat

    settings = set_ or []
    if config is None:  # the digits, as in the demo: a first run takes a minute
        settings = ["train.rounds=10", "train.lr=0.05", "run.checkpoint_seconds=0", *settings]
    chosen = load_config(config, settings)
    table = {
        "federation.shape": shape,
        "federation.classes": classes,
        "federation.nodes": nodes,
        "federation.clients": max(100, 2 * nodes),
        "federation.out": f"~/.cwfed/{folder.resolve().name}",
    }
    settled = flat(chosen.model_dump()) | table
    if "norm_bound" not in chosen.guard.model_fields_set:
        del settled["guard.norm_bound"]  # a federation's default is another one than a simulation's
    write_project(folder, Plan.of(settled))
    where = escape(str(folder))
    out.print(f"Written: [bold]{where}[/bold]. Its README says how to run it; the settings are in pyproject.toml")


@flower_app.command("up")
def flower_up(
    config: ConfigArgument = None,
    set_: SetOption = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of nodes, each with its own share of the data.", show_default=str(NODES)),
    ] = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="The federation's folder.")] = Path("federation"),
    timeout: Annotated[
        float | None, typer.Option(help="Seconds a round waits for answers.", show_default=f"{TIMEOUT:g}")
    ] = None,
    data_dir: DataDirOption = None,
) -> None:
    """Try a federation on this machine: a SuperLink and SuperNodes as real processes, with TLS and keys.

    Ctrl-C ends all of them; the same command goes on with what was done, and so does one with --out alone.
    """
    from cwfed.flower.local import LocalFederation, node_name

    if (folder / "app").exists():
        federation = LocalFederation.open(folder)
        chosen = load_config(config, set_ or []) if config or set_ else None
        federation.check_same(chosen, nodes, timeout)
    else:
        with err.status("dealing out the data, making keys"):
            federation = LocalFederation.prepare(
                folder,
                load_config(config, set_ or []),
                NODES if nodes is None else nodes,
                data_dir,
                timeout=TIMEOUT if timeout is None else timeout,
            )
    names = [node_name(number) for number in range(federation.plan.federation.nodes)]
    if problem := _run(federation, names):
        raise CwfedError(f"the run {problem} (more in {folder / 'logs' / 'superlink.log'})")
    from cwfed.folder import RunFolder

    print_summary(RunFolder(folder / "server").read_json("summary.json", "reported"))
    where = escape(str(folder))
    out.print(f"\nThe server's run folder is [bold]{where}/server[/bold], the personal models are in {where}/state")


def _run(federation: LocalFederation, names: list[str]) -> str:
    """Everything up, one run, everything down; what went wrong."""
    folder = federation.folder / "server"
    with progress(folder, "the same command goes on with it") as watch:
        try:
            err.print(f"starting the SuperLink and {len(names)} nodes", style="dim")
            federation.start_superlink()
            for name in names:
                federation.register(name)
                federation.start_node(name)
            return federation.follow(federation.submit(), watch("federation"))
        except KeyboardInterrupt:
            raise Interrupted(
                f"the federation in {federation.folder} was ended; the same command goes on with it"
            ) from None
        finally:
            federation.close()
