"""The terminal report as a person sees it: whole outputs, 80 columns wide, without colour."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import pytest
from measurement_samples import OOM_MESSAGE, T4, fitting, not_fitting, peak, step, untouched
from rich.console import Console

from oomproof.measure.measurement import (
    GPU,
    OOM,
    Allocator,
    Breakdown,
    Call,
    Demand,
    Measurement,
    Outside,
    Range,
    Rank,
    Remedy,
    ValueRead,
    World,
)
from oomproof.report.terminal import print_report, render
from oomproof.units import GIB, MIB

CONTEXT = Range(what="context", low_bytes=90 * MIB, high_bytes=140 * MIB, reason="the driver decides")
WORKSPACE = Range(what="cuDNN workspace", low_bytes=0, high_bytes=4 * GIB, reason="the engine is chosen by timing")


def mask(taken: str, most: int | None = 8192) -> ValueRead:
    """Return reads of how many rows a mask keeps."""
    return ValueRead(
        location="moe.py:9", operation="aten::index", count=12, affects_memory=True, least=0, most=most, taken=taken
    )


def many(size_bytes: int) -> Demand:
    """Return the demand of a run with the largest counts."""
    return Demand(allocated_bytes=10 * GIB, reserved_bytes=11 * GIB, device_bytes=size_bytes)


def shown(
    measurement: Measurement,
    *,
    width: int = 80,
    saved: str | None = None,
    larger_gpu: str | None = None,
    options: Sequence[str] = (),
    faults: Sequence[tuple[str, str, str]] = (),
) -> str:
    """Return the report as text, without colour."""
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    print_report(measurement, console, saved=saved, larger_gpu=larger_gpu, options=options, faults=faults)
    return console.export_text()


TIGHT = fitting(ranges=(CONTEXT, WORKSPACE))
SEVERAL_RANKS = fitting(
    verdict="does-not-fit",
    world=World(size=4, rank=2, local_world_size=4),
    peak=peak(12 * GIB, 15 * GIB),
    breakdown=Breakdown(parameter_bytes=8 * GIB, communication_bytes=4 * GIB),
    outside=Outside(cached_bytes=3 * GIB, context_bytes=100 * MIB),
    per_step=(),
    ranks=(
        Rank(rank=0, device=0, peak=peak(10 * GIB, 11 * GIB), verdict="fits"),
        Rank(rank=1, device=1, peak=peak(11 * GIB, 13 * GIB), verdict="fits"),
        Rank(rank=2, device=2, peak=peak(12 * GIB, 15 * GIB), verdict="does-not-fit"),
        Rank(rank=3, device=3, peak=peak(9 * GIB, 14 * GIB), verdict="unknown"),
    ),
)
NO_STEPS = fitting(
    per_step=(),
    steps=0,
    ended="finished",
    exit_code=0,
    peak=peak(7 * GIB, 8 * GIB, phase="forward", module="block6 (Block)"),
    demand=Demand(allocated_bytes=7 * GIB, reserved_bytes=8 * GIB, device_bytes=8 * GIB + 100 * MIB),
    breakdown=Breakdown(parameter_bytes=6 * GIB, buffer_bytes=GIB),
    outside=Outside(cached_bytes=GIB, context_bytes=100 * MIB),
    calls=tuple(
        Call(
            module=f"block{i} (Block)",
            count=1000 + i,
            allocated_bytes=(i + 1) * GIB,
            reserved_bytes=(i + 2) * GIB,
        )
        for i in range(7)
    ),
)
VALUE_READS = fitting(
    value_reads=tuple(
        ValueRead(location=f"train.py:{i}", operation="aten::nonzero", count=count, affects_memory=effect, taken=taken)
        for i, (count, effect, taken) in enumerate(
            [
                (90_000, False, None),
                (5, True, "least"),
                (7, None, None),
                (3, True, None),
                (2, None, None),
                (4_000, False, None),
            ]
        )
    )
)
RAISED = fitting(
    verdict="unknown",
    ended="raised",
    exit_code=1,
    steps=1,
    per_step=(step(1, 6 * GIB),),
    breakdown=None,
    notes=("with backend:cudaMallocAsync the allocator keeps no history",),
)


FITS_TEXT = """\
FITS  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to spare)

Peak         allocated  10,739,515,392 bytes  10.00 GiB  max_memory_allocated()
             reserved   11,811,160,064 bytes  11.00 GiB  max_memory_reserved()
             device     11,916,017,664 bytes  11.10 GiB  11.09 GiB to 11.14 GiB

             ██████████████████████████████████████████████▓▓▓▓▓░░░░░░░░░░░░░░░░
             █ allocated  ▓ cached  ▒ outside  ░ free

Consists of  optimizer state  4.00 GiB  40 %  ███████████████████████████████
             activation       3.00 GiB  30 %  ███████████████████████▎
             parameter        2.00 GiB  20 %  ███████████████▌
             gradient         1.00 GiB  10 %  ███████▊
             input             2.0 MiB  <1 %  ▏

Outside      cached   1,022.0 MiB  reserved, not in use
             context    100.0 MiB  estimate, 90.0 MiB to 140.0 MiB

Where        step 2, backward, in h.11.mlp (GPT2MLP)
             model.py:210 forward
             train.py:31 main

Steps                      allocated   reserved
             step 1         6.00 GiB   7.00 GiB
             steps 2 to 3  10.00 GiB  11.00 GiB
             the first step peaks 4.00 GiB below the last
             stopped there: evaluation and saving, if any, were not run

Allocator    default settings; no retries, no OOMs

Not known    context, 90.0 MiB to 140.0 MiB: the driver decides

Run          python train.py --batch 16
             3 steps, torch 2.11.0+cu126, CUDA 12.6, 2026-01-02T03:04:05Z

Next: keep this measurement in a file:
  oomproof run -o FILE.oomp -- python train.py --batch 16
"""

DOES_NOT_FIT_TEXT = """\
DOES NOT FIT  peak 22.10 GiB of 14.56 GiB on Tesla T4 (7.53 GiB over)

Peak         allocated  21,474,836,480 bytes  20.00 GiB  max_memory_allocated()
             reserved   23,622,320,128 bytes  22.00 GiB  max_memory_reserved()
             device     23,727,177,728 bytes  22.10 GiB  22.09 GiB to 22.14 GiB

             ████████████████████████████████████████████│████████████████▓▓▓▓▓▓
             █ allocated  ▓ cached  ▒ outside  │ end of the GPU's memory

Consists of  activation  16.00 GiB  80 %  ███████████████████████████████
             parameter    4.00 GiB  20 %  ███████▊

Outside      cached    2.00 GiB  reserved, not in use
             context  100.0 MiB  estimate, 90.0 MiB to 140.0 MiB

Where        step 1, forward, in h.11.attn (GPT2Attention)

Out of       step 1, forward, in h.7.attn (GPT2Attention), asking for 2.00 GiB
memory       CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total
             capacity of 14.56 GiB of which 1.41 GiB is free. Including
             non-PyTorch memory, this process has 13.15 GiB memory in use. Of
             the allocated memory 12.31 GiB is allocated by PyTorch, and 630.00
             MiB is reserved by PyTorch but unallocated. ...

Steps                allocated   reserved
             step 1  20.00 GiB  21.00 GiB

Allocator    expandable_segments:True; 1 retry, 1 OOM

Not known    context, 90.0 MiB to 140.0 MiB: the driver decides

Run          python train.py --batch 16
             3 steps, torch 2.11.0+cu126, CUDA 12.6, 2026-01-02T03:04:05Z

Next: see whether it fits a larger GPU (oomproof gpus lists them):
  oomproof run --gpu NAME -- python train.py --batch 16
"""

TIGHT_TEXT = """\
FITS, BUT ONLY JUST  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to
                     spare): the range reaches past the GPU, to 15.14 GiB

Peak         allocated  10,739,515,392 bytes  10.00 GiB  max_memory_allocated()
             reserved   11,811,160,064 bytes  11.00 GiB  max_memory_reserved()
             device     11,916,017,664 bytes  11.10 GiB  11.09 GiB to 15.14 GiB

             ██████████████████████████████████████████████▓▓▓▓▓░░░░░░░░░░░░░░░░
             █ allocated  ▓ cached  ▒ outside  ░ free

Consists of  optimizer state  4.00 GiB  40 %  ███████████████████████████████
             activation       3.00 GiB  30 %  ███████████████████████▎
             parameter        2.00 GiB  20 %  ███████████████▌
             gradient         1.00 GiB  10 %  ███████▊
             input             2.0 MiB  <1 %  ▏

Outside      cached   1,022.0 MiB  reserved, not in use
             context    100.0 MiB  estimate, 90.0 MiB to 140.0 MiB

Where        step 2, backward, in h.11.mlp (GPT2MLP)
             model.py:210 forward
             train.py:31 main

Steps                      allocated   reserved
             step 1         6.00 GiB   7.00 GiB
             steps 2 to 3  10.00 GiB  11.00 GiB
             the first step peaks 4.00 GiB below the last
             stopped there: evaluation and saving, if any, were not run

Allocator    default settings; no retries, no OOMs

Not known    context, 90.0 MiB to 140.0 MiB: the driver decides
             cuDNN workspace, 0 B to 4.00 GiB: the engine is chosen by timing

Run          python train.py --batch 16
             3 steps, torch 2.11.0+cu126, CUDA 12.6, 2026-01-02T03:04:05Z

Next: keep this measurement in a file:
  oomproof run -o FILE.oomp -- python train.py --batch 16
"""

SEVERAL_RANKS_TEXT = """\
DOES NOT FIT  peak 15.10 GiB of 14.56 GiB on Tesla T4, rank 2 of 4 (547.3 MiB
              over)

Peak         allocated  12,884,901,888 bytes  12.00 GiB  max_memory_allocated()
             reserved   16,106,127,360 bytes  15.00 GiB  max_memory_reserved()
             device     16,210,984,960 bytes  15.10 GiB  15.09 GiB to 15.14 GiB

             █████████████████████████████████████████████████████▓▓▓▓▓▓▓▓▓▓▓│▓▓
             █ allocated  ▓ cached  ▒ outside  │ end of the GPU's memory

Consists of  parameter      8.00 GiB  67 %  ███████████████████████████████
             communication  4.00 GiB  33 %  ███████████████▌

Outside      cached    3.00 GiB  reserved, not in use
             context  100.0 MiB  estimate, 90.0 MiB to 140.0 MiB

Where        not known

Ranks        rank  device  allocated   reserved     in all
             2     cuda:2  12.00 GiB  15.00 GiB  15.10 GiB  does not fit
             3     cuda:3   9.00 GiB  14.00 GiB  14.10 GiB  unknown
             1     cuda:1  11.00 GiB  13.00 GiB  13.10 GiB  fits
             0     cuda:0  10.00 GiB  11.00 GiB  11.10 GiB  fits

Allocator    default settings; no retries, no OOMs

Not known    context, 90.0 MiB to 140.0 MiB: the driver decides

Run          python train.py --batch 16
             3 steps, torch 2.11.0+cu126, CUDA 12.6, 2026-01-02T03:04:05Z

Next: see whether it fits a larger GPU (oomproof gpus lists them):
  oomproof run --gpu NAME -- python train.py --batch 16
"""

NO_STEPS_TEXT = """\
FITS  peak 8.10 GiB of 14.56 GiB on Tesla T4 (6.47 GiB to spare)

Peak         allocated  7,516,192,768 bytes  7.00 GiB  max_memory_allocated()
             reserved   8,589,934,592 bytes  8.00 GiB  max_memory_reserved()
             device     8,694,792,192 bytes  8.10 GiB  8.09 GiB to 8.14 GiB

             ████████████████████████████████▓▓▓▓▓░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░
             █ allocated  ▓ cached  ▒ outside  ░ free

Consists of  parameter  6.00 GiB  86 %  ███████████████████████████████
             buffer     1.00 GiB  14 %  █████▏

Outside      cached    1.00 GiB  reserved, not in use
             context  100.0 MiB  estimate, 90.0 MiB to 140.0 MiB

Where        forward, in block6 (Block)

Calls        no optimizer step was made
                             calls  allocated  reserved
             block6 (Block)  1,006   7.00 GiB  8.00 GiB
             block5 (Block)  1,005   6.00 GiB  7.00 GiB
             block4 (Block)  1,004   5.00 GiB  6.00 GiB
             block3 (Block)  1,003   4.00 GiB  5.00 GiB
             block2 (Block)  1,002   3.00 GiB  4.00 GiB
             +2 more modules

Allocator    default settings; no retries, no OOMs

Not known    context, 90.0 MiB to 140.0 MiB: the driver decides

Run          python train.py --batch 16
             no steps, torch 2.11.0+cu126, CUDA 12.6, 2026-01-02T03:04:05Z

Next: keep this measurement in a file:
  oomproof run -o FILE.oomp -- python train.py --batch 16
"""

VALUE_READS_TEXT = """\
FITS  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to spare), with 8 sizes
      that only a kernel computes: 5 taken as the least they can be, 3 not known

Peak         allocated  10,739,515,392 bytes  10.00 GiB  max_memory_allocated()
             reserved   11,811,160,064 bytes  11.00 GiB  max_memory_reserved()
             device     11,916,017,664 bytes  11.10 GiB  11.09 GiB to 11.14 GiB

             ██████████████████████████████████████████████▓▓▓▓▓░░░░░░░░░░░░░░░░
             █ allocated  ▓ cached  ▒ outside  ░ free

Consists of  optimizer state  4.00 GiB  40 %  ███████████████████████████████
             activation       3.00 GiB  30 %  ███████████████████████▎
             parameter        2.00 GiB  20 %  ███████████████▌
             gradient         1.00 GiB  10 %  ███████▊
             input             2.0 MiB  <1 %  ▏

Outside      cached   1,022.0 MiB  reserved, not in use
             context    100.0 MiB  estimate, 90.0 MiB to 140.0 MiB

Where        step 2, backward, in h.11.mlp (GPT2MLP)
             model.py:210 forward
             train.py:31 main

Steps                      allocated   reserved
             step 1         6.00 GiB   7.00 GiB
             steps 2 to 3  10.00 GiB  11.00 GiB
             the first step peaks 4.00 GiB below the last
             stopped there: evaluation and saving, if any, were not run

Allocator    default settings; no retries, no OOMs

Not known    context, 90.0 MiB to 140.0 MiB: the driver decides
             94,017 value reads, of numbers that only a real kernel computes:
             train.py:2  aten::nonzero  7 x  may change memory
             train.py:1  aten::nonzero  5 x  changes memory
             train.py:3  aten::nonzero  3 x  changes memory
             train.py:4  aten::nonzero  2 x  may change memory
             +2 more places

Run          python train.py --batch 16
             3 steps, torch 2.11.0+cu126, CUDA 12.6, 2026-01-02T03:04:05Z

Next: keep this measurement in a file:
  oomproof run -o FILE.oomp -- python train.py --batch 16
"""

RAISED_TEXT = """\
UNKNOWN  peak so far 11.10 GiB of 14.56 GiB on Tesla T4; the script raised an
         error (exit code 1)

Peak         allocated  10,739,515,392 bytes  10.00 GiB  max_memory_allocated()
             reserved   11,811,160,064 bytes  11.00 GiB  max_memory_reserved()
             device     11,916,017,664 bytes  11.10 GiB  11.09 GiB to 11.14 GiB

             ██████████████████████████████████████████████▓▓▓▓▓░░░░░░░░░░░░░░░░
             █ allocated  ▓ cached  ▒ outside  ░ free

Consists of  not known; the notes say why

Outside      cached   1,022.0 MiB  reserved, not in use
             context    100.0 MiB  estimate, 90.0 MiB to 140.0 MiB

Where        step 2, backward, in h.11.mlp (GPT2MLP)
             model.py:210 forward
             train.py:31 main

Steps                allocated  reserved
             step 1   6.00 GiB  7.00 GiB

Allocator    default settings; no retries, no OOMs

Not known    context, 90.0 MiB to 140.0 MiB: the driver decides

Notes        with backend:cudaMallocAsync the allocator keeps no history

Run          python train.py --batch 16
             1 step, torch 2.11.0+cu126, CUDA 12.6, 2026-01-02T03:04:05Z

Next: mend the script, then:
  oomproof run -o FILE.oomp -- python train.py --batch 16
"""

UNTOUCHED_TEXT = """\
UNKNOWN  the script never used the GPU

Peak         allocated  0 bytes  0 B  max_memory_allocated()
             reserved   0 bytes  0 B  max_memory_reserved()
             device     0 bytes  0 B  as nvidia-smi has it

Run          python train.py --batch 16
             no steps, torch 2.11.0+cu126, CUDA 12.6, 2026-01-02T03:04:05Z

Next: move the model to the GPU in the script, then:
  oomproof run -- python train.py --batch 16
"""


@pytest.mark.parametrize(
    ("measurement", "expected"),
    [
        pytest.param(fitting(), FITS_TEXT, id="fits"),
        pytest.param(not_fitting(), DOES_NOT_FIT_TEXT, id="does-not-fit"),
        pytest.param(TIGHT, TIGHT_TEXT, id="tight"),
        pytest.param(SEVERAL_RANKS, SEVERAL_RANKS_TEXT, id="several-ranks"),
        pytest.param(NO_STEPS, NO_STEPS_TEXT, id="no-steps"),
        pytest.param(VALUE_READS, VALUE_READS_TEXT, id="value-reads"),
        pytest.param(RAISED, RAISED_TEXT, id="raised"),
        pytest.param(untouched(), UNTOUCHED_TEXT, id="never-touched-the-gpu"),
    ],
)
def test_the_whole_report(measurement: Measurement, expected: str) -> None:
    """Each kind of run is shown as written here, to the character."""
    assert shown(measurement) == expected


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize(
    "measurement", [fitting(), not_fitting(), SEVERAL_RANKS, NO_STEPS, VALUE_READS, RAISED, untouched()]
)
def test_no_line_is_wider_than_the_console(measurement: Measurement, width: int) -> None:
    """A report never runs over the edge, nor past 110 columns, except for the command to copy."""
    lines = shown(measurement, width=width).splitlines()[:-1]
    assert max(map(len, lines)) <= max(min(width, 110), 37)


@pytest.mark.parametrize("width", [50, 80, 160])
def test_the_figures_are_exact_at_any_usual_width(width: int) -> None:
    """Allocated and reserved memory are there to the byte."""
    text = shown(not_fitting(), width=width)
    assert "21,474,836,480 bytes" in text
    assert "23,622,320,128 bytes" in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "gbk"])
def test_ascii_where_the_encoding_lacks_a_block(encoding: str) -> None:
    """A terminal that cannot show block characters gets the report in ASCII, names escaped where needed."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_report(fitting(command=("python", "\N{SNOWMAN}.py")), Console(width=80, file=file))
    file.flush()
    text = file.buffer.getvalue().decode(encoding)
    assert "##############################################+++++................" in text
    assert "# allocated  + cached  : outside  . free" in text
    assert "\\u2603.py" in text


def test_no_colour_in_a_pipe_or_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no terminal gets no escape codes; NO_COLOR leaves no colours, only bold and the like."""
    piped = io.StringIO()
    print_report(not_fitting(), Console(width=80, file=piped))
    assert "\x1b" not in piped.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = io.StringIO()
    print_report(not_fitting(), Console(width=80, file=terminal, force_terminal=True))
    assert "\x1b[1;7mDOES NOT FIT\x1b[0m" in terminal.getvalue()
    assert "\x1b[3" not in terminal.getvalue()


def test_text_from_a_script_cannot_steer_the_terminal() -> None:
    """Escape codes, markup, line breaks and direction marks in names and messages are shown, not obeyed."""
    evil = "a\x1b[2J[bold red]b\n\u202ec\ud800"
    text = shown(
        not_fitting(
            notes=(evil,),
            command=(evil,),
            gpu=GPU(name=evil, memory_bytes=T4.memory_bytes, compute_capability="7.5", sm_count=40),
            value_reads=(ValueRead(location=evil, operation=evil, count=1),),
        ),
        width=160,
    )
    assert not set(text) & {"\x1b", "\u202e", "\ud800"}
    assert "Notes        a\\x1b[2J[bold red]b \\u202ec\\ud800\n" in text


def test_many_steps_are_folded() -> None:
    """Of many steps the first two, the highest and the last are kept; equal neighbours share a row."""
    heights = [6, 7, 7, 8, 9, 12, 9, 8, 9, 10]
    text = shown(fitting(per_step=tuple(step(i, h * GIB) for i, h in enumerate(heights, 1))))
    assert (
        """\
Steps                      allocated   reserved
             step 1         6.00 GiB   7.00 GiB
             steps 2 to 3   7.00 GiB   8.00 GiB
             step 6        12.00 GiB  13.00 GiB
             step 10       10.00 GiB  11.00 GiB
             +5 more steps, none of them higher
             the first step peaks 4.00 GiB below the last
"""
        in text
    )
    assert "rising" not in text, "the highest step was long before"


def test_steps_that_rise_to_the_end() -> None:
    """Where the last step is the highest more may come, unless a profile knows what it is."""
    rising = fitting(per_step=tuple(step(i, i * GIB) for i in range(1, 5)))
    assert "still rising at the last step: measure more steps\n" in shown(rising)
    told = shown(rising, saved="a b.oomp", faults=[("LEAKS", "1.0 GiB more in each step are never freed", "red")])
    assert "LEAKS: 1.0 GiB more in each step are never freed\n" in told
    assert "rising" not in told
    assert told.splitlines()[-1].strip() == "oomproof steps 'a b.oomp'"


@pytest.mark.parametrize(
    ("measurement", "expected"),
    [
        (
            fitting(allocator=Allocator(retries=2)),
            "FITS, BUT ONLY JUST  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to spare): "
            "the allocator had to give back its cache 2 times to go on, which costs speed",
        ),
        (
            fitting(
                ranges=(Range(what="values", low_bytes=11 * GIB + 100 * MIB, high_bytes=17 * GIB, reason="a mask"),),
                demand_if_many=Demand(allocated_bytes=15 * GIB, reserved_bytes=16 * GIB, device_bytes=17 * GIB),
            ),
            "FITS, DEPENDING ON VALUES  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to spare): "
            "with the largest of the counts that nobody knows it would take 17.00 GiB",
        ),
        (
            fitting(value_reads=(mask("most"),)),
            "FITS  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to spare), with 12 sizes that only a kernel "
            "computes taken as the most they can be",
        ),
        (
            fitting(value_reads=(mask("assumed"),)),
            "FITS  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to spare), with 12 sizes that only a kernel "
            "computes assumed",
        ),
        (
            fitting(value_reads=(mask("least"), mask("assumed")), demand_if_many=many(13 * GIB)),
            "FITS  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to spare), up to 13.00 GiB by counts that nobody "
            "knows",
        ),
        (
            fitting(value_reads=(mask("least"),), demand_if_many=fitting().demand),
            "FITS  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to spare)",
        ),
        (
            fitting(value_reads=(mask("least"), mask("least", None)), demand_if_many=many(13 * GIB)),
            "FITS  peak 11.10 GiB of 14.56 GiB on Tesla T4 (3.47 GiB to spare), up to 13.00 GiB by counts that nobody "
            "knows, with 12 sizes that only a kernel computes taken as the least they can be",
        ),
        (
            not_fitting(peak=peak(14 * GIB, 14 * GIB)),
            "DOES NOT FIT  peak 14.10 GiB of 14.56 GiB on Tesla T4: "
            "no room for an allocation of 2.00 GiB along the way",
        ),
        (
            not_fitting(peak=peak(14 * GIB, T4.memory_bytes - 95 * MIB), outside=Outside(context_bytes=100 * MIB)),
            "DOES NOT FIT  peak 14.57 GiB of 14.56 GiB on Tesla T4 (5.0 MiB over): "
            "the low end of the range, 14.56 GiB, would fit",
        ),
        (
            fitting(verdict="unknown", ended="interrupted"),
            "UNKNOWN  peak so far 11.10 GiB of 14.56 GiB on Tesla T4; it was interrupted",
        ),
        (untouched(verdict="fits"), "FITS  the script never used the GPU"),
    ],
)
def test_the_verdict(measurement: Measurement, expected: str) -> None:
    """The first words say whether it fits and by how much."""
    assert shown(measurement).split("\n\n")[0].split() == expected.split()


def test_an_oom_that_the_script_caught() -> None:
    """A run that went on after an out-of-memory error says so, beside where it happened."""
    oom = OOM(message=OOM_MESSAGE, step=None, phase=None, module=None, requested_bytes=None, caught=True)
    assert """\
Out of       not known
memory       the script caught the error and went on
""" in shown(fitting(oom=oom))


@pytest.mark.parametrize(
    ("measurement", "options", "last_line"),
    [
        (fitting(), {}, "oomproof run -o FILE.oomp -- python train.py --batch 16"),
        (
            not_fitting(world=World(size=64, rank=3, local_world_size=8), ranks=()),
            {"saved": None},
            "oomproof run --gpu NAME --world-size 64 --rank 3 -- python train.py --batch 16",
        ),
        (
            not_fitting(world=World(size=12, rank=0, local_world_size=4), ranks=()),
            {"larger_gpu": "a10g"},
            "oomproof run --gpu a10g --world-size 12 --gpus 4 -- python train.py --batch 16",
        ),
        (SEVERAL_RANKS, {}, "oomproof run --gpu NAME -- python train.py --batch 16"),
        (fitting(), {"saved": "a b.oomp"}, "oomproof tree 'a b.oomp'"),
        (not_fitting(), {"larger_gpu": "a10g"}, "oomproof run --gpu a10g -- python train.py --batch 16"),
        (RAISED, {"saved": "a b.oomp"}, "oomproof run -o FILE.oomp -- python train.py --batch 16"),
        (
            fitting(command=("python", "a b.py", "x" * 80)),
            {},
            f"oomproof run -o FILE.oomp -- python 'a b.py' {'x' * 80}",
        ),
        (
            fitting(),
            {"options": ["--gpu", "t4", "--steps", "5"]},
            "oomproof run -o FILE.oomp --gpu t4 --steps 5 -- python train.py --batch 16",
        ),
        (
            not_fitting(),
            {"larger_gpu": "a10g", "options": ["--gpu", "t4", "--values", "keep"]},
            "oomproof run --gpu a10g --values keep -- python train.py --batch 16",
        ),
        (
            fitting(demand_if_many=many(17 * GIB)),
            {"saved": "a b.oomp", "options": ["--gpu", "t4", "--unknown-counts", "range"]},
            "oomproof run --unknown-counts many --gpu t4 -- python train.py --batch 16",
        ),
        (
            dataclasses.replace(RAISED, remedy=Remedy(reason="give it more", options=("--gpus", "8"))),
            {"options": ["--gpu", "t4", "--gpus", "2"]},
            "oomproof run --gpus 8 --gpu t4 -- python train.py --batch 16",
        ),
        (
            dataclasses.replace(RAISED, remedy=Remedy(reason="end it", options=("--steps", "2"))),
            {"options": ["--gpu", "t4", "--world-size", "8", "--steps", "5", "--until-stable"]},
            "oomproof run --steps 2 --gpu t4 --world-size 8 -- python train.py --batch 16",
        ),
    ],
)
def test_the_last_line_is_the_next_command(
    measurement: Measurement, options: dict[str, object], last_line: str
) -> None:
    """It is one line that a shell takes as it stands, with the options of the run but for the GPU it changes."""
    assert shown(measurement, **options).splitlines()[-1].strip() == last_line  # type: ignore[arg-type]


def test_render_is_a_rich_renderable() -> None:
    """``render`` gives what ``print_report`` prints."""
    console = Console(width=80, record=True, file=io.StringIO(), color_system=None)
    console.print(render(fitting()))
    assert console.export_text() == FITS_TEXT


def test_a_gpu_without_memory_is_still_shown() -> None:
    """Absurd figures in a file make an absurd report, not a traceback."""
    gpu = GPU(name="", memory_bytes=0, compute_capability="", sm_count=0)
    huge = 2**63 - 1
    assert shown(fitting(gpu=gpu, peak=peak(huge, 1, huge), breakdown=Breakdown(unknown_bytes=huge)))
