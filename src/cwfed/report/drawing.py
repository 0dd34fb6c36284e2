"""What all matplotlib pictures share: how they are saved, and how names, rounds, bytes and legends are written."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image

from cwfed.core.errors import ConfigError
from cwfed.report.style import Look

mpl.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "cwfed"}
FORMATS = ("png", "pdf", "svg")
LARGE_PNG = 200_000
"""Bytes from which on a PNG is reduced to 256 colours."""
MOST_TICKS = 12
"""The most names on an axis."""
BYTES = EngFormatter("B")
"""Formats bytes as 10 GB, not 10G."""


def check_formats(formats: Sequence[str]) -> None:
    """ConfigError for a format that cannot be written; to be called before hours of work."""
    for ending in formats:
        if ending not in FORMATS:
            raise ConfigError(f"unknown picture format {ending!r}: known are {', '.join(FORMATS)}")


def save(figure: Figure, stem: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Save a figure in each format; the same figure gives the same bytes."""
    check_formats(formats)
    dates: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in formats]
    figure.draw_without_rendering()  # finds the layout, which takes longer than to draw: once for all formats
    figure.set_layout_engine("none")
    for path, ending in zip(paths, formats, strict=True):
        if ending == "png":
            _save_small_png(figure, path)
        else:
            figure.savefig(path, metadata=dates[ending])
    return paths


def _save_small_png(figure: Figure, path: Path) -> None:
    """Save large drawings of lines and letters with 256 colours, which is not visible; heat maps keep all shades."""
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=130)
    if whole.tell() < LARGE_PNG or any(axes.images for axes in figure.axes):
        path.write_bytes(whole.getvalue())
        return
    with Image.open(whole) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def plain(text: str) -> str:
    """Text from data, with its dollar signs escaped: they do not begin mathematics."""
    return text.replace("$", r"\$")


def legend_text(label: str) -> str:
    """A label in several lines if it is long, to leave room for the curves."""
    return plain(textwrap.fill(label, 32))


def explain(figure: Figure, *sentences: str, width: int = 0) -> None:
    """What bands, stars and n mean, in small letters below the picture."""
    words = " ".join(filter(None, sentences))
    if words:
        wide = width or int(figure.get_figwidth() * 18)
        figure.supxlabel(plain(textwrap.fill(words, wide)), fontsize=7, color="0.35", x=0.01, ha="left")


def line_of(look: Look, points: int = 0) -> dict[str, Any]:
    """How matplotlib draws a method's line, with markers at some of its points."""
    every = {"markevery": max(1, points // 8)} if points else {}
    marker = {"marker": look.marker, "markersize": 4, "markerfacecolor": look.face}
    return {"color": look.colour, "linestyle": look.stroke, **marker, **every}


def whole_numbers(axis: Axis) -> None:
    """Only whole numbers on an axis: there is no round 2.5."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def name_places(axes: Axes, axis: Axis, names: Sequence[object]) -> None:
    """Write names along an axis that counts from 0: all of them, or as many as can be read."""
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 10**9) if ceil(len(names) / s) <= MOST_TICKS)
    texts = [plain(textwrap.shorten(str(name), 14, placeholder="…") or str(name)[:13]) for name in names]
    is_long = axis is axes.xaxis and max(map(len, texts), default=0) > 3 and len(texts) > 4
    axis.set_ticks(range(0, len(names), step), texts[::step], rotation=90 if is_long else 0)


def legend_beside(axes: Axes, **more: Any) -> None:
    """Put the legend beside the picture, where it covers nothing."""
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, **more)


def height_for(labels: Sequence[str], least: float = 3.6) -> float:
    """Inches that a legend of these labels needs, and the axes at least."""
    lines = sum(legend_text(label).count("\n") + 1 for label in labels)
    return max(least, 0.9 + 0.175 * lines)
