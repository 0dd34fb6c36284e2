"""The application that the commands belong to, and the options that several of them share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer.core import TyperGroup

from cwfed import __version__

if TYPE_CHECKING:
    from cwfed.federation.config import Config

PANELS = {
    "Run": ("demo", "run", "compare", "sweep", "reproduce"),
    "Look at runs": ("report", "figures", "runs", "privacy"),
    "Share runs": ("export", "leaderboard", "hub"),
    "What there is": ("algorithms", "presets", "data", "cost", "bench"),
    "Real federations": ("flower",),
}
"""The commands in the order in which a newcomer meets them."""


class Commands(TyperGroup):
    """In the order and under the headings of `PANELS`, not as modules happen to be imported."""

    def list_commands(self, context: click.Context) -> list[str]:
        listed = [name for names in PANELS.values() for name in names]
        return sorted(self.commands, key=lambda name: listed.index(name) if name in listed else len(listed))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        command = super().get_command(context, name)
        for heading, names in PANELS.items():
            if name in names:
                command.rich_help_panel = heading  # type: ignore[union-attr]
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """click's own: it suggests names for a misspelt one, and typer would say them a second time."""
        return click.Group.resolve_command(self, context, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[
    Path | None, typer.Argument(help="A config file (TOML), or preset:NAME; default: the digits experiment.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Change a setting: section.key=value. May be repeated.")
]
DataDirOption = Annotated[
    str | None,
    typer.Option(help="A folder with the hub's parquet files, one folder per hub name.", envvar="CWFED_DATA"),
]
TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        "--track", help="Follow the run live: tensorboard, or wandb or mlflow where installed. May be repeated."
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors on stderr: no bars, lines or notes.")
]
LogOption = Annotated[
    Path | None, typer.Option("--log", help="Add every evaluation, note and error to this file, with the time.")
]
JobsOption = Annotated[
    int,
    typer.Option(
        "--jobs", "-j", min=0, help="Runs side by side, each in a process; 0: one per core, where that saves time."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cwfed {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Personalised federated learning around class-wise federated averaging (cwFedAvg)."""


def load_config(path: Path | None, settings: list[str], resumed: Path | None = None) -> Config:
    """The config of a file, or of the run that is resumed, with settings on top."""
    from cwfed.federation import config as configs
    from cwfed.runs.folder import RunFolder

    if resumed and RunFolder(resumed).exists:
        return configs.with_settings(RunFolder(resumed).config(imports=True), settings)
    return configs.load(path, settings)
