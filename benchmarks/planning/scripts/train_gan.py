"""Train a DCGAN, a generator and a discriminator with an optimizer each, on random images.

Random weights and images of noise, nothing is downloaded.

    python train_gan.py                                       on a GPU
    oomproof run --gpu a100-80gb -- train_gan.py              its peak memory on an A100, without one
    python train_gan.py --device cpu --width 8 --image-size 32 --batch-size 2 --steps 2
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a DCGAN on random images.")
    parser.add_argument("--image-size", type=int, default=64, help="a power of two, 16 or more (default 64)")
    parser.add_argument("--latent", type=int, default=100)
    parser.add_argument("--width", type=int, default=64, help="channels of the widest layer at full size (default 64)")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--workers", type=int, default=0, help="data loader processes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.image_size < 16 or args.image_size & (args.image_size - 1):
        parser.error("--image-size must be a power of two, 16 or more")
    return args


def make_generator(latent: int, width: int, doublings: int) -> nn.Sequential:
    """Return a net from noise of 1 x 1 to images: 4 x 4, then twice the size with half the channels."""
    channels = width * 2 ** (doublings - 1)
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(latent, channels, 4, 1, 0, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    ]
    for _ in range(doublings - 1):
        layers += [
            nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(channels // 2),
            nn.ReLU(inplace=True),
        ]
        channels //= 2
    return nn.Sequential(*layers, nn.ConvTranspose2d(channels, 3, 4, 2, 1, bias=False), nn.Tanh())


def make_discriminator(width: int, halvings: int) -> nn.Sequential:
    """Return a net from images to one score: half the size with twice the channels, down to 4 x 4."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for _ in range(halvings - 1):
        layers += [
            nn.Conv2d(width, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.LeakyReLU(0.2, inplace=True),
        ]
        width *= 2
    return nn.Sequential(*layers, nn.Conv2d(width, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    halvings = args.image_size.bit_length() - 3  # down to 4 x 4
    generator = make_generator(args.latent, args.width, halvings).apply(initialise).to(device)
    discriminator = make_discriminator(args.width, halvings).apply(initialise).to(device)
    betas = (0.5, 0.999)
    of_generator = torch.optim.Adam(generator.parameters(), lr=args.learning_rate, betas=betas)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=args.learning_rate, betas=betas)
    images = torch.randn(4 * args.batch_size, 3, args.image_size, args.image_size).tanh()
    loader = DataLoader(
        TensorDataset(images), batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers
    )

    step = 0
    while step < args.steps:
        for (real,) in loader:
            step += 1
            real = real.to(device)
            noise = torch.randn(len(real), args.latent, 1, 1, device=device)
            ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                fake = generator(noise)
                of_real = F.binary_cross_entropy_with_logits(discriminator(real), ones)
                of_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
            of_discriminator.zero_grad()
            (of_real + of_fake).backward()
            of_discriminator.step()

            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                deceit = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
            of_generator.zero_grad()
            deceit.backward()
            of_generator.step()
            if step % 10 == 1:
                losses = f"discriminator {(of_real + of_fake).item():.4f}, generator {deceit.item():.4f}"
                print(f"step {step}: {losses}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
