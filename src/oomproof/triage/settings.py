"""What a log shows of the run's settings: the allocator's, and those training arguments that memory hangs on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ALLOCATOR = re.compile(
    r"(?<!setting )(?<!set )\bPYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF[\"'\]]*\s*(?:[=:,]|to)\s*[\"']?"
    r"([a-z_]\w*:[\w.\[\]:>,-]+)"
)
_WATERMARK = re.compile(r"(?<!Use )\bPYTORCH_MPS_HIGH_WATERMARK_RATIO[\"'\]]*\s*[=:]\s*[\"']?([\d.]+)")
_NO_EXPANDABLE = re.compile(r"expandable_segments not supported on this platform")
_WINDOWS = re.compile(r"\b[A-Z]:\\{1,2}\w|\bWinError\b|Microsoft Windows")
_BATCH = re.compile(
    r"\b((?:per_device_train_|per_gpu_train_|train_micro_|micro_|mini_|train_|local_)?batch[_-]?size"
    r"(?:_per_gpu|_per_device)?)[\"']?\s*[=: ]\s*(\d+)\b",
    re.IGNORECASE,
)
_CHECKPOINTING = re.compile(
    r"(?:gradient|activation)[_-]checkpointing(?:_enabled)?[\"']?\s*[=: ]\s*[\"']?(true|1|yes|full|selective)\b"
    r"|--(?:gradient[_-]checkpointing|use[_-]checkpoint(?:ing)?|recompute-activations)\b(?!\s*[= ]\s*(?:false|0|no)\b)",
    re.IGNORECASE,
)
_LOW_PRECISION = re.compile(
    r"--(?:bf16|fp16|amp)\b(?!\s*[= ]\s*(?:false|0|no)\b)"
    r"|\b(?:bf16|fp16|mixed[_-]precision|precision)[\"']?\s*[=: ]\s*[\"']?(?:true|1\b|bf16|fp16|16\b|16-)",
    re.IGNORECASE,
)
_WORKERS = re.compile(r"\b((?:dataloader_)?num_workers)[\"']?\s*[=: ]\s*(\d+)\b", re.IGNORECASE)
_PRETEST = re.compile(
    r"ALLOC_CONF|WATERMARK|expandable_segments|[A-Z]:\\|batch|checkpoint|bf16|fp16|--amp|precision|num_workers|Windows",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Settings:
    """What was seen so far; a setting that was not seen may still be on."""

    allocator: dict[str, str] = field(default_factory=dict)
    no_expandable: bool = False  # this platform cannot have expandable segments
    windows: bool = False
    mps_watermark: str | None = None
    batch_size: tuple[str, int] | None = None  # the name it is printed under, and the number
    checkpointing: bool = False
    low_precision: bool = False
    workers: tuple[str, int] | None = None

    def look_at(self, text: str) -> None:
        """Take what one line shows."""
        if not _PRETEST.search(text):
            return
        if match := _ALLOCATOR.search(text):
            self.take_allocator(match[1])
        if match := _WATERMARK.search(text):
            self.mps_watermark = match[1]
        self.no_expandable |= bool(_NO_EXPANDABLE.search(text))
        self.windows |= bool(_WINDOWS.search(text))
        self.checkpointing |= bool(_CHECKPOINTING.search(text))
        self.low_precision |= bool(_LOW_PRECISION.search(text))
        if self.batch_size is None and (match := _BATCH.search(text)):
            self.batch_size = (match[1], int(match[2][:9]))
        if self.workers is None and (match := _WORKERS.search(text)):
            self.workers = (match[1], int(match[2][:9]))

    def take_allocator(self, config: str) -> None:
        """Take the allocator's settings, written as in ``PYTORCH_ALLOC_CONF``."""
        for item in re.split(r",(?![^\[]*\])", config):
            name, _, value = item.partition(":")
            if name.strip():
                self.allocator[name.strip()] = value.strip().rstrip(".,;")

    @property
    def expandable(self) -> bool:
        """Return whether expandable segments are on."""
        return self.allocator.get("expandable_segments", "").lower() == "true"

    def to_json(self) -> dict[str, object]:
        """Return what was seen, and only that."""
        seen: dict[str, object] = {}
        if self.allocator:
            seen["allocator"] = dict(self.allocator)
        if self.batch_size:
            seen["batch_size"] = {"name": self.batch_size[0], "value": self.batch_size[1]}
        if self.workers:
            seen["workers"] = {"name": self.workers[0], "value": self.workers[1]}
        for name in ("checkpointing", "low_precision", "windows", "no_expandable"):
            if getattr(self, name):
                seen[name] = True
        if self.mps_watermark is not None:
            seen["mps_watermark"] = self.mps_watermark
        return seen
