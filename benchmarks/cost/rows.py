"""The public measurements that docs/cost.md compares with, and what is run for each.

``measured`` is the time of a step with the technique to that of one without it, from the rates in ``what``. ``base``
and ``changed`` are options of program.py. What the source does not say and was chosen here is in ``assumed``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement."""

    name: str
    technique: str
    source: str
    url: str
    what: str
    measured: float
    gpu: str
    model: str
    base: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    world: int | None = None
    assumed: str = ""
    reason: str = ""
    """Why the range misses the measurement, where it does."""


_TUNE = {
    "source": "torchtune, README",
    "url": "https://github.com/meta-pytorch/torchtune#optimization-flags",
    "gpu": "a100-80gb",
    "model": "llama3.2-3b",
}
_PACKED: dict[str, Any] = {"batch": 2, "sequence": 4096, "plain_norm": True}
_COMPILED = {**_PACKED, "compile": True}
_CHUNKED = {**_COMPILED, "chunks": 8}
_FULL = {**_CHUNKED, "checkpoint": "full"}
_FUSED = {**_FULL, "in_backward": True}
_OFFLOADED = {**_FUSED, "offload": True}

_TITAN = {
    "source": "torchtitan, performance report of 64 A100 (pull request 712 has the rows of Llama 2)",
    "url": "https://github.com/pytorch/torchtitan/pull/712",
    "gpu": "a100-80gb",
    "world": 64,
}
_13B: dict[str, Any] = {"batch": 2, "sequence": 4096, "fsdp": "reshard"}
_8B: dict[str, Any] = {"batch": 1, "sequence": 8192, "fsdp": "reshard"}

_AO = {"source": "torchao, README of its optimizers", "url": "https://github.com/pytorch/ao/tree/main/torchao/optim"}
_VIT_H: dict[str, Any] = {"batch": 8, "bf16": False, "compile": True}
_VIT_G: dict[str, Any] = {"batch": 32, "checkpoint": "full"}
_7B: dict[str, Any] = {"batch": 2, "sequence": 512, "checkpoint": "full"}
_QWEN: dict[str, Any] = {"batch": 2, "sequence": 4096}

CASES = (
    Case(
        name="full checkpointing, 3B",
        technique="every block checkpointed",
        **_TUNE,
        what="9,174 to 7,210 tokens/s",
        measured=9174 / 7210,
        base=_CHUNKED,
        changed=_FULL,
    ),
    Case(
        name="full to selective op checkpointing, 7B",
        technique="selective (attention and every second product kept) to full",
        source="torchtitan, pull request 97",
        url="https://github.com/pytorch/torchtitan/pull/97",
        what="4.5459 to 4.9126 s a step",
        measured=4.9126 / 4.5459,
        gpu="a100-80gb",
        model="llama2-7b",
        world=8,
        base={"batch": 8, "sequence": 2048, "fsdp": "reshard", "checkpoint": "op"},
        changed={"batch": 8, "sequence": 2048, "fsdp": "reshard", "checkpoint": "full"},
        assumed="8 A100, 8 sequences of 2,048",
    ),
    Case(
        name="selective layer checkpointing, 13B",
        technique="every second block checkpointed",
        **_TITAN,
        model="llama2-13b",
        what="2,162 to 1,914 tokens/s of a GPU",
        measured=2162 / 1914,
        base=_13B,
        changed={**_13B, "checkpoint": "layer"},
    ),
    Case(
        name="selective op checkpointing, 13B",
        technique="attention and every second product kept",
        **_TITAN,
        model="llama2-13b",
        what="2,162 to 1,904 tokens/s of a GPU",
        measured=2162 / 1904,
        base=_13B,
        changed={**_13B, "checkpoint": "op"},
    ),
    Case(
        name="selective layer to op checkpointing, 8B",
        technique="every second block to selective op",
        **{**_TITAN, "url": "https://github.com/pytorch/torchtitan/blob/v0.1.0/docs/performance.md"},
        model="llama3-8b",
        what="2,904 to 2,973 tokens/s of a GPU",
        measured=2904 / 2973,
        base={**_8B, "checkpoint": "layer"},
        changed={**_8B, "checkpoint": "op"},
    ),
    Case(
        name="chunked cross-entropy, 3B",
        technique="the loss in 8 chunks",
        **_TUNE,
        what="8,998 to 9,174 tokens/s",
        measured=8998 / 9174,
        base=_COMPILED,
        changed=_CHUNKED,
    ),
    Case(
        name="torch.compile, 3B",
        technique="each block compiled",
        **_TUNE,
        what="7,075 to 8,998 tokens/s",
        measured=7075 / 8998,
        base=_PACKED,
        changed=_COMPILED,
    ),
    Case(
        name="optimizer in backward, 3B",
        technique="each parameter stepped when its gradient is there",
        **_TUNE,
        what="7,210 to 7,309 tokens/s",
        measured=7210 / 7309,
        base=_FULL,
        changed=_FUSED,
    ),
    Case(
        name="activation offload, 3B",
        technique="what checkpoints keep goes to pinned memory and back",
        **_TUNE,
        what="7,309 to 7,301 tokens/s",
        measured=7309 / 7301,
        base=_FUSED,
        changed=_OFFLOADED,
    ),
    Case(
        name="8-bit AdamW (bitsandbytes), 3B",
        technique="bitsandbytes' AdamW8bit for fused AdamW, in backward",
        **_TUNE,
        what="7,301 to 6,960 tokens/s",
        measured=7301 / 6960,
        base=_OFFLOADED,
        changed={**_OFFLOADED, "optimizer": "bnb8"},
    ),
    Case(
        name="8-bit AdamW (bitsandbytes), ViT-H",
        technique="bitsandbytes' AdamW8bit for fused AdamW",
        **_AO,
        what="41.9 to 43.6 images/s",
        measured=41.9 / 43.6,
        gpu="rtx-4070-ti-super",
        model="vit-h",
        base=_VIT_H,
        changed={**_VIT_H, "optimizer": "bnb8"},
    ),
    Case(
        name="8-bit AdamW (torchao), ViT-H",
        technique="torchao's AdamW8bit for fused AdamW",
        **_AO,
        what="41.9 to 42.5 images/s",
        measured=41.9 / 42.5,
        gpu="rtx-4070-ti-super",
        model="vit-h",
        base=_VIT_H,
        changed={**_VIT_H, "optimizer": "ao8"},
    ),
    Case(
        name="8-bit AdamW (bitsandbytes), 7B",
        technique="bitsandbytes' AdamW8bit for fused AdamW",
        **_AO,
        what="3,200 to 3,000 tokens/s",
        measured=3200 / 3000,
        gpu="a100-80gb",
        model="llama2-7b",
        base=_7B,
        changed={**_7B, "optimizer": "bnb8"},
        assumed="2 sequences of 512 tokens, every block checkpointed",
    ),
    Case(
        name="8-bit AdamW (torchao), 7B",
        technique="torchao's AdamW8bit for fused AdamW",
        **_AO,
        what="3,200 to 2,900 tokens/s",
        measured=3200 / 2900,
        gpu="a100-80gb",
        model="llama2-7b",
        base=_7B,
        changed={**_7B, "optimizer": "ao8"},
        assumed="2 sequences of 512 tokens, every block checkpointed",
    ),
    Case(
        name="CPU-offloaded AdamW, ViT-g",
        technique="torchao's CPUOffloadOptimizer",
        **_AO,
        what="1.27 to 1.52 s a step",
        measured=1.52 / 1.27,
        gpu="rtx-4070-ti-super",
        model="vit-g",
        base=_VIT_G,
        changed={**_VIT_G, "optimizer": "offload"},
    ),
    Case(
        name="CPU-offloaded AdamW and gradients, ViT-g",
        technique="CPUOffloadOptimizer with offload_gradients",
        **_AO,
        what="1.27 to 1.53 s a step",
        measured=1.53 / 1.27,
        gpu="rtx-4070-ti-super",
        model="vit-g",
        base=_VIT_G,
        changed={**_VIT_G, "optimizer": "offload-gradients"},
    ),
    Case(
        name="FSDP2 reshard after forward, 3B",
        technique="parameters freed after forward and gathered again",
        source="torchtune, issue 2402",
        url="https://github.com/meta-pytorch/torchtune/issues/2402",
        what="about 8 % faster without",
        measured=1.08,
        gpu="a100-80gb",
        model="qwen2.5-3b",
        world=8,
        base={**_QWEN, "fsdp": "keep"},
        changed={**_QWEN, "fsdp": "reshard"},
        assumed="8 A100 on one machine, 2 sequences of 4,096 (the issue names neither GPUs nor batch)",
        reason="on such a machine NVLink hides the second gathering; slower links or a smaller batch hide less of it",
    ),
)
