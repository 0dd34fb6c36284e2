"""docs/commands.md: every command with its arguments and options, as `cwfed COMMAND --help` says them.

python tools/commands.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import typer

from cwfed.cli import app

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
HEADER = """\
# Commands

Made by `python tools/commands.py` from the program itself; `cwfed COMMAND --help` says the same. `--set section.key=value` takes every [setting](configuration.md). An error that you can fix is one
sentence on stderr and exit code 1; Ctrl-C is exit code 130.
"""


def commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    """All commands below this one, by what is typed."""
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            if not command.commands[name].hidden:
                yield from commands(command.commands[name], (*words, name))
    else:
        yield " ".join(words), command


def section(name: str, command: click.Command) -> list[str]:
    """One command."""
    context = click.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    help_ = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    lines = [
        f"## {name}",
        "",
        "```sh",
        f"{name} {usage}",
        "```",
        "",
        *(line for part in help_ for line in (part, "")),
    ]
    rows = [row for parameter in command.params if (row := _row(parameter, context))]
    if rows:
        lines += ["| argument, option | default | what |", "|---|---|---|", *rows, ""]
    return lines


def _row(parameter: click.Parameter, context: click.Context) -> str:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return ""
    named = isinstance(parameter, click.Option)
    names = (
        ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if named
        else f"`{parameter.make_metavar(context)}`"
    )
    shown = parameter.default
    is_said = not (callable(shown) or shown is None or shown is False or shown in ("", ()) or "UNSET" in str(shown))
    default = f"`{shown}`" if is_said else ""
    words = " ".join((getattr(parameter, "help", None) or "").split())
    if env := getattr(parameter, "envvar", None):
        words += f" (`{env}` in the environment)"
    return f"| {names} | {default} | {words.replace('|', chr(92) + '|')} |"


def current() -> str:
    """The page as it should be."""
    root = typer.main.get_command(app)
    lines = [line for name, command in commands(root, ("cwfed",)) for line in section(name, command)]
    return HEADER + "\n" + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(current(), encoding="utf-8")
