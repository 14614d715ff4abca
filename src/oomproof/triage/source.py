"""What is given to triage: a log, standard input, a capture; told apart by its first bytes."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

from oomproof.capture import read_capture
from oomproof.errors import CaptureError, UsageError
from oomproof.measure.measurement import SCHEMA, Measurement
from oomproof.snapshot.load import load
from oomproof.snapshot.model import Action
from oomproof.snapshot.profile import is_shown
from oomproof.snapshot.state import History
from oomproof.triage.advice import advise
from oomproof.triage.figures import Figures
from oomproof.triage.kinds import classify, classify_figures
from oomproof.triage.log import triage_log
from oomproof.triage.result import Evidence, Triage
from oomproof.triage.settings import Settings

_PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def triage(path: str) -> Triage:
    """Return the triage of the file at ``path``, or of standard input for ``-``.

    Raises UsageError when it cannot be read and CaptureError when it is a damaged capture.
    """
    if path == "-":
        return triage_log(sys.stdin.buffer)
    try:
        with open(path, "rb") as file:
            start = file.read(4096) if file.seekable() else b""
            if not start.startswith(_PICKLE) and not _is_capture(path, start):
                if file.seekable():
                    file.seek(0)
                if start.startswith(b"\x1f\x8b"):  # logs that were rotated away
                    with gzip.open(file) as inflated:
                        return triage_log(cast(BinaryIO, inflated))
                return triage_log(file)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise CaptureError(f"{path} is a gzip file that is cut short or damaged; copy it again") from None
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give a log, a capture, or - for standard input") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; give the log in it, such as {path}/train.log") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    if start.startswith(_PICKLE):
        return triage_snapshot(Path(path))
    return triage_measurement(read_capture(path))


def triage_snapshot(path: Path) -> Triage:
    """Return the triage of a memory snapshot: of the last out-of-memory in it, with what PyTorch had then."""
    snapshot = load(path)
    settings = Settings()
    for device in snapshot.devices():
        events = snapshot.events(device)
        failed = [index for index, action in enumerate(events.action) if action == Action.OOM]
        if not failed:
            continue
        state = History(snapshot, device).state_after(failed[-1])
        figures = Figures(
            requested_bytes=events.size[failed[-1]],
            free_bytes=events.address[failed[-1]],
            allocated_bytes=state.allocated_bytes,
            unallocated_bytes=state.reserved_bytes - state.allocated_bytes,
            device=device,
        )
        text = (
            f"event {failed[-1]:,} of device {device}: {figures.requested_bytes:,} bytes were asked for, "
            f"{figures.free_bytes:,} were free on the device; of PyTorch's {state.reserved_bytes:,} "
            f"{state.allocated_bytes:,} were allocated"
        )
        where = snapshot.stacks[events.stack[failed[-1]]]
        evidence = [Evidence(line=None, text=text)]
        evidence += [Evidence(line=None, text=f"at {f.filename}:{f.line} {f.name}") for f in where if is_shown(f)][:1]
        return replace(of_figures(figures, settings, tuple(evidence), source="the snapshot"), ooms=len(failed))
    why = "the snapshot recorded no out-of-memory" + ("; its oldest events were lost" if snapshot.overflowed else "")
    result = Triage(kind="not-oom", confidence="high", why=why, settings=settings)
    return replace(result, advice=advise(result, "", ()))


def of_figures(figures: Figures, settings: Settings, evidence: tuple[Evidence, ...], *, source: str) -> Triage:
    """Return the triage of an allocator's failure that is known by its figures, without a message."""
    kind, confidence, why = classify_figures(figures, source=source)
    result = Triage(
        kind=kind, confidence=confidence, why=why, evidence=evidence, figures=figures, settings=settings, ooms=1
    )
    return replace(result, advice=advise(result, "caching allocator", ()))


def triage_measurement(measured: Measurement) -> Triage:
    """Return the triage of a measurement: of the out-of-memory in it, or of a peak above the GPU's memory."""
    settings = Settings()
    settings.take_allocator(measured.allocator.config)
    oom = measured.oom
    if oom is not None and not (oom.caught and measured.verdict == "fits"):
        finding = classify(f"torch.OutOfMemoryError: {oom.message}")
        if finding is None:
            raise CaptureError("the out-of-memory message in it is none of PyTorch's; measure again with this oomproof")
        figures = finding.figures
        if figures.requested_bytes is None and oom.requested_bytes is not None:
            figures = replace(figures, requested_bytes=oom.requested_bytes)
        evidence = [Evidence(line=None, text=" ".join(oom.message.split()))]
        place = [f"step {oom.step}"] if oom.step is not None else []
        place += [part for part in (oom.phase, oom.module) if part]
        if place:
            evidence.append(Evidence(line=None, text=f"at {', '.join(place)}"))
        result = Triage(
            kind=finding.kind,
            confidence=finding.confidence,
            why=finding.why,
            evidence=tuple(evidence),
            figures=figures,
            settings=settings,
            ooms=max(1, measured.allocator.ooms),
        )
        return replace(result, advice=advise(result, finding.signature, [part for part in place[1:] if part]))
    if measured.verdict == "does-not-fit":
        need, have = measured.peak.device_bytes, measured.gpu.memory_bytes
        figures = Figures(
            requested_bytes=max(0, need - have),
            total_bytes=have,
            free_bytes=0,
            allocated_bytes=measured.peak.allocated_bytes,
            unallocated_bytes=0,
        )
        evidence_line = Evidence(line=None, text=f"peak of {need:,} bytes on a GPU of {have:,} bytes")
        return of_figures(figures, settings, (evidence_line,), source="the measurement")
    ended = f"the measurement's verdict is {measured.verdict!r}, and it ended as {measured.ended!r}"
    survived = measured.allocator.ooms if oom is not None and oom.caught else 0
    result = Triage(
        kind="not-oom", confidence="high", why=ended, settings=settings, ooms=measured.allocator.ooms, survived=survived
    )
    return replace(result, advice=advise(result, "", ()))


def _is_capture(path: str, start: bytes) -> bool:
    """Return whether the file is a capture, or JSON of one: a log in JSON lines begins with a brace, too."""
    if start.startswith(b"PK\x03\x04"):
        return True
    return start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and json.dumps(SCHEMA).encode() in start
