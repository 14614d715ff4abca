"""Errors that say more of how a script was run than of the script: too few GPUs, ranks that do not exist."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from oomproof.measure.measurement import Remedy
from oomproof.phantom.device import MOST_GPUS


class Cause(NamedTuple):
    """What an error comes from, for the notes, and what to do about it."""

    note: str
    remedy: Remedy


#: What PyTorch and Lightning say where a GPU is asked for that is not there.
_NO_SUCH_GPU = ("invalid device ordinal", "Invalid device id", "You requested gpu:")
_REQUESTED = re.compile(r"You requested gpu: \[([\d, ]+)\]")


def cause(findings: Sequence[Mapping[str, Any]], lead: Mapping[str, Any]) -> Cause | None:
    """Return why a run of these processes ended in an error, if that is known and not the script's fault."""
    if lead["ended"] != "raised":
        return None
    return _too_few_gpus(findings) or _no_other_ranks(lead)


def _too_few_gpus(findings: Sequence[Mapping[str, Any]]) -> Cause | None:
    errors = [f["error"] for f in findings if f["ended"] == "raised" and f["error"]]
    if not any(said in error for error in errors for said in _NO_SUCH_GPU):
        return None
    there = max(f["gpus"] for f in findings)
    named = [int(number) for e in errors for found in _REQUESTED.findall(e) for number in found.split(",")]
    ranks = [f["world_size"] for f in findings if not f["alone"]]
    wanted = max((max(named) + 1) if named else 0, *ranks, 0)
    count = str(wanted) if there < wanted <= MOST_GPUS else "N"
    return Cause(
        f"the script asks for a GPU that is not there: the machine has {there}; --gpus {count} gives it more",
        Remedy(reason="give the machine as many GPUs as the script asks for", options=("--gpus", count)),
    )


def _no_other_ranks(lead: Mapping[str, Any]) -> Cause | None:
    """Return the cause where a rank whose others do not exist had made whole steps before the error."""
    steps = lead["steps"]
    if not lead["alone"] or not steps:
        return None
    made = "1 step" if steps == 1 else f"{steps:,} steps"
    if lead["gathers_states"]:
        why = "this was where the states of all ranks are put together, and those of the other ranks do not exist"
    else:
        why = (
            "where the other ranks do not exist, what ranks compare or gather (a checkpoint, a check) may fail that "
            "would not among real ones"
        )
    return Cause(
        f"the error came after {made}: {why}. The figures until then are right; --steps {steps} ends the run there",
        Remedy(reason="end the run before the error", options=("--steps", str(steps))),
    )
