"""The look of every picture and page; only here a method gets its colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F6368", "#9B67FA",
    "#AC1F95", "#B62F46", "#32670C", "#2BBE38", "#F578F3", "#A79F7B", "#594DDC", "#0991ED",
    "#837D39", "#8C6AA1", "#F98E88", "#ED4074", "#CC51CB", "#6B93A3", "#C4A1DB", "#A96368",
    "#8F94ED", "#468F07", "#905A32", "#5AB19C", "#9033BD", "#327957", "#F37344", "#FA59AC",
)  # fmt: skip
"""The first eight stay apart without colour vision (six of Okabe and Ito's, a grey and a violet); each of the others is
as far as possible from those before it. All can be seen on white and on the dark page."""
COMMON = 8
METHODS = (
    "fedavg", "cwfedavg", "fedrep", "ditto", "fedala", "fedprox", "local", "fedper",
    "fedavg-ft", "fedfomo", "fedbabu", "fedbn", "apfl", "fedamp", "pfedme", "lg-fedavg",
    "feddbe", "per-fedavg", "cfl", "fedproto", "fedrod", "ifca", "fedcp", "fedas",
    "fednh", "fedcac", "fedpac", "feduv", "gpfl", "scaffold", "moon", "cwrows",
)  # fmt: skip
"""The methods in the order of their colours. A new method comes last, so that the others keep theirs."""
PARTS_OF = {"fedavg+balanced+fedopt+head_first+owners": "cwrows"}
"""Methods that are combinations of plug-ins have one look under both names."""
STROKES = ("-", "--", ":", "-.")
DASHES = ("solid", "dash", "dot", "dashdot")
"""Plotly's names of the strokes."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
SYMBOLS = (
    "circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star", "triangle-left", "triangle-right",
)  # fmt: skip
"""Plotly's names of the markers."""
PARTS = ("#3D4A57", "#A9B4BF", "#6F7F8F", "#D6DCE2", "#8C8474", "#C9C1B1")
"""Colours of the parts of bars, such as bytes up and down: greys, because a colour stands for a method."""
HATCHES = ("", "//", "..", "xx", "--", "||")
SEQUENTIAL = {
    "light": ((0, "#f7fbff"), (0.25, "#c6dbef"), (0.5, "#6baed6"), (0.75, "#2171b5"), (1, "#08306b")),
    "dark": ((0, "#1d2026"), (0.25, "#123f70"), (0.5, "#2f78b7"), (0.75, "#7db6e3"), (1, "#e6f2fd")),
}
"""Nothing has the colour of the page, and more stands out from it more: order can be told without colour."""
DIVERGING = {
    "light": ((0, "#8c510a"), (0.25, "#d8b365"), (0.5, "#f5f5f5"), (0.75, "#5ab4ac"), (1, "#01665e")),
    "dark": ((0, "#f0b866"), (0.25, "#96651d"), (0.5, "#1d2026"), (0.75, "#1f7d74"), (1, "#7ee0d4")),
}
"""Brown below zero, blue-green above; no pair of red and green."""


class Look(NamedTuple):
    """How a method is drawn, as numbers of its colour, its stroke and its marker."""

    colour_number: int
    stroke_number: int
    marker_number: int
    hollow: bool
    """The number of the variant: the method with plug-ins, or with other settings than its plainest variant here."""

    @property
    def colour(self) -> str:
        """The colour, as both matplotlib and plotly write it."""
        return COLOURS[self.colour_number]

    @property
    def stroke(self) -> str:
        """Matplotlib's name."""
        return STROKES[self.stroke_number]

    @property
    def dash(self) -> str:
        """Plotly's name."""
        return DASHES[self.stroke_number]

    @property
    def marker(self) -> str:
        """Matplotlib's name."""
        return MARKERS[self.marker_number]

    @property
    def symbol(self) -> str:
        """Plotly's name."""
        return SYMBOLS[self.marker_number] + ("-open" if self.hollow else "")

    @property
    def face(self) -> str:
        """The fill colour of a marker."""
        return "none" if self.hollow else self.colour


def looks(names: Sequence[str]) -> list[Look]:
    """How each of these methods is drawn. A name has its colour wherever it comes up; where it comes up again (with other
    settings), or has plug-ins, the stroke and the marker are others."""
    taken: set[tuple[int, int]] = set()
    found: dict[int, Look] = {}
    for i in sorted(
        range(len(names)), key=lambda i: names[:i].count(names[i])
    ):  # those that come first keep their own
        colour, variant = _place(names[i])
        while (colour, variant) in taken:
            variant += 1
        taken.add((colour, variant))
        found[i] = _look(colour, variant)
    return [found[i] for i in range(len(names))]


def colour(name: str) -> str:
    """A method's colour on every page and in every picture of cwfed, for pictures of one's own.

    Arguments:
        name: as in `algorithm.name`: "ditto", "fedavg+prior" (which has the colour of "fedavg"), or of one's own.

    Returns:
        The colour as "#RRGGBB", as matplotlib and plotly take it.

    Errors:
        none: a method that cwfed does not know has a colour, too, by its name.

    Examples:
        >>> import cwfed
        >>> cwfed.colour("cwfedavg")
        '#D55E00'
    """
    return COLOURS[_place(name)[0]]


def looks_of_settings(count: int) -> list[Look]:
    """Where all lines are of one method, its colour would say nothing: each of its settings has one, in their order."""
    return [_look(place % len(COLOURS), 0) for place in range(count)]


def _place(name: str) -> tuple[int, int]:
    """The colour of a method and which of its variants this is: functions of the name alone."""
    method, _, plugins = PARTS_OF.get(name, name).partition("+")
    rare = len(COLOURS) - COMMON
    colour = METHODS.index(method) if method in METHODS else COMMON + crc32(method.encode()) % rare
    return colour, 1 + crc32(plugins.encode()) % 9 if plugins else 0


def _look(colour: int, variant: int) -> Look:
    stroke, marker = colour // COMMON + variant, colour + variant
    return Look(colour, stroke % len(STROKES), marker % len(MARKERS), variant > 0)
