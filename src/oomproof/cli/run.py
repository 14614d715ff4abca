"""``oomproof run``: the peak memory of a training script on a GPU that isn't there."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from oomproof import api
from oomproof.capture import read_profile
from oomproof.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_FITS, EXIT_INTERRUPTED, OomproofError, UsageError
from oomproof.gpus import GPUSpec, all_gpus, load_gpu_file
from oomproof.measure.measurement import Measurement
from oomproof.phantom.launch import nodes_wanted
from oomproof.report.json_output import to_json_text
from oomproof.report.source import of_whole_steps
from oomproof.report.steps import faults
from oomproof.report.terminal import print_report
from oomproof.units import format_bytes, format_seconds

EPILOG = (
    "Exit codes: 0 it fits, 1 the tool or the script failed, 2 it does not fit, 64 wrong usage, 130 interrupted. "
    "Example: oomproof run --gpu a100-40gb -- python train.py --batch-size 16"
)


#: A world in which the first step takes long, and after how long without one that is said.
LARGE_WORLD = 1000
PATIENCE_SECONDS = 10.0

#: What is said before the steps of a further run.
AGAIN = {
    "demand": "out of memory; once more without a limit, for the demand",
    "values": "memory depends on unknown counts; once more with the largest, for the range",
}


def main(
    command: Annotated[
        list[str],
        typer.Argument(help="What to run: a script, -m module, or any command such as torchrun or bash."),
    ],
    gpu: Annotated[str | None, typer.Option(help="GPU from the catalogue; see `oomproof gpus`.")] = None,
    gpu_file: Annotated[Path | None, typer.Option(help="TOML file that describes a GPU of your own.")] = None,
    memory: Annotated[str | None, typer.Option(help="Override the GPU's memory, such as 20GiB.")] = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs in the machine; default: what the launcher asks for, or 1.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Run one rank of a world of this many, whose other ranks do not exist.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Which rank of that world; default 0.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Several ranks such as 0,7,63, or worst: every one that can differ in memory.")
    ] = None,
    steps: Annotated[str, typer.Option(help="Optimizer steps to run, or 'all'.")] = "3",
    until_stable: Annotated[bool, typer.Option(help="Stop when two steps in a row have the same peak.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a capture to this file.")] = None,
    snapshot: Annotated[bool, typer.Option(help="Add PyTorch's memory snapshot to the capture.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the measurement as JSON on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Hide what the script prints.")] = False,
    values: Annotated[
        str, typer.Option(help="mirror: compute small tensors on the CPU too; keep: only copies.")
    ] = "mirror",
    unknown_counts: Annotated[
        str,
        typer.Option(help="Counts of unknown values: few, many, or range: few, and once more with many if it matters."),
    ] = "range",
    platform: Annotated[str, typer.Option(help="Whose driver orders the addresses: linux or wsl.")] = "linux",
) -> None:
    """Run a command on a phantom GPU and report its peak memory."""
    if snapshot and output is None:
        raise UsageError("--snapshot goes into the capture; add -o FILE.oomp")
    progress = Progress(steps, in_world=world_size is not None or nodes_wanted(command) > 1)
    patience = threading.Timer(PATIENCE_SECONDS, progress.still_waiting, [world_size])
    patience.daemon = True
    failure: OomproofError | None = None
    interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of a scheduler or `timeout`: as Ctrl-C, nothing is left
    if world_size is not None and world_size >= LARGE_WORLD:
        patience.start()
    try:
        measured = api.run(
            command,
            gpu=chosen_gpu(gpu, gpu_file),
            memory=memory,
            gpus=gpus,
            world_size=world_size,
            rank=rank,
            ranks=ranks,
            steps=parse_steps(steps),
            until_stable=until_stable,
            values=values,
            unknown_counts=unknown_counts,
            platform=platform,
            output=output,
            snapshot=snapshot,
            quiet=quiet,
            on_step=progress,
            stdout=sys.stderr if json else None,  # standard output is the JSON's alone
        )
    except api.Interrupted as stop:
        measured, interrupted = stop.measurement, True
    except OomproofError as error:
        if not isinstance(error.measurement, Measurement):
            raise
        measured, failure = error.measurement, error
    finally:
        patience.cancel()
    if json:
        sys.stdout.write(to_json_text(measured))
    else:
        options = typed_options(
            gpu=gpu, gpu_file=gpu_file, memory=memory, gpus=gpus, world_size=world_size, rank=rank, ranks=ranks,
            values=values, unknown_counts=unknown_counts, platform=platform,
        )  # fmt: skip
        options += [] if steps == "3" else ["--steps", steps]
        options += ["--until-stable"] if until_stable else []
        saved = str(output) if output is not None and failure is None else None
        profile = read_profile(saved) if saved is not None else None
        print_report(
            measured,
            Console(),
            saved=saved,
            larger_gpu=larger_gpu(measured),
            options=options,
            faults=[] if profile is None else faults(of_whole_steps(profile, measured)),
        )
    if failure is not None:
        raise failure
    if interrupted:
        print("oomproof: interrupted; the command's processes have ended", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(exit_code(measured))


def chosen_gpu(name: str | None, file: Path | None, option: str = "--gpu") -> GPUSpec | str | None:
    """Return the GPU that the options name. Raises UsageError when both do."""
    if name is not None and file is not None:
        raise UsageError(f"{option} and --gpu-file name two GPUs; give one of them")
    return load_gpu_file(file) if file is not None else name


def typed_options(**options: object) -> list[str]:
    """Return the options as a person would type them, without those that have their default."""
    defaults = {None, "mirror", "range", "linux"}
    return [
        word
        for name, value in options.items()
        if value not in defaults
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def parse_steps(text: str) -> int | None:
    """Return the number of steps, None for "all". Raises UsageError."""
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--steps is {text!r}; give a number such as 3, or all") from None


def exit_code(measured: Measurement) -> int:
    """Return the exit code that a verdict ends with."""
    return {"fits": EXIT_FITS, "does-not-fit": EXIT_DOES_NOT_FIT}.get(measured.verdict, EXIT_FAILED)


def larger_gpu(measured: Measurement) -> str | None:
    """Return the key of the smallest whole GPU of the catalogue with more memory, which every rank's demand fits."""
    demand = max(measured.demand.device_bytes, *(rank.peak.device_bytes for rank in measured.ranks), 0)
    enough = [g for g in all_gpus() if g.memory_bytes >= demand * 1.02 and not g.mig]
    enough = [g for g in enough if g.memory_bytes > measured.gpu.memory_bytes and g.compute_capability >= (7, 5)]
    return min(enough, key=lambda g: g.memory_bytes).key if enough else None


class Progress:
    """A line on standard error for each step, with its rank where single ranks of a world are measured."""

    def __init__(self, steps: str, *, in_world: bool = False) -> None:
        self._of = "" if steps == "all" else f" of {steps}"
        self._run = 1
        self._in_world = in_world
        self._told = False

    def still_waiting(self, world_size: int) -> None:
        """Say what takes so long, unless a step has been told of by now."""
        if not self._told:
            print(
                f"oomproof: no step yet; for a world of {world_size:,} ranks, making its groups and the first step can "
                "take minutes",
                file=sys.stderr,
                flush=True,
            )

    def __call__(self, step: dict[str, Any]) -> None:
        self._told = True
        if step["run"] != self._run:
            self._run = step["run"]
            if step["purpose"] in AGAIN:
                print(f"oomproof: {AGAIN[step['purpose']]}", file=sys.stderr)
        rank = f"rank {step['rank']}: " if self._in_world else ""
        print(
            f"oomproof: {rank}step {step['step']}{self._of}: allocated {format_bytes(step['allocated_bytes'])}, "
            f"reserved {format_bytes(step['reserved_bytes'])} at its peak, {format_seconds(step['seconds'])}",
            file=sys.stderr,
            flush=True,
        )
