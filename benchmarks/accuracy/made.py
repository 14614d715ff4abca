"""Make the models and data sets that the programs of results.jsonl are run with: ``made.py FOLDER [NAME…]``.

Models have their public sizes and zeros for weights: a safetensors header and a hole, which takes no disk. Texts are
generated words under a tokenizer trained on them, pictures are noise. No byte of device memory depends on either.
Needs torch, transformers, tokenizers, diffusers and Pillow, no network.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}


def hole(state: dict[str, torch.Tensor], path: Path, dtype: torch.dtype) -> None:
    """Write a safetensors file of zeros for these tensors, floating point in ``dtype``."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in state.items():
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        size = tensor.numel() * kind.itemsize
        head[name] = {"dtype": DTYPES[kind], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def hf_model(kind: Any, config: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a transformers model."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        state = kind(config).state_dict()
    if getattr(config, "tie_word_embeddings", False):
        state.pop("lm_head.weight", None)
    hole(state, folder / "model.safetensors", dtype)
    config.architectures, config.dtype = [kind.__name__], str(dtype).partition(".")[2]
    config.save_pretrained(folder)


def diffusers_model(kind: Any, folder: Path, dtype: torch.dtype, **config: Any) -> None:
    """Write a diffusers model."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = kind(**config)
    hole(model.state_dict(), folder / "diffusion_pytorch_model.safetensors", dtype)
    model.save_config(folder)


def words(count: int, start: int = 0) -> str:
    """Return words that are the same in every run."""
    draw = random.Random(start)
    return " ".join("".join(draw.choices("aeioulnrst", k=draw.randint(2, 9))) for _ in range(count))


def tokenizer(folder: Path) -> None:
    """Write a byte-pair tokenizer of 8,000 tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    made.train_from_iterator([words(20_000)], vocab_size=8000, special_tokens=["<|endoftext|>"])
    PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    ).save_pretrained(folder)


def noise(path: Path, size: tuple[int, int], seed: int) -> None:
    """Write a picture."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes("RGB", (32, 32), random.Random(seed).randbytes(3 * 32 * 32)).resize(size).save(path)


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def llama_1b(folder: Path) -> None:
    """Write a model of Llama 3.2 1B's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hf_model(LlamaForCausalLM, config, folder)
    tokenizer(folder)


def mistral_7b(folder: Path) -> None:
    """Write a model of Mistral 7B's sizes."""
    from transformers import MistralConfig, MistralForCausalLM

    hf_model(MistralForCausalLM, MistralConfig(vocab_size=32000, bos_token_id=0, eos_token_id=0), folder)
    tokenizer(folder)


def qwen2_05b(folder: Path) -> None:
    """Write a model of Qwen2 0.5B's sizes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hf_model(Qwen2ForCausalLM, config, folder)
    tokenizer(folder)


def stable_diffusion_15(folder: Path) -> None:
    """Write a pipeline of Stable Diffusion 1.5's sizes; its tokenizer knows bytes only."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    diffusers_model(
        UNet2DConditionModel, folder / "unet", torch.float32, sample_size=64, cross_attention_dim=768,
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    )  # fmt: skip
    diffusers_model(
        AutoencoderKL, folder / "vae", torch.float32, sample_size=512, block_out_channels=(128, 256, 512, 512),
        layers_per_block=2, down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    text = CLIPTextConfig(
        vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        projection_dim=768, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    hf_model(CLIPTextModel, text, folder / "text_encoder", torch.float32)
    DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False).save_pretrained(
        folder / "scheduler"
    )
    spelling = folder / "tokenizer"
    spelling.mkdir(exist_ok=True)
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))]
    known = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (spelling / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(known)}))
    (spelling / "merges.txt").write_text("#version: 0.2\n")
    told = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>"}
    told |= dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    (spelling / "tokenizer_config.json").write_text(json.dumps(told))


def texts(folder: Path) -> None:
    """Write chats, plain texts, preferences and instructions."""
    for split, count in (("train", 128), ("test", 16)):
        draw = random.Random(split)
        length = draw.randint

        def text(least: int, most: int, length: Callable[[int, int], int] = length) -> str:
            return words(length(least, most), length(0, 10**6))

        chats = [
            [{"role": "user", "content": text(20, 120)}, {"role": "assistant", "content": text(100, 400)}]
            for _ in range(count)
        ]
        lines(folder / "chat" / f"{split}.jsonl", [{"messages": chat} for chat in chats])
        lines(folder / "text" / f"{split}.jsonl", [{"text": text(100, 500)} for _ in range(count)])
        pairs = [{"prompt": text(30, 30), "chosen": text(50, 200), "rejected": text(50, 200)} for _ in range(count)]
        lines(folder / "pref" / f"{split}.jsonl", pairs)
        tasks = [{"instruction": text(20, 60), "output": text(50, 250)} for _ in range(count)]
        lines(folder / "alpaca" / f"{split}.jsonl", tasks)


def captions(folder: Path) -> None:
    """Write 32 pictures of 512 x 512 with captions."""
    for number in range(32):
        noise(folder / "train" / f"{number:03d}.png", (512, 512), number)
    rows = [{"file_name": f"{number:03d}.png", "text": words(8, number)} for number in range(32)]
    lines(folder / "train" / "metadata.jsonl", rows)


def coco(folder: Path) -> None:
    """Write 24 pictures of 640 x 480 with 7 objects each, and 4 to validate with, in COCO's format."""
    draw = random.Random(0)
    for split, count in (("train2017", 24), ("val2017", 4)):
        images, objects = [], []
        for image in range(1, count + 1):
            noise(folder / split / f"{image:012d}.jpg", (640, 480), image)
            images.append({"id": image, "file_name": f"{image:012d}.jpg", "width": 640, "height": 480})
            for _ in range(7):
                w, h = draw.randint(30, 320), draw.randint(30, 240)
                x, y = draw.randint(0, 639 - w), draw.randint(0, 479 - h)
                objects.append(
                    {
                        "id": len(objects) + 1, "image_id": image, "category_id": draw.choice([1, 2, 3, 18, 62, 90]),
                        "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0,
                        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
                    }
                )  # fmt: skip
        told = {"images": images, "annotations": objects, "categories": [{"id": n, "name": str(n)} for n in range(91)]}
        (folder / "annotations").mkdir(parents=True, exist_ok=True)
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(told))


def flux2_klein(folder: Path) -> None:
    """Write what PEFT's method_comparison/image-gen loads by name: FLUX.2 klein 4B, DINOv2 and 20 pictures."""
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
    from transformers import Dinov2Config, Dinov2Model, Qwen3Config, Qwen3ForCausalLM

    model = folder / "black-forest-labs" / "FLUX.2-klein-base-4B"
    diffusers_model(
        Flux2Transformer2DModel, model / "transformer", torch.bfloat16, num_layers=5, num_single_layers=20,
        num_attention_heads=24, joint_attention_dim=7680, guidance_embeds=False,
    )  # fmt: skip
    diffusers_model(AutoencoderKLFlux2, model / "vae", torch.bfloat16)
    text = Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    hf_model(Qwen3ForCausalLM, text, model / "text_encoder")
    FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True).save_pretrained(model / "scheduler")
    tokenizer(model / "tokenizer")
    told = {"tokenizer_class": "Qwen2TokenizerFast", "pad_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    told["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(told))
    parts = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "vae": ["diffusers", "AutoencoderKLFlux2"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"], "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
    }  # fmt: skip
    index = {"_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.38.0", "is_distilled": False, **parts}
    (model / "model_index.json").write_text(json.dumps(index))
    judge = folder / "facebook" / "dinov2-base"
    hf_model(Dinov2Model, Dinov2Config(image_size=518), judge, torch.float32)
    sight = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}}
    sight["crop_size"] = {"height": 224, "width": 224}
    (judge / "preprocessor_config.json").write_text(json.dumps(sight))
    for number in range(20):
        cats = folder / "peft-internal-testing" / "cat-image-dataset" / "train"
        noise(cats / f"{number:03d}.png", (768, 768), number)


MAKERS: dict[str, Callable[[Path], None]] = {
    "llama-1b": llama_1b, "mistral-7b": mistral_7b, "qwen2-0.5b": qwen2_05b, "sd15": stable_diffusion_15,
    "texts": texts, "captions": captions, "coco": coco, "flux2-klein": flux2_klein,
}  # fmt: skip


def main(folder: str, *names: str) -> None:
    """Make what is named, or everything."""
    for name in names or MAKERS:
        MAKERS[name](Path(folder) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
