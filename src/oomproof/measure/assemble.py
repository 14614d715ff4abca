"""From what each process of a run left behind to one Measurement with its verdict."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from oomproof.errors import EnvironmentMissingError, ScriptError
from oomproof.gpus import GPUSpec
from oomproof.measure import causes, communicators, value_range
from oomproof.measure import measurement as m

#: Why each library's workspaces could raise the peak by more than what was counted.
WORKSPACE_REASONS = {
    "cuDNN convolution": "cuDNN may ask for a workspace to run faster; PyTorch takes the first plan whose workspace "
    "can be allocated, so it is never the cause of an out-of-memory error. Which plan that is, is not public. "
    "The bound is one copy of each tensor of the convolution",
    "cuDNN attention": "cuDNN's attention kernels ask for a workspace whose size is not public; the bound is one copy "
    "of each of its tensors",
    "cuDNN RNN": "more than was counted: the sizes of a newer cuDNN are not public, reserve space and workspace follow "
    "figures published for cuDNN 6 and 7; the bound is twice as much and four values for each time step",
    "cuDNN dropout": "more than was counted: 16 bytes of generator state for each resident thread, at most 48",
    "cuDNN CTC loss": "the workspace is not public; the bound is two copies of the probabilities",
    "cuDNN batch normalisation (NHWC)": "the spaces of the persistent kernels are not public; the bound is one copy of "
    "the input",
    "cuFFT": "more than was counted, one copy of the complex data as in published figures; NVIDIA documents eight "
    "copies as the most",
    "cuSOLVER": "its workspaces are not public and counted as 0; the bound is what LAPACK documents for the same "
    "routine (2 n^2 for eigenvectors, 4 n^2 for singular vectors, else one matrix) and 4 MiB",
    "cuSPARSE": "its buffers are not public and counted as 0; the bound is one copy of the sparse matrices (two for "
    "triangular solves) and of the result",
    "cuSPARSE product": "the buffer of a product of sparse matrices is not public and counted as 0; the bound is 64 "
    "bytes for each product of two elements, as in the one published figure",
    "cuSPARSELt": "its workspaces are not public and counted as 0; the bound is one dense copy of the matrix",
}
WORKSPACE_REASON = "the library may ask for a workspace whose size is not public; the bound is a copy of its data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of the command: its exit code and what its processes found."""

    exit_code: int
    findings: tuple[dict[str, Any], ...]
    interrupted: bool = False
    changes: tuple[dict[str, Any], ...] = ()  # what plan.injection recorded, one for each process

    @property
    def change_refused(self) -> str | None:
        """Which of a plan's changes could not be applied, and why."""
        return next((record["refused"] for record in self.changes if record["refused"]), None)

    @property
    def depends_on_counts(self) -> bool:
        """True when something was sized by a count that nobody knows, and that could have been larger."""
        return any(f["depends_on_counts"] for f in self.findings)

    @property
    def troubled(self) -> bool:
        """True when an allocation failed somewhere, so that more memory would have changed the run."""
        return any(f["refused"] for f in self.findings)


def read_outcome(folder: Path, exit_code: int, *, interrupted: bool = False) -> Outcome:
    """Read what the processes left in the run's folder.

    Raises EnvironmentMissingError when one of them had no usable torch.
    """
    for path in sorted(folder.glob("error-*.txt")):
        raise EnvironmentMissingError(path.read_text())
    findings = _records(folder, "process")
    return Outcome(exit_code=exit_code, findings=findings, interrupted=interrupted, changes=_records(folder, "changes"))


def _records(folder: Path, what: str) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text()) for path in sorted(folder.glob(f"{what}-*.json")))


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of several ranks that were measured one after another as if they had run together."""
    return Outcome(
        exit_code=next((o.exit_code for o in outcomes if o.exit_code), 0),
        findings=tuple(f for o in outcomes for f in o.findings),
        interrupted=any(o.interrupted for o in outcomes),
        changes=tuple(c for o in outcomes for c in o.changes),
    )


def assemble(
    command: Sequence[str],
    gpu: GPUSpec,
    limited: Outcome,
    unlimited: Outcome | None,
    cwd: Path | None = None,
    notes: Sequence[str] = (),
    many: Outcome | None = None,
) -> m.Measurement:
    """Build the Measurement of a run on the GPU's memory and, when allocations failed there, of one without limit.

    ``many`` is a run without limit in which counts that nobody knows were the largest possible.

    Raises ScriptError when no process imported torch, since then nothing was measured.
    """
    ranks, demand_ranks, lead, demand, shown = _chosen(limited, unlimited)
    verdict = _verdict(limited, lead)
    peak = _peak(shown)
    most = _same_rank(many, lead)
    top = _demand(most) if most is not None and value_range.got_as_far(most) else None
    reads = demand["value_reads"]
    cause = causes.cause(limited.findings, lead)
    ended = "interrupted" if limited.interrupted else "no-kernels" if lead["no_kernels"] else lead["ended"]
    if ended == "finished" and limited.exit_code:
        ended = "exited"
    return m.Measurement(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=tuple(command),
        cwd_git=_git(cwd),
        gpu=m.GPU(
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            compute_capability=".".join(map(str, gpu.compute_capability)),
            sm_count=gpu.sm_count,
        ),
        torch=m.Torch(**lead["torch"]),
        allocator=m.Allocator(**lead["allocator"]),
        world=m.World(size=lead["world_size"], rank=lead["rank"], local_world_size=lead["local_world_size"]),
        steps=shown["steps"],
        verdict=verdict,
        ended=ended,
        exit_code=None if ended in ("steps-reached", "stable") else limited.exit_code,
        peak=peak,
        demand=_demand(demand),
        breakdown=m.Breakdown(**shown["breakdown"]) if shown["breakdown"] else None,
        outside=_outside(shown, gpu),
        ranges=(*_ranges(shown, gpu), *value_range.ranges(reads, _demand(demand), top)),
        per_step=tuple(m.Step(**step) for step in shown["per_step"]),
        calls=tuple(m.Call(**call) for call in shown["calls"]),
        values=lead["values"],
        value_reads=tuple(m.ValueRead(**read) for read in lead["value_reads"]),
        demand_if_many=top,
        oom=m.OOM(**lead["oom"]) if lead["oom"] else None,
        ranks=_rank_rows(ranks, demand_ranks, limited) if len(ranks) > 1 else (),
        remedy=cause.remedy if cause else None,
        notes=(
            *notes,
            *_notes(limited, lead, shown),
            *([cause.note] if cause else []),
            *_worst_by_estimate(ranks, lead),
            *value_range.notes(reads, _demand(demand), top),
            *value_range.counted(reads, _demand(demand), top, ended),
            *value_range.hint(reads, ended),
            *(value_range.failure(reads, most, many.interrupted) if many is not None and top is None else ()),
        ),
    )


def files(limited: Outcome, unlimited: Outcome | None) -> tuple[Path | None, Path | None]:
    """Return the profile and the snapshot of the process whose peak the Measurement shows; None where there is none."""
    shown = _chosen(limited, unlimited)[-1]
    profile, snapshot = shown["profile"], shown["snapshot"]
    return Path(profile) if profile else None, Path(snapshot) if snapshot else None


def _chosen(
    limited: Outcome, unlimited: Outcome | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the findings by rank of both runs, the process that is told of, its like without limit, and the one shown.

    Raises ScriptError when no process imported torch, since then nothing was measured.
    """
    if not limited.findings:
        raise ScriptError(_nothing(limited))
    ranks = _leaders(limited.findings)
    lead = max(ranks, key=_height)
    demand_ranks = _leaders(unlimited.findings) if unlimited and unlimited.findings else ranks
    demand = next((f for f in demand_ranks if f["rank"] == lead["rank"]), max(demand_ranks, key=_height))
    shown = demand if _verdict(limited, lead) == "does-not-fit" and demand["used_gpu"] else lead
    return ranks, demand_ranks, lead, demand, shown


def _nothing(outcome: Outcome) -> str:
    code = outcome.exit_code
    if code < 0:
        return (
            f"nothing was measured: the command was killed by {signal.Signals(-code).name}. If a plain run of it "
            "without oomproof gets further, please report it with the output of OOMPROOF_TRACE=1"
        )
    how = f"ended with exit code {code}" if code else "ended well"
    return (
        f"nothing was measured: the command {how} and no Python process of it got as far as torch. Check that it "
        "starts the training itself, and that Python is not started with -I, -E or -S"
    )


def _height(finding: Mapping[str, Any]) -> tuple[bool, int, int]:
    """Return what decides which process is told of: one that ran out of memory, else the one with the highest peak."""
    peak = finding["process_peak_bytes"] if finding["used_gpu"] else -1
    return finding["ended"] == "oom", peak, finding["allocated_bytes"]


def _leaders(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one finding for each rank: of its processes the one that counts."""
    best: dict[int, dict[str, Any]] = {}
    for finding in findings:
        rank = finding["rank"]
        if rank not in best or _height(finding) > _height(best[rank]):
            best[rank] = finding
    return [best[rank] for rank in sorted(best)]


def _verdict(limited: Outcome, lead: Mapping[str, Any]) -> m.Verdict:
    if any(f["ended"] == "oom" or _refused_elsewhere(f) for f in limited.findings):
        return "does-not-fit"
    if limited.interrupted or not lead["used_gpu"] or lead["no_kernels"]:
        return "unknown"
    if any(f["ended"] == "raised" and (f["used_gpu"] or limited.exit_code) for f in limited.findings):
        return "unknown"  # a helper process beside the training may fail without harm
    if lead["ended"] in ("steps-reached", "stable"):
        return "fits"
    return "unknown" if limited.exit_code else "fits"


def _refused_elsewhere(finding: Mapping[str, Any]) -> bool:
    """Return whether the script died of memory that another library was refused: NCCL, or a program's own cudaMalloc.

    A failed allocation of PyTorch's is either a retry or an out-of-memory error, each with one refusal.
    """
    own = finding["allocator"]["ooms"] + finding["allocator"]["retries"]
    return bool(finding["ended"] == "raised" and finding["refused"] > own)


def _peak(finding: Mapping[str, Any]) -> m.Peak:
    return m.Peak(
        allocated_bytes=finding["allocated_bytes"],
        reserved_bytes=finding["reserved_bytes"],
        device_bytes=max(finding["process_peak_bytes"], finding["device_peak_bytes"]),
        step=finding["step"],
        phase=finding["phase"],
        module=finding["module"],
        stack=tuple(finding["stack"]),
    )


def _demand(finding: Mapping[str, Any]) -> m.Demand:
    return m.Demand(
        allocated_bytes=finding["allocated_bytes"],
        reserved_bytes=finding["reserved_bytes"],
        device_bytes=max(finding["process_peak_bytes"], finding["device_peak_bytes"]),
    )


def _communication(finding: Mapping[str, Any]) -> tuple[int, int]:
    return communicators.communication_bytes(finding["communicators"], finding["all_to_all"])


def _outside(finding: Mapping[str, Any], gpu: GPUSpec) -> m.Outside:
    context = gpu.context_bytes[1] if finding["used_gpu"] else 0
    communication = _communication(finding)[0]
    return m.Outside(
        cached_bytes=max(0, finding["reserved_bytes"] - finding["allocated_bytes"]),
        context_bytes=context,
        communication_bytes=communication,
        other_bytes=max(
            0,
            max(finding["process_peak_bytes"], finding["device_peak_bytes"])
            - finding["reserved_bytes"]
            - context
            - communication,
        ),
    )


def _ranges(finding: Mapping[str, Any], gpu: GPUSpec) -> tuple[m.Range, ...]:
    if not finding["used_gpu"]:
        return ()
    low, _, high = gpu.context_bytes
    reason = f"depends on the driver and on the kernels that get loaded; evidence: oomproof gpus {gpu.key}"
    ranges = [m.Range(what="context", low_bytes=low, high_bytes=high, reason=reason)]
    if finding["communicators"]:
        low, high = _communication(finding)
        reason = communicators.reason(finding["communicators"], finding["all_to_all"])
        ranges.append(m.Range(what="communication", low_bytes=low, high_bytes=high, reason=reason))
    room = max(0, gpu.memory_bytes - finding["process_peak_bytes"])
    for what, lift in sorted(finding["optional_workspaces"].items()):
        if lift:
            reason = WORKSPACE_REASONS.get(what, WORKSPACE_REASON)
            ranges.append(m.Range(what=f"{what} workspace", low_bytes=0, high_bytes=min(lift, room), reason=reason))
            if what == "cuDNN convolution":
                cached = max(0, finding["reserved_bytes"] - finding["allocated_bytes"])
                reason = "with workspaces between them blocks are cached differently; published runs held less and more"
                ranges.append(m.Range(what="cached", low_bytes=0, high_bytes=cached, reason=reason))
    return tuple(ranges)


def _same_rank(many: Outcome | None, lead: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the run with the largest counts found on the rank that is told of."""
    leaders = _leaders(many.findings) if many is not None else []
    return next((f for f in leaders if f["rank"] == lead["rank"]), None)


def _notes(limited: Outcome, lead: Mapping[str, Any], shown: Mapping[str, Any]) -> list[str]:
    notes = list(dict.fromkeys([*lead["notes"], *shown["notes"]]))
    if not lead["used_gpu"] and lead["ended"] not in ("raised", "oom") and not limited.exit_code:
        notes.append(
            "the script imported torch but put nothing on the GPU; check that it asks for cuda (torch.cuda."
            "is_available() was true)"
        )
    elif lead["oom"] and lead["ended"] != "oom":
        notes.append("the script met an out-of-memory error, handled it and went on; the peak is that of what followed")
    if lead["in_kind"]:
        notes.append(
            f"whole numbers were reduced or gathered over ranks that do not exist, {lead['in_kind']} x, as if each "
            "held what this rank holds. Where sizes follow them, such as the longest of all batches, real ones can be "
            "larger: measure real processes (torchrun)"
        )
    shares = [f for f in limited.findings if f["on_first_gpu"]]
    if shares:
        notes.append(
            f"rank {shares[0]['rank']} used cuda:0 and not the GPU of its local rank. On a real machine all its ranks "
            "would share that GPU and its memory; call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first"
        )
    unanswered = sum(f["unanswered"] for f in limited.findings)
    if unanswered:
        notes.append(
            f"{unanswered} small messages of other ranks never came (a rank had ended, or took over a minute); from "
            "then on they were taken to be what this rank had itself"
        )
    if any(_refused_elsewhere(f) for f in limited.findings):
        notes.append(
            "memory was refused to a library beside PyTorch, such as NCCL, and the script ended with its error"
        )
    if lead["error"] and lead["ended"] == "raised":
        first_line = _first_line(lead["error"])
        notes.append(f"the script raised {first_line}; the figures are those until then")
    unknown = [what for what, lift in lead["optional_workspaces"].items() if not lift and ":" in what]
    if unknown:
        notes.append(f"counted as 0, their size is not public: workspaces of {', '.join(sorted(unknown))}")
    if shown["pinned_host_bytes"] >= 2**20:
        notes.append(f"pinned host memory: {shown['pinned_host_bytes'] / 2**30:.2f} GiB at its peak, not on the GPU")
    if shown["managed_bytes"]:
        notes.append(
            f"managed memory: {shown['managed_bytes'] / 2**30:.2f} GiB at its peak, not counted: the driver keeps it "
            "on the GPU as far as there is room, and on the host before an allocation would fail"
        )
    together = shown["device_peak_bytes"] - shown["process_peak_bytes"]
    if together > 0:
        notes.append(
            f"other processes of the run held {together / 2**30:.2f} GiB of the same GPU; the peak counts them"
        )
    others = [f for f in limited.findings if f["used_gpu"] and f["rank"] == lead["rank"] and f is not lead]
    if others:
        notes.append(
            f"{len(others) + 1} processes used the GPU; the figures are those of the one with the highest peak"
        )
    return notes


def _first_line(error: str) -> str:
    """Return an error's name and the first line of its message that says something.

    Those of launchers begin with rules and blank lines; mp.spawn's quotes the traceback of a process, up to its error.
    """
    name, _, message = error.partition(": ")
    trace = message.partition("Traceback (most recent call last):\n")[2]
    lines = [line for line in trace.splitlines() if not line.startswith(" ")] or message.splitlines()
    line = next((line.strip() for line in lines if any(c.isalnum() for c in line)), "")
    return f"{name}: {line}"[:200] if line else name


def _worst_by_estimate(ranks: Sequence[dict[str, Any]], lead: Mapping[str, Any]) -> list[str]:
    """Return the note that a rank is the worst only by what its communicators are estimated to take."""
    if lead["ended"] == "oom":
        return []

    def without(finding: Mapping[str, Any]) -> int:
        return int(finding["process_peak_bytes"]) - _communication(finding)[0]

    lower = [f for f in ranks if f["used_gpu"] and f["process_peak_bytes"] < lead["process_peak_bytes"]]
    other = next((f for f in lower if without(f) >= without(lead)), None)
    if other is None:
        return []
    same = "as much" if without(other) == without(lead) else "more"
    return [
        f"rank {lead['rank']} is the worst by the estimate of NCCL's memory alone: it is in "
        f"{len(lead['communicators'])} communicators, rank {other['rank']} in {len(other['communicators'])}, which "
        f"takes {same} apart from that"
    ]


def _rank_rows(
    ranks: Sequence[dict[str, Any]], demands: Sequence[dict[str, Any]], limited: Outcome
) -> tuple[m.Rank, ...]:
    shown = {f["rank"]: f for f in demands}
    rows = [
        m.Rank(
            rank=f["rank"],
            device=f["device"],
            peak=_peak(shown.get(f["rank"], f)),
            verdict=_verdict(Outcome(exit_code=limited.exit_code, findings=(f,)), f),
        )
        for f in ranks
    ]
    return tuple(sorted(rows, key=lambda row: -row.peak.device_bytes))


def _git(cwd: Path | None) -> m.Git | None:
    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=cwd, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = ask("rev-parse", "HEAD")
    return m.Git(revision=revision, dirty=bool(ask("status", "--porcelain", "-uno"))) if revision else None
