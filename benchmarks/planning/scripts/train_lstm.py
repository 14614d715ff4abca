"""Train an LSTM language model on random tokens, with truncated backpropagation through time.

The defaults have the shape of the large word-level models of the 2010s: a vocabulary of 33,278 words (WikiText-2's),
two layers of 1,500, dropout, an output layer tied to the embedding, SGD with clipped gradients. The state is carried
from window to window. Random weights and tokens, nothing is downloaded.

    python train_lstm.py                                      on a GPU
    oomproof run --gpu t4 -- train_lstm.py                    its peak memory on a T4, without one
    python train_lstm.py --device cpu --vocabulary 100 --hidden 16 --window 8 --batch-size 2 --steps 3
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an LSTM language model on random tokens.")
    parser.add_argument("--vocabulary", type=int, default=33278)
    parser.add_argument("--hidden", type=int, default=1500)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.65)
    parser.add_argument("--untied", action="store_true", help="an output layer of its own")
    parser.add_argument("--window", type=int, default=35, help="tokens that gradients go back (default 35)")
    parser.add_argument("--batch-size", type=int, default=20, help="streams of text side by side (default 20)")
    parser.add_argument("--steps", type=int, default=100, help="windows (default 100)")
    parser.add_argument("--learning-rate", type=float, default=20.0)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class LanguageModel(nn.Module):
    """Embedding, LSTM, projection onto the vocabulary."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.encoder.weight
        else:
            nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        output, state = self.lstm(self.drop(self.encoder(tokens)), state)
        return self.decoder(self.drop(output)), state

    def start(self, batch: int) -> State:
        weight = self.encoder.weight
        shape = (self.lstm.num_layers, batch, self.lstm.hidden_size)
        return weight.new_zeros(shape), weight.new_zeros(shape)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    text = torch.randint(args.vocabulary, (args.steps * args.window + 1, args.batch_size)).to(device)
    model = LanguageModel(args.vocabulary, args.hidden, args.layers, args.dropout, tied=not args.untied).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=args.momentum)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.batch_size} x {args.window} tokens")

    model.train()
    state = model.start(args.batch_size)
    for step in range(1, args.steps + 1):
        first = (step - 1) * args.window
        tokens, targets = text[first : first + args.window], text[first + 1 : first + args.window + 1]
        state = tuple(part.detach() for part in state)
        logits, state = model(tokens, state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if step % 10 == 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
