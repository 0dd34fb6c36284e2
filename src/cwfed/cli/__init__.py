"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from types import FrameType
from typing import Any

from cwfed.cli import about, data, flower, privacy, report, reproduce, run, share, sweep
from cwfed.cli.app import app
from cwfed.core import plugins
from cwfed.core.errors import CwfedError, Interrupted, RenamedSetting, plain
from cwfed.core.terminal import err, escape

__all__ = [
    "about",
    "app",
    "check_text",
    "data",
    "flower",
    "main",
    "privacy",
    "report",
    "reproduce",
    "run",
    "share",
    "sweep",
]

TRACEBACK = "CWFED_TRACEBACK"
"""The variable that has an error in the user's own code shown with its traceback."""


def main() -> None:
    """The console script: errors are one sentence on stderr and a non-zero exit code."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, _interrupt)
    _say_new_names()
    try:
        check_text(sys.argv)
        app()
    except SystemExit as end:
        if end.code == 130:  # typer's way to end after Ctrl-C where a command has nothing to say of it
            err.print("interrupted")
        raise
    except Interrupted as interrupt:
        err.print(f"interrupted: {escape(str(interrupt))}", highlight=False, soft_wrap=True)
        sys.exit(130)
    except CwfedError as error:
        err.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, MemoryError) as error:  # the machine says no, somewhere nobody had a better sentence for it
        err.print(f"[red]error:[/red] {escape(str(error) or 'not enough memory')}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except Exception as error:  # of an algorithm of one's own, say; ours are bugs, and show themselves whole
        if os.environ.get(TRACEBACK) or not plugins.place_in_own_code(error):
            raise
        sentence = f"your code failed: {plugins.why(error)} ({TRACEBACK}=1 shows the whole traceback)"
        err.print(f"[red]error:[/red] {escape(plain(sentence))}", highlight=False, soft_wrap=True)
        sys.exit(1)


def check_text(arguments: list[str]) -> None:
    """Half characters, as Python makes of other encodings, could be neither printed nor written."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise CwfedError(f"the argument {argument!r} is not text in UTF-8") from None


def _say_new_names() -> None:
    """A setting given by its former name is a note, said once; other warnings look as always."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if category is RenamedSetting:
            err.print(f"note: {escape(str(message))}", highlight=False, soft_wrap=True)
        else:
            usual(message, category, *where, **more)

    warnings.simplefilter("once", RenamedSetting)
    warnings.showwarning = show


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C, or an end that is asked for. What is being imported is finished first: torch and others would swallow the exception, or go on
    without half of numpy. Who asks twice does not wait."""
    global _asked
    is_first, _asked = not _asked or number == signal.SIGALRM, True
    while is_first and frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # then it is looked at again
            return
        frame = frame.f_back
    raise KeyboardInterrupt


_asked = False
