"""Errors whose message is one sentence that the user can read as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

MOST_TEXT = 2000
"""The most characters of a sentence that may contain text from outside."""
MOST_NAME = 100
"""The most characters of a name: a class, a column, a folder."""
MOST_NAMES = 100
"""The most names that a sentence lists."""
_JOINERS = "\u200c\u200d"
"""Characters that are not printable by themselves, but that Persian, Hindi and emoji need."""


def plain(text: str, most: int = MOST_TEXT, keep: str = "") -> str:
    """Text from outside, made safe for a terminal, a log or an event: one line, no control characters, limited length.

    A text that is too long loses its middle, so that both the problem and the advice stay.

    >>> plain("red \\x1b[31m and\\na line")
    'red �[31m and a line'
    >>> plain("0123456789", 7)
    '01 … 89'
    """
    if len(text) > most:
        head = (most - 3) * 2 // 3
        text = f"{text[:head]} … {text[len(text) - (most - 3 - head) :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep or c in _JOINERS else " " if c.isspace() else "�" for c in text)


class CwfedError(Exception):
    """Something the user can fix; the command line prints it without a traceback.

    The sentence may contain text from outside (names of columns or tensors, a node's reason), so it is passed through `plain`.

    Examples:
        >>> import cwfed
        >>> try:
        ...     cwfed.load_config(settings="train.rouns=3")
        ... except cwfed.CwfedError as error:
        ...     print(error)
        unknown setting train.rouns: did you mean rounds?
    """

    def __init__(self, sentence: object = "") -> None:
        super().__init__(plain(str(sentence)))


class ConfigError(CwfedError):
    """A setting is unknown, impossible or contradicts another."""


class DataError(CwfedError):
    """A data set is missing, damaged or does not have the shape it should have."""


class RunError(CwfedError):
    """A run cannot start, be continued or be read: the folder is in use, the checkpoint is another run's, the training diverged."""


class WorkerLost(RunError):
    """A worker process has ended by itself; the rounds before are intact, and the run can be resumed."""


class GivenUp(RunError):
    """A run is given up because every update was refused for several rounds, mostly because the training diverged."""


class Interrupted(CwfedError):
    """Ctrl-C, with a sentence about how to continue."""


class StopRun(Exception):
    """Raised by a listener (`on_event`): the run stops after this round, cleanly; with a folder it can be resumed.

    It is not an error: `cwfed.run` returns the result of the rounds that are done, with the reason in `stopped`.

    Examples:
        >>> import cwfed
        >>> def listener(event):
        ...     if isinstance(event, cwfed.Round) and event.round == 1:
        ...         raise cwfed.StopRun("far enough")
        >>> settings = {"train": {"rounds": 9, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}}
        >>> cwfed.run(settings, on_event=listener).stopped
        'far enough'
    """

    def __init__(self, reason: object = "a listener stopped the run") -> None:
        super().__init__(plain(str(reason)))


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string_type": "a text",
    "list_type": 'a list, such as ["a", "b"]',
    "model": "a section, with settings of its own",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "literal_error": "{expected}",
}
"""What a value must be, by how the type of pydantic's error begins."""


def reason(error: Mapping[str, Any]) -> str:
    """Why a setting cannot have a value, from what pydantic says.

    >>> reason({"type": "greater_than", "ctx": {"gt": 0}, "msg": "Input should be greater than 0"})
    'it must be above 0'
    """
    wanted = next((words for kind, words in _WANTED.items() if error["type"].startswith(kind)), "")
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"it must be {wanted.format(**error.get('ctx', {}))}" if wanted else message[:1].lower() + message[1:]


class RenamedSetting(FutureWarning):
    """A setting was given by its former name, which still works; the command line prints it as a note."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error sentence about an unknown name: the nearest names, or all of them.

    >>> did_you_mean("fedvag", ["fedavg", "local"])
    'did you mean fedavg?'
    >>> did_you_mean("heat", ["heatmaps-a", "heatmaps-b", "memory"])
    'did you mean heatmaps-a or heatmaps-b?'
    """
    names = sorted(plain(name, MOST_NAME) for name in known)
    word = word[:MOST_NAME]
    near = [name for name in names if word and word in name][:3] or get_close_matches(
        word, names[: 10 * MOST_NAMES], n=3, cutoff=0.5
    )
    if near:
        return f"did you mean {' or '.join(near)}?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"known: {', '.join(names[:MOST_NAMES])}{more}"
