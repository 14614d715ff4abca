"""What one step executes, counted beside the phantom; and that counting it changes nothing of what is measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child import PYTHON, Child, has_module

from oomproof.gpus import get_gpu
from oomproof.phantom import launch
from oomproof.plan.work import Work

#: What differs between two runs of the same program.
VARIES = ("pid", "seconds", "work", "no_work", "argv", "snapshot", "profile")

DIM, LAYERS, HEADS, WORDS, BATCH, LENGTH = 256, 3, 4, 1000, 4, 128
TOKENS = BATCH * LENGTH


def language_model(options):
    """Train a GPT without end, or for ``steps``; options name the techniques."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    dim, layers, heads, words, batch, length = options["sizes"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = self.qkv(self.n1(x)).view(b, t, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, dim))
            return x + self.down(nn.functional.gelu(self.up(self.n2(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(words, dim), nn.Linear(dim, words, bias=False)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))

        def forward(self, ids):
            x = self.embedding(ids)
            for block in self.blocks:
                again = options.get("checkpoint")
                x = checkpoint(block, x, use_reentrant=again == "reentrant") if again else block(x)
            return self.head(x)

    model = Model().cuda()
    if options.get("compile"):
        model.compile()
    make = {"fused": {"fused": True}, "loop": {"foreach": False}}.get(options.get("optimizer"), {})
    if options.get("in_backward"):
        for p in model.parameters():
            own = torch.optim.AdamW([p], **make)

            def step(parameter, own=own):
                own.step()
                own.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        optimizer = None
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **make)
    scaler = torch.amp.GradScaler("cuda", enabled=bool(options.get("scaled")))
    for _ in range(options.get("steps") or 100):
        ids = torch.randint(0, words, (batch, length)).cuda()
        with torch.autocast("cuda", dtype=torch.float16, enabled=bool(options.get("scaled"))):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        scaler.scale(loss).backward()
        if optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        loss.item()


@pytest.fixture
def findings(child: Child) -> Callable[..., dict[str, Any]]:
    """Run a body and return what its process left."""

    def run(body: Callable[..., Any], *arguments: Any, gpu: str = "a100-80gb", **settings: Any) -> dict[str, Any]:
        script = child.script(body, *arguments)
        with tempfile.TemporaryDirectory(dir=child.folder) as folder:
            made = launch.Settings(gpu=get_gpu(gpu), **{"meter": True, "steps": 2, **settings})
            process = launch.start([PYTHON, str(script)], made, Path(folder), cwd=child.folder)
            process.wait(300)
            left = [json.loads(path.read_text()) for path in Path(folder).glob("process-*.json")]
        return max(left, key=lambda f: f["reserved_bytes"])

    return run


@pytest.fixture
def work(findings: Callable[..., dict[str, Any]]) -> Callable[..., Work]:
    """Return what one step of a language model with these options executes."""

    def of(**options: Any) -> Work:
        found = findings(language_model, {"sizes": [DIM, LAYERS, HEADS, WORDS, BATCH, LENGTH], **options})
        assert found["work"] is not None, (found["no_work"], found["error"])
        return Work.from_json(found["work"])

    return of


def products() -> int:
    """Return the FLOPs of a forward pass: 2 for each weight of a product and token, and attention."""
    weights = LAYERS * 12 * DIM * DIM + DIM * WORDS
    return 2 * weights * TOKENS + attention()


def attention() -> int:
    """Return the FLOPs of causal attention: two products of which half is skipped."""
    return LAYERS * 2 * (2 * BATCH * LENGTH * LENGTH * DIM) // 2


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    """Return what must not differ."""
    kept = {name: value for name, value in found.items() if name not in VARIES}
    kept["per_step"] = [{**step, "seconds": 0} for step in found["per_step"]]
    return kept


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "fused"},
        {"optimizer": "loop", "checkpoint": "plain"},
        {"checkpoint": "reentrant"},
        {"scaled": True},
        {"in_backward": True},
        {"compile": True},
        {"steps": 2},
    ],
    ids=str,
)
def test_counting_changes_nothing(findings: Callable[..., dict[str, Any]], options: dict[str, Any]) -> None:
    """Peaks, steps, breakdown, verdict and notes are the same with and without the meter, to the byte."""
    sizes = {"sizes": [DIM, LAYERS, HEADS, WORDS, BATCH, LENGTH]}
    bare, metered = (findings(language_model, {**sizes, **options}, meter=on) for on in (False, True))
    if options.get("steps"):  # it ends before there is anything to count
        assert metered["work"] is None
        assert "ended before" in metered["no_work"]
    else:
        assert metered["work"]["rows"], metered["no_work"]
    assert bare["work"] is None
    assert bare["steps"] == 2
    assert without_times(metered) == without_times(bare)


def test_flops_are_those_of_the_products(work: Callable[..., Work]) -> None:
    """A forward pass has 2 FLOPs for each weight and token and those of attention, a backward pass twice that.

    Attention's backward pass has five products for the forward pass's two.
    """
    counted = work()
    assert counted.flops("forward") == products()
    assert counted.flops("backward") == 2 * (products() - attention()) + attention() * 5 // 2
    assert counted.flops("recompute") == 0
    assert counted.uncounted == ()


def test_full_checkpointing_is_another_forward_pass(work: Callable[..., Work]) -> None:
    """Reentrant checkpoints run each block again; others stop before the last product, whose output nobody saved."""
    blocks = products() - 2 * DIM * WORDS * TOKENS
    plain, again, early = work(), work(checkpoint="reentrant"), work(checkpoint="plain")
    assert again.flops("recompute") == blocks
    assert early.flops("recompute") == blocks - LAYERS * 2 * 4 * DIM * DIM * TOKENS
    for counted in (again, early):
        assert counted.flops() - counted.flops("recompute") == plain.flops()


def test_an_optimizer_touches_its_parameters(work: Callable[..., Work]) -> None:
    """Fused AdamW reads parameter, gradient and two states, and writes three of them; foreach touches more."""
    parameters = LAYERS * (12 * DIM * DIM + 13 * DIM) + 2 * DIM * WORDS
    fused, foreach, loop = work(optimizer="fused"), work(), work(optimizer="loop")
    update = sum(row.bytes * row.calls for row in fused.rows if row.operator == "aten::_fused_adamw_")
    assert update == pytest.approx(7 * 4 * parameters, rel=0.001)
    assert foreach.bytes("optimizer") > 2 * fused.bytes("optimizer")
    assert loop.kernels("optimizer") > 10 * foreach.kernels("optimizer")
    assert fused.flops("optimizer") == 0


def test_compiled_code_has_the_same_products_and_fewer_bytes(
    work: Callable[..., Work], version: tuple[int, ...]
) -> None:
    """Inductor's kernels are counted by what they are given, and said to be; its products are operators."""
    compiled, eager = work(compile=True), work()
    assert compiled.flops() == eager.flops()
    passes = ("forward", "backward")
    assert any(row.operator.startswith("triton::") for row in compiled.rows)
    assert 0 < compiled.bytes(*passes) < eager.bytes(*passes)
    assert any("Triton" in what for what in compiled.estimated)
    # before 2.9 a dispatch mode has code compiled anew, and that launches kernels
    assert all("code was compiled" in what for what in compiled.uncounted)
    assert version < (2, 9) or not compiled.uncounted


def test_a_step_made_in_backward_is_counted_whole(work: Callable[..., Work]) -> None:
    """Optimizers that step as soon as a gradient is there touch as much as one that steps them all."""
    counted, whole = work(in_backward=True, optimizer="fused"), work(optimizer="fused")
    assert counted.flops() == whole.flops()
    assert counted.bytes("optimizer") == pytest.approx(whole.bytes("optimizer"), rel=0.01)


def test_autocast_computes_in_its_dtype(work: Callable[..., Work]) -> None:
    """The FLOPs of a run under autocast are fp16's, and so is what an fp32 one with TF32 allowed says."""
    half = work(scaled=True)
    by_dtype = {row.dtype for row in half.rows if row.flops}
    assert by_dtype == {"fp16"}
    assert {row.dtype for row in work().rows if row.flops} == {"fp32"}


def test_copies_are_told_apart(findings: Callable[..., dict[str, Any]]) -> None:
    """Each copy between host and device counts once, by direction and by whether the host waits."""

    def body():
        import torch

        weight = torch.nn.Parameter(torch.ones(1024, 256, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        host = torch.zeros(1024, 256)
        pinned = torch.zeros(1024, 256).pin_memory()
        while True:
            (weight * host.cuda()).sum().backward()
            pinned.copy_(weight.detach(), non_blocking=True)
            weight.grad += pinned.to("cuda", non_blocking=True)
            optimizer.step()
            optimizer.zero_grad()

    found = findings(body)
    copies = {(c["direction"], c["pinned"], c["blocking"]): (c["count"], c["bytes"]) for c in found["work"]["copies"]}
    size = 1024 * 256 * 4
    assert copies == {
        ("h2d", False, True): (1, size),
        ("d2h", True, False): (1, size),
        ("h2d", True, False): (1, size),
    }


def test_views_are_free_and_lookups_read_what_comes_out(findings: Callable[..., dict[str, Any]]) -> None:
    """A transposed, reshaped, sliced tensor moves nothing; an embedding reads its rows, not its table."""

    def body():
        import torch

        table = torch.nn.Embedding(100_000, 64).cuda()
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        ids = torch.arange(100, device="cuda")
        while True:
            x = table(ids)
            x.t().reshape(64, 100)[:10].expand(3, 10, 100).detach().unsqueeze(0)
            x.sum().backward()
            optimizer.step()

    rows = findings(body)["work"]["rows"]
    forward = {row["operator"]: row["bytes"] for row in rows if row["phase"] == "forward"}
    assert forward.pop("aten::embedding") == 2 * 100 * 64 * 4 + 100 * 8
    assert set(forward) <= {"aten::sum", "aten::ones_like", "aten::clone"}, forward


def test_collectives_count_with_their_groups(findings: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """FSDP gathers each parameter twice where it frees them after forward, and reduces each gradient once."""

    def body():
        import torch
        import torch.distributed as dist
        from torch.distributed._composable.fsdp import fully_shard

        dist.init_process_group("nccl")
        net = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False, device="cuda") for _ in range(4)])
        for layer in net:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        while True:
            net(torch.randn(8, 256, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    world = launch.World(size=16, rank=0, local_size=8, folder=tmp_path)
    found = findings(body, world=world, gpu_count=8)["work"]["collectives"]
    counts: dict[str, int] = {}
    for item in found:
        assert (item["bytes"], item["ranks"], item["nodes"]) == (256 * 256 * 4, 16, 2)
        counts[item["kind"]] = counts.get(item["kind"], 0) + item["calls"]
    assert counts["reduce_scatter"] == 4
    assert counts["all_gather"] in (7, 8), "once more in backward, but for the last layer where torch keeps it"


def test_the_step_that_is_counted_may_take_more_memory(findings: Callable[..., dict[str, Any]]) -> None:
    """What the step after the measured ones needs decides nothing: no allocation of it fails, no figure changes."""

    def body():
        import torch

        weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(9):
            if step == 2:
                torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
            weight.sum().backward()
            optimizer.step()

    found = findings(body)
    assert found["oom"] is None
    assert found["reserved_bytes"] < 1 << 30
    assert found["work"] is not None


def test_a_script_that_fails_in_that_step_keeps_what_was_measured(findings: Callable[..., dict[str, Any]]) -> None:
    """An error after the measured steps is no error of theirs."""

    def body():
        import torch

        weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(9):
            if step == 2:
                raise SystemExit(3)
            weight.sum().backward()
            optimizer.step()

    found = findings(body)
    assert (found["ended"], found["steps"], found["error"]) == ("steps-reached", 2, None)
    assert found["work"] is None
    assert "ended before" in found["no_work"]


def test_a_mode_of_the_scripts_own_is_left_alone(findings: Callable[..., dict[str, Any]]) -> None:
    """Where the script counts FLOPs itself, nothing is counted here, and the reason is there."""

    def body():
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with FlopCounterMode(display=False):
            while True:
                weight.sum().backward()
                optimizer.step()

    found = findings(body)
    assert found["work"] is None
    assert "TorchDispatchMode" in found["no_work"]


def test_what_cannot_be_seen_is_named(findings: Callable[..., dict[str, Any]]) -> None:
    """Kernels outside of operators, graphs that are replayed and products without a formula are listed as uncounted."""

    def body():
        import torch

        @torch.library.custom_op("mine::gemm", mutates_args=())
        def gemm(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        graph, x = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
        with torch.cuda.graph(graph):
            x.mul_(2)
        while True:
            graph.replay()
            gemm(x)
            weight.sum().backward()
            optimizer.step()

    uncounted = findings(body)["work"]["uncounted"]
    assert any("FLOPs of mine::gemm" in what for what in uncounted)
    assert any("CUDA graph" in what for what in uncounted)


@pytest.mark.skipif(not has_module("bitsandbytes"), reason="bitsandbytes is not installed beside the tested torch")
def test_an_optimizer_of_another_library_is_counted_or_named(findings: Callable[..., dict[str, Any]]) -> None:
    """The update of an 8-bit optimizer is in the rows, or among what is uncounted."""

    def body():
        import bitsandbytes
        import torch

        weight = torch.nn.Parameter(torch.ones(4096, 64, device="cuda"))
        optimizer = bitsandbytes.optim.AdamW8bit([weight], lr=0.1)
        while True:
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = findings(body)["work"]
    counted = sum(row["bytes"] * row["calls"] for row in found["rows"] if row["phase"] == "optimizer")
    assert counted >= 4 * 3 * 4096 * 64 or found["uncounted"]
