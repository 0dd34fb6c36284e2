"""cwfed flower: the same algorithms in a real federation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cwfed.cli.app import ConfigArgument, DataDirOption, JsonOption, SetOption, app, load_config
from cwfed.cli.console import print_summary
from cwfed.cli.progress import progress
from cwfed.core.errors import CwfedError, Interrupted
from cwfed.core.terminal import err, escape, out

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
    most_samples: Annotated[
        int, typer.Option(min=1, help="Training samples that a client may claim: those of your largest one.")
    ] = 10_000,
) -> None:
    """Write a Flower app that is ready for `flwr run`, with guards against clients that are not trusted."""
    from cwfed.federation.settings import flat
    from cwfed.flower.plan import Plan
    from cwfed.flower.project import with_most_samples, write_project

    settings = set_ or []
    if config is None:  # the digits, as in the demo: a first run takes a minute
        settings = ["train.rounds=10", "train.lr=0.05", "run.checkpoint_seconds=0", *settings]
    chosen = with_most_samples(load_config(config, settings), most_samples)
    table = {
        "federation.shape": shape,
        "federation.classes": classes,
        "federation.nodes": nodes,
        "federation.clients": max(100, 2 * nodes),
        "federation.pin": True,
        "federation.out": f"~/.cwfed/{folder.resolve().name}",
    }
    settled = flat(chosen.model_dump()) | table
    if "norm_bound" not in chosen.guard.model_fields_set:
        del settled["guard.norm_bound"]  # a federation's default is another one than a simulation's
    write_project(folder, Plan.of(settled))
    where = escape(str(folder))
    out.print(f"Written: [bold]{where}[/bold]. Its README says how to run it; the settings are in pyproject.toml")
    out.print(
        f"A client may claim at most {chosen.guard.most_samples:,} training samples (guard.most_samples): the number of your "
        "largest one is best"
    )


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

    Ctrl-C ends all of them; the same command resumes what was done, and so does one with --out alone.
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
    from cwfed.runs.folder import RunFolder

    print_summary(RunFolder(folder / "server").summary())
    where = escape(str(folder))
    out.print(f"\nThe server's run folder is [bold]{where}/server[/bold], the personal models are in {where}/state")


def _run(federation: LocalFederation, names: list[str]) -> str:
    """Everything up, one run, everything down; what went wrong."""
    folder = federation.folder / "server"
    with progress(folder, "the same command resumes it") as watch:
        try:
            err.print(f"starting the SuperLink and {len(names)} nodes", style="dim")
            federation.start_superlink()
            for name in names:
                federation.register(name)
                federation.start_node(name)
            return federation.follow(federation.submit(), watch("federation"))
        except KeyboardInterrupt:
            raise Interrupted(
                f"the federation in {federation.folder} was ended; the same command resumes it"
            ) from None
        finally:
            federation.close()


# --- a real federation, by the folders that `deploy` writes

ServerArgument = Annotated[Path, typer.Argument(help="The server's folder.")]
NodeArgument = Annotated[Path, typer.Argument(help="The node's folder.")]
DeploymentArgument = Annotated[Path, typer.Argument(help="The folder that cwfed flower deploy wrote.")]
NameArgument = Annotated[str, typer.Argument(help="The node's name.")]


@flower_app.command("deploy")
def flower_deploy(
    project: Annotated[Path, typer.Argument(help="The Flower app, as cwfed flower new writes it.")],
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where the folders go.")],
    server: Annotated[str, typer.Option(help="Where nodes reach the server, HOST:PORT.")],
    node: Annotated[list[str], typer.Option(help="A node's name. May be repeated.")],
    control: Annotated[int, typer.Option(help="The SuperLink's port, which only the server itself reaches.")] = 9093,
) -> None:
    """Write what a real federation needs: keys, certificates, a folder for the server and for every node."""
    from cwfed.flower.deploy import deploy

    deploy(project, folder, server, node, control)
    where = escape(str(folder))
    out.print(
        f"Written: [bold]{where}[/bold]. server/ goes to the server, nodes/NAME/ to each node (it holds no secret); keep "
        "authority/ where neither is"
    )


@flower_app.command("key")
def flower_key(folder: NodeArgument) -> None:
    """Make a node's key, or replace it; send the public key to the server's operator."""
    from cwfed.flower.service import Node

    node = Node(folder)
    public = node.new_key()
    out.print(
        f"Send [bold]{escape(str(public))}[/bold] to the server's operator, who admits it as {node.settings.name}"
    )


@flower_app.command("admit")
def flower_admit(
    folder: ServerArgument, name: NameArgument, key: Annotated[Path, typer.Argument(help="Its public key.")]
) -> None:
    """Let a node take part under a name; a new key replaces the one that it had."""
    from cwfed.flower.service import Server

    replaced = Server(folder).admit(name, key)
    out.print(f"{name} is admitted{' with its new key; the old one is refused from now on' if replaced else ''}")


@flower_app.command("exclude")
def flower_exclude(folder: ServerArgument, name: NameArgument) -> None:
    """Exclude a node: its key is refused from now on."""
    from cwfed.flower.service import Server

    Server(folder).exclude(name)
    out.print(
        f"{name} is excluded; what it sent stays in the models: cwfed flower rollback goes back to a round before"
    )


@flower_app.command("sign")
def flower_sign(folder: DeploymentArgument) -> None:
    """Sign the app in server/app as it is now, so that nodes run it."""
    from cwfed.flower.deploy import sign

    out.print(f"Nodes will run the app {sign(folder)[:16]}")


@flower_app.command("certify")
def flower_certify(folder: DeploymentArgument) -> None:
    """Make a new certificate and key for the server, from the same authority; then restart the server."""
    from cwfed.flower.deploy import certify

    certify(folder)
    out.print("The server has a new certificate: restart cwfed flower serve")


@flower_app.command("serve")
def flower_serve(folder: ServerArgument) -> None:
    """Run the server: the SuperLink on the loopback, the gate for nodes, the run. Programs that die are restarted."""
    from cwfed.flower import logs
    from cwfed.flower.service import Server

    logs.show()
    _until_ended(Server(folder).keep, "the server was ended; a run that was under way is resumed by the same command")


@flower_app.command("join")
def flower_join(folder: NodeArgument) -> None:
    """Run a node, which runs signed apps only; programs that die are restarted."""
    from cwfed.flower import logs
    from cwfed.flower.service import Node

    logs.show()
    _until_ended(Node(folder).keep, "the node was ended")


@flower_app.command("unit")
def flower_unit(folder: Annotated[Path, typer.Argument(help="The server's folder, or a node's.")]) -> None:
    """Print a systemd unit that runs this server or node on this machine, and restarts it if it ends."""
    from cwfed.flower.service import unit

    print(unit(folder), end="")


@flower_app.command("start")
def flower_start(folder: ServerArgument) -> None:
    """Start the federation, or resume it, until its rounds are done."""
    from cwfed.flower.service import Server

    Server(folder).want()
    out.print("The federation is started; cwfed flower status says how it is")


@flower_app.command("stop")
def flower_stop(folder: ServerArgument) -> None:
    """Stop the run; the rounds that are done stay."""
    from cwfed.flower.service import Server

    server = Server(folder)
    server.want_no_longer()
    server.wait_for_end()
    out.print("The run has ended; cwfed flower start resumes it")


@flower_app.command("status")
def flower_status(folder: ServerArgument, as_json: JsonOption = False) -> None:
    """Show the state of a federation. The exit code is 1 if its operator must do something."""
    from cwfed.flower.service import Server
    from cwfed.flower.status import health

    found = health(Server(folder))
    if as_json:
        print(json.dumps(found.table(), indent=1))
    else:
        for line in found.lines():
            out.print(escape(line), soft_wrap=True)
    if found.problems:
        raise typer.Exit(1)


@flower_app.command("rollback")
def flower_rollback(
    folder: Annotated[Path, typer.Argument(help="The server's folder, or any run folder.")],
    round_: Annotated[int, typer.Option("--round", min=0, help="The round to go back to.")],
) -> None:
    """Go back to the checkpoint of a round, from which the run will continue; later files are moved aside."""
    from cwfed.runs.folder import RunFolder

    run = RunFolder(folder / "run" if (folder / "server.toml").exists() else folder)
    with run.locked():
        aside = run.rollback(round_)
    out.print(f"The run is after round {round_} again; what came since is in {escape(str(aside))}", soft_wrap=True)


def _until_ended(work: Callable[[], None], said: str) -> None:
    try:
        work()
    except KeyboardInterrupt:
        raise Interrupted(said) from None
