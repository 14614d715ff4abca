"""Writing the exports."""

from __future__ import annotations

import json
from pathlib import Path

from oomproof.capture import copy_snapshot, replacing
from oomproof.errors import CaptureError
from oomproof.report.export.perfetto import to_perfetto
from oomproof.report.export.speedscope import to_speedscope
from oomproof.report.source import is_snapshot, load


def export(
    path: Path, *, speedscope: Path | None = None, perfetto: Path | None = None, memory_viz: Path | None = None
) -> list[tuple[Path, str]]:
    """Write the files asked for, and return each with where it opens.

    Raises CaptureError when the capture has no snapshot for ``memory_viz``; nothing is written then.
    """
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


def _write(path: Path, data: object) -> None:
    with replacing(path) as file:
        file.write(json.dumps(data, separators=(",", ":"), allow_nan=False).encode())
