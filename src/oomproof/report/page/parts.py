"""The page's text: the verdict, the figures, the steps, what is not known, and what to do next. All of it escaped."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape

from oomproof.measure.measurement import Measurement
from oomproof.measure.profile import CATEGORIES, Profile, StepRow
from oomproof.report import steps as step_report
from oomproof.report.blocks import by_category, words
from oomproof.report.page.data import COLOURS
from oomproof.report.source import Source
from oomproof.report.verdict import headline
from oomproof.report.words import NextCommand, clean, exact, next_command, place, plural, share, span
from oomproof.units import format_bytes

TONES = {"green": "good", "yellow": "care", "red": "bad"}
STEP_ROWS = 12
READS = 50
RANKS = 16


def text(value: str) -> str:
    """Return text from a script or a file as HTML: on one line, no character of it markup or a control code."""
    return escape(clean(value))


def verdict(source: Source) -> str:
    """Return the banner: whether it fits, by how much, and of what run that is said."""
    measured, profile = source.measurement, source.profile
    if measured is None:
        detail = f"{format_bytes(profile.allocated_bytes)} allocated, {format_bytes(profile.reserved_bytes)} reserved"
        return f'<div class="verdict care"><h1><b>PEAK</b> {detail}</h1><p>{text(source.path)}</p></div>'
    head = headline(measured)
    cuda = f", CUDA {measured.torch.cuda}" if measured.torch.cuda else ""
    facts = f"{plural(measured.steps, 'step')} · torch {measured.torch.version}{cuda} · {measured.created[:10]}"
    return (
        f'<div class="verdict {TONES.get(head.colour, "care")}">'
        f"<h1><b>{text(head.verdict)}</b> <span>{text(head.detail)}</span></h1>"
        f"<p><code>{text(shlex.join(measured.command))}</code></p><p>{text(facts)}</p></div>"
    )


def warning(source: Source) -> str:
    """Return what the steps show when it is a fault, to stand right below the verdict; "" when they show none."""
    return "".join(
        f'<p class="finding {TONES[colour]}"><b>{name}</b> {text(detail)}. <a href="#steps">More</a></p>'
        for name, detail, colour in step_report.faults(source.profile)
    )


def figures(source: Source) -> str:
    """Return the peak to the byte, as a bar against the GPU's memory, and where it is."""
    profile, measured = source.profile, source.measurement
    allocated, reserved = profile.allocated_bytes, profile.reserved_bytes
    cards = [
        _card("allocated", allocated, "live tensors: max_memory_allocated()"),
        _card("reserved", reserved, "the allocator's segments: max_memory_reserved()"),
    ]
    if measured is not None:
        low, high = measured.device_bounds
        meaning = f"{span(low, high)}: with the context and all else" if low < high else "as nvidia-smi would show"
        cards.append(_card("device", measured.peak.device_bytes, meaning))
    return f'<div class="cards">{"".join(cards)}</div>{_bar(profile, measured)}{_where(measured)}{_death(measured)}'


def _card(name: str, size_bytes: int, meaning: str) -> str:
    return (
        f'<div class="card"><h3>{name}</h3><p class="size">{format_bytes(size_bytes)}</p>'
        f"<p>{exact(size_bytes)}</p><p>{escape(meaning)}</p></div>"
    )


def _bar(profile: Profile, measured: Measurement | None) -> str:
    limit = measured.gpu.memory_bytes if measured is not None else profile.limit_bytes
    if not limit:
        return ""
    device = measured.peak.device_bytes if measured is not None else profile.reserved_bytes
    scale = max(limit, device, 1)
    cells = []
    below = 0
    for name, end in (("allocated", profile.allocated_bytes), ("cached", profile.reserved_bytes), ("outside", device)):
        if end > below:
            cells.append(f'<i class="{name}" style="width:{100 * (end - below) / scale:.3f}%"></i>')
            below = end
    mark = f'<u style="left:{100 * limit / scale:.3f}%"></u>' if device > limit else ""
    over = f" · {format_bytes(device - limit)} over" if device > limit else f" · {format_bytes(limit - device)} free"
    key = "".join(f'<span><i class="{name}"></i>{name}</span>' for name in ("allocated", "cached", "outside"))
    return (
        f'<div class="bar" role="img" aria-label="{format_bytes(device)} of {format_bytes(limit)}">{"".join(cells)}'
        f'{mark}</div><p class="key">{key}<span>of the GPU\'s {format_bytes(limit)}{over}</span></p>'
    )


def _where(measured: Measurement | None) -> str:
    if measured is None:
        return ""
    peak = measured.peak
    lines = "".join(f"<li><code>{text(frame)}</code></li>" for frame in peak.stack[:6])
    stack = f'<ol class="stack">{lines}</ol>' if lines else ""
    return f'<p class="where"><b>Where:</b> {text(place(peak.step, peak.phase, peak.module))}</p>{stack}'


def _death(measured: Measurement | None) -> str:
    """Return where the run on the GPU's own memory met its out-of-memory error."""
    if measured is None or measured.oom is None:
        return ""
    oom = measured.oom
    asked = "" if oom.requested_bytes is None else f", asking for {format_bytes(oom.requested_bytes)}"
    caught = "; the script caught the error and went on" if oom.caught else ""
    return (
        f'<p class="where"><b>Out of memory:</b> {text(place(oom.step, oom.phase, oom.module))}{asked}{caught}</p>'
        f'<p class="quiet">{text(oom.message)}</p>'
    )


def ranks(measured: Measurement | None) -> str:
    """Return each rank of a run with several processes, the worst first; "" for a single one."""
    if measured is None or len(measured.ranks) < 2:
        return ""
    order = ("does-not-fit", "unknown", "fits")
    found = sorted(measured.ranks, key=lambda r: (order.index(r.verdict), -r.peak.device_bytes, r.rank))
    rows = "".join(
        f'<tr><th scope="row">rank {r.rank}, cuda:{r.device}</th>'
        f'<td class="number">{format_bytes(r.peak.allocated_bytes)}</td>'
        f'<td class="number">{format_bytes(r.peak.reserved_bytes)}</td>'
        f'<td class="number">{format_bytes(r.peak.device_bytes)}</td><td>{r.verdict.replace("-", " ")}</td></tr>'
        for r in found[:RANKS]
    )
    hidden = len(found) - RANKS
    more = f'<p class="quiet">{hidden} more, none of them worse</p>' if hidden > 0 else ""
    return (
        '<section id="ranks"><h2>Ranks</h2><p>The charts are those of the worst one.</p><div class="scroll">'
        '<table class="steps"><thead><tr><td></td><th>allocated</th><th>reserved</th><th>device</th><td></td></tr>'
        f"</thead>{rows}</table></div>{more}</section>"
    )


def breakdown(profile: Profile) -> str:
    """Return the categories at the peak, the biggest first, each with a bar."""
    sizes = by_category(profile)
    total, most = sum(sizes.values()), max(sizes.values())
    rows = [
        f'<tr><th scope="row"><i style="background:{COLOURS[name]}"></i>{words(name)}</th>'
        f'<td class="number">{format_bytes(size)}</td><td class="number">{share(size, total)}</td>'
        f'<td class="drawn"><i style="width:{100 * size / most:.2f}%;background:{COLOURS[name]}"></i></td></tr>'
        for name, size in sorted(sizes.items(), key=lambda item: (-item[1], CATEGORIES.index(item[0])))
        if size > 0
    ]
    return f'<table class="breakdown">{"".join(rows)}</table>' if rows else "<p>No block was seen.</p>"


def steps(source: Source) -> str:
    """Return the steps in a table, and what grows from one to the next."""
    found = step_report.examine(source.profile)
    if not found.rows:
        return ""
    told = "".join(
        f'<p class="finding {TONES[colour]}"><b>{name}</b> {text(detail)}</p>'
        for name, detail, colour in step_report.verdicts(found)
    )
    body = _step_rows(found.rows)
    changes = ", ".join(f"{words(name)} {step_report.signed(size)}" for name, size in step_report.told_changes(found))
    first = f"<p>The first step against the last: {changes}</p>" if changes else ""
    culprits = [
        f"<li><b>{format_bytes(step_report.per_step(g))} a step</b>, {plural(g.blocks, 'block')}, {words(g.category)}"
        f"{' in ' + text(g.module) if g.module else ''}{_frames(g.stack)}</li>"
        for g in found.leaks[:8]
    ] + [
        f"<li><b>{format_bytes(p.size_bytes)}</b> in {plural(p.segments, 'new segment')}"
        f"{' in ' + text(p.module) if p.module else ''}{_frames(p.stack)}</li>"
        for p in found.places[:8]
    ]
    return (
        f'<section id="steps"><h2>Steps</h2>{told}'
        f'<div class="scroll"><table class="steps"><thead><tr><td></td><th>allocated</th><th>reserved</th>'
        f"<th>left at its end</th></tr></thead>{body}</table></div>{first}"
        f"{'<ul>' + ''.join(culprits) + '</ul>' if culprits else ''}</section>"
    )


def _step_rows(rows: Sequence[StepRow]) -> str:
    """Return the first steps, the one with the peak and the last ones, and how many are left out between them."""
    top = max(range(len(rows)), key=lambda i: step_report.high(rows[i]))
    ends = {*range(STEP_ROWS - 3), top, len(rows) - 2, len(rows) - 1}
    kept = range(len(rows)) if len(rows) <= STEP_ROWS else sorted(ends)
    body, before = "", -1
    for number in kept:
        hidden, row = number - before - 1, rows[number]
        before = number
        body += f'<tr><td colspan="4" class="quiet">{plural(hidden, "step")} more</td></tr>' if hidden else ""
        body += (
            f'<tr><th scope="row">step {row.step}</th><td class="number">{format_bytes(step_report.high(row))}</td>'
            f'<td class="number">{format_bytes(row.reserved_bytes)}</td>'
            f'<td class="number">{format_bytes(row.end_allocated_bytes)}</td></tr>'
        )
    return body


def _frames(stack: Sequence[str]) -> str:
    lines = "".join(f"<li><code>{text(frame)}</code></li>" for frame in stack[:5])
    return f'<ol class="stack">{lines}</ol>' if lines else ""


def unknowns(source: Source) -> str:
    """Return what could not be known, the value reads, and the notes."""
    measured = source.measurement
    parts: list[str] = []
    if measured is not None and measured.ranges:
        rows = (f"{r.what}, {span(r.low_bytes, r.high_bytes)}: {r.reason}" for r in measured.ranges)
        parts.append(f"<h3>Ranges</h3>{_list(rows)}")
    if measured is not None and measured.value_reads:
        reads = sorted(measured.value_reads, key=lambda read: (read.affects_memory is False, -read.count))
        effect = {True: "changes memory", None: "may change memory", False: "harmless"}
        body = "".join(
            f"<tr><td><code>{text(r.location)}</code></td><td><code>{text(r.operation)}</code></td>"
            f'<td class="number">{r.count:,}</td><td>{effect[r.affects_memory]}</td></tr>'
            for r in reads[:READS]
        )
        hidden = len(reads) - READS
        more = f'<p class="quiet">{hidden} more places</p>' if hidden > 0 else ""
        parts.append(
            "<h3>Value reads</h3><p>Numbers that the script read back though only a real kernel computes them.</p>"
            f'<div class="scroll"><table class="reads"><thead><tr><th>line</th><th>operation</th><th>times</th>'
            f"<th>effect</th></tr></thead>{body}</table></div>{more}"
        )
    notes = [*(measured.notes if measured is not None else ()), *source.profile.notes]
    if notes:
        parts.append(f"<h3>Notes</h3>{_list(dict.fromkeys(notes))}")
    return f'<section id="unknown"><h2>Not known, and notes</h2>{"".join(parts)}</section>' if parts else ""


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>"


def advice(source: Source, larger_gpu: str | None) -> list[NextCommand]:
    """Return what to type next, the most useful first."""
    found = step_report.examine(source.profile)
    advised = []
    if source.measurement is not None:
        advised.append(next_command(source.measurement, saved=source.path, larger_gpu=larger_gpu))
    if found.rows and found.states != ("steady",):
        advised.append(step_report.after(source, found))
    advised += [
        NextCommand(reason="see the peak by line of code", command=f"oomproof tree {source.quoted} --by stack"),
        NextCommand(reason="take the blocks to a spreadsheet", command=f"oomproof table {source.quoted} --csv"),
        NextCommand(
            reason="after a change, see what grew (exit code 2 if the peak did)",
            command=f"oomproof diff {source.quoted} CHANGED.oomp",
        ),
    ]
    return advised


def following(source: Source, larger_gpu: str | None) -> str:
    """Return the next commands, each with a button that copies it."""
    rows = "".join(
        f"<li><p>{text(item.reason[:1].upper() + item.reason[1:])}</p>"
        f'<div class="command"><code>{text(item.command)}</code>'
        '<button type="button" class="copy">Copy</button></div></li>'
        for item in advice(source, larger_gpu)
    )
    return f'<section id="next"><h2>What to try next</h2><ul class="next">{rows}</ul></section>'
