"""The catalogue: catalogue.toml read into GPUSpecs, once, on first use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from oomproof.gpus.context import SOURCE as CONTEXT_SOURCE
from oomproof.gpus.context import estimate_context_bytes
from oomproof.gpus.fields import read_fields
from oomproof.gpus.spec import GPUSpec
from oomproof.gpus.toml import parse_toml

SOURCE_GROUPS = {
    "memory": ("memory_bytes",),
    "nvml": ("nvml_memory_bytes",),
    "chip": (
        "name",
        "compute_capability",
        "sm_count",
        "l2_bytes",
        "clock_khz",
        "memory_clock_khz",
        "memory_bus_bits",
        "memory_bandwidth_bytes_per_s",
    ),
    "flops": ("flops",),
    "links": ("link_bytes_per_s", "pcie_bytes_per_s"),
    "context": ("context_bytes",),
}
"""The groups under which catalogue.toml gives its sources, with the fields that each covers."""

_DOCUMENT = re.compile(r"\{([a-z0-9-]+)\}")
_EIGHTHS = 8  # memory and L2 slices of every MIG-capable data-centre board


@lru_cache(maxsize=1)
def all_gpus() -> tuple[GPUSpec, ...]:
    """Return every GPU of the catalogue in the file's order, MIG slices last."""
    data = _data()
    boards = {key: _board(key, entry) for key, entry in data["gpu"].items()}
    slices = [
        _slice(boards[board], profile, entry)
        for board, profiles in data["mig"].items()
        for profile, entry in profiles.items()
    ]
    return (*boards.values(), *slices)


@lru_cache(maxsize=1)
def capabilities() -> Mapping[tuple[int, int], Mapping[str, int]]:
    """Return the limits of each known compute capability, by field of GPUSpec."""
    table = _data()["capability"]
    names = table["fields"]
    return {_split(key): dict(zip(names, row, strict=True)) for key, row in table.items() if key != "fields"}


def complete(key: str, values: Mapping[str, Any]) -> GPUSpec:
    """Return the spec of ``values``, with what follows from the capability and the SM count filled in.

    ``values`` must hold a known compute capability and every field that nothing follows from.
    """
    limits = capabilities()[values["compute_capability"]]
    merged: dict[str, Any] = {**limits, **values}
    sources = dict.fromkeys(limits, cite("{cuda-guide}"))
    if "context_bytes" not in merged:
        merged["context_bytes"] = estimate_context_bytes(merged["sm_count"], merged["max_threads_per_sm"])
        sources["context_bytes"] = CONTEXT_SOURCE
    merged["sources"] = {**sources, **values["sources"]}
    return GPUSpec(key=key, **merged)


def cite(text: str) -> str:
    """Return ``text`` with every ``{document}`` replaced by its entry in the list of documents."""
    documents: Mapping[str, str] = _data()["documents"]
    return _DOCUMENT.sub(lambda match: documents[match[1]], text)


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return parse_toml(Path(__file__).with_name("catalogue.toml").read_text("utf-8"))


def _board(key: str, entry: Mapping[str, Any]) -> GPUSpec:
    groups = entry["sources"]
    values, faults = read_fields({name: raw for name, raw in entry.items() if name != "sources"})
    assert not faults, (key, faults)
    values["sources"] = {name: cite(text) for group, text in groups.items() for name in SOURCE_GROUPS[group]}
    return complete(key, values)


def _slice(board: GPUSpec, profile: str, entry: Mapping[str, Any]) -> GPUSpec:
    values, faults = read_fields({name: entry[name] for name in ("sm_count", "memory_bytes")})
    assert not faults, (board.key, profile, faults)
    sms, memory_eighths, l2_eighths = values["sm_count"], entry["memory_eighths"], entry["l2_eighths"]
    share = sms / board.sm_count
    whole = {name: text for name, text in board.sources.items() if name not in ("context_bytes", "nvml_memory_bytes")}
    guide = cite("{mig-guide}")
    scaled = cite("derived: the board's figure times the slice's eighths of the memory; {mig-guide}")
    sources = {
        "memory_bytes": cite(entry["memory_source"]),
        "sm_count": cite("{mig-list}"),
        "nvml_memory_bytes": "unknown: nvidia-smi shows a slice's memory in varying ways",
        "l2_bytes": guide,
        "memory_bus_bits": scaled,
        "memory_bandwidth_bytes_per_s": scaled,
        "flops": "derived: the board's peak times the slice's share of the SMs",
        "link_bytes_per_s": f"no NVLink in MIG mode: {guide}",
    }
    values |= {
        "name": f"{board.name} MIG {profile}",
        "mig": True,
        "compute_capability": board.compute_capability,
        "l2_bytes": board.l2_bytes * l2_eighths // _EIGHTHS,
        "clock_khz": board.clock_khz,
        "memory_clock_khz": board.memory_clock_khz,
        "memory_bus_bits": board.memory_bus_bits * memory_eighths // _EIGHTHS,
        "memory_bandwidth_bytes_per_s": board.memory_bandwidth_bytes_per_s * memory_eighths // _EIGHTHS,
        "flops": {dtype: peak * share for dtype, peak in board.flops.items()},
        "pcie_bytes_per_s": board.pcie_bytes_per_s,
        "sources": {**whole, **sources},
    }
    return complete(f"{board.key}-mig-{profile}", values)


def _split(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)
