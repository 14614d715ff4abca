"""The guard on a phantom GPU, with PyTorch's own out-of-memory."""

from __future__ import annotations

from dataclasses import replace

from child import Child

from oomproof.gpus import get_gpu

MIB = 1 << 20


def test_a_real_out_of_memory_is_survived(child: Child) -> None:
    """A batch that does not fit is done in pieces that do; when they begin, the failed activations are freed."""

    def body():
        import torch

        import oomproof

        torch.manual_seed(0)
        model = torch.nn.Linear(1024, 1024, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = oomproof.Guard(model, optimizer)
        batch = torch.zeros(8, 4096, 1024, device="cuda")
        model(batch[:, :1]).mean().backward()  # cuBLAS keeps its workspace
        optimizer.zero_grad()
        held, tried, states = [], [], []

        def loss_fn(part):
            held.append(torch.cuda.memory_allocated())
            tried.append(len(part))
            states.append(torch.cuda.get_rng_state().tolist())
            x = torch.nn.functional.dropout(part, 0.1)
            for _ in range(6):
                x = torch.relu(model(x))
            return x.mean()

        guard.step(batch, loss_fn)
        starts = [i for i, size in enumerate(tried) if i == 0 or size != tried[i - 1]]
        return [tried, [held[i] for i in starts], [states[i] == states[0] for i in starts], guard.size]

    small = replace(get_gpu("t4"), memory_bytes=1024 * MIB)
    tried, held, states, size = child(body, gpu=small)
    assert tried[0] == 8
    assert size < 8
    assert tried[-(8 // size) :] == [size] * (8 // size)
    assert len(held) > 1  # something failed
    assert set(held) == {held[0]}
    assert all(states)
