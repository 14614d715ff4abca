"""Observing changes nothing: the same allocations, of the same sizes, at the same places, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from child import Child, has_module

from oomproof.measure.measurement import Measurement


def watched(train):
    """Return peaks and the whole sequence of the allocator's events while ``train()`` runs."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = len(torch.cuda.memory._snapshot()["device_traces"][0])
    gc.disable()  # when garbage is collected depends on how many objects there are, not only on the script
    train()
    gc.enable()
    trace = torch.cuda.memory._snapshot()["device_traces"][0][start:]
    events = [e for e in trace if e["action"] != "snapshot"]
    first = events[0]["addr"]
    found, frees = [], []
    for e in events:
        event = [e["action"], e["size"], e["addr"] - first]
        if e["action"].startswith("free"):  # autocast drops its cache in the order of a hash table: it varies
            frees.append(event)
        else:
            found += [*sorted(frees), event]
            frees = []
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "events": found + sorted(frees),
    }


def programs(with_transformers, with_vision):
    """Return what ``watched`` found for each program."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    def optimize(net, make_optimizer, loss, steps=3):
        optimizer = make_optimizer(net.parameters())
        for _ in range(steps):
            loss().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def mlp():
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256)).cuda()

    def plain(make_optimizer):
        net = mlp()
        optimize(net, make_optimizer, lambda: net(torch.randn(32, 256, device="cuda")).sum())

    def checkpointed(reentrant):
        net = nn.ModuleList(mlp() for _ in range(3))

        def loss():
            x = torch.randn(32, 256, device="cuda", requires_grad=True)
            for layer in net:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.sum()

        optimize(net, torch.optim.AdamW, loss)

    def recurrent():
        net = nn.LSTM(64, 128, num_layers=2, dropout=0.1).cuda()
        optimize(net, torch.optim.SGD, lambda: net(torch.randn(20, 4, 64, device="cuda"))[0].sum())

    def scaled():
        net, scaler = mlp(), torch.amp.GradScaler("cuda")
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = net(torch.randn(32, 256, device="cuda")).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            loss.item()

    def attention():
        net = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True).cuda()
        table = nn.Embedding(1000, 128).cuda()
        ids = torch.randint(0, 1000, (4, 64), device="cuda")
        both = nn.ModuleList([net, table])
        optimize(both, torch.optim.AdamW, lambda: net(table(ids)).sum())

    def language_model():
        from transformers import GPT2Config, GPT2LMHeadModel

        net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1000, n_positions=64)).cuda()
        ids = torch.randint(0, 1000, (2, 64), device="cuda")
        optimize(net, torch.optim.AdamW, lambda: net(input_ids=ids, labels=ids).loss)

    def resnet():
        import torchvision

        net = torchvision.models.resnet18().cuda()
        x, y = torch.randn(2, 3, 64, 64, device="cuda"), torch.randint(0, 1000, (2,), device="cuda")
        optimize(net, lambda p: torch.optim.SGD(p, momentum=0.9), lambda: nn.functional.cross_entropy(net(x), y))

    torch.cuda.memory._record_memory_history(max_entries=200000, context=None)
    found = {
        "plain": watched(lambda: plain(torch.optim.Adam)),
        "loop": watched(lambda: plain(lambda p: torch.optim.AdamW(p, foreach=False))),
        "foreach": watched(lambda: plain(lambda p: torch.optim.AdamW(p, foreach=True))),
        "fused": watched(lambda: plain(lambda p: torch.optim.AdamW(p, fused=True))),
        "checkpoint": watched(lambda: checkpointed(False)),
        "reentrant checkpoint": watched(lambda: checkpointed(True)),
        "LSTM": watched(recurrent),
        "GradScaler": watched(scaled),
        "attention": watched(attention),
    }
    if with_transformers:
        found["GPT-2"] = watched(language_model)
    if with_vision:
        found["ResNet-18"] = watched(resnet)
    return found


def test_observing_changes_nothing(child: Child) -> None:
    """Peaks and the allocator's events (size, place, order) are the same with and without observer."""
    there = [has_module("transformers"), has_module("torchvision")]
    options: dict[str, Any] = {"uses": [watched], "steps": None}
    bare = child(programs, *there, observe=False, **options)
    for values in ("mirror", "keep"):
        observed = child(programs, *there, observe=True, values=values, **options)
        assert bare.keys() == observed.keys()
        for name in bare:
            if (name, values) == ("GradScaler", "mirror"):
                continue  # it knows that no gradient overflowed; without it a stale number decides whether to step
            assert len(bare[name]["events"]) > 50
            assert observed[name]["events"] == bare[name]["events"], (name, values)
            assert observed[name] == bare[name], (name, values)


def test_the_mirror_leaves_composite_operators_alone(child: Child) -> None:
    """A linear layer on a transposed input takes the same memory while values are mirrored.

    ATen's isTensorSubclassLike() is true for every tensor while a TorchDispatchMode is active; linear then adds the
    bias into an output of its own, and a run would look larger by a half.
    """

    def body():
        import torch

        x = torch.randn(64, 512, 256, device="cuda").transpose(0, 1)
        layer = torch.nn.Linear(256, 256).cuda()
        layer(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = layer(x)
        return (torch.cuda.max_memory_allocated() - before) / y.untyped_storage().nbytes()

    bare = child(body)
    assert bare == 2.0, "the input made contiguous, and the output"
    assert child(body, observe=True, steps=None, values="mirror") == bare


def test_a_gradient_within_forward_does_not_end_it(measure: Callable[..., Measurement]) -> None:
    """What a module allocates after autograd.grad in its own forward pass is kept for backward: activations."""

    def body():
        import torch

        class Penalised(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(1024, 1024)

            def forward(self, x):
                x.requires_grad_()
                (slope,) = torch.autograd.grad(self.layer(x).sum(), x)
                return self.layer(slope).tanh().exp().sum()

        net = Penalised().cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.randn(8192, 1024, device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()

    parts = measure(body).breakdown
    assert parts is not None
    assert parts.activation_bytes >= 2 * 32 << 20, "what tanh and exp saved"
    assert parts.unknown_bytes < 1 << 20
