"""The command to type after a plan: it keeps the options of the one before that bear on what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oomproof.errors import UsageError
from oomproof.gpus import get_gpu
from oomproof.phantom.launch import MOST_GPUS
from oomproof.plan.planning import CANDIDATES, SECONDS, Planned
from oomproof.report.words import NextCommand, quoted

#: Options and what was given for them, as a person types them; None is the value of a flag.
Options = Mapping[str, str | None]

#: Those that a run of the same script on the same GPU has as well.
OF_RUNS = ("--gpu", "--gpu-file", "--memory", "--steps")

#: A search that was stopped by its budget is proposed again with so many times as much.
MORE = 4


def words(options: Options, *names: str) -> list[str]:
    """Return the options, all or those of these names, as words of a command."""
    chosen = {name: value for name, value in options.items() if not names or name in names}
    return [word for name, value in chosen.items() for word in (name, value) if word is not None]


def line(verb: str, options: Sequence[str], command: Sequence[str]) -> str:
    """Return a command of oomproof's, quoted for a shell."""
    return " ".join(filter(None, ("oomproof", verb, quoted(options), "--", quoted(command))))


def after(planned: Planned, saved: str | None, options: Options | None = None) -> NextCommand:
    """Return the next command. ``options`` are those that were typed, without them what is known of the plan."""
    given = _known(planned) if options is None else dict(options)
    if not {"--gpu", "--gpu-file"} & given.keys():  # what was taken for it may be another tomorrow
        given = {"--gpu": planned.gpu.key, **given}
    command = planned.command
    if planned.fits_as_it_is:
        run = [*words(given, *OF_RUNS), "-o", "FILE.oomp"]
        return NextCommand(reason="see what the peak consists of", command=line("run", run, command))
    if planned.plan is not None and saved is not None:
        return NextCommand(reason="train with it", command=line("apply", [saved], command))
    if planned.plan is not None:
        return NextCommand(
            reason="keep the plan in a file", command=line("plan", [*words(given), "-o", "plan.toml"], command)
        )
    return _nothing_fits(planned, given, command)


def _nothing_fits(planned: Planned, given: dict[str, str | None], command: Sequence[str]) -> NextCommand:
    if planned.found.out_of_budget:
        given["--candidates"] = str(MORE * int(given.get("--candidates") or CANDIDATES))
        given["--seconds"] = f"{MORE * float(given.get('--seconds') or SECONDS):g}"
        return NextCommand(reason="look for longer", command=line("plan", words(given), command))
    if {"--only", "--without"} & given.keys():
        rest = {name: value for name, value in given.items() if name not in ("--only", "--without")}
        return NextCommand(reason="see what other techniques would do", command=line("plan", words(rest), command))
    if given.get("--allow") != "changes-model":
        given["--allow"] = "changes-model"
        return NextCommand(reason="see whether another model would fit", command=line("plan", words(given), command))
    if planned.smallest is not None:
        run = ["--gpu", planned.smallest.key, *words(given, "--steps")]
        return NextCommand(
            reason=f"as it is the script fits {planned.smallest.key}; see what it takes there",
            command=line("run", run, command),
        )
    if planned.gpus < MOST_GPUS:
        given["--gpus"] = str(min(MOST_GPUS, 2 * planned.gpus))
        return NextCommand(reason="spread it over more GPUs", command=line("plan", words(given), command))
    return NextCommand(reason="see which GPUs have more memory", command="oomproof gpus")


def _known(planned: Planned) -> dict[str, str | None]:
    """Return the options that a plan itself tells of."""
    found: dict[str, str | None] = {"--gpu": planned.gpu.key}
    try:
        usual = get_gpu(planned.gpu.key).memory_bytes
    except UsageError:  # of a file
        usual = planned.gpu.memory_bytes
    if usual != planned.gpu.memory_bytes:
        found["--memory"] = str(planned.gpu.memory_bytes)
    if planned.gpus > 1:
        found["--gpus"] = str(planned.gpus)
    return found
