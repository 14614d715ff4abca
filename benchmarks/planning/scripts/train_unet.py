"""Train a diffusion U-Net from diffusers on random images, with accelerate.

The defaults have the shape of an unconditional DDPM for images of 128 x 128; --conditional gives the U-Net of a latent
diffusion model, with cross attention to text embeddings of 77 tokens. Random weights and images, nothing is downloaded;
needs diffusers and accelerate.

    python train_unet.py                                      on a GPU
    oomproof run --gpu a100-80gb -- train_unet.py             its peak memory on an A100, without one
    python train_unet.py --device cpu --channels 32 64 --image-size 16 --batch-size 2 --steps 2
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DConditionModel, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.utils.data import DataLoader, TensorDataset

TOKENS = 77
TEXT_WIDTH = 768


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a diffusion U-Net on random images.")
    parser.add_argument("--conditional", action="store_true", help="cross attention to text embeddings")
    parser.add_argument("--image-size", type=int, default=128, help="of images, or of latents with --conditional")
    parser.add_argument("--channels", type=int, nargs="+", default=[128, 128, 256, 256, 512, 512])
    parser.add_argument("--layers", type=int, default=2, help="residual blocks a level (default 2)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step (default 1)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--precision", choices=("no", "fp16", "bf16"), default="no", help="mixed precision")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> UNet2DModel | UNet2DConditionModel:
    """Return a U-Net with attention in the two lowest levels, or in all but the lowest of a conditional one."""
    levels = len(args.channels)
    groups = min(32, *args.channels)
    if args.conditional:
        return UNet2DConditionModel(
            sample_size=args.image_size,
            block_out_channels=args.channels,
            layers_per_block=args.layers,
            down_block_types=["CrossAttnDownBlock2D"] * (levels - 1) + ["DownBlock2D"],
            up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * (levels - 1),
            cross_attention_dim=TEXT_WIDTH,
            norm_num_groups=groups,
        )
    plain = max(0, levels - 2)
    return UNet2DModel(
        sample_size=args.image_size,
        block_out_channels=args.channels,
        layers_per_block=args.layers,
        down_block_types=["DownBlock2D"] * plain + ["AttnDownBlock2D"] * (levels - plain),
        up_block_types=["AttnUpBlock2D"] * (levels - plain) + ["UpBlock2D"] * plain,
        norm_num_groups=groups,
    )


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    accelerator = Accelerator(
        mixed_precision=args.precision, gradient_accumulation_steps=args.accumulate, cpu=args.device == "cpu"
    )
    model = make_model(args)
    if args.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    count = args.batch_size * args.accumulate * 4
    images = torch.randn(count, model.config.in_channels, args.image_size, args.image_size)
    loader = DataLoader(TensorDataset(images), batch_size=args.batch_size, shuffle=True, drop_last=True)
    schedule = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=1e-6, eps=1e-8)
    warmup = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=args.steps)
    model, optimizer, loader, warmup = accelerator.prepare(model, optimizer, loader, warmup)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, batch {args.batch_size}")

    step = 0
    while step < args.steps:
        for (clean,) in loader:
            noise = torch.randn_like(clean)
            times = torch.randint(schedule.config.num_train_timesteps, (len(clean),), device=clean.device)
            noisy = schedule.add_noise(clean, noise, times)
            text = {}
            if args.conditional:
                text = {"encoder_hidden_states": torch.randn(len(clean), TOKENS, TEXT_WIDTH, device=clean.device)}
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noisy, times, **text).sample.float(), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                warmup.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if step % 10 == 1:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)
                if step == args.steps:
                    break


if __name__ == "__main__":
    main()
