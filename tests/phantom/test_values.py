"""The value mirror: what a script reads back, and that nothing of it shows in the allocator."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.phantom


@pytest.fixture
def child(lines: Any) -> Any:
    """Run lines of Python beside a mirror, or without one."""
    return lines


def test_what_is_sent_comes_back(child: Any) -> None:
    """A small tensor that was copied to the device reads back as it was, in any type and layout."""
    assert child(
        """
        wrong = []
        types = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int64,
                 torch.complex64, torch.float8_e4m3fn)
        for dtype in types:
            for shape in ((), (0,), (3,), (300, 70)):
                sent = (torch.randn(shape) * 3).to(dtype)
                for back, same in ((sent.cuda().cpu(), sent), (sent.cuda().t().cpu(), sent.t())
                                   if sent.dim() == 2 else (sent.to("cuda").to("cpu"), sent)):
                    same = same.contiguous()
                    back = back.contiguous()
                    if back.reshape(-1).view(torch.uint8).tolist() != same.reshape(-1).view(torch.uint8).tolist():
                        wrong.append([str(dtype), list(shape)])
        target = torch.zeros(40, 40, device="cuda")
        target.copy_(torch.arange(1600.).view(40, 40).t())
        converted = torch.arange(3000).to("cuda", torch.bfloat16).cpu().equal(torch.arange(3000).bfloat16())
        into = torch.empty(10, dtype=torch.float64)
        into.copy_(torch.arange(10, device="cuda"))
        result = [wrong, torch.tensor(3, device="cuda").item(), target[1, 0].item(), target[0, 1].item(), converted,
                  into.tolist(), repr(torch.arange(3, device="cuda")), unknown]
        """
    ) == [[], 3, 1.0, 40.0, True, list(range(10)), "tensor([0, 1, 2], device='cuda:0')", []]


def test_unsigned_numbers_of_64_bits_are_read_whole(child: Any) -> None:
    """torchtitan broadcasts its seed as one: above 2**63 it is no int64, and torch 2.6 failed to pass it on."""
    most = 2**64 - 5
    result = child(
        """
        sent = torch.tensor([2**64 - 5], dtype=torch.uint64, device="cuda")
        result = [sent.item(), sent.view(torch.int64).view(torch.uint64).item(), sent.tolist()]
        """
    )
    assert result == [most, most, [most]]


def test_masks_lengths_and_counters_take_the_right_branch(child: Any) -> None:
    """Integers and booleans that follow from known ones are known: masks, lengths, positions, counters."""
    found = child(
        """
        D = "cuda"
        r = result = {}
        mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], device=D)
        r["lengths"] = mask.sum(-1).tolist()
        r["longest"] = mask.sum(-1).max().item()
        r["all"] = "yes" if mask.all() else "no"
        r["all ones"] = bool(torch.ones_like(mask).all())
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        r["positions"] = positions.tolist()
        causal = torch.ones(4, 4, dtype=torch.bool, device=D).tril()
        full = causal[None, None] & mask[:, None, None, :].bool()
        r["attends"] = full.sum().item()
        r["additive"] = torch.where(full[0, 0], 0.0, -1.0).tolist()[1]
        r["arange"] = (torch.arange(5, device=D)[None] < torch.tensor([[2], [4]], device=D)).sum(1).tolist()
        counter = torch.zeros((), dtype=torch.long, device=D)
        for _ in range(5):
            counter += 1
        counter.add_(mask.sum()).mul_(2)
        r["counter"] = counter.item()
        pieces = torch.empty(4, dtype=torch.long, device=D)
        for i in range(4):
            pieces[i] = i * i
        r["pieces"] = pieces.tolist()
        out = torch.empty(4, dtype=torch.long, device=D)
        torch.add(pieces, 1, out=out)
        r["out"] = out.tolist()
        labels = torch.full((2, 4), -100, device=D)
        labels[0, :2] = 7
        r["tokens"] = (labels != -100).sum().item()
        r["values, places"] = [t.tolist() for t in mask.sum(-1).sort(descending=True)]
        r["mean"] = mask.float().mean().item()
        big = torch.randn(2000, 2000, device=D)
        r["like unknown"] = [torch.zeros_like(big, dtype=torch.bool).any().item(), big.new_ones(3).bool().all().item()]
        r["vmap"] = torch.vmap(lambda row: row.sum())(mask).tolist()
        with torch.inference_mode():
            r["inference"] = mask.max().item()
        with torch.device("cuda"):
            r["default device"] = torch.arange(4).sum().item()
        r["one hot"] = list(F.one_hot(mask.sum(-1)).shape)
        r["unknown"] = unknown
        """
    )
    assert found == {
        "lengths": [3, 2], "longest": 3, "all": "no", "all ones": True,
        "positions": [[0, 1, 2, 1], [0, 1, 1, 1]], "attends": 16, "additive": [0.0, 0.0, -1.0, -1.0],
        "arange": [2, 4], "counter": 20, "pieces": [0, 1, 4, 9], "out": [1, 2, 5, 10], "tokens": 2,
        "values, places": [[3, 2], [0, 1]], "mean": 0.625, "like unknown": [False, True], "vmap": [3, 2],
        "inference": 1, "default device": 6, "one hot": [2, 4], "unknown": [],
    }  # fmt: skip


SIZED_BY_VALUES = """
    flags = KNOWN
    f = torch.randn(10, 4, device="cuda")
    numbers = flags.long()
    made = {
        "nonzero": flags.nonzero(), "where": torch.where(flags)[0], "masked_select": f.masked_select(flags[:, None]),
        "x[mask]": f[flags], "x[:, mask]": f.t()[:, flags], "unique": torch.unique(numbers * torch.arange(10).cuda()),
        "unique bool": torch.unique(flags), "unique_dim": torch.unique(numbers.view(5, 2), dim=0),
        "unique_consecutive": torch.unique_consecutive(numbers),
        "unique_consecutive dim": torch.unique_consecutive(numbers.view(5, 2), dim=0),
        "repeat_interleave": torch.repeat_interleave(numbers, numbers + 1), "bincount": torch.bincount(numbers + 2),
    }
    result = [{name: list(tensor.shape) for name, tensor in made.items()}, [u for u in unknown if u[1] is not None]]
"""


def test_shapes_that_follow_from_known_values(child: Any) -> None:
    """nonzero, boolean masks, unique, repeat_interleave and bincount have their real shapes, on the device's terms."""
    shapes, untold = child(SIZED_BY_VALUES.replace("KNOWN", 'torch.arange(10, device="cuda") > 3'))
    assert shapes == {
        "nonzero": [6, 1], "where": [6], "masked_select": [24], "x[mask]": [6, 4], "x[:, mask]": [4, 6],
        "unique": [7], "unique bool": [2], "unique_dim": [2, 2], "unique_consecutive": [2],
        "unique_consecutive dim": [2, 2], "repeat_interleave": [16], "bincount": [4],
    }  # fmt: skip
    assert untold == []


def test_shapes_that_follow_from_unknown_values_are_told(child: Any) -> None:
    """Where the values are not known, each read that sizes an allocation is told, and nothing breaks."""
    shapes, told = child(SIZED_BY_VALUES.replace("KNOWN", 'torch.randn(10, device="cuda") > 0'))
    assert shapes["nonzero"] == [0, 1]
    assert shapes["x[mask]"] == [0, 4]
    assert shapes["repeat_interleave"] == [0]
    assert all(affects is True for _, affects in told)
    assert [o for o, _ in told][:4] == [
        "aten::nonzero (bool)", "aten::nonzero (bool)", "aten::masked_select (float32)", "aten::index (float32)",
    ]  # fmt: skip
    assert {o.split()[0].removeprefix("aten::") for o, _ in told} == {
        "nonzero", "masked_select", "index", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave",
        "bincount",
    }  # fmt: skip


def test_results_of_sized_operators_are_known(child: Any) -> None:
    """What nonzero, unique, x[mask] and x[mask] = y leave behind can itself be read."""
    assert child(
        """
        x = torch.arange(10, device="cuda")
        mask = x > 3
        put, put_many = torch.zeros_like(x), torch.zeros_like(x)
        put[mask] = 7
        put_many[mask] = torch.arange(6, device="cuda")
        result = [mask.nonzero().flatten().tolist(), x[mask].tolist(), put.tolist(), put_many.tolist(),
                  [t.tolist() for t in torch.unique(x // 3, return_inverse=True, return_counts=True)],
                  torch.unique(mask).tolist(), torch.repeat_interleave(x[:4], x[:4]).tolist(),
                  torch.bincount(x // 3).tolist(), torch.equal(x, x.clone()), torch.equal(x, x + 1), unknown]
        """
    ) == [
        [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9], [0] * 4 + [7] * 6, [0] * 4 + list(range(6)),
        [[0, 1, 2, 3], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3], [3, 3, 3, 1]],
        [False, True], [1, 2, 2, 3, 3, 3], [3, 3, 3, 1], True, False, [],
    ]  # fmt: skip


def test_a_reused_address_is_not_taken_for_known(child: Any) -> None:
    """A new tensor in the memory of a known one is unknown and reads as zeros, as does a partly overwritten one."""
    assert child(
        """
        scores = torch.randn(1000, 2, device="cuda")
        known = torch.arange(1000, 2000, device="cuda")
        address = known.data_ptr()
        del known
        new = scores.argmax(1)
        same = new.data_ptr() == address
        partly = torch.arange(4, device="cuda")
        partly[1:2] = new[:1]
        result = [same, new.max().item(), new[:3].tolist(), partly.tolist(), len(unknown)]
        """
    ) == [True, 0, [0, 0, 0], [0, 0, 0, 0], 3]


def test_floats_are_unknown_but_finite(child: Any) -> None:
    """loss.item() is told as harmless; tests for NaN and infinity give the normal answer, for large tensors too."""
    assert child(
        """
        import math
        big = torch.randn(2000, 2000, device="cuda", requires_grad=True)
        loss = (big * 2).mean()
        finite = [bool(torch.isfinite(loss)), bool(torch.isnan(loss)), bool(torch.isinf(loss)),
                  torch.isfinite(big).all().item(), torch.isnan(big).any().item(), bool((big != big).any()),
                  int((~torch.isfinite(big)).sum()), list(big[torch.isnan(big)].shape), bool(loss < math.inf)]
        with torch.inference_mode():
            finite.append(bool(torch.isfinite(loss)))
        told_by_tests = len(unknown)
        value = loss.item()
        copied = big[:2, :2].cpu().tolist()
        branch = bool(loss > 1)
        result = [finite, told_by_tests, value, copied, branch, unknown]
        """
    ) == [
        [True, False, False, True, False, False, 0, [0], True, True], 0, 0.0, [[0.0, 0.0], [0.0, 0.0]], False,
        [["aten::_local_scalar_dense (float32)", False], ["aten::_to_copy (float32)", False],
         ["aten::_local_scalar_dense (bool)", None]],
    ]  # fmt: skip


def test_grad_scaler_loop(child: Any) -> None:
    """GradScaler finds no infinity, so it steps every time, and grows when it is due."""
    assert child(
        """
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
        stepped, scales = [], []
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        for _ in range(4):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(8, 64, device="cuda")).float().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        result = [len(stepped), scales, unknown]
        """
    ) == [4, [1024.0, 1024.0, 2048.0, 2048.0], []]


def test_random_numbers_are_samples_and_the_scripts_own_stay(child: Any) -> None:
    """Random integers on the device are drawn, follow the device's seed, and leave the CPU's generator as it was."""
    found = child(
        """
        def draw():
            torch.cuda.manual_seed(5)
            return [torch.randint(1, 9, (6,), device="cuda").tolist(), torch.randperm(8, device="cuda").tolist(),
                    torch.empty(5, dtype=torch.long, device="cuda").random_(1, 7).tolist(),
                    torch.randint_like(torch.arange(3, device="cuda"), 1, 9).tolist()]
        torch.manual_seed(1)
        before = torch.random.get_rng_state()
        first, second = draw(), draw()
        torch.cuda.manual_seed(6)
        other = torch.randint(1, 9, (6,), device="cuda").tolist()
        same = torch.equal(before, torch.random.get_rng_state())
        result = [first, second, other, 0 < torch.rand((), device="cuda").item() < 1, same, unknown]
        """
    )
    first, second, other, scalar, same, unknown = found
    assert first == second
    assert first[0] != other
    assert sorted(first[1]) == list(range(8))
    assert all(1 <= n < 9 for n in first[0] + first[2] + first[3])
    assert scalar
    assert same
    assert unknown == []


TRAINING = """
    torch.manual_seed(0)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1000000)
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(64)
            self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)
            self.mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        def forward(self, x, mask):
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)
            return x + self.mlp(x + self.out(y.transpose(1, 2).flatten(2)))
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = torch.nn.Embedding(500, 64), torch.nn.Embedding(128, 64)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
            self.head = torch.nn.Linear(64, 500)
        def forward(self, ids, mask, labels):
            positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
            x = self.tokens(ids) + self.places(positions)
            length = ids.size(1)
            causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
            attends = causal[None, None] & mask[:, None, None, :].bool()
            additive = torch.zeros(attends.shape, device=x.device).masked_fill_(~attends, torch.finfo(x.dtype).min)
            for block in self.blocks:
                x = block(x, additive)
            logits = self.head(x)[:, :-1].flatten(0, 1)
            return F.cross_entropy(logits.float(), labels[:, 1:].flatten(), ignore_index=-100)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=FOREACH)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for step in range(3):
        ids = torch.randint(0, 500, (4, 40 + 8 * step))
        mask = (torch.arange(ids.size(1)) < torch.tensor([[20], [30], [40], [25]])).long()
        batch = {"ids": ids.cuda(), "mask": mask.cuda(), "labels": ids.masked_fill(mask == 0, -100).cuda()}
        loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss.item()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    result = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(),
              [[e["action"], e["addr"] % (32 << 20), e["size"]] for e in events]]
"""


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_the_allocator_sees_nothing_of_it(child: Any, foreach: bool, checkpointed: bool) -> None:
    """Every allocation and free of a training run is the same, in order, size and place, with the mirror."""
    code = TRAINING.replace("FOREACH", str(foreach))
    if checkpointed:
        call = "torch.utils.checkpoint.checkpoint(block, x, additive, use_reentrant=False)"
        code = code.replace("block(x, additive)", call)
    bare = child(code, mirrored=False)
    mirrored = child(code)
    assert len(bare[3]) > 1000
    assert mirrored == bare


def test_backward_answers_masks(child: Any) -> None:
    """The backward of x[mask] and masked_scatter reads the mask's count, on autograd's thread without the mirror."""
    assert child(
        """
        mask = torch.arange(10, device="cuda") > 3
        shapes = []
        def put(x):
            y = x * 2
            y[mask] = x[:6]
            return y
        def put_slice(x):
            y = x * 2
            y[:, 1:][mask] = x[:6, 1:]
            return y
        def two_masks(x):
            return x.t()[torch.tensor([True, False, False], device="cuda"), mask]
        def put_new(x):
            return torch.zeros_like(x).index_put((mask,), x[:6])
        def scatter(x):
            return torch.zeros(10, 3, device="cuda").masked_scatter(mask[:, None], x)
        def scatter_wide(x):
            return torch.zeros(3, device="cuda").masked_scatter(mask[:, None], x)
        def scatter_into(x):
            y = x * 2
            y[:, 1:].masked_scatter_(mask[:, None], x)
            return y
        for make in (lambda x: x[mask], lambda x: x.t()[:, mask], put_new, put, put_slice, two_masks, scatter,
                     scatter_wide, scatter_into):
            x = torch.randn(10, 3, device="cuda", requires_grad=True)
            loss = make(x).sum()
            loss.backward()
            shapes.append(list(x.grad.shape))
        result = [shapes, unknown]
        """
    ) == [[[10, 3]] * 9, []]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_sees_the_same_values(child: Any, reentrant: bool) -> None:
    """A checkpointed function takes the same branches when backward runs it again."""
    assert child(
        f"""
        from torch.utils.checkpoint import checkpoint
        lengths = torch.tensor([3, 5], device="cuda")
        seen = []
        def part(h):
            seen.append([lengths.max().item(), torch.randint(1, 1000, (1,), device="cuda").item()])
            return h[: lengths.max().item()].sin().exp()
        h = torch.randn(8, 3, device="cuda", requires_grad=True)
        loss = checkpoint(part, h, use_reentrant={reentrant}).sum()
        loss.backward()
        result = [len(seen), seen[0] == seen[1], seen[0][0], unknown]
        """
    ) == [2, True, 5, []]


def test_other_ways_of_running_are_left_alone(child: Any) -> None:
    """Fake and meta tensors, DTensor, functorch, data loader workers, graphs and flex attention run as without it."""
    assert child(
        """
        import copy
        r = result = {}
        from torch._subclasses import FakeTensorMode
        with FakeTensorMode():
            fake = torch.arange(10, device="cuda").add_(1)
            layer = torch.nn.Linear(8, 8, device="cuda")
            layer(torch.randn(2, 8, device="cuda")).sum().backward()
            r["fake"] = type((fake > 3).all()).__name__
        with torch.device("meta"):
            r["meta"] = str((torch.arange(5) + torch.nn.Linear(4, 5).out_features).device)
        embedding = torch.nn.Embedding(2000, 8, sparse=True).cuda()
        embedding(torch.arange(4, device="cuda")).sum().backward()
        torch.optim.SparseAdam(embedding.parameters()).step()
        r["sparse"] = list((embedding.weight.grad * 2).mul_(3).shape)
        r["copy"] = list(copy.deepcopy(torch.nn.Linear(3, 3).cuda()).weight.shape)
        r["grad"] = list(torch.func.grad(lambda a: (a**2).sum())(torch.randn(3, device="cuda")).shape)
        exported = torch.export.export(torch.nn.Linear(4, 4).cuda(), (torch.randn(2, 4).cuda(),))
        r["export"] = len(list(exported.graph.nodes))
        from torch.utils.data import DataLoader
        loader = DataLoader(torch.arange(64).view(16, 4), batch_size=4, num_workers=2, pin_memory=True)
        r["loader"] = [batch.to("cuda", non_blocking=True).max().item() for batch in loader]
        x, count = torch.randn(16, 16, device="cuda"), torch.zeros(3, dtype=torch.long, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            x @ x
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, count = x @ x, count + 1
        graph.replay()
        r["graph"] = list(y.shape)
        q = torch.randn(1, 2, 128, 64, device="cuda")
        try:
            from torch.nn.attention.flex_attention import flex_attention
        except ImportError:  # torch 2.4
            flex_attention = F.scaled_dot_product_attention
        r["flex"] = list(flex_attention(q, q, q).shape)
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        try:
            from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        except ImportError:  # torch 2.4
            from torch.distributed._tensor import Replicate, Shard, distribute_tensor
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        mesh = init_device_mesh("cuda", (4,))
        a, b = (distribute_tensor(torch.randn(16, 16, device="cuda"), mesh, [p]) for p in (Shard(0), Replicate()))
        r["dtensor"] = list((a @ b).to_local().shape)
        n = torch.tensor([5], device="cuda")
        dist.all_reduce(n)
        gathered = [torch.empty(1, dtype=torch.long, device="cuda") for _ in range(4)]
        dist.all_gather(gathered, n)
        r["gathered"] = [t.item() for t in gathered]
        """
    ) == {
        "fake": "FakeTensor", "meta": "meta", "sparse": [2000, 8],
        "copy": [3, 3], "grad": [3], "export": 5, "loader": [15, 31, 47, 63],
        "graph": [16, 16], "flex": [1, 2, 128, 64], "dtensor": [4, 16], "gathered": [5, 5, 5, 5],
    }  # fmt: skip


def test_compiled_code_is_compiled(child: Any) -> None:
    """torch.compile makes a graph although the mirror is active, and the mirror keeps working around it."""
    assert child(
        """
        torch._dynamo.reset()
        graphs = []
        def backend(graph, inputs):
            graphs.append(len(list(graph.graph.nodes)))
            return graph.forward
        @torch.compile(backend=backend)
        def gelu(a, b):
            return F.gelu(a @ b).sum()
        a = torch.randn(64, 64, device="cuda", requires_grad=True)
        for _ in range(4):
            gelu(a, a).backward()
        result = [len(graphs), torch.arange(4, device="cuda").sum().item(), list(a.grad.shape)]
        """
    ) == [1, 6, [64, 64]]


def test_known_storages_do_not_pile_up(child: Any) -> None:
    """Entries of freed storages are dropped, and none of them keeps device memory."""
    entries, allocated = child(
        """
        for i in range(20000):
            torch.tensor([i], device="cuda")
        result = [len(mirror.known.entries), torch.cuda.memory_allocated()]
        """
    )
    assert entries <= 4096
    assert allocated == 0


def test_kept_values_reads_what_was_last_copied(child: Any) -> None:
    """Without the mirror a read gives the bytes last copied there, and every read is told."""
    assert child(
        """
        kept = KeptValues(told)
        device.on_read(kept.on_read)
        result = [torch.tensor(3, device="cuda").item(), torch.arange(4, device="cuda").sum().item(), unknown]
        """,
        mirrored=False,
    ) == [3, 0, [["copy to the host", None], ["copy to the host", None]]]


def test_types_may_be_strings(child: Any) -> None:
    """x.type("torch.cuda.HalfTensor") names no device; large tensors and small ones pass."""
    assert child(
        """
        big = torch.randn(300, 300, device="cuda")
        small = torch.tensor([1, 2], device="cuda")
        result = [str(big.type("torch.cuda.HalfTensor").dtype), str(big.type("torch.FloatTensor").device),
                  small.type("torch.cuda.IntTensor").tolist(), small.to("cpu").tolist(), big.to(torch.float16).is_cuda]
        """
    ) == ["torch.float16", "cpu", [1, 2], [1, 2], True]
