"""``oomproof apply``: train with a plan, the script unchanged; or rehearse that on the phantom."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from oomproof import api
from oomproof.cli.run import Progress, chosen_gpu, exit_code, parse_steps, typed_options
from oomproof.errors import EXIT_FAILED, EXIT_FITS, EXIT_INTERRUPTED, PlanError, UsageError
from oomproof.measure.measurement import Measurement
from oomproof.plan import applying
from oomproof.plan.document import Plan, read_plan
from oomproof.plan.planning import rehearse
from oomproof.report.json_output import to_json_text
from oomproof.report.plan_next import line
from oomproof.report.terminal import print_report
from oomproof.report.words import NextCommand

EPILOG = (
    "Exit codes: 0 done (--phantom: it fits), 1 the tool or the script failed, 2 --phantom: it does not fit, 64 wrong "
    "usage, or the plan cannot be applied here, 130 interrupted. Example: oomproof apply plan.toml -- python train.py"
)


def main(
    plan: Annotated[Path, typer.Argument(help="A plan written by `oomproof plan -o`.")],
    command: Annotated[list[str], typer.Argument(help="The training command, as for `oomproof plan`.")],
    phantom: Annotated[
        str | None, typer.Option(metavar="GPU", help="Rehearse on this GPU of the catalogue, without one.")
    ] = None,
    gpu_file: Annotated[Path | None, typer.Option(help="Rehearse on the GPU that this TOML file describes.")] = None,
    memory: Annotated[str | None, typer.Option(help="With --phantom: override the GPU's memory.")] = None,
    steps: Annotated[str, typer.Option(help="With --phantom: optimizer steps to run, or 'all'.")] = "3",
    anyway: Annotated[bool, typer.Option(help="Apply a plan that was made for something else.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --phantom: print the measurement as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="With --phantom: hide what the script prints.")] = False,
) -> None:
    """Train for real with a plan's changes in the script, or rehearse it with --phantom."""
    made = read_plan(plan)
    command = command[1:]  # the parser leaves the dashes where they follow an argument
    gpu = chosen_gpu(phantom, gpu_file, "--phantom")
    if gpu is None and (memory is not None or json):
        raise UsageError("--memory and --json are for a rehearsal; add --phantom GPU")
    job = api.prepare(command, gpu=gpu, memory=memory, steps=parse_steps(steps))
    here = applying.look(command, job.program, job.folder, real=gpu is None)
    if gpu is not None:
        here = replace(here, gpus=None, gpu=job.settings.gpu.name)
    wrong, other = applying.differences(made, command, here)
    for what in other:
        print(f"oomproof: {what}", file=sys.stderr)
    if wrong and not anyway:
        raise PlanError(f"{'; '.join(wrong)} (--anyway applies it all the same)")
    if gpu is None:
        code = applying.apply(made, command)
        interrupted = code in (-signal.SIGINT, EXIT_INTERRUPTED)
        raise typer.Exit(EXIT_INTERRUPTED if interrupted else EXIT_FAILED if code else EXIT_FITS)
    result = rehearse(job, made.changes, quiet=quiet, on_step=Progress(steps), stdout=sys.stderr if json else None)
    measured = result.measurement
    for record in result.limited.changes:
        for entry in record["said"]:
            print(f"oomproof: {entry['technique']}: {entry['what']} ({entry['where']})", file=sys.stderr)
    if json:
        sys.stdout.write(to_json_text(measured))
    else:
        options = typed_options(gpu=phantom, gpu_file=gpu_file, memory=memory)
        print_report(measured, Console(), after=_after(measured, str(plan), options, command))
    if result.interrupted:
        print("oomproof: interrupted; the command's processes have ended", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)
    if not other and (made.gpu_memory_bytes, made.steps) == (job.settings.gpu.memory_bytes, measured.steps):
        print(f"oomproof: {_compared(made, measured)}", file=sys.stderr)
    raise typer.Exit(exit_code(measured))


def _compared(made: Plan, measured: Measurement) -> str:
    """Return whether the peak is the one that proved the plan, where it was made for the same."""
    if (measured.peak.allocated_bytes, measured.peak.reserved_bytes) == (made.allocated_bytes, made.reserved_bytes):
        return "the peak is the plan's, to the byte"
    proved = f"{made.allocated_bytes:,} allocated and {made.reserved_bytes:,} reserved were proved"
    return f"the peak is not the plan's: {proved}"


def _after(measured: Measurement, plan: str, options: list[str], command: list[str]) -> NextCommand:
    """Return the next command: a run would know nothing of the plan."""
    if measured.verdict == "fits":
        return NextCommand(reason="train with it", command=line("apply", [plan], command))
    if measured.verdict == "does-not-fit":
        return NextCommand(reason="plan again for this GPU", command=line("plan", options, command))
    words = ["--phantom" if word == "--gpu" else word for word in options]
    return NextCommand(
        reason=f"the script {measured.ended}: see why, then", command=line("apply", [*words, plan], command)
    )
