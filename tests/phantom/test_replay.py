"""A recorded run replayed through PyTorch's allocator is the recorded run; other settings do what they are for."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from child import PYTHON, Child

import oomproof
from oomproof import snapshot
from oomproof.gpus import get_gpu, with_memory
from oomproof.snapshot import replay as replay_module
from oomproof.snapshot.candidates import candidates, variable
from oomproof.snapshot.replay import Replay, replay
from oomproof.snapshot.state import History

MIB = 1 << 20
SHARED = Path(__file__).parents[3] / "shared" / "snapshots"
T4 = get_gpu("t4")


def gpu_with(room_bytes: int) -> Any:
    """Return a T4 that has so much for PyTorch."""
    return with_memory(T4, room_bytes + T4.context_bytes[1])


def _busy(path, seed, recorded_from, limit_mib, pooled):
    """Allocate and free at random on three streams and perhaps in a pool, with out-of-memory errors, and record it."""
    import random

    import torch

    chance = random.Random(seed)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    pool = torch.cuda.MemPool() if pooled else None
    live, errors = [], 0

    def make():
        kind = chance.random()
        low, high = (1, 1 << 20) if kind < 0.5 else (1 << 20, 10 << 20) if kind < 0.8 else (10 << 20, 90 << 20)
        with torch.cuda.stream(chance.choice(streams)):
            return torch.empty(chance.randrange(low, high), dtype=torch.uint8, device="cuda")

    for step in range(1500):
        if step == recorded_from:
            torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
        kind = chance.random()
        if kind < 0.02:
            torch.cuda.empty_cache()
        elif kind < 0.55 and sum(t.numel() for t in live) < (limit_mib << 20) * 0.8:
            try:
                if pool is not None and chance.random() < 0.2:
                    with torch.cuda.use_mem_pool(pool):
                        live.append(make())
                else:
                    live.append(make())
            except torch.cuda.OutOfMemoryError:
                errors += 1
        elif live:
            tensor = live.pop(chance.randrange(len(live)))
            if chance.random() < 0.2:
                tensor.record_stream(chance.choice(streams))
            del tensor
    torch.cuda.memory._dump_snapshot(path)
    stats = torch.cuda.memory_stats()
    return [errors, stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]]


def baseline_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the replays under other settings."""
    monkeypatch.setattr(replay_module, "candidates", lambda **_: [])


def busy(child: Child, config: str, *, pooled: bool, recorded_from: int = 0) -> tuple[Path, Any]:
    """Record ``_busy`` under a setting; return the snapshot's path and what the run itself counted."""
    path = child.folder / "busy.pickle"
    limit_mib = 600
    counted = child(
        _busy, str(path), 0, recorded_from, limit_mib, pooled, gpu=gpu_with(limit_mib * MIB),
        env={"PYTORCH_CUDA_ALLOC_CONF": config},
    )  # fmt: skip
    return path, counted


@pytest.mark.parametrize(
    "config", ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"]
)
def test_a_run_with_streams_pools_and_errors(
    child: Child, version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    """Replayed from an empty allocator, every address, driver call and peak is the recorded one.

    Up to torch 2.11 events do not say their pool, so with a pool such a run cannot be told from its trace.
    """
    baseline_only(monkeypatch)
    path, (errors, allocated, reserved) = busy(child, config, pooled=version >= (2, 12))
    assert errors
    recorded = snapshot.load(path)
    found = History(recorded, 0)
    assert not found.problems
    assert (found.peak_allocated.size_bytes, found.peak_reserved.size_bytes) == (allocated, reserved)
    result = replay(recorded, python=PYTHON)
    assert result.baseline.exact, result.baseline.first_difference


def test_a_run_of_expandable_segments_from_its_middle(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is rebuilt with its unmapped pages and with free room too small to be asked for."""
    baseline_only(monkeypatch)
    path, _ = busy(child, "expandable_segments:True", pooled=False, recorded_from=700)
    recorded = snapshot.load(path)
    assert History(recorded, 0).start_segments.total_bytes
    result = replay(recorded, python=PYTHON)
    assert result.baseline.exact, result.baseline.first_difference


def _graphs(path):
    """Capture two graphs in one pool, let go of them, and go on; on a second GPU allocate a little."""
    import torch

    torch.cuda.memory._record_memory_history(stacks="python")
    net = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(4))).cuda()
    x = torch.zeros(4000, 500, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        net(x).sum().backward()
    net.zero_grad()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        net(x).sum().backward()
    with torch.cuda.graph(other, pool=graph.pool()):
        y = net(x).relu()
    graph.replay()
    del graph, other, y
    torch.cuda.empty_cache()
    for size in (60, 20, 10):
        torch.empty(size << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.device(1):
        kept = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (10, 30, 3)]
    torch.cuda.memory._dump_snapshot(path)
    return len(kept)


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_graphs_and_a_second_gpu(
    child: Child, version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    """Pools that are let go of are freed in the replay too; each device is replayed by itself."""
    baseline_only(monkeypatch)
    path = child.folder / "graphs.pickle"
    child(_graphs, str(path), gpu_count=2, env={"PYTORCH_CUDA_ALLOC_CONF": config})
    recorded = snapshot.load(path)
    assert recorded.devices() == [0, 1]
    assert replay(recorded, device=1, python=PYTHON).baseline.exact
    result = replay(recorded, device=0, python=PYTHON)
    if version >= (2, 12):
        assert result.baseline.exact, result.baseline.first_difference
    elif not result.baseline.exact:
        assert result.baseline.first_difference is not None
        assert "pools" in result.baseline.first_difference.why


def _steps(path, recorded_from):
    """Train a small model for some steps, recorded from one of them on."""
    import torch

    net = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(4):
        if step == recorded_from:
            torch.cuda.memory._record_memory_history(stacks="python")
        for rows in (900, 3100, 1700):
            net(torch.zeros(rows, 700, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.memory._dump_snapshot(path)


@pytest.mark.parametrize("recorded_from", [0, 2])
def test_training(child: Child, monkeypatch: pytest.MonkeyPatch, recorded_from: int) -> None:
    """A training run is replayed exactly in every version, from its beginning and from its middle."""
    baseline_only(monkeypatch)
    path = child.folder / "steps.pickle"
    child(_steps, str(path), recorded_from)
    result = replay(snapshot.load(path), python=PYTHON)
    assert result.baseline.exact, result.baseline.first_difference


def _attention(path, record):
    """Train over growing lengths, as padded batches have; return what the run itself counts."""
    import torch

    if record:
        torch.cuda.memory._record_memory_history(stacks="python")
    net = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for length in (64, 190, 130, 250, 90, 310):
        net(torch.zeros(8, length, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if record:
        torch.cuda.memory._dump_snapshot(path)
    stats = torch.cuda.memory_stats()
    keys = ("reserved_bytes.all.peak", "allocated_bytes.all.peak", "num_alloc_retries")
    return [stats[key] for key in keys] + [stats.get("num_device_alloc")]


@pytest.mark.parametrize(
    "config",
    ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"],
)
def test_what_a_setting_would_do_is_what_it_does(child: Child, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    """Replaying a run of the defaults under a setting gives the figures of the run itself under that setting."""
    monkeypatch.setattr(replay_module, "candidates", lambda **_: [config])
    path = child.folder / "attention.pickle"
    child(_attention, str(path), True)
    found = replay(snapshot.load(path), python=PYTHON).outcomes[0]
    counted = child(_attention, str(path), False, env={"PYTORCH_CUDA_ALLOC_CONF": config})
    predicted = [found.peak_reserved_bytes, found.peak_allocated_bytes, found.retries, found.device_allocations]
    assert predicted == counted


EXACT_IN_ANY = {"lm_medium_train_128", "lm_xl_forward_2048_expandable", "lm_xl_full_step_bf16_128"}


@pytest.mark.parametrize(
    "name",
    [
        "cnn_small", "lm4_train_100", "lm_2.7b_full_step_128", "lm_large_bf16_midrun", "lm_medium_train_128",
        "lm_xl_forward_2048_expandable", "lm_xl_full_step_bf16_128", "lora_8bit_old_format",
    ],
)  # fmt: skip
def test_recorded_on_real_gpus(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Real GPUs' runs are replayed exactly by a PyTorch that chooses among equal blocks as theirs did.

    torch 2.14 takes the oldest (pull request 183591), those that recorded these the one at the lowest address.
    """
    path = SHARED / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"no recorded snapshot {path.name}")
    baseline_only(monkeypatch)
    result = replay(snapshot.load(path), python=PYTHON)
    if version < (2, 12) or name in EXACT_IN_ANY:
        assert result.baseline.exact, result.baseline.first_difference
    else:
        difference = result.baseline.first_difference
        assert difference is not None
        assert "oldest" in difference.why
        assert "--python" in difference.why


def _fragment(path):
    """Grow a tensor step by step, as attention over longer and longer sequences does, beside one that stays."""
    import torch

    torch.cuda.memory._record_memory_history(stacks="python")
    kept = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    for megabytes in (30, 50, 70, 90):
        torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.memory._dump_snapshot(path)
    return kept.numel()


def fragmented(child: Child) -> Path:
    """Record ``_fragment``."""
    path = child.folder / "fragment.pickle"
    child(_fragment, str(path))
    return path


def outcome(result: Replay, config: str) -> Any:
    """Return the outcome of a setting."""
    return next(found for found in result.outcomes if found.config == config)


def test_expandable_segments_save_what_fragments(child: Child) -> None:
    """Where segments of growing sizes add up, one that grows does not; the line to paste names the right variable."""
    result = replay(snapshot.load(fragmented(child)), python=PYTHON)
    assert result.baseline.exact
    usual, grown = outcome(result, ""), outcome(result, "expandable_segments:True")
    assert usual.peak_reserved_bytes == 340 * MIB
    assert 190 * MIB <= grown.peak_reserved_bytes <= 200 * MIB
    assert usual.device_allocations == 5
    assert usual.cached_bytes == 150 * MIB
    assert result.best() == grown
    assert result.variable == variable(result.torch)
    assert result.start_bytes == 0


def test_on_less_memory(child: Child) -> None:
    """With room for the blocks but not for all segments, the allocator has to give some back and goes on."""
    path = fragmented(child)
    result = replay(snapshot.load(path), gpu=gpu_with(250 * MIB), python=PYTHON)
    usual = outcome(result, "")
    assert usual.survives
    assert usual.retries >= 1
    assert usual.device_frees >= 1
    assert usual.peak_reserved_bytes <= 250 * MIB
    assert any("garbage_collection_threshold" in found.config for found in result.outcomes)
    result = replay(snapshot.load(path), gpu=gpu_with(180 * MIB), python=PYTHON)
    assert not any(found.survives for found in result.outcomes)
    assert outcome(result, "").failed_bytes == 90 * MIB
    assert result.best() is None
    result = replay(snapshot.load(path), gpu=gpu_with(50 * MIB), python=PYTHON)
    assert outcome(result, "").failed_bytes == 100 * MIB


def test_the_command(child: Child) -> None:
    """The JSON has the stable keys, the table ends with a line to paste, and 2 means that nothing survives."""
    path = fragmented(child)

    def command(*options: str) -> subprocess.CompletedProcess[str]:
        source = str(Path(oomproof.__file__).parents[1])
        words = [sys.executable, "-m", "oomproof", "replay", str(path), "--python", PYTHON, *options]
        return subprocess.run(words, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True)

    done = command("--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["baseline"]["exact"]
    assert found["baseline"]["first_difference"] is None
    assert found["baseline"]["peak_reserved_bytes"] == 340 * MIB
    keys = {
        "config",
        "peak_reserved_bytes",
        "cached_bytes",
        "device_allocations",
        "device_frees",
        "retries",
        "survives",
    }
    assert all(keys <= set(setting) for setting in found["settings"])
    assert [setting["config"] for setting in found["settings"]] == candidates(limited=False)
    assert found["best"]["config"] == "expandable_segments:True"
    done = command()
    assert f"export {found['best']['variable']}=expandable_segments:True" in done.stdout
    assert "EXACT" in done.stdout
    assert command("--gpu", "t4", "--memory", "300MiB").returncode == 2


def test_nothing_to_replay(tmp_path: Path) -> None:
    """Without events, or with none of the device asked for, the message says so."""
    path = tmp_path / "empty.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    with pytest.raises(oomproof.errors.UsageError, match="no events"):
        replay(snapshot.load(path), python=PYTHON)


def test_an_interpreter_that_cannot_be_used(tmp_path: Path) -> None:
    """One that is not there is the user's mistake; one without torch is told as such."""
    path = tmp_path / "small.pickle"
    segment = {
        "device": 0, "address": 1 << 40, "total_size": 2 * MIB, "stream": 0, "segment_type": "small", "blocks": [],
        "frames": [],
    }  # fmt: skip
    call = {"action": "segment_alloc", "addr": 1 << 40, "size": 2 * MIB, "stream": 0, "frames": []}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[call]]}))
    with pytest.raises(oomproof.errors.UsageError, match="no interpreter"):
        replay(snapshot.load(path), python=str(tmp_path / "none"))
    venv.create(tmp_path / "bare", symlinks=True)  # -S would do without oomproof's sitecustomize too
    with pytest.raises(oomproof.errors.EnvironmentMissingError, match="needs a CUDA build of torch"):
        replay(snapshot.load(path), python=str(tmp_path / "bare" / "bin" / "python"))


def test_a_trace_that_contradicts_itself(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording that was switched off for a while is said to be why a replay parts from its record."""
    baseline_only(monkeypatch)
    path = fragmented(child)
    with path.open("rb") as file:
        data = pickle.load(file)  # written above
    trace = data["device_traces"][0]
    del trace[next(i for i, e in enumerate(trace) if e["action"] == "free_completed")]
    path.write_bytes(pickle.dumps(data))
    result = replay(snapshot.load(path), python=PYTHON)
    assert not result.baseline.exact
    assert result.baseline.first_difference is not None
    assert "contradict" in result.baseline.first_difference.why
