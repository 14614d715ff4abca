"""What one line of a log says: an out-of-memory, another error, the fall-out of one, or that training goes on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from oomproof.triage.signatures import SIGNATURES, Signature

What = Literal["oom", "error", "fall-out"]

MAX_TEXT = 8192
MAX_CONTEXT = 60

_TIME = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ \t](?:std(?:err|out) [FP] )?"
)
_GREP = re.compile(r"^\d{1,9}:(?=\[)|^[\w.-]{1,60} {1,4}\| (?=\S)")  # grep -n, docker compose logs
_RANK = re.compile(
    r"^\s*(?:\[?rank ?(\d+)\]?:|\[default(\d+)\]:|(\d{1,4}):(?= )|\[\d+,(\d+)\]<std(?:err|out)>:"
    r"|\((?:[\w.-]+ )?(?:pid=)\d+[^)]{0,80}\)|\[(\d{1,4})\]:(?= ))[ \t]?",
    re.IGNORECASE,
)
_RANK_WITHIN = re.compile(r"\[Rank (\d+)\]|\(exitcode: -9\) local_rank: (\d+)")
#: torchrun's summary names the rank some lines above its exit code.
_RANK_ABOVE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank")
_EXCEPTION = re.compile(
    r"^(?:E {3,})?((?:[A-Za-z_]\w*\.)*[A-Za-z_]*"
    r"(?:Error|Exception|Interrupt|Exit|Failure|OutOfResources|Timeout|Expired))"
    r"(?:\(\w+\))?(?::(?=\s|$)|\s*$|(?=\s{2,}Traceback))"
)
_WHAT = re.compile(r"^\s*what\(\):\s*")
_FATAL = re.compile(
    r"^Fatal Python error|Segmentation fault|^Bus error|DUE TO (?:TIME LIMIT|PREEMPTION)|^error: .*time limit",
    re.IGNORECASE,
)
_FRAME = re.compile(r'File "([^"]{1,400})", line (\d+), in (\S+)')
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_CHAIN = re.compile(r"direct cause of the following exception|During handling of the above exception")
#: What a process says as it ends: the error that follows is not what ended it.
_PARTING = re.compile(r"^Exception ignored in|^Error in (?:atexit\._run_exitfuncs|sys\.excepthook)")
#: Source as IPython, rich and pytest show it: numbered, arrowed, boxed.
_SHOWN_SOURCE = re.compile(r"^\s*(?:-+>|>)?\s*\d+ (?: |$|\S)|^\s*[│┃║╭╰]|^\s*-+> ?\d+|^>\s{3,}")
_CODE = re.compile(
    r"\bexcept\b|\braise\b|\bassert\b|\bif\b.*\bin\b|\bdef \w|\bclass \w|\bimport \w|\bprint\(|==|\bcase \w|\breturn\b"
    r"|[(=+]\s*[rfb]{0,2}[\"']|^\s*[#\"'`]|^\s*//|help="
)
#: What may stand between a line's start and a sentence that has no exception's name before it.
_LEADS_IN = re.compile(r"(?:^|[:\]|>)\-✗❌!]|\b(?:error|exception|failed|warning)[:,]?)\s*[\"'“(]?\s*$", re.IGNORECASE)

FALL_OUT = re.compile(
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|CalledProcessError|RayTaskError|RayActorError"
    r"|ActorDiedError|WorkerCrashedError|NodeDiedError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError"
    r"|ConnectionAbortedError|EOFError|SystemExit|KeyboardInterrupt|BrokenProcessPool|SignalException|DistBackendError"
    r"|DistNetworkError|DistStoreError|EngineDeadError|exited unexpectedly|No executable batch size found"
    r"|[Ss]ee root cause above|[Ss]ubprocess .{0,80}(?:exited|failed)|non-zero exit status (?!137)|Worker proc \w+ died"
)
PEER = re.compile(
    r"Connection closed by (?:remote )?(?:peer|localRank)|Connection reset by (?:remote )?peer|Broken pipe"
    r"|Watchdog caught collective|remote process exited|ncclRemoteError"
    r"|NCCL communicator was aborted|collective operation timeout"
    r"|watchdog timeout|peer closed|Socket Timeout|wait timeout after|heartbeat monitor timed out",
    re.IGNORECASE,
)
LAUNCHER = re.compile(
    r"ChildFailedError|torch[./]distributed[./](?:elastic|run|launch)|Killing subprocess|closing signal SIGTERM"
    r"|accelerate[./]commands|torch[./]multiprocessing[./]spawn|deepspeed[./]launcher|ray::"
)
_FOREIGN = re.compile(
    r"java\.lang\.OutOfMemoryError|cupy\S{0,40}OutOfMemoryError"
    r"|RESOURCE_EXHAUSTED|ResourceExhaustedError|OOM when allocating tensor"
    r"|(?:stream_executor|bfc_allocator|tensorflow/"
    r"|XlaRuntimeError|jaxlib).{0,300}(?:[Oo]ut of memory|OUT_OF_MEMORY|ran out of memory)"
)
_OUT_OF = re.compile(
    r"memory|alloc|kill|nvml|nccl|_STATUS_|\b137\b|-9\b|1455|paging|bus error|to execute this|cudnn algorithm|oom\b"
    r"|_RESOURCES|THCudaCheck|/torch_|when calling",
    re.IGNORECASE,
)
#: By trust: a bar's count, numbers of steps and epochs, a loss (ranks that die together show different ones).
_PROGRESS = (
    re.compile(r"\d{1,3}%\|.{0,120}?\|\s*(\d+/\d+)|\b(\d+/\d+) \[\d+:\d\d"),
    re.compile(r"\b(?:epoch|step|iter(?:ation)?|batch|update)s?\b[\W_]{0,12}(\d+)", re.IGNORECASE),
    re.compile(r"\bloss\W{1,6}(\d[\d.]*)", re.IGNORECASE),
)
#: Lines of the launcher or a logger's summary that name steps without any being made.
_NO_PROGRESS = re.compile(r"wandb:|StepId|slurmstepd|\bSTEP \d+\.|step tasks|batch size", re.IGNORECASE)

#: What ended a run and is often taken for an out-of-memory, with what it is.
LOOKALIKES: tuple[tuple[re.Pattern[str], str], ...] = (
    (_FOREIGN, "it is an out-of-memory of TensorFlow, JAX or another program, not of PyTorch"),
    (
        re.compile(r"out of resource: shared memory"),
        "a Triton kernel wants more on-chip memory than the GPU has",
    ),
    (re.compile(r"illegal memory access"), "a kernel touched memory that is not its own; none was lacking"),
    (re.compile(r"input tensor is too large"), "the operator has a limit on its input's size; no memory was lacking"),
    (re.compile(r"device-side assert"), "a kernel's own check failed, mostly an index out of range"),
    (re.compile(r"No space left on device"), "a disk was full"),
    (re.compile(r"Too many open files"), "the limit on open files was reached (ulimit -n)"),
    (re.compile(r"DUE TO TIME LIMIT", re.IGNORECASE), "the scheduler's time limit ended it"),
)


@dataclass(slots=True)
class Event:
    """One error in a log; ``text`` grows by the lines that belong to its message."""

    what: What
    line: int
    text: str
    rank: int | None = None
    signature: Signature | None = None
    raised: bool = False  # printed as an exception, not as a logger's line
    core: str = ""  # the recognised sentence and what follows it on its line
    context: tuple[str, ...] = ()
    ending: str | None = None  # the error that this out-of-memory led to, by Python's own chain
    direct: bool = True  # the chain says "direct cause", or there is none
    room: int = 8  # how many more lines may belong to its message

    @property
    def weak(self) -> bool:
        """Return whether this follows from many causes."""
        return self.signature is not None and self.signature.weak


@dataclass(slots=True)
class Reader:
    """What must be remembered of one rank's lines to read the next."""

    context: list[str] = field(default_factory=list)
    in_traceback: bool = False
    source_next: bool = False
    parting: bool = False
    chain: str | None = None
    rank: int | None = None


def unprefixed(text: str) -> tuple[str, int | None]:
    """Return ``text`` without time stamps and ranks before it, and the rank if one was named."""
    rank = None
    for _ in range(4):
        if match := _TIME.match(text) or _RANK.match(text) or _GREP.match(text):
            named = next((group for group in match.groups() if group), None) if match.re is _RANK else None
            rank = int(named) if named else rank
            text = text[match.end() :]
        else:
            break
    return text, rank


def read(text: str, number: int, rank: int | None, reader: Reader) -> Event | None:
    """Return what one line, without its prefix, tells; frames and chains are kept in ``reader``."""
    if _TRACEBACK.search(text) and not _EXCEPTION.match(text):
        reader.in_traceback, reader.source_next = True, False
        if "Original Traceback" not in text:
            reader.context.clear()
        return None
    if frame := _FRAME.search(text):
        reader.in_traceback, reader.source_next = True, True
        _remember(reader, f"{frame[1]}:{frame[2]} {frame[3]}")
        return None
    if _CHAIN.search(text):
        reader.chain = text
        return None
    if _PARTING.match(text):
        reader.parting = True
        return None
    if (reader.source_next and text[:1] in (" ", "\t")) or _SHOWN_SOURCE.match(text):
        _remember(reader, text.strip()[:300])
        return None
    if above := _RANK_ABOVE.match(text):
        reader.rank = int(above[1][:9])
    event = _event(text, number, rank)
    if event is not None and reader.parting and event.what == "error":
        reader.parting = False
        return None
    if event is not None:
        if event.weak and event.rank is None:
            event.rank, reader.rank = reader.rank, None
        event.context = tuple(reader.context)
        reader.in_traceback = reader.source_next = False
        if event.text.startswith("RuntimeError: Caught "):
            _remember(reader, text[:300])
    elif text.strip():
        reader.source_next = False
    return event


def _event(text: str, number: int, rank: int | None) -> Event | None:
    named = _EXCEPTION.match(text)
    raised = named is not None or _WHAT.match(text) is not None
    if within := _RANK_WITHIN.search(text):
        rank = int(within[1] or within[2])
    if _FOREIGN.search(text):
        return Event("error", number, text[:MAX_TEXT], rank, raised=raised)
    if (found := _signature(text, raised)) is not None:
        signature, at = found
        start = 0 if at < 400 else at - 200
        return Event("oom", number, text[start : start + MAX_TEXT], rank, signature, raised, text[at : at + 300])
    if PEER.search(text) or (FALL_OUT.search(text) and (raised or not _CODE.search(text))):
        return Event("fall-out", number, text[:MAX_TEXT], rank, raised=raised)
    if raised or _FATAL.search(text):
        return Event("error", number, text[:MAX_TEXT], rank, raised=raised)
    return None


def _signature(text: str, raised: bool) -> tuple[Signature, int] | None:
    """Return the first sentence in ``text`` that is a message, and where it begins."""
    if not _OUT_OF.search(text):
        return None
    for signature in SIGNATURES:
        if match := signature.pattern.search(text):
            found = (signature, match.start())
            before = text[: match.start()]
            if raised or (signature.figured and not re.match(r"\s*(?:#|//)", before)):
                return found
            near = before[-400:]
            if _CODE.search(near) or _CODE.match(text) or (signature.loose and not _LEADS_IN.search(near)):
                return None
            return found
    return None


def belongs(event: Event, text: str) -> bool:
    """Return whether ``text`` may continue the message of ``event``: long ones are broken over lines."""
    if event.room <= 0 or not text.strip() or len(event.text) > MAX_TEXT:
        return False
    return not (_TRACEBACK.search(text) or _FRAME.search(text) or _EXCEPTION.match(text) or _CHAIN.search(text))


def progress(text: str) -> str | None:
    """Return the step, epoch or loss that a line shows, or None when it shows none."""
    for pattern in _PROGRESS:
        if found := pattern.findall(text[:2000]):
            return None if _NO_PROGRESS.search(text) else str(found)
    return None


def _remember(reader: Reader, text: str) -> None:
    reader.context.append(text[:400])
    del reader.context[:-MAX_CONTEXT]
