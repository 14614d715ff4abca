"""``oomproof plan``: the cheapest change that makes a script fit, proved by a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from oomproof import api
from oomproof.cli.run import chosen_gpu
from oomproof.errors import EXIT_DOES_NOT_FIT, EXIT_FITS, EXIT_INTERRUPTED, UsageError
from oomproof.plan.candidate import Trial
from oomproof.plan.document import read_plan, write_plan
from oomproof.plan.largest import Tried, find_largest
from oomproof.plan.planning import CANDIDATES, SECONDS, plan
from oomproof.plan.technique import FRAMEWORKS
from oomproof.report import largest as largest_report
from oomproof.report import plan as report
from oomproof.report.plan_next import after
from oomproof.report.sheet import print_sheet
from oomproof.units import format_bytes

EPILOG = (
    "Exit codes: 0 it fits as it is or with the plan, 1 the tool or the script failed, 2 nothing fits, 64 wrong usage, "
    "130 interrupted. Example: oomproof plan --gpu t4 -o plan.toml -- python train.py"
)


def main(
    command: Annotated[list[str], typer.Argument(help="The training command, as for `oomproof run`.")],
    gpu: Annotated[str | None, typer.Option(help="GPU from the catalogue; see `oomproof gpus`.")] = None,
    gpu_file: Annotated[Path | None, typer.Option(help="TOML file that describes a GPU of your own.")] = None,
    memory: Annotated[str | None, typer.Option(help="Override the GPU's memory, such as 20GiB.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that the plan may spread the script over.")] = 1,
    allow: Annotated[
        str, typer.Option(help="Worst fidelity of a plan: exact, equal, approximate or changes-model.")
    ] = "approximate",
    only: Annotated[str, typer.Option(help="Techniques to try, separated by commas; see docs/techniques.md.")] = "",
    without: Annotated[str, typer.Option(help="Techniques to leave out, separated by commas.")] = "",
    candidates: Annotated[int, typer.Option(min=1, help="Sets of changes to run at most.")] = CANDIDATES,
    seconds: Annotated[float, typer.Option(min=1, help="Time after which no further set is begun.")] = SECONDS,
    explore: Annotated[
        bool, typer.Option("--explore", help="Go on after the answer, to the end of --candidates or --seconds.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 3,
    largest: Annotated[
        str | None,
        typer.Option(metavar="OPTION", help="Find the largest value of the command's own OPTION that fits instead."),
    ] = None,
    multiple_of: Annotated[int, typer.Option(min=1, help="With --largest: values to try are multiples of this.")] = 1,
    with_plan: Annotated[Path | None, typer.Option(help="With --largest: the plan that is applied.")] = None,
    executor: Annotated[str, typer.Option(help="Where sets are run: local, ray or slurm.")] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at once; default: what the machine allows.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="File that keeps what was tried; what is in it is not run again.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")] = None,
    emit: Annotated[str | None, typer.Option(help=f"Show what to write by hand: {', '.join(FRAMEWORKS)}.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with all sets, and memory against time, to this file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing while it runs.")] = False,
) -> None:
    """Find the cheapest changes that make a command fit; each candidate is run on the phantom."""
    if emit is not None and emit not in FRAMEWORKS:
        raise UsageError(f"--emit is {emit!r}; it must be one of {', '.join(FRAMEWORKS)}")
    for path in (output, html):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent} for {path.name}; create it first")
    options = _typed(
        {
            "--gpu": gpu,
            "--gpu-file": gpu_file,
            "--memory": memory,
            "--gpus": (gpus, 1),
            "--allow": (allow, "approximate"),
            "--only": (only, ""),
            "--without": (without, ""),
            "--candidates": (candidates, CANDIDATES),
            "--seconds": (seconds, SECONDS),
            "--explore": explore,
            "--steps": (steps, 3),
            "--executor": (executor, "local"),
            "--workers": workers,
            "--resume": resume,
            "-o": output,
            "--emit": emit,
            "--html": html,
            "-q": quiet,
        }
    )
    if largest is not None:
        changes = read_plan(with_plan).changes if with_plan is not None else ()
        job = api.prepare(command, gpu=chosen_gpu(gpu, gpu_file), memory=memory, steps=steps)
        found = find_largest(job, largest, changes=changes, multiple=multiple_of, told=None if quiet else _tell)
        if json:
            sys.stdout.write(largest_report.to_json_text(found, job))
        else:
            print_sheet(largest_report.body(found, job), largest_report.after(found, job, options, with_plan))
        raise typer.Exit(EXIT_FITS if found.answer is not None else EXIT_DOES_NOT_FIT)
    try:
        planned = plan(
            command,
            gpu=chosen_gpu(gpu, gpu_file),
            memory=memory,
            gpus=gpus,
            allow=allow,
            only=_names(only),
            without=_names(without),
            candidates=candidates,
            seconds=seconds,
            explore=explore,
            steps=steps,
            executor=executor,
            workers=workers,
            resume=resume,
            told=None if quiet else Progress(),
        )
    except KeyboardInterrupt:  # typer would end without a word
        kept = (
            f"; {resume} has what was tried" if resume is not None else "; --resume FILE would have kept what was tried"
        )
        print(f"oomproof: interrupted, all runs have ended{kept}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    saved = None
    if output is not None and planned.plan is not None:
        write_plan(output, planned.plan)
        saved = str(output)
    if html is not None:
        from oomproof.report.page.files import write_page
        from oomproof.report.plan_page import page

        write_page(html, page(planned, emit or planned.facts.framework, saved, options))
    if json:
        sys.stdout.write(report.to_json_text(planned))
    else:
        print_sheet(report.body(planned, emit), after(planned, saved, options))
    if output is not None and saved is None:
        print(f"oomproof: there is no plan to write to {output}", file=sys.stderr)
    raise typer.Exit(EXIT_FITS if planned.found.winner is not None else EXIT_DOES_NOT_FIT)


def _tell(tried: Tried) -> None:
    verdict = "fits" if tried.fits_easily else "fits by giving back cached memory" if tried.fits else "does not fit"
    print(
        f"oomproof: {tried.value:,}: {verdict}, {format_bytes(tried.measurement.demand.device_bytes)}", file=sys.stderr
    )


def _typed(values: Mapping[str, object]) -> dict[str, str | None]:
    """Return the options as a person would type them, without those that have their default: None, or given beside."""
    found: dict[str, str | None] = {}
    for name, value in values.items():
        value, default = value if isinstance(value, tuple) else (value, None)
        if isinstance(value, bool):
            found.update({name: None} if value else {})
        elif value != default:
            found[name] = f"{value:g}" if isinstance(value, float) else str(value)
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


class Progress:
    """A line on standard error for each set of changes that was run."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._count = 0

    def __call__(self, trial: Trial) -> None:
        peak = trial.reason[:60] if trial.peak_bytes is None else format_bytes(trial.peak_bytes)
        verdict = trial.verdict.replace("-", " ")
        print(
            f"oomproof: {time.monotonic() - self._started:5.1f} s  {self._count or 'base'}  {trial.candidate.label}: "
            f"{verdict}, {peak}",
            file=sys.stderr,
            flush=True,
        )
        self._count += 1
