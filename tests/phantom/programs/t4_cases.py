"""Three training steps whose peaks were published for a real Tesla T4: GPT-2, DistilBERT, ResNet-50.

Run in a process of its own, it prints one line of JSON for each case. The published figures come from one process
that had run other programs before. All that is left of those by then is where three blocks lie that PyTorch never
gives back, the cuBLAS workspaces of the main and the autograd thread and cuBLASLt's: ``leave_workspaces`` leaves them
there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DistilBertConfig, DistilBertModel, GPT2Config, GPT2LMHeadModel, PreTrainedModel

BATCH, LENGTH = 4, 128


class Layer(nn.Module):
    """A transformer layer without biases whose attention is spelt out."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before_attention(x)
        q, k, v = (
            project(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


def train_twice(parameters: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Make two steps; the peak counters start anew before the second."""
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()


def train_layers() -> None:
    """Train four layers for two steps."""
    layers = nn.Sequential(*(Layer(512, 8, 2048) for _ in range(4))).cuda()
    x = torch.randn(4, 256, 512, device="cuda")

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            squares: torch.Tensor = layers(x).float().pow(2).mean()
        return squares

    train_twice(layers.parameters(), loss)


def leave_workspaces() -> None:
    """Bring the three lasting blocks to where the published process had them."""
    a = torch.randn(256, 256, device="cuda")
    (a @ a).sum().item()
    convolution = nn.Conv2d(3, 16, 3, padding=1).cuda()
    convolution(torch.randn(1, 3, 64, 64, device="cuda")).sum().backward()
    del a, convolution
    torch.cuda.empty_cache()

    train_layers()
    torch.cuda.empty_cache()

    biased = nn.Linear(256, 256).cuda()
    biased(torch.randn(8, 256, device="cuda")).sum().backward()
    del biased
    torch.cuda.empty_cache()


def saved_and_loaded(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Return the model as ``from_pretrained`` builds it: that decides in which order its parameters are allocated."""
    with tempfile.TemporaryDirectory() as folder:
        kind(config).save_pretrained(folder)
        return kind.from_pretrained(folder)


def language_model(model: nn.Module, data: tuple[torch.Tensor, ...]) -> tuple[Any, torch.Tensor]:
    out = model(input_ids=data[0], labels=data[0])
    return out, out.loss


def encoder(model: nn.Module, data: tuple[torch.Tensor, ...]) -> tuple[Any, torch.Tensor]:
    out = model(input_ids=data[0])
    return out, out.last_hidden_state.float().pow(2).mean()


def classifier(model: nn.Module, data: tuple[torch.Tensor, ...]) -> tuple[Any, torch.Tensor]:
    return None, nn.functional.cross_entropy(model(data[0]), data[1])


def tokens(vocabulary: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, vocabulary - 1, (BATCH, LENGTH), device="cuda"),)


def images(batch: int) -> tuple[torch.Tensor, ...]:
    pixels = torch.randn(batch, 3, 224, 224, device="cuda")
    return pixels, torch.randint(0, 1000, (batch,), device="cuda")


def measure(
    name: str,
    build: Callable[[], nn.Module],
    make_data: Callable[[], tuple[torch.Tensor, ...]],
    call: Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[Any, torch.Tensor]],
) -> None:
    """Print the peaks of a second step; the model's output lives on through the backward pass, as in a script."""
    torch.cuda.empty_cache()
    model = build().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = make_data()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _out, loss = call(model, data)
        loss.backward()
        optimizer.step()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    found = {
        "model": name,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    print(json.dumps(found), flush=True)


def main() -> None:
    import torchvision

    leave_workspaces()
    gpt2, distilbert = GPT2Config(), DistilBertConfig()
    measure(
        "gpt2",
        lambda: saved_and_loaded(GPT2LMHeadModel, gpt2),
        lambda: tokens(gpt2.vocab_size),
        language_model,
    )
    measure(
        "distilbert-base-uncased",
        lambda: saved_and_loaded(DistilBertModel, distilbert),
        lambda: tokens(distilbert.vocab_size),
        encoder,
    )
    measure("resnet50", torchvision.models.resnet50, lambda: images(16), classifier)


if __name__ == "__main__":
    main()
