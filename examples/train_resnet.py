"""Train a torchvision classifier, ResNet-50 by default, on generated images.

Random weights and random images with random labels, so nothing is downloaded.

    python train_resnet.py --fp16 --channels-last             on a GPU
    oomproof run --gpu t4 -- train_resnet.py --fp16           its peak memory on a T4, without one
    python train_resnet.py --device cpu --model resnet18 --image-size 64 --batch-size 2 --steps 2 --workers 0
"""

import argparse

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an image classifier on generated images.")
    parser.add_argument("--model", default="resnet50", help="a torchvision classification model (default resnet50)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--channels-last", action="store_true", help="NHWC memory format")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--fp16", action="store_true", help="fp16 autocast with a gradient scaler")
    precision.add_argument("--bf16", action="store_true", help="bf16 autocast")
    parser.add_argument("--benchmark", action="store_true", help="let cuDNN try its algorithms and keep the fastest")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=2, help="data loader processes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = args.benchmark
    device = torch.device(args.device)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format

    images = torchvision.datasets.FakeData(
        size=args.steps * args.batch_size,
        image_size=(3, args.image_size, args.image_size),
        num_classes=args.classes,
        transform=v2.Compose(
            [
                v2.ToImage(),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        ),
    )
    loader = DataLoader(
        images, batch_size=args.batch_size, num_workers=args.workers, pin_memory=device.type == "cuda", shuffle=True
    )
    model = torchvision.models.get_model(args.model, weights=None, num_classes=args.classes)
    model.to(device, memory_format=memory_format).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=args.fp16)

    for step, (batch, labels) in enumerate(loader, 1):
        batch = batch.to(device, memory_format=memory_format, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype, enabled=args.fp16 or args.bf16):
            loss = criterion(model(batch), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if step % 10 == 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
