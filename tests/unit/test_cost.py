"""The cost of a step beside another: laws of the roofline, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oomproof.gpus import all_gpus, get_gpu
from oomproof.plan.cost import Collective, Copy, Row, Work, relative_time, step_seconds
from oomproof.plan.spans import SPANS

A100 = get_gpu("a100-80gb")
GIB = 1 << 30


def row(**given: Any) -> Row:
    """Return a row: a large bf16 product unless told otherwise."""
    usual = {"operator": "aten::mm", "phase": "forward", "device": "cuda", "dtype": "bf16", "calls": 1, "kernels": 1}
    return Row(**{**usual, "flops": 10**13, "bytes": GIB, **given})


def copy(**given: Any) -> Copy:
    """Return a copy of 1 GiB to the GPU."""
    return Copy(**{"direction": "h2d", "phase": "forward", "pinned": True, "blocking": False, "count": 1, "bytes": GIB,
                   **given})  # fmt: skip


def gather(**given: Any) -> Collective:
    """Return an all-gather of 1 GiB over 8 GPUs of one machine."""
    return Collective(**{"kind": "all_gather", "phase": "forward", "bytes": GIB, "ranks": 8, "nodes": 1, "calls": 1,
                         **given})  # fmt: skip


STEP = Work(rows=(row(), row(operator="aten::add", flops=0, phase="backward"), row(operator="aten::attention")))


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.key)
def test_a_step_beside_itself_takes_as_long(gpu: Any) -> None:
    """The expected ratio of equal work is 1, on each GPU of the catalogue, and the range holds it."""
    ratio = relative_time(STEP, STEP, gpu)
    assert ratio.expected == 1
    assert ratio.low < 1 < ratio.high
    assert ratio.high < 1.05


@pytest.mark.parametrize(
    "more",
    [
        {"rows": (*STEP.rows, row(phase="recompute"))},
        {"rows": (*STEP.rows, row(operator="aten::add", flops=0))},
        {"rows": (*STEP.rows, row(device="cpu", flops=0, phase="optimizer", bytes=64 * GIB))},
        {"copies": (copy(blocking=True),)},
        {"copies": (copy(bytes=64 * GIB),)},
        {"copies": (copy(pinned=False),)},
        {"collectives": (gather(bytes=64 * GIB),)},
    ],
)
def test_more_work_takes_no_less_time(more: dict[str, Any]) -> None:
    """Whatever is added to a step, neither end of its ratio falls below that of equal work."""
    same, ratio = relative_time(STEP, STEP, A100), relative_time(replace(STEP, **more), STEP, A100)
    assert ratio.low >= same.low
    assert ratio.expected > 1
    assert ratio.high > same.high
    assert ratio.low <= ratio.expected <= ratio.high


def test_a_forward_pass_again_is_a_third_more() -> None:
    """Full checkpointing of what products bound takes 4 / 3: a backward pass is two forward passes."""
    forward, backward = row(bytes=0), row(bytes=0, phase="backward", calls=2)
    base = Work(rows=(forward, backward))
    ratio = relative_time(replace(base, rows=(*base.rows, replace(forward, phase="recompute"))), base, A100)
    assert ratio.expected == pytest.approx(4 / 3, rel=0.001)


def test_a_product_takes_the_longer_of_computing_and_moving() -> None:
    """A product with few bytes is as fast as its FLOPs, one with many as its bytes."""
    computing, moving = Work(rows=(row(bytes=1, kernels=0, calls=1),)), Work(rows=(row(flops=1, kernels=0),))
    _, usual, _ = step_seconds(computing, A100)
    assert usual.products == pytest.approx(1e13 / (312e12 * SPANS["products"].usual))
    assert usual.memory == 0
    _, usual, _ = step_seconds(moving, A100)
    assert usual.memory == pytest.approx(GIB / (A100.memory_bandwidth_bytes_per_s * SPANS["memory"].usual))
    assert usual.products == 0


def test_many_small_kernels_wait_for_the_host() -> None:
    """A step of operators that take no time lasts as long as the host needs to call them."""
    many = Work(rows=(row(flops=0, bytes=1, calls=10_000, kernels=10_000),))
    _, usual, _ = step_seconds(many, A100)
    assert usual.total == pytest.approx(10_000 * SPANS["launch"].usual)


def test_copies_that_block_are_not_beside_anything() -> None:
    """The same bytes cost more where the host waits for them, and most in pageable memory."""
    times = [
        step_seconds(replace(STEP, copies=(item,)), A100)[1].total
        for item in (copy(), copy(blocking=True), copy(blocking=True, pinned=False))
    ]
    assert times == sorted(set(times))


def test_copies_both_ways_share_no_link() -> None:
    """PCIe carries both directions at once."""
    one, both = (copy(bytes=99 * GIB),), (copy(bytes=99 * GIB), copy(bytes=99 * GIB, direction="d2h"))
    assert step_seconds(Work(copies=one), A100)[1].total == step_seconds(Work(copies=both), A100)[1].total


def test_collectives_go_round_a_ring() -> None:
    """An all-reduce sends 2 (n - 1) / n of its bytes, an all-gather half of that, a message all."""

    def seconds(kind: str) -> float:
        work = Work(collectives=(gather(kind=kind, bytes=1000 * GIB),))
        return step_seconds(work, A100)[1].collectives - SPANS["latency"].usual

    rate = A100.link_bytes_per_s * SPANS["link"].usual if A100.link_bytes_per_s else 0
    assert seconds("all_gather") == pytest.approx(1000 * GIB * 7 / 8 / rate)
    assert seconds("all_reduce") == pytest.approx(2 * seconds("all_gather"))
    assert seconds("reduce_scatter") == pytest.approx(seconds("all_gather"))
    assert seconds("send") == pytest.approx(1000 * GIB / rate)


def test_between_machines_the_network_decides() -> None:
    """A group over several machines is slower than one within a machine, with one GPU on each the slowest."""
    times = [
        step_seconds(Work(collectives=(gather(ranks=16, nodes=nodes),)), A100)[1].collectives for nodes in (1, 2, 16)
    ]
    assert times[0] < times[1] < times[2]


def test_without_nvlink_collectives_are_slower() -> None:
    """GPUs without links between them share data over PCIe."""
    work = Work(collectives=(gather(),))
    assert step_seconds(work, get_gpu("a10g"))[1].collectives > step_seconds(work, A100)[1].collectives


def test_a_missing_figure_is_said() -> None:
    """FLOPs of a dtype for which the catalogue has no peak are named as unknown, and not counted as free of a word."""
    work = Work(rows=(row(dtype="fp8"),))
    assert any("fp8" in what for what in relative_time(work, work, A100).unknown)
    assert not relative_time(work, work, get_gpu("h100-80gb")).unknown
    on_host = Work(rows=(row(), row(device="cpu")))
    assert any("on the CPU" in what for what in relative_time(on_host, on_host, A100).unknown)


def test_without_units_for_a_dtype_pytorch_computes_in_fp32() -> None:
    """bf16 on a T4 is as fast as fp32, and so is TF32."""
    t4 = get_gpu("t4")
    times = {
        dtype: step_seconds(Work(rows=(row(dtype=dtype, bytes=0),)), t4)[1].products
        for dtype in ("fp32", "bf16", "tf32")
    }
    assert len(set(times.values())) == 1


def test_what_was_not_counted_is_in_the_answer() -> None:
    """Both steps' uncounted work is named, once."""
    one, two = replace(STEP, uncounted=("a", "b")), replace(STEP, uncounted=("b", "c"))
    assert relative_time(one, two, A100).unknown == ("a", "b", "c")


def test_retries_cost_and_are_said_to_be_assumed() -> None:
    """Each allocation that tried again makes the step longer."""
    ratios = [relative_time(STEP, STEP, A100, retries=n) for n in (0, 1, 5)]
    assert ratios[0].expected < ratios[1].expected < ratios[2].expected
    assert not ratios[0].unknown
    assert any("assumed" in what for what in ratios[1].unknown)


def test_another_gpu_is_compared_with_the_baselines() -> None:
    """An H100 is faster than an A100 with the same work, with a wider range than one GPU beside itself."""
    h100 = get_gpu("h100-80gb")
    ratio = relative_time(STEP, STEP, h100, baseline_gpu=A100)
    assert ratio.expected < 1
    assert ratio.high / ratio.low > 1.5
    assert relative_time(STEP, STEP, A100, baseline_gpu=A100) == relative_time(STEP, STEP, A100)


def test_a_baseline_without_work_is_refused() -> None:
    """Nothing can be compared with nothing."""
    with pytest.raises(ValueError, match="measure it again"):
        relative_time(STEP, Work(), A100)


def test_the_best_of_everything_is_the_fastest() -> None:
    """The three times are in order, in each part."""
    work = replace(STEP, copies=(copy(), copy(blocking=True)), collectives=(gather(),))
    best, usual, worst = step_seconds(work, A100)
    for part in ("total", "products", "memory", "launches", "copies", "collectives"):
        assert getattr(best, part) < getattr(usual, part) < getattr(worst, part)


def test_every_figure_has_its_source() -> None:
    """What the model takes from elsewhere is in order and says where it is from."""
    for span in SPANS.values():
        assert span.low < span.usual <= span.high
        assert len(span.source) > 20


def test_work_comes_back_from_json() -> None:
    """What is written is read again."""
    work = replace(STEP, copies=(copy(),), collectives=(gather(),), uncounted=("x",), estimated=("y",))
    assert Work.from_json(work.to_json()) == work


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2"),
        ({"rows": [{"operator": "aten::mm"}]}, "belong"),
        ({"copies": [{**copy().__class__.__dict__, "x": 1}]}, "belong"),
    ],
)
def test_a_record_of_another_version_is_refused(change: dict[str, Any], said: str) -> None:
    """A record that is not of this version, or lacks something, is told so."""
    with pytest.raises(ValueError, match=said):
        Work.from_json({**STEP.to_json(), **change})


def test_a_wrong_value_is_refused() -> None:
    """A negative or mistyped figure is no figure."""
    data = STEP.to_json()
    data["rows"][0]["flops"] = -1
    with pytest.raises(ValueError, match="flops"):
        Work.from_json(data)
    data["rows"][0]["flops"] = "many"
    with pytest.raises(ValueError, match="flops"):
        Work.from_json(data)


def test_sums_are_of_the_gpu_by_phase() -> None:
    """FLOPs, bytes and kernels are those of all calls on the GPU, of the phases named or all."""
    work = Work(rows=(row(calls=3, kernels=3), row(phase="backward"), row(device="cpu")))
    assert work.flops() == 4 * 10**13
    assert work.flops("forward") == 3 * 10**13
    assert work.bytes("backward") == GIB
    assert work.kernels("forward", "backward") == 4


def test_the_page_is_rendered_from_its_data() -> None:
    """Nobody types a figure into docs/cost.md: rendering it again changes nothing."""
    script = Path(__file__).parents[2] / "benchmarks" / "cost" / "compare.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
