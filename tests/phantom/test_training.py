"""What eager training takes, to the byte where it can be derived from the shapes."""

from __future__ import annotations

import pytest
from child import Child

WORKSPACE_BYTES = 8_519_680  # cuBLAS, one for the main thread and one for autograd's
HOPPER_WORKSPACE_BYTES = 33_554_432


def blocks(*sizes: int) -> int:
    """Return what tensors of these sizes allocate: each a multiple of 512 B."""
    return sum(-(-size // 512) * 512 for size in sizes)


#: Whole numbers of 2 MiB, or small: with others a block that is too large by less than 1 MiB is not split.
SIZES = [1024 * 3072 * 4, 3072 * 512 * 4, 512 * 7 * 4]


def small_net():
    """Return torch and three bias-free linear layers of the sizes in SIZES."""
    import torch

    layers = [(1024, 3072), (3072, 512), (512, 7)]
    net = torch.nn.Sequential(*(torch.nn.Linear(a, b, bias=False) for a, b in layers)).cuda()
    return torch, net


def stages(configurations):
    """Return live memory, less what is there before, along two steps for each [optimizer, options, set_to_none]."""
    import gc

    import torch

    a = torch.zeros(64, 64, device="cuda", requires_grad=True)
    (a @ a).sum().backward()  # the workspaces of cuBLAS
    del a
    results = []
    for name, options, set_to_none in configurations:
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        net = small_net()[1]
        live = lambda: torch.cuda.memory_allocated() - base  # noqa: E731, B023
        found = {"parameters": live()}
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=1e-3, **options)
        x = torch.zeros(64, 1024, device="cuda")
        net(x).sum().backward()
        found["backward"] = live()
        optimizer.step()
        found["step"] = live()
        optimizer.zero_grad(set_to_none=set_to_none)
        found["zero_grad"] = live()
        net(x).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        found["lift"] = torch.cuda.max_memory_allocated() - before
        found["second step"] = live()
        results.append(found)
        del net, optimizer, x
    return results


WEIGHTS = blocks(*SIZES)
INPUT = blocks(64 * 1024 * 4)
WAYS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}


def test_adam_holds_twice_the_parameters(child: Child) -> None:
    """Gradients take what the parameters take, Adam's state twice that; zero_grad frees them only when set to none."""
    cases = [(way, none) for way in WAYS for none in (True, False)]
    results = child(stages, [["Adam", WAYS[way], none] for way, none in cases], uses=[small_net])
    for (way, none), found in zip(cases, results, strict=True):
        counters = blocks(4, 4, 4) if way == "fused" else 0  # fused counts its steps on the device
        assert found["parameters"] == WEIGHTS
        assert found["backward"] == INPUT + 2 * WEIGHTS
        assert found["step"] == INPUT + 4 * WEIGHTS + counters, (way, none)
        assert found["zero_grad"] == found["step"] - (WEIGHTS if none else 0)
        assert found["second step"] == found["step"], "the second step ends where the first did"


def test_temporaries_of_the_optimizer_step(child: Child) -> None:
    """foreach takes temporaries as large as all parameters, a loop as large as one, fused none."""
    foreach, fused, loop = child(stages, [["Adam", way, True] for way in WAYS.values()], uses=[small_net])
    assert fused["lift"] == 0
    assert blocks(SIZES[0]) <= loop["lift"] <= 2 * blocks(SIZES[0])
    assert foreach["lift"] >= WEIGHTS


def test_optimizer_state_is_whole_copies(child: Child) -> None:
    """After a step the state is a whole number of copies of the parameters."""
    copies = [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("RMSprop", {}, 1),
        ("Adagrad", {}, 1),
        ("AdamW", {"amsgrad": True}, 3),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 3),
    ]
    results = child(stages, [[name, options, False] for name, options, _ in copies], uses=[small_net])
    for (name, options, expected), found in zip(copies, results, strict=True):
        assert found["step"] == INPUT + (2 + expected) * WEIGHTS, (name, options)


@pytest.mark.parametrize(("gpu", "each"), [
    ("t4", WORKSPACE_BYTES), ("a100-40gb", WORKSPACE_BYTES), ("rtx-4090", WORKSPACE_BYTES),
    ("h100-sxm", HOPPER_WORKSPACE_BYTES),
])  # fmt: skip
def test_training_holds_two_cublas_workspaces(child: Child, gpu: str, each: int) -> None:
    """The main thread's handle has one workspace, the autograd thread's another; Hopper's are larger."""

    def body():
        import torch

        live = torch.cuda.memory_allocated
        a = torch.zeros(128, 128, device="cuda", requires_grad=True)
        found = [live()]
        product = a @ a
        found.append(live())
        product.sum().backward()
        found.append(live())
        b = a.detach() @ a.detach()
        found.append(live() - b.untyped_storage().nbytes())
        return found

    matrix = 128 * 128 * 4
    plain, forward, backward, again = child(body, gpu=gpu)
    assert plain == matrix
    assert forward == 2 * matrix + each
    assert backward == 3 * matrix + 2 * each
    assert again == backward, "the workspace is made once"


def test_autocast_and_grad_scaler(child: Child) -> None:
    """Autocast keeps one 16-bit copy of each weight until its end; the scaler steps, and counts on the device."""

    def body():
        found = {}
        import torch

        for dtype in (torch.bfloat16, torch.float16):
            net = torch.nn.Linear(1024, 1024, bias=False).cuda()
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
            scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
            x = torch.zeros(8, 1024, device="cuda")
            for _ in range(2):
                before = torch.cuda.memory_allocated()
                with torch.autocast("cuda", dtype=dtype):
                    y = net(x)
                    inside = torch.cuda.memory_allocated() - before
                    loss = y.float().sum()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                del y, loss
            found[str(dtype)] = {
                "inside": inside,
                "output": str(net.weight.dtype),
                "scale": scaler.get_scale() if scaler.is_enabled() else None,
                "state": sorted(scaler.state_dict()),
            }
        return found

    found = child(body)
    for case in found.values():
        weight, x, y = 1024 * 1024 * 2, 8 * 1024 * 2, 8 * 1024 * 2
        assert case["inside"] >= weight + x + y
        assert case["output"] == "torch.float32"
    assert found["torch.float16"]["state"]


def test_tied_weights_count_once(child: Child) -> None:
    """An output layer that shares the embedding's weight takes nothing, and one gradient."""

    def body():
        import torch

        live = torch.cuda.memory_allocated
        found = []
        for tied in (True, False):
            start = live()
            table = torch.nn.Embedding(4096, 256)
            head = torch.nn.Linear(256, 4096, bias=False)
            if tied:
                head.weight = table.weight
            net = torch.nn.ModuleList([table, head]).cuda()
            weights = live() - start
            ids = torch.zeros(4, 16, dtype=torch.long, device="cuda")
            before = live()
            head(table(ids)).sum().backward()
            found.append([weights, sum(p.grad.untyped_storage().nbytes() for p in net.parameters()), live() - before])
            del net, table, head, ids
        return found

    (tied, tied_gradient, _), (apart, gradients, _) = child(body)
    assert tied == tied_gradient == blocks(4096 * 256 * 4)
    assert apart == gradients == 2 * tied


def test_gradient_accumulation_adds_nothing(child: Child) -> None:
    """From the second micro-batch on a backward pass adds to the gradients in place."""

    def body():
        torch, net = small_net()
        x = torch.zeros(64, 1024, device="cuda")
        live = []
        addresses = []
        for _ in range(3):
            net(x).sum().backward()
            live.append(torch.cuda.memory_allocated())
            addresses.append([p.grad.data_ptr() for p in net.parameters()])
        return live, addresses

    live, addresses = child(body, uses=[small_net])
    assert live[0] == live[1] == live[2]
    assert addresses[0] == addresses[1] == addresses[2]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_keeps_only_the_inputs(child: Child, reentrant: bool) -> None:
    """A checkpointed chain of layers holds one activation a layer, recomputes the rest, and has the same gradients."""

    def body(reentrant):
        import torch
        from torch.utils.checkpoint import checkpoint

        def block():
            return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))

        def kept(wrap):
            net = torch.nn.ModuleList(block() for _ in range(4)).cuda()
            x = torch.zeros(512, 256, device="cuda", requires_grad=True)
            torch.nn.Linear(256, 256).cuda()(
                x
            ).sum().backward()  # the workspaces of cuBLAS and, up to torch 2.11, cuBLASLt
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = x
            for layer in net:
                y = wrap(layer, y)
            forward = torch.cuda.memory_allocated() - before
            y.sum().backward()
            return {
                "forward": forward,
                "peak": torch.cuda.max_memory_allocated() - before,
                "gradients": all(p.grad is not None for p in net.parameters()),
            }

        return {
            "plain": kept(lambda layer, y: layer(y)),
            "checkpointed": kept(lambda layer, y: checkpoint(layer, y, use_reentrant=reentrant)),
        }

    found = child(body, reentrant)
    small, large = 512 * 256 * 4, 512 * 1024 * 4
    assert found["plain"]["forward"] == 4 * (small + 2 * large)
    rng = found["checkpointed"]["forward"] - 4 * small
    assert 0 <= rng < 4 * 8192, "at most the generator's state beside the four outputs"
    assert found["checkpointed"]["peak"] < found["plain"]["peak"]
    assert found["checkpointed"]["gradients"]


def test_clip_grad_norm(child: Child) -> None:
    """Clipping leaves no memory behind, whether it goes parameter by parameter or by lists."""

    def body():
        torch, net = small_net()
        net(torch.zeros(64, 1024, device="cuda")).sum().backward()
        before = torch.cuda.memory_allocated()
        norms = []
        for foreach in (True, False):
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=foreach)
            norms.append(list(norm.shape))
            del norm
        return torch.cuda.memory_allocated() - before, norms

    left, norms = child(body, uses=[small_net])
    assert left == 0
    assert norms == [[], []]
