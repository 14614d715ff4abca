"""Train a GPT-2-size language model with the Hugging Face Trainer on generated text.

Random weights and a generated data set, so nothing is downloaded. Each sequence repeats a short random phrase: the
loss falls once the model has learned to copy.

    python train_gpt2.py                                      on a GPU
    oomproof run --gpu t4 -- train_gpt2.py                    its peak memory on a T4, without one
    python train_gpt2.py --device cpu --layers 2 --hidden 64 --heads 2 --sequence 64 --batch-size 2 --steps 2
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT-2-size language model on generated text.")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default 8)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step (default 1)")
    parser.add_argument("--sequence", type=int, default=512, help="tokens a sequence (default 512)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--fp16", action="store_true", help="fp16 autocast with a gradient scaler")
    precision.add_argument("--bf16", action="store_true", help="bf16 autocast")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute each block in backward")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class RepeatedPhrases(Dataset):
    """Sequences of token ids, each one random phrase of 8 to 32 tokens over and over."""

    def __init__(self, count: int, sequence: int, vocabulary: int, seed: int) -> None:
        self.count = count
        self.sequence = sequence
        self.vocabulary = vocabulary
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        length = int(torch.randint(8, 33, (1,), generator=generator))
        phrase = torch.randint(self.vocabulary, (length,), generator=generator)
        tokens = phrase.repeat(self.sequence // length + 1)[: self.sequence]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    args = parse_arguments()
    config = GPT2Config(
        vocab_size=args.vocabulary,
        n_positions=max(1024, args.sequence),
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=args.heads,
        bos_token_id=args.vocabulary - 1,
        eos_token_id=args.vocabulary - 1,
        use_cache=False,
    )
    sequences = args.steps * args.batch_size * args.accumulate
    with tempfile.TemporaryDirectory(prefix="train-gpt2-") as output:
        model = GPT2LMHeadModel(config)
        if args.gradient_checkpointing:
            # older transformers call it gradient_checkpointing_enable
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=output,
                per_device_train_batch_size=args.batch_size,
                gradient_accumulation_steps=args.accumulate,
                max_steps=args.steps,
                learning_rate=args.learning_rate,
                fp16=args.fp16,
                bf16=args.bf16,
                use_cpu=args.device == "cpu",
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                seed=args.seed,
            ),
            train_dataset=RepeatedPhrases(sequences, args.sequence, args.vocabulary, args.seed),
        )
        trainer.train()


if __name__ == "__main__":
    main()
