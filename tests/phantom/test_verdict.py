"""What a measured run says: verdict, demand, where the peak is, what it consists of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from child import PYTHON, Child

import oomproof
from oomproof.errors import ScriptError
from oomproof.gpus import get_gpu
from oomproof.measure.measurement import Measurement

Measure = Callable[..., Measurement]
MIB = 1 << 20
GIB = 1 << 30
WORKSPACE_BYTES = 8_519_680


def wide(size, steps):
    """Train one bias-free layer whose weight takes ``size`` MiB."""
    import torch

    net = torch.nn.Linear(1024, size * 256, bias=False).cuda()
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    for _ in range(steps):
        x = torch.randn(512, 1024).cuda()
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_breakdown_is_the_known_sum(measure: Measure) -> None:
    """Each category is what the shapes say, and together they are the allocated peak."""
    found = measure(wide, 64, 3)
    parts = found.breakdown
    assert parts is not None
    assert parts.parameter_bytes == parts.gradient_bytes == 64 * MIB
    assert parts.optimizer_state_bytes == 128 * MIB
    assert parts.workspace_bytes == 2 * WORKSPACE_BYTES
    assert parts.input_bytes == 2 * MIB
    assert parts.temporary_bytes >= 64 * MIB
    assert parts.unknown_bytes == 0
    assert parts.total_bytes() == found.peak.allocated_bytes
    assert found.peak.phase == "optimizer"
    assert found.outside.cached_bytes == found.peak.reserved_bytes - found.peak.allocated_bytes
    assert found.outside.context_bytes == get_gpu("t4").context_bytes[1]
    assert found.peak.device_bytes == found.peak.reserved_bytes + found.outside.context_bytes
    assert found.demand.allocated_bytes == found.peak.allocated_bytes
    assert (found.allocator.ooms, found.oom, found.fits) == (0, None, True)


def test_activations_are_told_from_temporaries(measure: Measure) -> None:
    """What forward leaves for backward is activation; what it drops itself is temporary."""

    def body():
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(1024, 1024))

            def forward(self, x):
                x = x @ self.weight
                for _ in range(8):
                    x = torch.tanh(x) * 1.0  # tanh keeps its output; the product keeps nothing
                return x

        net = Net().cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.zeros(2048, 1024).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = measure(body)
    parts = found.breakdown
    assert parts is not None
    assert parts.parameter_bytes == 4 * MIB
    assert parts.optimizer_state_bytes == 0
    assert 64 * MIB <= parts.activation_bytes <= 88 * MIB
    assert parts.unknown_bytes == 0


def test_the_counters_are_pytorchs_own(measure: Measure, tmp_path: Path) -> None:
    """Peaks are max_memory_allocated() and max_memory_reserved() as the script itself reads them."""

    def body():
        import json
        from pathlib import Path

        wide(64, 3)
        import torch

        Path("said.json").write_text(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))

    found = measure(body, uses=[wide], steps=None)
    said = (tmp_path / "said.json").read_text()
    assert said == f"[{found.peak.allocated_bytes}, {found.peak.reserved_bytes}]"


def test_the_script_may_reset_its_peaks(measure: Measure, tmp_path: Path) -> None:
    """A script that resets the counters sees its own figures, and the report still has the highest."""

    def body():
        from pathlib import Path

        import torch

        x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        del x
        torch.cuda.reset_peak_memory_stats()
        y = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
        Path("said.txt").write_text(f"{torch.cuda.max_memory_allocated()} {y.numel()}")

    found = measure(body)
    assert found.peak.allocated_bytes == 100 * MIB
    assert (tmp_path / "said.txt").read_text().split()[0] == str(50 * MIB)


def test_does_not_fit(measure: Measure) -> None:
    """An error that ends the script is the verdict; a second run without limit tells the demand."""
    found = measure(wide, 2048, 3, memory="6GiB")
    assert (found.verdict, found.ended, found.fits) == ("does-not-fit", "oom", False)
    assert found.oom is not None
    assert not found.oom.caught
    assert found.oom.step == 1
    assert found.oom.phase == "optimizer"
    assert "CUDA out of memory" in found.oom.message
    assert found.oom.requested_bytes == 2048 * MIB
    assert found.demand.allocated_bytes >= 4 * 2048 * MIB
    assert found.peak.allocated_bytes == found.demand.allocated_bytes
    assert found.breakdown is not None
    assert found.breakdown.optimizer_state_bytes == 2 * 2048 * MIB
    assert found.gpu.memory_bytes == 6 * GIB


def test_fits_is_true_or_false(child: Child) -> None:
    """oomproof.fits() answers a question: true, false, or ScriptError when the script failed otherwise."""
    script = child.script(wide, 256, 2)
    command = [PYTHON, str(script)]
    assert oomproof.fits(command, memory="4GiB", cwd=child.folder)
    assert not oomproof.fits(command, memory="1GiB", cwd=child.folder)

    def broken():
        import torch

        torch.zeros(1, device="cuda")
        raise ValueError("no data")

    with pytest.raises(ScriptError, match="no data"):
        oomproof.fits([PYTHON, str(child.script(broken))], cwd=child.folder)


def test_an_error_that_the_script_survives(measure: Measure) -> None:
    """A caught out-of-memory error is told, and the run goes on and fits; the demand is what it wanted at first."""

    def body():
        import torch

        net = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batch = 1 << 22
        done = 0
        while done < 3:
            try:
                net(torch.zeros(batch, 1024, device="cuda")).sum().backward()
            except torch.OutOfMemoryError:
                batch //= 2
                torch.cuda.empty_cache()
                continue
            optimizer.step()
            optimizer.zero_grad()
            done += 1

    found = measure(body)
    assert (found.verdict, found.steps) == ("fits", 3)
    assert found.oom is not None
    assert found.oom.caught
    assert found.allocator.ooms >= 1
    assert found.demand.allocated_bytes > found.peak.allocated_bytes
    assert found.peak.allocated_bytes < get_gpu("t4").memory_bytes
    assert any("handled it" in note for note in found.notes)


def test_a_script_that_raises(measure: Measure, capfd: pytest.CaptureFixture[str]) -> None:
    """Its own traceback is shown, its exit code told, and what was measured until then kept."""

    def body():
        import torch

        wide(64, 1)
        raise KeyError("no such column") from torch.cuda.OutOfMemoryError.__base__("x")

    found = measure(body, uses=[wide])
    assert (found.verdict, found.ended, found.exit_code, found.steps) == ("unknown", "raised", 1, 1)
    assert found.peak.allocated_bytes > 256 * MIB
    assert any("no such column" in note for note in found.notes)
    assert "KeyError: 'no such column'" in capfd.readouterr().err


def test_a_script_that_exits(measure: Measure) -> None:
    """sys.exit(3) is no verdict; sys.exit(0) is a good end."""

    def body(code):
        import sys

        wide(64, 1)
        sys.exit(code)

    found = measure(body, 3, uses=[wide])
    assert (found.verdict, found.exit_code, found.steps) == ("unknown", 3, 1)
    found = measure(body, 0, uses=[wide])
    assert (found.verdict, found.exit_code, found.steps) == ("fits", 0, 1)


def test_a_script_that_never_touches_the_gpu(measure: Measure) -> None:
    """No verdict and a note that says what to check."""

    def body():
        import torch

        torch.nn.Linear(8, 8)(torch.zeros(8)).sum().backward()

    found = measure(body)
    assert (found.verdict, found.peak.allocated_bytes, found.peak.device_bytes) == ("unknown", 0, 0)
    assert any("nothing on the GPU" in note for note in found.notes)


def test_a_script_without_torch(child: Child) -> None:
    """Without torch there is nothing to measure, and the message says so."""

    def body():
        return 1

    with pytest.raises(ScriptError, match="nothing was measured"):
        oomproof.run([PYTHON, str(child.script(body))], cwd=child.folder)


def test_a_script_that_executes_itself_anew(measure: Measure) -> None:
    """os.execv keeps the phantom: what the second life does is measured."""

    def body():
        import os
        import sys

        import torch

        if os.environ.get("SECOND") != "1":
            torch.zeros(1, device="cuda")
            os.environ["SECOND"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        wide(64, 5)

    found = measure(body, uses=[wide])
    assert (found.steps, found.verdict) == (3, "fits")
    assert found.breakdown is not None
    assert found.breakdown.parameter_bytes == 64 * MIB


def test_a_script_that_starts_others(measure: Measure) -> None:
    """The training may happen in a subprocess, or in several; the largest one is reported."""

    def body(sizes):
        import subprocess
        import sys

        import torch

        torch.zeros(1, device="cuda")
        for size in sizes:
            code = f"exec(open({sys.argv[0]!r}).read().split('def body')[0]); wide({size}, 5)"
            subprocess.run([sys.executable, "-c", code], check=True)

    found = measure(body, [8, 64, 16], uses=[wide])
    assert (found.steps, found.verdict) == (3, "fits")
    assert found.breakdown is not None
    assert found.breakdown.parameter_bytes == 64 * MIB
    assert any("processes used the GPU" in note for note in found.notes)


def test_recurrent_networks_have_a_range(measure: Measure) -> None:
    """cuDNN's reserve space is not public: the report has a range with its reason, no silent zero."""

    def body():
        import torch

        net = torch.nn.LSTM(128, 256).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.zeros(50, 16, 128, device="cuda"))[0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    ranges = {r.what: r for r in measure(body).ranges}
    assert ranges["context"].low_bytes < ranges["context"].high_bytes
    (name,) = [what for what in ranges if "RNN" in what]
    assert ranges[name].high_bytes > 0
    assert "not public" in ranges[name].reason


def test_convolutions_have_a_range(measure: Measure) -> None:
    """A convolution may take a workspace that is not known: a range above the peak, bounded by the memory."""

    def body():
        import torch

        net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.ReLU()).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.zeros(16, 3, 64, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = measure(body)
    (workspace,) = [r for r in found.ranges if "convolution" in r.what]
    assert 0 <= workspace.low_bytes <= workspace.high_bytes <= found.gpu.memory_bytes
    assert workspace.reason


def test_other_backends_are_measured_with_a_note(measure: Measure) -> None:
    """cudaMallocAsync keeps no history, so there is no breakdown, and a note says why."""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    found = measure(wide, 64, 3, env=env)
    assert found.breakdown is None
    assert found.peak.allocated_bytes > 256 * MIB
    assert found.allocator.config == "backend:cudaMallocAsync"
    assert any("cudaMallocAsync" in note for note in found.notes)
    found = measure(wide, 2048, 1, env=env, memory="6GiB")
    assert (found.verdict, found.ended) == ("does-not-fit", "oom")
    assert found.demand.allocated_bytes >= 4 * 2048 * MIB


def test_a_script_with_a_recording_of_its_own(measure: Measure, tmp_path: Path) -> None:
    """A script that records and dumps memory history gets its dump, and the breakdown is there all the same."""

    def body():
        import torch

        torch.cuda.memory._record_memory_history(max_entries=100000)
        wide(64, 2)
        torch.cuda.memory._dump_snapshot("own.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
        wide(64, 1)

    found = measure(body, uses=[wide], steps=None)
    assert found.breakdown is not None
    assert found.breakdown.total_bytes() == found.peak.allocated_bytes
    assert (tmp_path / "own.pickle").stat().st_size > 1000


def test_a_peak_after_the_last_step_is_found(measure: Measure) -> None:
    """What a script takes after its steps is part of the run, and has a place and a breakdown."""

    def body():
        import torch

        wide(16, 2)
        late = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        del late

    found = measure(body, uses=[wide], steps=None)
    assert found.peak.allocated_bytes > GIB
    assert found.peak.step == 3
    assert found.breakdown is not None
    assert found.breakdown.total_bytes() == found.peak.allocated_bytes


def test_value_reads_are_listed(measure: Measure) -> None:
    """What a script reads back of computed values is listed with its line."""

    def body():
        import torch

        net = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            loss = net(torch.randn(8, 64, device="cuda")).pow(2).mean()
            loss.backward()
            optimizer.step()
            float(loss)

    reads = measure(body).value_reads
    assert reads
    assert all(read.location.startswith("body.py:") for read in reads)
    assert all(read.count >= 1 and read.operation for read in reads)


def test_arguments_without_an_address_do_no_harm(measure: Measure) -> None:
    """Modules get named tuples, objects with a ``values`` of their own, sparse gradients and tensors inside vmap."""

    def body():
        import torch

        class Sum(torch.nn.Module):
            def forward(self, found):
                return found.values.sum() if isinstance(found.values, torch.Tensor) else found.values

        class Other:
            values = 3

        x = torch.randn(4, 8, device="cuda")
        Sum()(x.topk(2))
        Sum()(Other())
        layer = torch.nn.Linear(8, 3).cuda()
        torch.vmap(lambda row: layer(row))(x)
        table = torch.nn.Embedding(100, 8, sparse=True).cuda()
        optimizer = torch.optim.SparseAdam(table.parameters())
        for _ in range(2):
            table(torch.tensor([1, 2, 3], device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = measure(body, steps=None)
    assert (found.verdict, found.steps) == ("fits", 2)
