"""Tables for a terminal of any width. A number is never cut: columns that do not fit are in another table below."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from cwfed.core.errors import MOST_NAME, MOST_TEXT, plain

FOLDED = 12
"""The least width of a column of words, which are then wrapped."""
HEADING = 9
"""A word of a heading has this much room: "algorithm", "validated". Longer ones may go on in the next line."""


@dataclass
class FittedTable:
    """A table that rich prints; columns that do not fit go on in further tables, which begin with the same ones.

    Give it to `console.print_table`, which never crops: even a terminal too narrow for one number gets all of it.
    """

    header: Sequence[str]
    words: Collection[str] = ()
    """The columns besides the first that have words: aligned left, and wrapped if they do not fit. The others have numbers."""
    names: Collection[str] = ()
    """The columns that, with the first one, say what a line is about; if there are several tables, each has them."""
    title: str = ""
    caption: str = ""
    framed: bool = True
    rows: list[Sequence[str | Text]] = field(default_factory=list)

    def add_row(self, *cells: str | Text) -> None:
        """Add a line; texts are shown as they are, without markup."""
        self.rows.append([_cell(cell) for cell in cells])

    def __post_init__(self) -> None:
        self.header = [plain(name, MOST_NAME) for name in self.header]
        self.title, self.caption = plain(self.title, keep="\n"), plain(self.caption, 5 * MOST_TEXT, keep="\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table, for rich."""
        blocks = self._blocks(options.max_width)
        for number, widths in enumerate(blocks):
            table = Table(title=Text(self.title) if self.title and not number else None, padding=(0, 1))
            if not self.framed:
                table.box = None
            for i, width in widths.items():
                table.add_column(
                    Text(self.header[i]), width=width, overflow="fold", justify="left" if self._folds(i) else "right"
                )
            for row in self.rows:
                table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in (row[i] for i in widths)))
            needed = max(options.max_width, self._width(list(widths.values())))
            yield from console.render(table, options.update(max_width=needed))
        if self.caption:
            yield Text(self.caption, style="dim italic")

    def _folds(self, i: int) -> bool:
        return i == 0 or self.header[i] in self.words

    def _width(self, widths: Sequence[int]) -> int:
        return sum(widths) + (3 * len(widths) + 1 if self.framed else 2 * len(widths))

    def _blocks(self, room: int) -> list[dict[int, int]]:
        """For each table, the width of each column in it."""
        columns = range(len(self.header))
        needs, wants = [self._need(i, room) for i in columns], [self._want(i) for i in columns]
        names = [i for i in columns if i == 0 or self.header[i] in self.names]
        blocks = [names]
        for i in (i for i in columns if i not in names):
            longer = sorted([*blocks[-1], i])
            fits = self._width([needs[j] for j in longer]) <= room or blocks[-1] == names
            blocks[-1:] = [longer] if fits else [blocks[-1], sorted([*names, i])]
        return [self._share(block, needs, wants, room) for block in blocks]

    def _share(self, block: Sequence[int], needs: Sequence[int], wants: Sequence[int], room: int) -> dict[int, int]:
        """Give each column what it needs, and divide the rest equally among those that want more."""
        widths = {i: needs[i] for i in block}
        spare = max(0, room - self._width(list(widths.values())))
        by_wish = sorted(block, key=lambda i: wants[i] - needs[i])
        for left, i in zip(range(len(block), 0, -1), by_wish, strict=True):
            extra = min(wants[i] - needs[i], spare // left)
            widths[i] += extra
            spare -= extra
        return widths

    def _longest(self, i: int) -> int:
        texts = (str(row[i]) for row in self.rows)
        return max((cell_len(line) for text in texts for line in text.split("\n")), default=1)

    def _want(self, i: int) -> int:
        return max(self._longest(i), cell_len(self.header[i]), 1)

    def _need(self, i: int, room: int) -> int:
        heading = max((cell_len(word) for word in self.header[i].split()), default=1)
        if not self._folds(i):
            return max(self._longest(i), min(heading, HEADING), 1)
        least = max(8, room // 3) if i == 0 else FOLDED
        return min(self._want(i), max(least, min(heading, HEADING)))


def _cell(cell: str | Text) -> str | Text:
    """Texts may be from outside, such as the names of folders and classes; they may have several lines."""
    return plain(cell, keep="\n") if isinstance(cell, str) else cell
