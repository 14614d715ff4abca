"""Writing the exports."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from oomproof.capture import copy_snapshot, replacing
from oomproof.errors import CaptureError, UsageError
from oomproof.report.export.perfetto import to_perfetto
from oomproof.report.export.speedscope import to_speedscope
from oomproof.report.source import is_snapshot, load


def export(
    path: Path, *, speedscope: Path | None = None, perfetto: Path | None = None, memory_viz: Path | None = None
) -> list[tuple[Path, str]]:
    """Write the files asked for, and return each with where it opens.

    Raises CaptureError when the capture has no snapshot for ``memory_viz``, UsageError when two of the files are one;
    nothing is written then.
    """
    _check_apart(path, [target for target in (speedscope, perfetto, memory_viz) if target is not None])
    written = []
    if memory_viz is not None and is_snapshot(path):
        raise CaptureError(f"{path} is a memory snapshot already; open it in https://docs.pytorch.org/memory_viz")
    if memory_viz is not None:  # first, since it is what may be missing
        if not copy_snapshot(path, memory_viz):
            raise CaptureError(
                f"{path} has no memory snapshot; measure again with `oomproof run --snapshot -o FILE.oomp -- …`"
            )
        written.append((memory_viz, "https://docs.pytorch.org/memory_viz"))
    if speedscope is None and perfetto is None:
        return written
    source = load(path)
    if speedscope is not None:
        _write(speedscope, to_speedscope(source))
        written.append((speedscope, "https://www.speedscope.app"))
    if perfetto is not None:
        _write(perfetto, to_perfetto(source))
        written.append((perfetto, "https://ui.perfetto.dev"))
    return written


def _check_apart(path: Path, targets: Sequence[Path]) -> None:
    """Refuse to write one file over another."""
    places = [os.path.realpath(place) for place in (path, *targets)]
    if places[0] in places[1:]:
        raise UsageError(f"{path} is the file to export, and would be overwritten; name another")
    for number, target in enumerate(targets, start=1):
        if places[number] in places[1:number]:
            raise UsageError(f"{target} is named twice; give each export a file of its own")


def _write(path: Path, data: object) -> None:
    with replacing(path) as file:
        file.write(json.dumps(data, separators=(",", ":"), allow_nan=False).encode())
