"""The report's sentences: places, counts, and text from elsewhere made safe for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from oomproof.measure.measurement import Measurement, Phase
from oomproof.units import format_bytes

GPUS_PER_MACHINE = 8  # that a run takes for a world when nothing says otherwise, if they divide it


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommand:
    """What to type next, and why."""

    reason: str
    command: str


def clean(text: str, encoding: str = "utf-8", *, limit: int | None = None) -> str:
    """Return ``text`` on one line, with whatever the terminal could obey or not encode written as an escape.

    Module names, messages and commands come from scripts and files; none may move the cursor or set colours.
    With ``limit``, text longer than that many characters is cut there and ends in "...".
    """
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in line)
    line = line.encode(encoding, "backslashreplace").decode(encoding)
    return line if limit is None or len(line) <= limit else line[: limit - 3].rstrip() + "..."


def verbatim(line: str, encoding: str = "utf-8") -> str:
    """Return a line of code with its spaces as they are; what the terminal could obey or not encode is escaped."""
    line = line.expandtabs(4)
    line = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in line)
    return line.encode(encoding, "backslashreplace").decode(encoding)


def quoted(words: Sequence[str]) -> str:
    """Return the words of a command as a shell reads them, on one line whatever is in them."""
    return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in words)


def _escaped(word: str) -> str:
    """Return a word with line breaks or control characters in the form that bash and zsh have for them."""
    special = {"'": "\\'", "\\": "\\\\"}
    codes = (special.get(c, c) if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in word)
    return f"$'{''.join(codes)}'"


def exact(size_bytes: int) -> str:
    """Return every digit of a size: ``57,982,058,496 bytes``."""
    return f"{size_bytes:,} bytes"


def span(low_bytes: int, high_bytes: int) -> str:
    """Return a range for a person: ``400.0 MiB to 660.0 MiB``."""
    return f"{format_bytes(low_bytes)} to {format_bytes(high_bytes)}"


def share(part: int, whole: int) -> str:
    """Return ``part`` as a percentage of ``whole``; a part that is there never shows as 0 %."""
    percent = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < percent < 0.5 else f"{percent:.0f} %"


def plural(count: int, noun: str) -> str:
    """Return ``1 retry``, ``no retries``, ``2 steps``."""
    if count == 1:
        return f"1 {noun}"
    many = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count:,} {many}" if count else f"no {many}"


def place(step: int | None, phase: Phase | None, module: str | None) -> str:
    """Return where something happened, as far as it is known."""
    parts = []
    if step is not None:
        parts.append(f"step {step}")
    if phase is not None:
        parts.append("other phase" if phase == "other" else phase)
    if module:
        parts.append(f"in {module}")
    return ", ".join(parts) or "not known"


def is_untouched(measurement: Measurement) -> bool:
    """Return True when the script took no memory on the GPU at all."""
    peak = measurement.peak
    return not (peak.allocated_bytes or peak.reserved_bytes or measurement.outside.other_bytes)


def next_command(
    measurement: Measurement,
    *,
    saved: str | None,
    larger_gpu: str | None,
    options: Sequence[str] = (),
    at_fault: bool = False,
) -> NextCommand:
    """Return what to type after this report; ``saved`` is the capture that it is in already, with a profile.

    ``options`` are those of the run that was measured; the next one keeps them but for the GPU it changes. Where they
    are not known, it keeps the world at least. ``at_fault`` says that the steps leak, fragment or vary.
    """
    options = options or world_options(measurement)
    kept = shlex.join(options)
    others = shlex.join(_without(options, "--gpu", "--gpu-file", "--memory"))
    if is_untouched(measurement) and measurement.ended not in ("raised", "exited", "interrupted"):
        return NextCommand(reason="move the model to the GPU in the script, then", command=_run(measurement, kept))
    if measurement.remedy is not None and measurement.verdict == "unknown":
        others = shlex.join(_without(options, measurement.remedy.options[0]))
        return NextCommand(
            reason=measurement.remedy.reason,
            command=_run(measurement, shlex.join(measurement.remedy.options), others),
        )
    if measurement.verdict == "unknown":
        reason = {
            "raised": "mend the script, then",
            "exited": "see why the script exited early, then",
            "interrupted": "let it run to its end",
            "no-kernels": "install a torch that was built for this GPU, then",
        }.get(measurement.ended, "run it again and keep what it shows")
        return NextCommand(reason=reason, command=_run(measurement, "-o FILE.oomp", kept))
    if measurement.verdict == "does-not-fit" and larger_gpu is not None:
        return NextCommand(
            reason=f"see whether it fits {larger_gpu}",
            command=_run(measurement, f"--gpu {shlex.quote(larger_gpu)}", others),
        )
    if depends(measurement):
        others = shlex.join(_without(options, "--unknown-counts"))
        return NextCommand(
            reason="see what it takes with the largest counts",
            command=_run(measurement, "--unknown-counts many", others),
        )
    if saved is not None and at_fault:
        return NextCommand(reason="see what the steps show", command=f"oomproof steps {shlex.quote(saved)}")
    if saved is not None:
        return NextCommand(reason="see what the peak consists of", command=f"oomproof tree {shlex.quote(saved)}")
    if measurement.verdict == "does-not-fit":
        reason = "see whether it fits a larger GPU (oomproof gpus lists them)"
        return NextCommand(reason=reason, command=_run(measurement, "--gpu NAME", others))
    return NextCommand(reason="keep this measurement in a file", command=_run(measurement, "-o FILE.oomp", kept))


def world_options(measurement: Measurement) -> list[str]:
    """Return the options that make the measured rank's world anew; none where the command started all ranks itself."""
    world = measurement.world
    if world.size <= 1 or len(measurement.ranks) >= world.size:
        return []
    options = ["--world-size", str(world.size)]
    usual = next(count for count in range(GPUS_PER_MACHINE, 0, -1) if world.size % count == 0)
    if world.local_world_size != usual:
        options += ["--gpus", str(world.local_world_size)]
    if len(measurement.ranks) > 1:
        return [*options, "--ranks", ",".join(str(rank.rank) for rank in measurement.ranks)]
    return [*options, "--rank", str(world.rank)] if world.rank else options


def _without(options: Sequence[str], *names: str) -> list[str]:
    """Return the options without those of these names, each of which takes a value.

    With another ``--steps`` goes ``--until-stable``, beside which steps are not looked at.
    """
    kept, skip = [], False
    for option in options:
        if not skip and option not in names and not (option == "--until-stable" and "--steps" in names):
            kept.append(option)
        skip = not skip and option in names
    return kept


def depends(measurement: Measurement) -> bool:
    """Return whether a run that fits would not with the largest counts of unknown values."""
    many = measurement.demand_if_many
    return measurement.verdict == "fits" and many is not None and many.device_bytes > measurement.gpu.memory_bytes


def _run(measurement: Measurement, *options: str) -> str:
    return " ".join(filter(None, ("oomproof run", *options, "--", shlex.join(measurement.command))))
