"""One training program of the comparison: ``program.py MODEL key=value ...``, endless; the caller stops it.

Plain PyTorch in the shape of what each public measurement ran; options name the techniques.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SHAPES = {  # dim, layers, heads, key-value heads, hidden, vocabulary
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama3-8b": (4096, 32, 32, 8, 14336, 128256),
    "llama3.2-3b": (3072, 28, 24, 8, 8192, 128256),
    "qwen2.5-3b": (2048, 36, 16, 2, 11008, 151936),
}
VITS = {"vit-h": "vit_huge_patch14_224", "vit-g": "vit_giant_patch14_dinov2"}


class PlainNorm(nn.Module):
    """RMSNorm in eager operators, as torchtune had it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.scale


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv: int, hidden: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, dim // heads
        self.n1, self.n2 = norm(dim), norm(dim)
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, kv * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        y = self.n1(x)
        q, k, v = (f(y).view(b, t, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        rotate = _rotate_pairs if isinstance(self.n1, PlainNorm) else _rotate
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.kv != self.heads:
            k, v = (z.repeat_interleave(self.heads // self.kv, 1) for z in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        y = self.n2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring elements, as torchtune does."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).type_as(x)


class Llama(nn.Module):
    def __init__(self, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        super().__init__()
        dim, layers, heads, kv, hidden, vocabulary = shape
        self.options = options
        self.embedding = nn.Embedding(vocabulary, dim)
        norm = PlainNorm if options["plain_norm"] else nn.RMSNorm
        self.blocks = nn.ModuleList(Block(dim, heads, kv, hidden, norm) for _ in range(layers))
        self.norm, self.head = norm(dim), nn.Linear(dim, vocabulary, bias=False)
        at = torch.arange(options["sequence"])[:, None] * 1e4 ** (-torch.arange(0, dim // heads, 2) / (dim // heads))
        self.register_buffer("cos", at.cos(), persistent=False)
        self.register_buffer("sin", at.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for index, block in enumerate(self.blocks):
            x = _run(block, self.options["checkpoint"], index, x, self.cos, self.sin)
        return self.norm(x)


def _run(block: nn.Module, how: str, index: int, *inputs: torch.Tensor) -> torch.Tensor:
    if how == "full" or (how == "layer" and index % 2 == 0):
        return checkpoint(block, *inputs, use_reentrant=False)
    if how == "op":
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=_saving)
    return block(*inputs)


def _saving() -> Any:
    """Keep attention, collectives and every second matrix product, as torchtitan's selective op checkpointing does."""
    aten = torch.ops.aten
    kept = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    counts: dict[bool, int] = {}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is aten.mm.default:
            counts[context.is_recompute] = counts.get(context.is_recompute, 0) + 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = operator in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def _loss(model: Any, ids: torch.Tensor, chunks: int, cross_entropy: Any) -> torch.Tensor:
    hidden = model(ids)
    if chunks == 1:
        return cross_entropy(model.head(hidden).float(), ids) / ids.numel()
    logits = [model.head(x) for x in hidden.chunk(chunks, 1)]
    return sum(map(cross_entropy, logits, ids.chunk(chunks, 1))) / ids.numel()


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Move what is saved to pinned memory beside the computation, and back."""

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    @staticmethod
    def pack(tensor: torch.Tensor) -> Any:
        small = tensor.numel() < 1024 or not tensor.is_floating_point()
        if not tensor.is_cuda or small or isinstance(tensor, nn.Parameter):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # its strides too: compiled code asks for them
        return host.copy_(tensor, non_blocking=True)

    @staticmethod
    def unpack(packed: torch.Tensor) -> torch.Tensor:
        return packed.to("cuda", non_blocking=True)  # nothing, where it never left


def _optimizer(name: str, parameters: Any) -> Any:
    if name == "fused":
        return torch.optim.AdamW(parameters, fused=True)
    if name == "foreach":
        return torch.optim.AdamW(parameters)
    if name == "bnb8":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters)
    from torchao import optim

    if name == "ao8":
        return optim.AdamW8bit(parameters)
    return optim.CPUOffloadOptimizer(
        parameters, torch.optim.AdamW, fused=True, offload_gradients=name == "offload-gradients"
    )


class InBackward:
    """A step of each parameter's own optimizer as soon as its gradient is there."""

    def __init__(self, name: str, parameters: Any) -> None:
        for parameter in parameters:
            optimizer = _optimizer(name, [parameter])
            parameter.register_post_accumulate_grad_hook(functools.partial(self._step, optimizer))

    @staticmethod
    def _step(optimizer: Any, parameter: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()


def _shard(model: Any, reshard: bool) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("nccl")
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": reshard,
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _llama(name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    with torch.device("meta" if options["fsdp"] else "cuda"):
        model = Llama(SHAPES[name], options)
    if not options["fsdp"]:
        model.to(torch.bfloat16)
    if options["compile"]:
        for block in model.blocks:
            block.compile()
    if options["fsdp"]:
        _shard(model, options["fsdp"] == "reshard")
        model.to_empty(device="cuda")
    ids = torch.randint(0, 1000, (options["batch"], options["sequence"]))
    cross_entropy = torch.compile(_cross_entropy) if options["compile"] else _cross_entropy
    if options["fsdp"]:  # the head is the root's own parameter: it is gathered within forward
        forward = type(model).forward
        type(model).forward = lambda self, x: self.head(forward(self, x))
        return model, lambda: functional.cross_entropy(model(ids.cuda()).float().flatten(0, 1), ids.cuda().flatten())
    return model, lambda: _loss(model, ids.cuda(), options["chunks"], cross_entropy)


def _vit(name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    import timm

    with torch.device("cuda"):
        model = timm.create_model(VITS[name], num_classes=45)
    if options["checkpoint"] == "full":
        model.set_grad_checkpointing()
    model = model.cuda()
    if options["bf16"]:
        model.bfloat16()
    if options["compile"]:
        model.compile()
    side = model.patch_embed.img_size[0]
    dtype = torch.bfloat16 if options["bf16"] else torch.float32
    images, labels = torch.randn(options["batch"], 3, side, side, dtype=dtype), torch.zeros(options["batch"]).long()

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not options["bf16"]):
            return functional.cross_entropy(model(images.cuda()), labels.cuda())

    return model, loss


def main() -> None:
    """Train until stopped."""
    options: dict[str, Any] = {
        "batch": 1, "sequence": 2048, "checkpoint": "none", "compile": False, "chunks": 1, "optimizer": "fused",
        "in_backward": False, "offload": False, "fsdp": "", "bf16": True, "plain_norm": False,
        **json.loads(sys.argv[2]),
    }  # fmt: skip
    model, loss = (_vit if sys.argv[1] in VITS else _llama)(sys.argv[1], options)
    model.train()
    make = InBackward if options["in_backward"] else _optimizer
    optimizer = make(options["optimizer"], list(model.parameters()))
    while True:
        with Offload() if options["offload"] else contextlib.nullcontext():
            value = loss()
        value.backward()
        if not options["in_backward"]:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
