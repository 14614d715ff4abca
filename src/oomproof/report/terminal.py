"""The report that a person reads in ten seconds: the verdict first, the next command last."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from oomproof.measure.measurement import Measurement
from oomproof.report import lists, sections
from oomproof.report.bars import glyphs_for
from oomproof.report.sections import Fault, Section, View
from oomproof.report.verdict import headline
from oomproof.report.words import NextCommand, is_untouched, next_command, plural, verbatim

LABEL_WIDTH = 11
MAX_WIDTH = 110  # longer lines are harder to read


class Report:
    """A rich renderable; how it looks depends on the console's width, encoding and colours."""

    def __init__(
        self,
        measurement: Measurement,
        *,
        saved: str | None = None,
        larger_gpu: str | None = None,
        options: Sequence[str] = (),
        faults: Sequence[Fault] = (),
        after: NextCommand | None = None,
    ) -> None:
        self.measurement = measurement
        self.saved = saved
        self.larger_gpu = larger_gpu
        self.options = options
        self.faults = faults
        self.after = after

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the verdict, the sections that have something to say, and the next command."""
        width = min(options.max_width, MAX_WIDTH)
        view = View(
            measurement=self.measurement,
            width=max(24, width - LABEL_WIDTH - 2),
            encoding=options.encoding,
            glyphs=glyphs_for(options.encoding),
            faults=tuple(self.faults),
        )
        after = self.after or next_command(
            self.measurement,
            saved=self.saved,
            larger_gpu=self.larger_gpu,
            options=self.options,
            at_fault=bool(self.faults),
        )
        blocks = Group(*self._blocks(view), Text(f"\nNext: {after.reason}:", "dim"))
        for line in console.render_lines(blocks, options.update(width=width), pad=False):
            yield from stripped(line)
            yield Segment.line()
        # on one line, whatever its length: the terminal wraps it, and it can be copied
        yield Text(f"  {verbatim(after.command, view.encoding)}", "bold", no_wrap=True, overflow="ignore")

    def _blocks(self, view: View) -> Iterator[RenderableType]:
        head = headline(self.measurement)
        yield _row(Text(head.verdict, f"bold reverse {head.colour}"), Text(view.clean(head.detail), "bold"))
        for show in _sections(self.measurement):
            for label, body in show(view):
                yield Text()
                yield _row(Text(label, "bold"), body, label_width=LABEL_WIDTH)


def _sections(m: Measurement) -> list[Callable[[View], list[Section]]]:
    if is_untouched(m):
        return [sections.peak, lists.unknowns, lists.notes, _run]
    return [
        sections.peak,
        sections.breakdown,
        sections.outside,
        sections.where,
        sections.death,
        lists.ranks,
        lists.steps,
        lists.calls,
        sections.allocator,
        lists.unknowns,
        lists.notes,
        _run,
    ]


def _run(view: View) -> list[Section]:
    m = view.measurement
    command = Text(view.clean(shlex.join(m.command), limit=3 * view.width), overflow="fold")
    cuda = f", CUDA {m.torch.cuda}" if m.torch.cuda else ""
    facts = f"{plural(m.steps, 'step')}, torch {m.torch.version}{cuda}, {m.created}"
    return [("Run", Group(command, Text(view.clean(facts), "dim", overflow="fold")))]


def stripped(line: list[Segment]) -> list[Segment]:
    """Return the line without the blanks that rich fills tables with: reports end up in logs and diffs."""
    kept = list(line)
    while kept and not kept[-1].text.rstrip(" "):
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(" "), kept[-1].style)
    return kept


def _row(label: Text, body: RenderableType, *, label_width: int | None = None) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, width=label_width)
    table.add_column(overflow="fold")
    table.add_row(label, body)
    return table


def render(
    measurement: Measurement,
    *,
    saved: str | None = None,
    larger_gpu: str | None = None,
    options: Sequence[str] = (),
    faults: Sequence[Fault] = (),
    after: NextCommand | None = None,
) -> Report:
    """Return the report as a rich renderable.

    ``saved`` is the capture that the measurement is in already, so that the last line leads on from there.
    ``larger_gpu`` names the catalogue's GPU to try when this one is too small, ``options`` are those of the run.
    ``faults`` are what the profile's steps show, as ``oomproof.report.steps.faults`` gives them. ``after`` is the next
    command where it is not that of a run.
    """
    return Report(measurement, saved=saved, larger_gpu=larger_gpu, options=options, faults=faults, after=after)


def print_report(
    measurement: Measurement,
    console: Console | None = None,
    *,
    saved: str | None = None,
    larger_gpu: str | None = None,
    options: Sequence[str] = (),
    faults: Sequence[Fault] = (),
    after: NextCommand | None = None,
) -> None:
    """Print the report on ``console``, or on standard output."""
    report = render(measurement, saved=saved, larger_gpu=larger_gpu, options=options, faults=faults, after=after)
    (console or Console()).print(report, crop=False)
