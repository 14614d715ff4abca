"""Plans for the tests of what shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from measurement_samples import fitting

from oomproof.gpus import get_gpu
from oomproof.measure.measurement import Allocator, Demand, Measurement, Range
from oomproof.plan.candidate import Candidate, Trial
from oomproof.plan.cost import Ratio
from oomproof.plan.document import Plan
from oomproof.plan.facts import BlockGroup, Facts, Loader, Model, Optimizer
from oomproof.plan.planning import Planned
from oomproof.plan.search import Found
from oomproof.plan.technique import Change
from oomproof.units import GIB, MIB

T4 = get_gpu("t4")
GENERATOR = Model(
    kind="Generator",
    module="gan",
    parameters=3_000_000,
    trainable=3_000_000,
    parameter_bytes=12_000_000,
    dtypes=("float32",),
    blocks=(BlockGroup("decoder.blocks", "Block", ("decoder.blocks.0", "decoder.blocks.1"), 1 << 20),),
)
DISCRIMINATOR = GENERATOR._replace(
    kind="Discriminator",
    parameters=1_000_000,
    trainable=1_000_000,
    blocks=(BlockGroup("0.layers", "Block", ("0.layers.0", "0.layers.1"), 1 << 20),),
)


def adam(parameters: int, kind: str = "Adam") -> Optimizer:
    """Return an optimizer over so many parameters."""
    return Optimizer(kind, f"torch.optim.{kind.lower()}", {"lr": 1e-3, "foreach": None, "fused": None}, parameters)


ONE = Facts(
    models=(GENERATOR,), optimizers=(adam(3_000_000),), loaders=(Loader(16, 1000, True, True),), torch="2.14.1+cu130"
)
GAN = ONE._replace(models=(GENERATOR, DISCRIMINATOR), optimizers=(adam(3_000_000), adam(1_000_000, "AdamW")))

CUT = Change("micro-batch", {"parts": 4})
CHECKPOINT = Change("checkpoint-blocks")
CHUNKED = Change("chunked-cross-entropy", {"use": "torch"})
LOOP = Change("optimizer-implementation", {"use": "for-loop"})


def measurement(size_bytes: int, **changes: Any) -> Measurement:
    """Return a measurement whose peak is ``size_bytes``, with 100 MiB of context in it, on a T4."""
    base = fitting()
    held = size_bytes - 100 * MIB
    return replace(
        base,
        verdict="fits" if size_bytes <= T4.memory_bytes else "does-not-fit",
        peak=replace(base.peak, allocated_bytes=held, reserved_bytes=held, device_bytes=size_bytes),
        demand=Demand(allocated_bytes=held, reserved_bytes=held, device_bytes=size_bytes),
        ranges=(),
        **changes,
    )


def trial(changes: tuple[Change, ...], size_bytes: int, time: float | None = 1.0, **fields: Any) -> Trial:
    """Return what running a set of changes showed."""
    measured = measurement(size_bytes)
    fields.setdefault("verdict", measured.verdict)
    fields.setdefault("measurement", measured)
    ratio = None if time is None else Ratio(low=time - 0.02, expected=time, high=time + 0.05)
    return Trial(candidate=Candidate(changes=changes), time=ratio, **fields)


def with_retries(size_bytes: int) -> Measurement:
    """Return a measurement that would take more than a T4 has, and fits as the allocator gives back its cache."""
    measured = measurement(size_bytes, allocator=Allocator(retries=2))
    peak = replace(measured.peak, device_bytes=T4.memory_bytes - MIB)
    return replace(measured, verdict="fits", peak=peak)


def only_just() -> Measurement:
    """Return a measurement that fits, while the range of the context reaches past the GPU."""
    measured = measurement(T4.memory_bytes - 50 * MIB)
    context = Range(what="context", low_bytes=90 * MIB, high_bytes=400 * MIB, reason="the driver decides")
    return replace(measured, ranges=(context,))


def planned(
    *trials: Trial, baseline: Trial | None = None, winner: Trial | None = None, facts: Facts = ONE, **found: Any
) -> Planned:
    """Return what planning came to; the first trial wins unless ``winner`` says otherwise or nothing fits."""
    first = baseline or trial((), 20 * GIB)
    if winner is None:
        winner = first if first.fits else next((t for t in trials if t.fits), None)
    made = None
    if winner is not None and winner is not first:
        made = Plan.of(winner, facts, T4, "t4", 1)
    return Planned(
        command=("python", "train.py", "--name", "a  b"),
        gpu=T4,
        gpus=1,
        facts=facts,
        found=Found(
            baseline=first, trials=trials, winner=winner, out_of_budget=found.pop("out_of_budget", False), **found
        ),
        plan=made,
        smallest=None,
        smallest_with_plan=None,
    )
