"""What goes wrong, said in one sentence: every error here is meant to be read by the user as it is."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class CwfedError(Exception):
    """Something the user can mend; the command line prints it without a traceback."""


class ConfigError(CwfedError):
    """A setting is unknown, impossible or contradicts another."""


class DataError(CwfedError):
    """A data set is missing, damaged or does not have the shape it should have."""


class RunError(CwfedError):
    """A run cannot start, go on or be read: folder in use, foreign checkpoint, diverged training."""


class Interrupted(CwfedError):
    """Ctrl-C, with a word on how to go on."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error sentence about an unknown name: the nearest names, or all of them.

    >>> did_you_mean("fedvag", ["fedavg", "local"])
    'did you mean fedavg?'
    >>> did_you_mean("heat", ["heatmaps-a", "heatmaps-b", "memory"])
    'did you mean heatmaps-a or heatmaps-b?'
    """
    names = sorted(known)
    near = [name for name in names if word and word in name][:3] or get_close_matches(word, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
