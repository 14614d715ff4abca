"""The range over unknown counts: a further run where memory depends on them, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from child import PYTHON, Child, has_module

from oomproof.errors import UsageError
from oomproof.measure.measurement import Measurement, Range
from oomproof.report.verdict import headline

Measure = Callable[..., Measurement]


def masked(keep):
    """Train on the rows that a mask keeps: one that is computed, or one that keeps none or all."""
    import torch

    with open("runs.txt", "a") as file:
        file.write("run\n")
    net = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sent = torch.full((16384,), keep == "all")
    for _ in range(3):
        x = net(torch.randn(16384, 512, device="cuda"))
        computed, known = x[:, 0] > 0, sent.cuda()
        kept = x[computed if keep == "unknown" else known]
        kept.exp().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values_range(measured: Measurement) -> Range | None:
    return next((r for r in measured.ranges if r.what == "values"), None)


def runs(child: Child) -> int:
    """Return how often the script ran, and forget it."""
    path = child.folder / "runs.txt"
    count = path.read_text().count("run")
    path.unlink()
    return count


def test_bounds_are_the_peaks_at_none_and_all(child: Child, measure: Measure) -> None:
    """The peaks of a mask that is not known reach from that of one that keeps nothing to that of one that keeps all."""
    measured = measure(masked, "unknown")
    assert runs(child) == 2
    none, everything = measure(masked, "none"), measure(masked, "all")
    assert runs(child) == 2
    assert measured.demand == none.demand
    assert measured.demand_if_many == everything.demand
    span = values_range(measured)
    assert span is not None
    assert (span.low_bytes, span.high_bytes) == (none.peak.device_bytes, everything.peak.device_bytes)
    assert span.high_bytes - span.low_bytes > 16384 * 512 * 4
    assert "masked.py:" in span.reason
    assert "aten::index (float32), 0 to 16,384" in span.reason
    (read,) = measured.value_reads
    assert (read.least, read.most, read.affects_memory) == (0, 16384, True)


def test_without_unknown_sizes_there_is_no_further_run(child: Child, measure: Measure) -> None:
    """A script that sizes nothing by unknown values runs once, and its report has no such range."""
    measured = measure(masked, "all")
    assert runs(child) == 1
    assert values_range(measured) is None
    assert measured.demand_if_many is None
    assert measured.value_reads == ()


@pytest.mark.parametrize("counts", ["few", "many"])
def test_one_end_can_be_asked_for(child: Child, measure: Measure, counts: str) -> None:
    """With few or many counts there is one run, and its figures are those of that end of the range."""
    measured = measure(masked, "unknown", unknown_counts=counts)
    assert runs(child) == 1
    assert values_range(measured) is None
    assert measured.demand == measure(masked, "none" if counts == "few" else "all").demand


def test_kept_values_have_no_largest(child: Child, measure: Measure) -> None:
    """Without the mirror nothing tells what a read is for: no further run, and asking for the largest is refused."""
    measured = measure(masked, "unknown", values="keep")
    assert runs(child) == 1
    assert values_range(measured) is None
    with pytest.raises(UsageError, match="mirror"):
        measure(masked, "unknown", values="keep", unknown_counts="many")


def test_verdict_says_that_it_depends(child: Child) -> None:
    """Where the smallest counts fit and the largest do not, the first line says so; the exit code is that of fits."""
    script = str(child.script(masked, "unknown"))
    command = [sys.executable, "-m", "oomproof", "run", "-q", "--gpu", "t4", "--memory", "300MiB", "--", PYTHON, script]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=child.folder, env={**os.environ, "COLUMNS": "100"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("FITS, DEPENDING ON VALUES")
    assert "once more with the largest" in done.stderr
    shown = subprocess.run(
        [*command[:4], "--json", *command[4:]], capture_output=True, text=True, cwd=child.folder, env=os.environ
    )
    data = json.loads(shown.stdout)
    assert data["verdict"] == "fits"
    assert data["demand_if_many"]["device_bytes"] > 300 << 20


def test_demand_range_and_all_three_runs(child: Child, measure: Measure) -> None:
    """When not even the smallest counts fit, the demand's run and the range's are further ones: three in all."""
    measured = measure(masked, "unknown", memory="240MiB")
    assert runs(child) == 3
    assert measured.verdict == "does-not-fit"
    span = values_range(measured)
    assert span is not None
    assert span.low_bytes == measured.demand.device_bytes < span.high_bytes


def contradicting():
    import torch

    x = torch.randn(1000, 64, device="cuda")
    mask = x[:, 0] > 0
    kept, others = x[mask], x[~mask]
    if kept.size(0) + others.size(0) > 1000:
        raise ValueError("more rows than there are")


def test_a_script_that_fails_with_the_largest_counts(measure: Measure) -> None:
    """A mask and its opposite cannot both keep all: the verdict stands, and a note says that no high end is known."""
    measured = measure(contradicting)
    assert measured.verdict == "fits"
    assert values_range(measured) is None
    assert measured.demand_if_many is None
    (note,) = [n for n in measured.notes if "largest counts" in n]
    assert "more rows than there are" in note
    assert "contradicting.py:6 (aten::index (float32), 0 to 1,000)" in note


def unbounded():
    import torch

    n = torch.randn(1000, device="cuda").long()
    torch.bincount(n)
    torch.repeat_interleave(n)


def test_sizes_that_shapes_do_not_bound_are_told(measure: Measure) -> None:
    """Numbers to count and repeats may be of any size: that is a note, and no further run pretends to know."""
    measured = measure(unbounded)
    (note,) = [n for n in measured.notes if "without a largest size" in n]
    assert "unbounded.py:5 (aten::bincount (int64))" in note
    assert "unbounded.py:6 (aten::repeat_interleave (int64))" in note
    assert values_range(measured) is None


def same_either_way():
    import torch

    x = torch.randn(1 << 20, device="cuda")
    torch.zeros(64 << 20, device="cuda")
    (x[:1000] > 0).nonzero()


def test_counts_that_do_not_matter_are_told_so(measure: Measure) -> None:
    """Where the peak is elsewhere, the further run shows that it stays, and a note says it."""
    measured = measure(same_either_way)
    assert values_range(measured) is None
    assert measured.demand_if_many == measured.demand
    assert any("do not change the peak" in n for n in measured.notes)


def mixture(routing):
    """Train a small Mixtral whose experts are called one by one; ``routing`` None leaves the choices to its router."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = {
        "vocab_size": 500, "hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    }  # fmt: skip
    if routing is not None:
        topk = torch.topk

        def choose(values, k, *args, **kwargs):
            chosen = topk(values, k, *args, **kwargs)
            rows = chosen.indices.size(0)
            if routing == "random":
                places = torch.rand(rows, 8).argsort(1)[:, :2]
            else:  # all to the same two experts
                places = torch.tensor([[0, 1]]).repeat(rows, 1)
            chosen.indices.data.copy_(places.cuda())
            return chosen.values, chosen.indices

        torch.topk = choose
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**settings)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        ids = torch.randint(0, 500, (4, 1024)).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("transformers")
def test_mixture_of_experts(measure: Measure) -> None:
    """Even routing is near what a random one takes, and the uneven end near what every token to two experts takes."""
    measured = measure(mixture, None)
    assert measured.demand_if_many is not None
    even, uneven = measured.demand.allocated_bytes, measured.demand_if_many.allocated_bytes
    chance = measure(mixture, "random").demand.allocated_bytes
    two = measure(mixture, "two").demand.allocated_bytes
    assert abs(even - chance) < 0.02 * chance
    assert max(even, uneven) >= 0.98 * max(chance, two)
    assert any(r.affects_memory and r.most is not None for r in measured.value_reads)


def experts(routing):
    """Train experts that get the tokens whose largest gate score is theirs; known routes are spread evenly."""
    import torch

    experts = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4)).cuda()
    gate = torch.nn.Linear(256, 4).cuda()
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    even = (torch.arange(8192) % 4).cuda()
    for _ in range(3):
        x = torch.randn(8192, 256, device="cuda")
        route = gate(x).argmax(-1) if routing == "unknown" else even
        torch.bincount(route, minlength=4)
        out = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            rows = (route == number).nonzero()[:, 0]
            out[rows] = expert(x[rows]).exp()
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_tokens_of_experts_are_bounded_and_told(measure: Measure) -> None:
    """Even routes lie between the ends; each end says how it counts, and that it counts each mask for itself."""
    even = measure(experts, "even")
    assert even.value_reads == ()
    measured = measure(experts, "unknown")
    assert measured.demand_if_many is not None
    assert measured.demand.allocated_bytes < even.demand.allocated_bytes < measured.demand_if_many.allocated_bytes
    span = values_range(measured)
    assert span is not None
    assert "at none of them in the former and at several in the latter" in span.reason
    assert headline(measured).detail.endswith(
        "by counts that nobody knows, with 3 sizes that only a kernel computes taken as the least they can be"
    )  # the numbers of bincount
    for way, other in (("few", "many"), ("many", "few")):
        one = measure(experts, "unknown", unknown_counts=way)
        end = {"few": "least", "many": "most"}[way]
        assert {r.taken for r in one.value_reads if r.most is not None} == {end}
        assert f"taken as the {end} they can be" in headline(one).detail
        (note,) = [n for n in one.notes if f"--unknown-counts {other}" in n]
        assert f"as the {end} it can be" in note
        assert f"one may be counted at {'none' if way == 'few' else 'several'} of them" in note


def detection():
    """Train Faster R-CNN on two images, and return how many proposals its box head was given."""
    import torch
    import torchvision

    torch.manual_seed(0)
    make = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    model = make(weights=None, weights_backbone=None, num_classes=5).cuda().train()
    seen = []
    model.roi_heads.box_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].size(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        images = [torch.rand(3, 320, 400).cuda() for _ in range(2)]
        boxes = torch.tensor([[10.0, 10, 100, 120], [50, 60, 300, 310]]).cuda()
        targets = [{"boxes": boxes, "labels": torch.tensor([1, 2]).cuda()} for _ in images]
        sum(model(images, targets).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.skipif(not has_module("torchvision"), reason="torchvision is not installed beside the tested torch")
def test_detection(child: Child, measure: Measure) -> None:
    """Faster R-CNN runs with few and with many boxes kept, and its sampler's 512 an image hold for many."""
    few = child(detection, observe=True, steps=None)
    many = child(detection, observe=True, steps=None, unknown_counts="many")
    assert all(a <= b <= 2 * 512 for a, b in zip(few, many, strict=True))
    assert many[0] > 2 * 100
    measured = measure(detection)
    assert measured.verdict == "fits"
    assert any("boxes that a detector keeps" in n and "--unknown-counts many" in n for n in measured.notes)
    assert measured.demand_if_many is not None
    assert measured.demand_if_many.allocated_bytes >= measured.demand.allocated_bytes


def saving():
    import io

    import torch

    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20))).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        torch.save(net.state_dict(), io.BytesIO())
        torch.save(optimizer.state_dict(), io.BytesIO())


def test_saving_a_checkpoint_is_one_harmless_line(measure: Measure) -> None:
    """Saving copies every parameter and state to the host: that is told in one line, and none of it affects memory."""
    (read,) = measure(saving, steps=None).value_reads
    assert read.operation == "saving a checkpoint"
    assert read.affects_memory is False
    assert read.count > 100
    assert read.location.startswith("saving.py:")
