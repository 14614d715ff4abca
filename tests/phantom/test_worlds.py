"""One rank of a world whose other ranks do not exist: every kind of parallel training runs as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from child import PYTHON, has_module

import oomproof
from oomproof import running
from oomproof.errors import ScriptError, UsageError
from oomproof.measure.measurement import Measurement

MIB = 1 << 20

START = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
torch.cuda.set_device(local)

def layers(count=4, width=1024):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

def steps(model, optimizer=None, width=1024, count=2):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(count):
        model(torch.randn(8, width, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
steps(DistributedDataParallel(layers().cuda(), device_ids=[local]))
"""
FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group("nccl")
steps(FullyShardedDataParallel(layers().cuda(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=local))
"""
FSDP2 = """
from torch.distributed._composable.fsdp import fully_shard
dist.init_process_group("nccl")
model = layers().cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
steps(model)
"""
HSDP = """
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cuda", (size // 8, 8), mesh_dim_names=("replicate", "shard"))
model = layers().cuda()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
steps(model)
"""
BOUND = """
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
mesh = init_device_mesh("cuda", (size // 8, 8), mesh_dim_names=("replicate", "shard"))
model = layers().cuda()
fully_shard(model, mesh=mesh)
steps(model)
"""
TENSOR = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed._tensor import Shard  # torch.distributed.tensor from 2.5 on
mesh = init_device_mesh("cuda", (size // 8, 8), mesh_dim_names=("data", "tensor"))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)
        self.head = nn.Linear(1024, 8192, bias=False)
    def forward(self, x):
        return self.head(self.down(F.gelu(self.up(self.norm(x)))))
model = parallelize_module(Block().cuda(), mesh["tensor"], {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
})
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    with loss_parallel():
        x = torch.randn(2, 64 // 8, 1024, device="cuda", requires_grad=True)  # 2.4 has no norm without
        logits = model(x)
        F.cross_entropy(logits.flatten(0, 1), torch.zeros(128, dtype=torch.int64, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CONTEXT = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
mesh = init_device_mesh("cuda", (size,))
query = nn.Linear(1024, 3072).cuda()
optimizer = torch.optim.AdamW(query.parameters())
for _ in range(2):
    x = torch.randn(1, 128 * size, 1024, device="cuda")
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        q, k, v = query(x).view(1, x.shape[1], 3, 16, 64).permute(2, 0, 3, 1, 4).unbind(0)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
model = DistributedDataParallel(layers().cuda(), device_ids=[local])
steps(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW))
"""
PIPELINE = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
dist.init_process_group("nccl")
stage_layers = layers(1 + 2 * (rank == 1)).cuda()
# 2.4 wants to be told what a stage gets
given = {"input_args": torch.empty(8, 1024, device="cuda")} if torch.__version__ < (2, 5) else {}
stage = PipelineStage(stage_layers, rank, size, torch.device("cuda", local), **given)
schedule = Schedule1F1B(stage, n_microbatches=size, loss_fn=lambda out, target: out.sum())
optimizer = torch.optim.AdamW(stage_layers.parameters())
for _ in range(2):
    given = (torch.randn(size * 8, 1024, device="cuda"),) if rank == 0 else ()
    last = rank == size - 1
    schedule.step(*given, **({"target": torch.zeros(size * 8, 1024, device="cuda")} if last else {}))
    optimizer.step()
    optimizer.zero_grad()
"""
SYMMETRIC = """
import torch.distributed._symmetric_memory as symmetric
dist.init_process_group("nccl")
group = dist.group.WORLD.group_name
block = symmetric.empty(1 << 20, device=f"cuda:{local}")
handle = symmetric.rendezvous(block, group)
handle.get_buffer(size - 1, (16,), torch.float32)
left, right = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(left, [right], 0, group)
assert products[0].shape == (64 * size, 64)
assert torch.ops.symm_mem.fused_matmul_reduce_scatter(left, right, "sum", 0, group).shape == (64 // size, 64)
steps(layers().cuda())
"""
OBJECTS = """
dist.init_process_group("cpu:gloo,cuda:nccl")
gloo = dist.new_group(list(range(0, size, 2)), backend="gloo")
own = {"rank": rank}
gathered = [None] * size
dist.all_gather_object(gathered, own)
assert gathered == [own] * size, gathered
setting = ["chosen by 0"] if rank == 0 else [None]
dist.broadcast_object_list(setting, 0)
assert setting == ["chosen by 0"], setting
mine = [None]
dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
assert mine == [f"for {rank}"], mine
at_root = [None] * size if rank == 0 else None
dist.gather_object(own, at_root, dst=0)
assert rank != 0 or at_root == [own] * size
for place in ("cpu", "cuda"):
    ones = torch.ones(3, device=place)
    dist.all_reduce(ones)
    assert ones.tolist() == [size] * 3, (place, ones)
    most = torch.tensor([rank], device=place)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert most.item() == rank
    parts = [torch.empty(2, device=place) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([1.0, 2.0], device=place))
    assert all(p.tolist() == [1, 2] for p in parts)
    counts = torch.empty(size, dtype=torch.int64, device=place)
    dist.all_to_all_single(counts, torch.arange(size, device=place))
    assert counts.tolist() == [rank] * size, counts
if rank % 2 == 0:
    dist.barrier(group=gloo)
    dist.monitored_barrier(gloo)
dist.barrier()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set("name", "chosen")
assert store.get("name") == b"chosen"
store.set(f"address/{rank}", "here")
assert store.get(f"address/{size - 1}") == b"here"
steps(layers().cuda())
"""


def measured(folder: Path, code: str, **options: Any) -> Measurement:
    """Run a script as a rank of a world that does not exist, for two steps."""
    script = folder / "train.py"
    script.write_text(START + code)
    return oomproof.run([PYTHON, str(script)], **{"gpu": "h100-80gb", "steps": 2, **options})


@pytest.mark.parametrize(
    ("code", "size", "rank"),
    [
        (DDP, 8, 0), (DDP, 300, 299), (FSDP1, 16, 5), (FSDP2, 16, 15), (FSDP2, 1024, 0), (HSDP, 64, 63), (BOUND, 64, 9),
        (SYMMETRIC, 4, 1), (TENSOR, 32, 17), (CONTEXT, 4, 2), (ZERO, 8, 7), (OBJECTS, 6, 0), (OBJECTS, 6, 4),
    ],
    ids=[
        "DDP", "DDP past 128 ranks", "FSDP1", "FSDP2", "FSDP2 of 1,024", "HSDP",
        "device bound", "symmetric memory", "tensor parallel",
        "context", "ZeroRedundancyOptimizer", "objects, rank 0", "objects, rank 4",
    ],
)  # fmt: skip
def test_a_rank_trains_without_the_others(
    tmp_path: Path, version: tuple[int, ...], code: str, size: int, rank: int
) -> None:
    """The script ends as it would among its peers, and its peak is measured."""
    if code is CONTEXT and version < (2, 5):
        pytest.skip("torch.distributed.tensor.experimental.context_parallel came with torch 2.5")
    if code is SYMMETRIC and version < (2, 5):
        pytest.skip("torch.distributed._symmetric_memory came with torch 2.5")
    found = measured(tmp_path, code, world_size=size, rank=rank)
    assert found.verdict == "fits", found.notes
    assert (found.world.size, found.world.rank, found.steps) == (size, rank, 2)
    assert found.peak.allocated_bytes > 0


def test_fully_sharded_states_follow_the_closed_formula(tmp_path: Path) -> None:
    """FSDP2 keeps 1/N of parameters and of Adam's two states on each rank: 4 layers of 1024 x 1024 and a bias."""
    parameters = 4 * (1024 * 1024 + 1024) * 4
    for size in (4, 16):
        found = measured(tmp_path, FSDP2, world_size=size)
        assert found.breakdown is not None
        assert found.breakdown.parameter_bytes == pytest.approx(parameters / size, rel=0.01)
        assert found.breakdown.optimizer_state_bytes == pytest.approx(2 * parameters / size, rel=0.01)


def test_the_first_rank_holds_no_less_than_the_last(tmp_path: Path) -> None:
    """torch.chunk cuts 1,024 rows over 300 ranks as 4 rows for the first 256 and none for the others."""
    first = measured(tmp_path, FSDP2, world_size=300, rank=0)
    last = measured(tmp_path, FSDP2, world_size=300, rank=299)
    assert first.peak.allocated_bytes > last.peak.allocated_bytes


def test_worst_measures_each_pipeline_stage(tmp_path: Path) -> None:
    """Stage 1 has three times the layers: --ranks worst finds it, and every stage is in the report."""
    found = measured(tmp_path, PIPELINE, world_size=4, ranks="worst")
    assert sorted(row.rank for row in found.ranks) == [0, 1, 2, 3]
    assert found.world.rank == 1
    assert found.ranks[0].rank == 1
    assert found.peak == found.ranks[0].peak
    assert found.verdict == "fits", found.notes


def test_a_stage_learns_its_shapes_from_the_stages_before_it(tmp_path: Path, version: tuple[int, ...]) -> None:
    """Rank 3 alone: the ranks before it are run to hear what they send."""
    if version < (2, 5):
        pytest.skip("in torch 2.4 the script itself tells a stage its shapes")
    alone = measured(tmp_path, PIPELINE, world_size=4, rank=3)
    among = measured(tmp_path, PIPELINE, world_size=4, ranks=[0, 1, 2, 3])
    row = next(r for r in among.ranks if r.rank == 3)
    assert alone.verdict == "fits", alone.notes
    assert alone.peak.allocated_bytes == row.peak.allocated_bytes


def test_what_nobody_sends_is_told(tmp_path: Path) -> None:
    """Waiting for an object of a rank that never sends one ends with an error, not in a loop."""
    code = (
        'dist.init_process_group("nccl")\nheard = [None]\n'
        "if rank == 1:\n    dist.recv_object_list(heard, src=0)\nsteps(layers().cuda())\n"
    )
    with pytest.raises(ScriptError, match="rank 1 waits for something that rank 0 does not send: it ended"):
        measured(tmp_path, code, world_size=2, rank=1)


def test_ranks_that_wait_for_each_other_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that receive before they send would hang among real peers, too."""
    monkeypatch.setattr(running, "STUCK_SECONDS", 1.0)
    code = (
        'dist.init_process_group("nccl")\nheard = [None]\ndist.recv_object_list(heard, src=1 - rank)\n'
        "dist.send_object_list([rank], dst=1 - rank)\nsteps(layers().cuda())\n"
    )
    with pytest.raises(ScriptError, match="all ranks wait for one another"):
        measured(tmp_path, code, world_size=2)


BOTH_WAYS = """
dist.init_process_group("nccl")
model = layers().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shape = torch.zeros(2, dtype=torch.int64, device="cuda")
for _ in range(6):
    if rank:
        dist.recv(shape, rank - 1)
    x = torch.randn(8, 1024, device="cuda") if rank == 0 else torch.randn(*shape.tolist(), device="cuda")
    if rank < size - 1:
        dist.send(torch.tensor(x.shape, device="cuda"), rank + 1)
        dist.recv(shape, rank + 1)
    model(x).sum().backward()
    if rank:
        dist.send(torch.tensor(x.shape, device="cuda"), rank - 1)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_is_measured_to_its_end_whatever_its_senders_wait_for(tmp_path: Path, rank: int) -> None:
    """A rank that is stopped after two of six steps leaves its neighbours waiting; it has its report."""
    found = measured(tmp_path, BOTH_WAYS, world_size=3, rank=rank)
    assert (found.verdict, found.steps) == ("fits", 2), found.notes


NUMBERS = """
dist.init_process_group("cpu:gloo,cuda:nccl")
for place in ("cuda", "cpu"):
    chosen = torch.tensor([100 + rank, 7], device=place)
    dist.broadcast(chosen, 0)
    assert chosen.tolist() == [100, 7], (place, chosen)
    part = torch.zeros(2, dtype=torch.int64, device=place)
    dist.scatter(part, [torch.tensor([r, r * r], device=place) for r in range(size)] if rank == 1 else None, src=1)
    assert part.tolist() == [rank, rank * rank], (place, part)
computed = torch.tensor([rank, 3], device="cuda") * 2
if rank == 0:
    dist.send(computed, 1)
elif rank == 1:
    dist.recv(computed, 0)
    assert computed.tolist() == [0, 6], computed
left, right = (rank - 1) % size, (rank + 1) % size
heard, own = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.tensor([rank], dtype=torch.int32, device="cuda")
for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, heard, left), dist.P2POp(dist.isend, own, right)]):
    work.wait()
assert heard.item() == left, heard
heard.zero_()
coming = dist.irecv(heard, left)
dist.isend(own, right).wait()
coming.wait()
assert heard.item() == left, heard
unknown = torch.randn(4, device="cuda").argmax(keepdim=True)
dist.broadcast(unknown, 0)
mask = torch.ones(3, dtype=torch.bool, device="cuda") if rank == 0 else torch.zeros(3, dtype=torch.bool, device="cuda")
dist.broadcast(mask, 0)
assert mask.sum().item() == 3
held = torch.empty(int(chosen[0]) << 20, dtype=torch.uint8, device="cuda")
steps(layers().cuda())
"""


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_whole_numbers_of_another_rank_are_its_own(tmp_path: Path, rank: int) -> None:
    """A length that rank 0 chooses is rank 0's on each rank; the ranks that send are run beside the measured one."""
    found = measured(tmp_path, NUMBERS, world_size=3, rank=rank)
    assert found.verdict == "fits", found.notes
    assert found.peak.allocated_bytes > 100 << 20
    assert not found.value_reads, found.value_reads
    assert [note for note in found.notes if note.startswith("run beside it")], found.notes


def test_numbers_that_their_sender_does_not_know_stay_unknown(tmp_path: Path) -> None:
    """Reading a broadcast index that rank 0 got from computed floats is a value read, as on rank 0 itself."""
    code = (
        'dist.init_process_group("nccl")\nindex = torch.tensor([5], device="cuda")\n'
        'if rank == 0:\n    index = (torch.randn(9, device="cuda") * 3).long().sum(0, keepdim=True)\n'
        "dist.broadcast(index, 0)\nprint(int(index))\nsteps(layers().cuda())\n"
    )
    for rank in (0, 1):
        found = measured(tmp_path, code, world_size=2, rank=rank)
        assert [read.location for read in found.value_reads if "train.py" in read.location], (rank, found.value_reads)


def test_numbers_gathered_over_ranks_are_told(tmp_path: Path) -> None:
    """A longest length over ranks is this rank's own here: the report says so; a summed loss is no such thing."""
    code = (
        'dist.init_process_group("nccl")\nlength = torch.tensor([rank + 1], device="cuda")\n'
        "dist.all_reduce(length, op=dist.ReduceOp.MAX)\ntorch.empty(int(length) << 20, device='cuda')\n"
        "steps(layers().cuda())\n"
    )
    told = [note for note in measured(tmp_path, code, world_size=8).notes if "as if each held" in note]
    assert len(told) == 1
    other = code.replace("torch.tensor([rank + 1], ", "torch.tensor([1.5], ")
    assert not [note for note in measured(tmp_path, other, world_size=8).notes if "as if each held" in note]


def test_a_rank_on_the_first_gpu_is_told(tmp_path: Path) -> None:
    """Without set_device every rank of a machine is on cuda:0, and they share its memory."""
    code = (
        'dist.init_process_group("gloo")\nmodel = layers().to("cuda:0")\n'
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(2):\n    model(torch.randn(8, 1024, device='cuda:0')).sum().backward()\n    optimizer.step()\n"
    )
    (tmp_path / "train.py").write_text(START.replace("torch.cuda.set_device(local)", "") + code)
    found = oomproof.run([PYTHON, str(tmp_path / "train.py")], gpu="h100-80gb", steps=2, world_size=4, rank=2)
    assert [note for note in found.notes if "cuda:0" in note], found.notes


def test_worst_measures_the_first_and_last_rank_where_all_do_the_same(tmp_path: Path) -> None:
    """Without point-to-point messages, the ends of each group are enough."""
    found = measured(tmp_path, DDP, world_size=64, ranks="worst")
    assert sorted(row.rank for row in found.ranks) == [0, 63]
    assert "ranks 0, 63 of a world of 64" in found.notes[0]


def test_torchrun_starts_one_rank_of_many_nodes(tmp_path: Path) -> None:
    """The other machines of --nnodes do not exist: rank 0 is measured, in the world that torchrun was asked for."""
    (tmp_path / "train.py").write_text(START + DDP)
    command = [PYTHON, "-m", "torch.distributed.run", "--nnodes=4", "--nproc-per-node=8", str(tmp_path / "train.py")]
    found = oomproof.run(command, gpu="a100-80gb", steps=2)
    assert found.verdict == "fits", found.notes
    assert (found.world.size, found.world.rank, found.world.local_world_size) == (32, 0, 8)


def test_spawn_starts_one_rank(tmp_path: Path) -> None:
    """multiprocessing.spawn calls the function once, as the rank that is measured."""
    code = """
def main(index):
    os.environ["RANK"] = str(index)
    dist.init_process_group("nccl", init_method="tcp://10.0.0.1:1234", rank=index, world_size=size)
    assert dist.get_rank() == 5
    steps(layers().cuda())

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=size)
"""
    found = measured(tmp_path, code, world_size=8, rank=5)
    assert found.verdict == "fits", found.notes


def test_a_rank_that_does_not_fit_has_its_demand(tmp_path: Path) -> None:
    """Out of memory on a phantom rank is measured again without limit, as on one GPU."""
    script = tmp_path / "train.py"
    script.write_text(START + DDP.replace("layers()", "layers(40, 2048)").replace("steps(", "steps(width=2048, model="))
    found = oomproof.run([PYTHON, str(script)], gpu="t4", memory="2GiB", steps=2, world_size=16)
    assert found.verdict == "does-not-fit"
    assert found.demand.device_bytes > 2 << 30


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"rank": 1}, "need --world-size"),
        ({"world_size": 0}, "^a world of 0 ranks; it must have at least 1$"),
        ({"world_size": -1}, "^a world of -1 ranks; it must have at least 1$"),
        ({"world_size": 8, "gpus": 3}, "^3 GPUs in each machine do not divide a world of 8; give --gpus 2, or"),
        ({"world_size": 4, "gpus": 8}, "^8 GPUs in each machine do not divide a world of 4; give --gpus 4, or"),
        ({"world_size": 8, "gpus": 0}, "1 to 16"),
        ({"world_size": 34, "gpus": 33}, "give --gpus 2, or"),
        ({"world_size": 4, "rank": 4}, "rank 4 is not in a world of 4"),
        ({"world_size": 4, "ranks": "best"}, "write worst"),
        ({"world_size": 4, "ranks": "0", "rank": 0}, "give one of them"),
    ],
)
def test_wrong_worlds_are_refused(tmp_path: Path, options: dict[str, Any], fault: str) -> None:
    """Each fault is told with its cure, before anything is run."""
    with pytest.raises(UsageError, match=fault):
        measured(tmp_path, DDP, **options)


def test_machines_have_as_many_ranks_each(tmp_path: Path) -> None:
    """Without --gpus, as many as eight share a machine, and every machine has the same number: 12 ranks are 2 x 6."""
    found = measured(tmp_path, DDP, world_size=12, rank=11)
    assert found.world.local_world_size == 6
    assert found.verdict == "fits", found.notes


CHECKPOINT = """
import torch.distributed.checkpoint
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import get_state_dict
dist.init_process_group("nccl")
model = layers().cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
steps(model, optimizer)
model, optimizer = get_state_dict(model, optimizer)
dist.checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id="CHECKPOINT")
"""


def test_a_checkpoint_where_other_ranks_do_not_exist(tmp_path: Path) -> None:
    """Its error is put down to the world, the figures until then are those of the steps, and --steps 2 gets them."""
    code = CHECKPOINT.replace("CHECKPOINT", str(tmp_path / "saved"))
    found = measured(tmp_path, code, world_size=8, steps=None)
    assert found.ended == "raised"
    assert found.remedy is not None, found.notes
    assert found.remedy.options == ("--steps", "2")
    assert any("where the states of all ranks are put together" in note for note in found.notes), found.notes
    before = measured(tmp_path, code, world_size=8, steps=2)
    assert before.verdict == "fits", before.notes
    assert before.per_step[-1].allocated_bytes == found.per_step[-1].allocated_bytes


def test_launchers_that_start_all_ranks_are_refused(tmp_path: Path) -> None:
    """deepspeed and mpirun would start ranks that do not exist."""
    with pytest.raises(UsageError, match="write the script itself"):
        oomproof.run(["deepspeed", "train.py"], world_size=16)


REAL = """
dist.init_process_group("cpu:gloo,cuda:nccl")
own = torch.tensor([rank + 1.0], device="cuda")
dist.all_reduce(own)
assert own.item() == size * (size + 1) / 2
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank, "text": "x" * 100 * rank})
assert [o["rank"] for o in objects] == list(range(size)), objects
setting = [{"from": rank}] if rank == 0 else [None]
dist.broadcast_object_list(setting, 0, device=torch.device("cuda"))
assert setting == [{"from": 0}], setting
sent, got = torch.arange(size, device="cuda") + 10 * rank, torch.empty(size, dtype=torch.int64, device="cuda")
dist.all_to_all_single(got, sent)
assert got.tolist() == [rank + 10 * i for i in range(size)], got
part = torch.empty(2, dtype=torch.int64, device="cuda")
dist.reduce_scatter_tensor(part, torch.arange(2 * size, device="cuda"))
assert part.tolist() == [2 * rank * size, (2 * rank + 1) * size], part
slots = [torch.empty(1, device="cuda") for _ in range(size)] if rank == 0 else None
dist.gather(torch.tensor([float(rank)], device="cuda"), slots, dst=0)
assert rank != 0 or [s.item() for s in slots] == list(range(size))
message = torch.zeros(3, device="cuda")
if rank == 0:
    dist.send(message + 7, 1)
elif rank == 1:
    dist.recv(message, 0)
    assert message.tolist() == [7, 7, 7]
if rank == 0:
    dist.send(torch.arange(4.0, device="cuda"), 1)
elif rank == 1:
    got = torch.empty(4, device="cuda")
    dist.recv(got, 0)
    assert got.tolist() == [0, 1, 2, 3], got
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(own, group=pair)
kept = torch.arange(4, device="cuda") <= rank
count = kept.sum()
dist.all_reduce(count)
rows = torch.empty(int(count) * 1000, 256, device="cuda")
steps(layers().cuda())
"""


def test_processes_of_one_run_exchange_small_values(tmp_path: Path) -> None:
    """Between real ranks collectives carry what each rank holds, and it steers what they allocate."""
    script = tmp_path / "train.py"
    script.write_text(START + REAL)
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=3", str(script)]
    found = oomproof.run(command, gpu="a100-80gb", steps=2)
    assert found.verdict == "fits", found.notes
    assert not found.value_reads, found.value_reads
    assert len(found.ranks) == 3
    assert found.peak.allocated_bytes > 6 * 1000 * 256 * 4


def test_a_rank_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    """A rank whose peer has ended goes on with what it has itself, and the report says so."""
    code = (
        'dist.init_process_group("nccl")\ndist.all_reduce(torch.ones(1, device="cuda"))\n'
        "if rank == 1:\n    os._exit(0)\n"
        'dist.all_reduce(torch.ones(1, device="cuda"))\nsteps(layers().cuda())\n'
    )
    script = tmp_path / "train.py"
    script.write_text(START + code)
    found = oomproof.run([PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)], gpu="t4", steps=2)
    assert any("never came" in note for note in found.notes), found.notes


@pytest.mark.skipif(not has_module("accelerate"), reason="accelerate is not installed beside the tested torch")
def test_accelerate_scripts_run_as_a_rank(tmp_path: Path) -> None:
    """Accelerate finds its ranks in the environment; its gathered numbers are this rank's."""
    code = """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
assert accelerator.num_processes == size and accelerator.process_index == rank
model, optimizer = accelerator.prepare(layers(), torch.optim.AdamW(layers().parameters()))
optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
for _ in range(2):
    loss = model(torch.randn(8, 1024, device="cuda")).sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    assert accelerator.gather(torch.ones(1, device="cuda")).shape[0] == size
"""
    found = measured(tmp_path, code, world_size=16, rank=3)
    assert found.verdict == "fits", found.notes
