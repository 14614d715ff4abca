"""Train a Llama-3-shaped language model in plain PyTorch on random tokens.

The defaults have the shape of Llama 3 8B: RMSNorm, rotary positions, grouped-query attention, SwiGLU, weights and
AdamW states in bfloat16, one sequence of 4,096 tokens a step. Weights are random, nothing is downloaded.

    python train_llama.py                                     on a GPU
    oomproof run --gpu h200 -- train_llama.py                 its peak memory on an H200, without one
    python train_llama.py --device cpu --hidden 64 --layers 2 --heads 4 --kv-heads 2 --mlp 128 \
        --vocabulary 256 --sequence 64 --steps 2
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal attention; several query heads share one key and value head."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        query = rotate(self._split(self.query(x)), rotation)
        key = rotate(self._split(self.key(x)), rotation)
        value = self._split(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # batch, heads, tokens, head size


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, mlp: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = Attention(hidden, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = MLP(hidden, mlp)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(
        self, *, vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, recompute: bool
    ) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.recompute = recompute
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads, mlp) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        rotation = rotations(tokens.shape[1], self.head_size, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, rotation, use_reentrant=False) if self.recompute else block(x, rotation)
        return self.head(self.norm(x))


def rotations(tokens: int, head_size: int, device: torch.device) -> Tensor:
    """Return the complex rotation of each position and pair of channels."""
    frequencies = 500_000 ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama-3-shaped language model on random tokens.")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--mlp", type=int, default=14336)
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute each block in backward")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--fp32", action="store_true", help="weights and states in float32 instead of bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    torch.set_default_dtype(torch.float32 if args.fp32 else torch.bfloat16)
    with device:
        model = Llama(
            vocabulary=args.vocabulary,
            hidden=args.hidden,
            layers=args.layers,
            heads=args.heads,
            kv_heads=args.kv_heads,
            mlp=args.mlp,
            recompute=args.gradient_checkpointing,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, batch {args.batch_size} x {args.sequence} tokens")

    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        # one token more than the model reads: the targets are the inputs moved by one
        tokens = torch.randint(args.vocabulary, (args.batch_size, args.sequence + 1)).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - started:.3f} s", flush=True)


if __name__ == "__main__":
    main()
