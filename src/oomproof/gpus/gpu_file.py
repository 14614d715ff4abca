"""GPUs that the catalogue does not have: a user's GPU file, or an entry with another amount of memory."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from oomproof.errors import UnknownGPUError, UsageError
from oomproof.gpus.catalogue import capabilities, complete
from oomproof.gpus.fields import READERS, nearest, read_fields
from oomproof.gpus.lookup import get_gpu
from oomproof.gpus.spec import GPUSpec
from oomproof.gpus.toml import parse_toml
from oomproof.units import format_bytes

MAX_FILE_BYTES = 65_536
"""A GPU file is a few lines; anything longer is something else."""

REQUIRED = (
    "name",
    "memory_bytes",
    "compute_capability",
    "sm_count",
    "l2_bytes",
    "clock_khz",
    "memory_clock_khz",
    "memory_bus_bits",
    "memory_bandwidth_bytes_per_s",
    "flops",
    "pcie_bytes_per_s",
)
"""What a GPU file without ``base`` must give; everything else has a default or follows."""


def load_gpu_file(path: str | Path) -> GPUSpec:
    """Return the GPU that the TOML file at ``path`` describes.

    The keys are the fields of GPUSpec; ``base = "a100-40gb"`` takes every figure that the file does not give
    from the catalogue. The limits of the compute capability and the context size follow anew when what they
    depend on is given. Raises UsageError with every fault of the file and its cure.
    """
    path = Path(path)
    table = _read(path)
    base, faults = _base(table.pop("base", None))
    values, field_faults = read_fields(table)
    faults += field_faults
    faults += _unknown_capability(values)
    faults += _unknown_sources(values)
    if base is None and "base" not in {fault.partition(":")[0] for fault in faults}:
        missing = [name for name in REQUIRED if name not in table]
        if missing:
            faults.append(f'{", ".join(missing)} missing; give them, or start from the catalogue with base = "..."')
    if not faults:
        spec = _merge(path, base, values)
        faults = _contradictions(spec)
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise UsageError("\n  - ".join([f"GPU file {path} has {count}:", *faults]))
    return spec


def with_memory(spec: GPUSpec, memory_bytes: int) -> GPUSpec:
    """Return ``spec`` with ``memory_bytes`` of memory as PyTorch reports it, and a name that says so.

    What nvidia-smi would show is no longer known; everything else stays. Raises UsageError when the size is
    not above zero.
    """
    if memory_bytes <= 0:
        raise UsageError(f"{memory_bytes} bytes of memory is not above zero; give a size like 20GiB")
    by_hand = {"memory_bytes": "set by hand", "nvml_memory_bytes": "unknown: the memory was set by hand"}
    return replace(
        spec,
        name=f"{spec.name} with {format_bytes(memory_bytes)}",
        memory_bytes=memory_bytes,
        nvml_memory_bytes=None,
        sources={**spec.sources, **by_hand},
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise UsageError(f"GPU file {path} is larger than {MAX_FILE_BYTES // 1024} KiB; is it a GPU file?")
        return parse_toml(content.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"GPU file {path} cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise UsageError(f"GPU file {path} is not UTF-8 text; save it as TOML in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"GPU file {path} is not TOML: {error}; see https://toml.io for the syntax") from None


def _base(name: object) -> tuple[GPUSpec | None, list[str]]:
    if name is None:
        return None, []
    if not isinstance(name, str):
        return None, [f'base: {name!r} is no name; write it like base = "a100-40gb"']
    try:
        return get_gpu(name), []
    except UnknownGPUError as error:
        return None, [f"base: {error}"]


def _unknown_capability(values: dict[str, Any]) -> list[str]:
    capability = values.get("compute_capability")
    if capability is None or capability in capabilities():
        return []
    known = ", ".join(f"{major}.{minor}" for major, minor in capabilities())
    return [f"compute_capability: {capability[0]}.{capability[1]} is not in the catalogue; use one of {known}"]


def _unknown_sources(values: dict[str, Any]) -> list[str]:
    return [
        f"sources: {name} is no field of a GPU; {nearest(name, READERS)}"
        for name in values.get("sources", ())
        if name not in READERS
    ]


def _merge(path: Path, base: GPUSpec | None, values: dict[str, Any]) -> GPUSpec:
    inherited = {field.name: getattr(base, field.name) for field in fields(GPUSpec)} if base else {}
    sources = dict(inherited.get("sources", {}))
    outdated = {"key", "aliases"}
    if "compute_capability" in values:
        outdated |= {*capabilities()[values["compute_capability"]], "context_bytes"}
    if {"sm_count", "max_threads_per_sm"} & values.keys():
        outdated.add("context_bytes")
    if "memory_bytes" in values:
        outdated.add("nvml_memory_bytes")
    given = {name: value for name, value in values.items() if name != "sources"}
    merged = {name: value for name, value in inherited.items() if name not in outdated} | given
    for name in outdated:
        sources.pop(name, None)
    for name in ("nvml_memory_bytes", "link_bytes_per_s"):
        sources.setdefault(name, "unknown: the GPU file does not give it")
    sources |= dict.fromkeys(given, f"GPU file {path.name}") | values.get("sources", {})
    return complete(path.stem, {**merged, "sources": sources})


def _contradictions(spec: GPUSpec) -> list[str]:
    faults = []
    if spec.nvml_memory_bytes is not None and spec.memory_bytes > spec.nvml_memory_bytes:
        faults.append("memory_bytes is above nvml_memory_bytes; PyTorch never sees more than nvidia-smi, swap them")
    if spec.context_bytes[2] >= spec.memory_bytes:
        faults.append("context_bytes: its high figure leaves no memory; lower it or raise memory_bytes")
    if spec.shared_memory_per_block_optin_bytes > spec.shared_memory_per_sm_bytes:
        faults.append("shared_memory_per_block_optin_bytes is above shared_memory_per_sm_bytes; lower it")
    return faults
