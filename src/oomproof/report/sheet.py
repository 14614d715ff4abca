"""The sheet that the reports about memory are printed on: its width and characters, and the next command at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from oomproof.report.bars import Glyphs, glyphs_for
from oomproof.report.terminal import stripped
from oomproof.report.words import NextCommand, clean, verbatim

MAX_WIDTH = 140  # longer lines are harder to read
MIN_WIDTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The room and characters there are."""

    width: int
    encoding: str
    glyphs: Glyphs

    def clean(self, text: str) -> str:
        """Return text from a script or a file as the terminal can safely show it."""
        return clean(text, self.encoding)

    def verbatim(self, line: str) -> Text:
        """Return a line of code that is printed as it is, whatever the width, so that it can be copied."""
        return Text(verbatim(line, self.encoding), no_wrap=True, overflow="ignore")

    @property
    def dots(self) -> str:
        """Return what stands for characters that were cut."""
        return "..." if self.glyphs.eighths == "#" else "…"

    def cut(self, text: str, cells: int, *, left: bool = False) -> str:
        """Return ``text``, cleaned, in exactly that many cells; what does not fit is cut, on the left if asked."""
        line = self.clean(text)
        if cell_len(line) <= cells:
            return set_cell_size(line, cells)
        room = max(0, cells - len(self.dots))
        if not left:
            return set_cell_size(set_cell_size(line, room) + self.dots, cells)
        kept = line[-room:] if room else ""
        while cell_len(kept) > room:
            kept = kept[1:]
        return set_cell_size(self.dots + kept, cells)


Body = Callable[[Sheet], Iterable[Text]]


class Printed:
    """A rich renderable: lines made for the console's width, then the next command on one line."""

    def __init__(self, body: Body, after: NextCommand) -> None:
        self.body = body
        self.after = after

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines, each cut to the width, and the next command."""
        width = max(MIN_WIDTH, min(options.max_width, MAX_WIDTH))
        sheet = Sheet(width=width, encoding=options.encoding, glyphs=glyphs_for(options.encoding))
        for text in (*self.body(sheet), Text(), Text(f"Next: {self.after.reason}:", "dim")):
            if text.overflow == "ignore":  # rich would cut it where it splits it into lines
                yield text
                continue
            text.overflow = text.overflow or "fold"
            for line in console.render_lines(text, options.update(width=width), pad=False):
                yield from stripped(line)
                yield Segment.line()
        # on one line, whatever its length: the terminal wraps it, and it can be copied
        yield Text(f"  {verbatim(self.after.command, sheet.encoding)}", "bold", no_wrap=True, overflow="ignore")


def print_sheet(body: Body, after: NextCommand, console: Console | None = None) -> None:
    """Print lines on ``console``, or on standard output, and the next command after them."""
    (console or Console()).print(Printed(body, after), crop=False)
