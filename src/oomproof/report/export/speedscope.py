"""The peak for https://www.speedscope.app: stacks weighed in bytes, by code and by module."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from oomproof.measure.profile import Block
from oomproof.report.blocks import NO_MODULE, NO_STACK, ROUNDING, has_modules, module_path, words
from oomproof.report.source import Source

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_FRAME = re.compile(r"(.*):(\d+) (.*)", re.DOTALL)


def to_speedscope(source: Source) -> dict[str, Any]:
    """Return the file's content; its weights add up to what is allocated at the peak."""
    frames: dict[str, int] = {}
    ways: list[tuple[str, Callable[[Block], tuple[str, ...]]]] = [("the peak by stack", _by_stack)]
    if has_modules(source.profile):
        ways.append(("the peak by module", _by_module))
    return {
        "$schema": SCHEMA,
        "name": source.path,
        "exporter": "oomproof",
        "profiles": [_profile(source, name, path_of, frames) for name, path_of in ways],
        "shared": {"frames": [_frame(frame) for frame in frames]},
    }


def _by_stack(block: Block) -> tuple[str, ...]:
    return (*(reversed(block.stack) if block.stack else (NO_STACK,)), words(block.category))


def _by_module(block: Block) -> tuple[str, ...]:
    path = module_path(block)
    levels = (path,) if path == NO_MODULE else path.split(".")
    return (*(".".join(levels[: n + 1]) for n in range(len(levels))), words(block.category))


def _profile(
    source: Source, name: str, path_of: Callable[[Block], tuple[str, ...]], frames: dict[str, int]
) -> dict[str, Any]:
    weights: dict[tuple[int, ...], int] = {}
    for block in source.profile.blocks:
        sample = tuple(frames.setdefault(frame, len(frames)) for frame in path_of(block))
        weights[sample] = weights.get(sample, 0) + block.size_bytes
    if source.profile.slack_bytes > 0:
        weights[(frames.setdefault(ROUNDING, len(frames)),)] = source.profile.slack_bytes
    ordered = sorted(weights.items(), key=lambda item: item[0])
    return {
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(weights.values()),
        "samples": [list(sample) for sample, _ in ordered],
        "weights": [weight for _, weight in ordered],
    }


def _frame(frame: str) -> dict[str, Any]:
    match = _FRAME.fullmatch(frame)
    if match is None:
        return {"name": frame}
    return {"name": frame, "file": match[1], "line": int(match[2])} if len(match[2]) < 10 else {"name": frame}
