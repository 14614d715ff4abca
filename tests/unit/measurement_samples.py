"""Measurements for the tests of whatever reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

from oomproof.measure.measurement import (
    GPU,
    OOM,
    Allocator,
    Breakdown,
    Call,
    Demand,
    Git,
    Measurement,
    Outside,
    Peak,
    Range,
    Rank,
    Remedy,
    Step,
    Torch,
    ValueRead,
    World,
)
from oomproof.units import GIB, MIB

T4 = GPU(name="Tesla T4", memory_bytes=15_637_086_208, compute_capability="7.5", sm_count=40)
OOM_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56 GiB of which 1.41 "
    "GiB is free. Including non-PyTorch memory, this process has 13.15 GiB memory in use. Of the allocated "
    "memory 12.31 GiB is allocated by PyTorch, and 630.00 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation."
)


def peak(allocated_bytes: int, reserved_bytes: int, outside_bytes: int = 100 * MIB, **where: Any) -> Peak:
    """Return a Peak whose device memory is what is reserved plus ``outside_bytes``."""
    return Peak(
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        device_bytes=reserved_bytes + outside_bytes,
        **where,
    )


def step(number: int, allocated_bytes: int) -> Step:
    """Return a Step that reserves 1 GiB more than it allocates."""
    return Step(step=number, allocated_bytes=allocated_bytes, reserved_bytes=allocated_bytes + GIB, seconds=0.25)


def fitting(**changes: Any) -> Measurement:
    """Return a small training run that fits a T4, with ``changes`` to its fields."""
    base = Measurement(
        created="2026-01-02T03:04:05Z",
        command=("python", "train.py", "--batch", "16"),
        cwd_git=Git(revision="0123abc", dirty=False),
        gpu=T4,
        torch=Torch(version="2.11.0+cu126", cuda="12.6"),
        allocator=Allocator(),
        world=World(),
        steps=3,
        verdict="fits",
        ended="steps-reached",
        exit_code=None,
        peak=peak(
            10 * GIB + 2 * MIB,
            11 * GIB,
            step=2,
            phase="backward",
            module="h.11.mlp (GPT2MLP)",
            stack=("model.py:210 forward", "train.py:31 main"),
        ),
        demand=Demand(allocated_bytes=10 * GIB + 2 * MIB, reserved_bytes=11 * GIB, device_bytes=11 * GIB + 100 * MIB),
        breakdown=Breakdown(
            parameter_bytes=2 * GIB,
            gradient_bytes=GIB,
            optimizer_state_bytes=4 * GIB,
            activation_bytes=3 * GIB,
            input_bytes=2 * MIB,
        ),
        outside=Outside(cached_bytes=GIB - 2 * MIB, context_bytes=100 * MIB),
        ranges=(Range(what="context", low_bytes=90 * MIB, high_bytes=140 * MIB, reason="the driver decides"),),
        per_step=(step(1, 6 * GIB), step(2, 10 * GIB + 2 * MIB), step(3, 10 * GIB + 2 * MIB)),
    )
    return dataclasses.replace(base, **changes)


def not_fitting(**changes: Any) -> Measurement:
    """Return a training run that dies on a T4 in its first step."""
    top = peak(20 * GIB, 22 * GIB, step=1, phase="forward", module="h.11.attn (GPT2Attention)")
    base = fitting(
        verdict="does-not-fit",
        ended="oom",
        exit_code=1,
        allocator=Allocator(config="expandable_segments:True", retries=1, ooms=1),
        peak=top,
        demand=Demand(allocated_bytes=20 * GIB, reserved_bytes=22 * GIB, device_bytes=top.device_bytes),
        breakdown=Breakdown(parameter_bytes=4 * GIB, activation_bytes=16 * GIB),
        outside=Outside(cached_bytes=2 * GIB, context_bytes=100 * MIB),
        per_step=(step(1, 20 * GIB),),
        oom=OOM(
            message=OOM_MESSAGE,
            step=1,
            phase="forward",
            module="h.7.attn (GPT2Attention)",
            requested_bytes=2 * GIB,
            caught=False,
        ),
    )
    return dataclasses.replace(base, **changes)


def untouched(**changes: Any) -> Measurement:
    """Return a run whose script never used the GPU."""
    base = fitting(
        verdict="unknown",
        ended="finished",
        exit_code=0,
        steps=0,
        peak=peak(0, 0, 0),
        demand=Demand(allocated_bytes=0, reserved_bytes=0, device_bytes=0),
        breakdown=Breakdown(),
        outside=Outside(),
        ranges=(),
        per_step=(),
    )
    return dataclasses.replace(base, **changes)


def full() -> Measurement:
    """Return a Measurement with something in every field, for laws that hold for all of them."""
    return not_fitting(
        world=World(size=2, rank=1, local_world_size=2),
        calls=(Call(module="net (Net)", count=12, allocated_bytes=GIB, reserved_bytes=2 * GIB),),
        value_reads=(
            ValueRead(location="train.py:31", operation="aten::_local_scalar_dense (float32)", count=3),
            ValueRead(location="naïve.py:1", operation="aten::nonzero", count=1, affects_memory=True, taken="least"),
        ),
        ranks=(
            Rank(rank=0, device=0, peak=peak(GIB, 2 * GIB), verdict="fits"),
            Rank(rank=1, device=1, peak=peak(20 * GIB, 22 * GIB), verdict="does-not-fit"),
        ),
        remedy=Remedy(reason="give the machine as many GPUs", options=("--gpus", "8")),
        notes=("the loss was not known",),
    )
