"""Convolutions, normalisation, pooling and recurrent networks."""

from __future__ import annotations

import pytest
from child import Child


def test_convolutions_of_every_kind(child: Child) -> None:
    """1d to 3d, transposed, grouped and dilated convolutions keep input and output and make whole gradients."""

    def body():
        import itertools

        import torch

        cases = itertools.product((False, True), (torch.float32, torch.float16, torch.bfloat16))
        return [case for benchmark, dtype in cases for case in convolve(benchmark, dtype)]

    for name, held, gradients, kept_layout in child(body, gpu="a100-40gb", uses=[convolve]):
        assert held == 0, f"forward of {name} holds more than its output"
        assert gradients, name
        assert kept_layout, name


def convolve(benchmark, dtype):
    import torch
    from torch import nn

    torch.backends.cudnn.benchmark = benchmark
    kinds = [
        (nn.Conv1d(32, 64, 3, padding=1), (4, 32, 256)),
        (nn.Conv2d(32, 64, 3, padding=1), (4, 32, 32, 32)),
        (nn.Conv2d(32, 64, 3, stride=2, bias=False), (4, 32, 33, 33)),
        (nn.Conv2d(32, 64, 3, padding=2, dilation=2, groups=8), (4, 32, 32, 32)),
        (nn.ConvTranspose2d(32, 16, 2, stride=2), (4, 32, 16, 16)),
        (nn.Conv3d(8, 16, 3, padding=1), (2, 8, 8, 16, 16)),
    ]
    found = []
    for layer, shape in kinds:
        for layout in (torch.contiguous_format, torch.channels_last):
            if layout == torch.channels_last and len(shape) != 4:
                continue
            net = layer.to("cuda", dtype).to(memory_format=layout)
            x = torch.zeros(*shape, device="cuda", dtype=dtype).to(memory_format=layout)
            x.requires_grad_()
            before = torch.cuda.memory_allocated()
            y = net(x)
            held = torch.cuda.memory_allocated() - before - -(-y.untyped_storage().nbytes() // 512) * 512
            y.sum().backward()
            gradients = all(p.grad.shape == p.shape for p in [*net.parameters(), x])
            kept = y.is_contiguous(memory_format=layout)
            found.append([str([layer, dtype, layout, benchmark]), held, gradients, kept])
            del net, x, y
    return found


def test_normalisation_and_pooling(child: Child) -> None:
    """Batch norm keeps its output and two statistics; max pooling keeps an int64 index beside each value."""

    def body():
        import torch
        from torch import nn

        found = {}
        for name, layer in {
            "batch": nn.BatchNorm2d(64), "group": nn.GroupNorm(8, 64), "instance": nn.InstanceNorm2d(64, affine=True),
            "max": nn.MaxPool2d(2), "average": nn.AvgPool2d(2), "adaptive": nn.AdaptiveAvgPool2d(1),
        }.items():  # fmt: skip
            net = layer.cuda()
            x = torch.zeros(8, 64, 32, 32, device="cuda", requires_grad=True)
            before = torch.cuda.memory_allocated()
            y = net(x)
            found[name] = torch.cuda.memory_allocated() - before
            y.sum().backward()
            assert x.grad.shape == x.shape
            net.eval()
            del x, y
        return found

    found = child(body)
    full = 8 * 64 * 32 * 32 * 4
    assert found["batch"] == full + 2 * 512
    assert found["group"] == full + 2 * 512
    assert found["instance"] - full < 32 * 1024
    assert found["max"] == full // 4 + full // 4 * 2
    assert found["average"] == full // 4
    assert found["adaptive"] == 8 * 64 * 4


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_networks(child: Child, kind: str) -> None:
    """Weights lie in one flat buffer of their summed size; training keeps more than evaluating."""

    def body(kind):
        import torch

        found = {}
        for name, options in {
            "plain": {}, "deep": {"num_layers": 2, "dropout": 0.1, "bidirectional": True, "batch_first": True},
            "no bias": {"bias": False}, "projected": {"proj_size": 64} if kind == "LSTM" else {},
        }.items():  # fmt: skip
            net = getattr(torch.nn, kind)(128, 256, **options)
            size = sum(p.numel() * 4 for p in net.parameters())
            net = net.cuda()
            net.flatten_parameters()
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in net.parameters()}
            x = torch.zeros(20, 8, 128, device="cuda", requires_grad=True)
            before = torch.cuda.memory_allocated()
            y, state = net(x)
            training = torch.cuda.memory_allocated() - before
            y.sum().backward()
            gradients = all(p.grad.shape == p.shape for p in [*net.parameters(), x])
            del y, state
            with torch.no_grad():
                before = torch.cuda.memory_allocated()
                kept = net(x)
                evaluating = torch.cuda.memory_allocated() - before
            packed = torch.nn.utils.rnn.pack_padded_sequence(
                torch.zeros(20, 8, 128, device="cuda"), torch.full((8,), 20), enforce_sorted=False
            ) if not options.get("batch_first") else None  # fmt: skip
            if packed is not None:
                net(packed)[0].data.sum().backward()
            found[name] = [size, list(storages.values()), training, evaluating, gradients]
            del kept, packed
        return found

    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    for name, (size, storages, training, evaluating, gradients) in child(body, kind).items():
        unused = 2 * gates * 256 * 4 if name == "no bias" else 0  # PyTorch asks cuDNN for biases all the same
        assert storages == [size + unused], name
        assert training > evaluating > 0, name
        assert gradients, name
