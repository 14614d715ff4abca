"""Train a vision transformer on generated images.

timm's ViT-B/16 by default; any of timm's models by name. Random weights and random images with random labels, so
nothing is downloaded.

    python train_vit.py --bf16                                on a GPU
    oomproof run --gpu a100-80gb -- train_vit.py --bf16       its peak memory on an A100, without one
    python train_vit.py --device cpu --model vit_tiny_patch16_224 --image-size 32 --batch-size 2 --steps 2 --workers 0
"""

import argparse

import timm
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a vision transformer on generated images.")
    parser.add_argument("--model", default="vit_base_patch16_224", help="a model of timm (vit_base_patch16_224)")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--drop-path", type=float, default=0.1, help="stochastic depth (default 0.1)")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--fp16", action="store_true", help="fp16 autocast with a gradient scaler")
    precision.add_argument("--bf16", action="store_true", help="bf16 autocast")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=2, help="data loader processes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class RandomImages(Dataset):
    """Images of noise with labels; the same ones each time."""

    def __init__(self, count: int, size: int, classes: int) -> None:
        self.count = count
        self.size = size
        self.classes = classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), index % self.classes


def groups_of(model: nn.Module, decay: float) -> list[dict]:
    """Return parameter groups: matrices decay; biases, norms and what the model names do not."""
    without = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim > 1 and name not in without]
    rest = [p for name, p in named if p.ndim <= 1 or name in without]
    return [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    images = RandomImages(args.steps * args.batch_size, args.image_size, args.classes)
    loader = DataLoader(
        images, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=device.type == "cuda"
    )
    model = timm.create_model(
        args.model, num_classes=args.classes, img_size=args.image_size, drop_path_rate=args.drop_path
    )
    if args.gradient_checkpointing:
        model.set_grad_checkpointing()
    model.to(device).train()
    optimizer = torch.optim.AdamW(groups_of(model, 0.05), lr=args.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, total_steps=args.steps + 1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=args.fp16)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, batch {args.batch_size}")

    for step, (batch, labels) in enumerate(loader, 1):
        batch = batch.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype, enabled=args.fp16 or args.bf16):
            loss = criterion(model(batch), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if step % 10 == 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
