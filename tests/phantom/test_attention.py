"""PyTorch chooses the attention backend from the phantom's capability, as it would on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
from child import Child

BATCH, HEADS, LENGTH, WIDTH = 2, 8, 1024, 64
OUT_BYTES = BATCH * HEADS * LENGTH * WIDTH * 2
LOGSUMEXP_BYTES = BATCH * HEADS * LENGTH * 4
SCORES_BYTES = BATCH * HEADS * LENGTH * LENGTH * 2
SEED_BYTES = 2 * 512  # the generator's seed and offset, where a version keeps them on the device

NODES = {
    "FLASH_ATTENTION": "ScaledDotProductFlashAttentionBackward0",
    "EFFICIENT_ATTENTION": "ScaledDotProductEfficientAttentionBackward0",
    "CUDNN_ATTENTION": "ScaledDotProductCudnnAttentionBackward0",
}


def attend(batch, heads, length, width):
    """Return, for each backend alone and for PyTorch's own choice, its autograd node and what forward holds."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward(backends):
        q, k, v = (
            torch.zeros(batch, heads, length, width, device="cuda", dtype=torch.float16, requires_grad=True)
            for _ in range(3)
        )
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            with sdpa_kernel(backends):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        except RuntimeError as error:
            return {"error": str(error)}
        found = {
            "node": type(out.grad_fn).__name__,
            "kept": torch.cuda.memory_allocated() - before,
            "peak": torch.cuda.max_memory_allocated() - before,
        }
        out.backward(torch.zeros_like(out))
        found["gradients"] = [tuple(t.grad.shape) == tuple(t.shape) for t in (q, k, v)]
        return found

    names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    forward([SDPBackend.MATH])  # cuBLAS's workspaces come with the first product
    found = {name: forward([getattr(SDPBackend, name)]) for name in names}
    q = torch.zeros(batch, heads, length, width, device="cuda", dtype=torch.float16, requires_grad=True)
    found["chosen"] = {"node": type(torch.nn.functional.scaled_dot_product_attention(q, q, q).grad_fn).__name__}
    return found


@pytest.mark.parametrize(
    ("gpu", "refused", "chosen"),
    [
        ("t4", {"FLASH_ATTENTION", "CUDNN_ATTENTION"}, "EFFICIENT_ATTENTION"),
        ("a100-40gb", set(), "FLASH_ATTENTION"),
        ("h100-sxm", set(), "CUDNN_ATTENTION"),
    ],
)
def test_backends_follow_the_capability(
    child: Child, version: tuple[int, ...], gpu: str, refused: set[str], chosen: str
) -> None:
    """Turing has no flash attention, Ampere takes it, Hopper prefers cuDNN's (before 2.8: flash)."""
    found: dict[str, Any] = child(attend, BATCH, HEADS, LENGTH, WIDTH, gpu=gpu)
    if version < (2, 5):
        refused = refused | {"CUDNN_ATTENTION"}  # 2.4 has it behind a switch
    assert {name for name, case in found.items() if "error" in case} == refused
    assert all("No available kernel" in found[name]["error"] for name in refused)
    if chosen == "CUDNN_ATTENTION" and version < (2, 8):
        chosen = "FLASH_ATTENTION"
    assert found["chosen"]["node"] == NODES[chosen]
    for name in NODES.keys() - refused:
        assert found[name]["node"] == NODES[name]
        assert 0 <= found[name]["kept"] - OUT_BYTES - LOGSUMEXP_BYTES <= SEED_BYTES, name
        assert found[name]["peak"] == found[name]["kept"], f"{name} has no temporaries"
        assert found[name]["gradients"] == [True, True, True]
    kept = 1 if version < (2, 5) else 2  # 2.4 keeps the scores in half precision
    assert found["MATH"]["kept"] >= kept * SCORES_BYTES, "scores and their softmax are kept for the backward pass"
