"""The allocator settings that a replay tries."""

from __future__ import annotations

SPLIT_LIMITS_MB = (32, 64, 128, 256, 512)
EXPANDABLE = "expandable_segments:True"
COLLECTING = "garbage_collection_threshold"


def candidates(*, limited: bool, recorded: str = "") -> list[str]:
    """Return the settings to try, PyTorch's defaults first; "" stands for them.

    Garbage collection starts at a share of the memory there is, so without a limit it is left out.
    """
    found = [
        "",
        EXPANDABLE,
        *(f"max_split_size_mb:{limit}" for limit in SPLIT_LIMITS_MB),
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:8",
        f"{EXPANDABLE},roundup_power2_divisions:8",
    ]
    if limited:
        found += [
            f"{COLLECTING}:0.6",
            f"{COLLECTING}:0.8",
            f"max_split_size_mb:128,{COLLECTING}:0.8",
            f"max_split_size_mb:512,{COLLECTING}:0.8",
            f"{EXPANDABLE},{COLLECTING}:0.8",
        ]
    return found if recorded in found else [*found, recorded]


def variable(torch_version: str) -> str:
    """Return the environment variable that this torch reads: PYTORCH_ALLOC_CONF from 2.9 on."""
    parts = torch_version.split("+")[0].split(".")
    release = tuple(int(part) for part in parts[:2] if part.isdigit())
    return "PYTORCH_ALLOC_CONF" if release >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"
