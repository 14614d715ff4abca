"""How long a step takes beside another: a roofline over what each executes, with the catalogue's figures.

A step's seconds depend on how much of the GPU's peak its kernels reach, which no count tells. The ratio of two steps
of the same script depends on it far less, since both reach about the same. So each ratio is worked out many times, at
the ends and in the middle of what is reached (``spans.SPANS``), each time with the same figures for both steps;
it comes as the least, the middle and the most of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from oomproof.gpus.spec import GPUSpec
from oomproof.plan.spans import NOISE, OTHER_GPU, SPANS
from oomproof.plan.work import Collective, Copy, Row, Work

__all__ = ["Collective", "Copy", "Ratio", "Row", "Seconds", "Work", "relative_time", "step_seconds"]


_ATTENTION = ("attention", "attn")
_QUANTISED = ("bitsandbytes::optimizer_update",)
_RING = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
    "broadcast": 1.0,
    "reduce": 1.0,
    "gather": 1.0,
    "scatter": 1.0,
}
"""How often a ring sends (n - 1) / n of the bytes (NCCL tests, PERFORMANCE.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """A step's time and what it is made of, each if it ran alone; their sum is more where they overlap."""

    total: float
    products: float
    """Operators that compute bounds."""
    memory: float
    """Operators that memory bounds, and the gaps between kernels."""
    launches: float
    """The host's calls; the step lasts at least so long."""
    copies: float
    collectives: float
    host: float
    """Operators on the CPU."""
    unknown: tuple[str, ...]
    """What is not in the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as long as the baseline's a step takes."""

    low: float
    expected: float
    high: float
    unknown: tuple[str, ...] = ()
    """What the range does not cover."""


def relative_time(
    work: Work,
    baseline: Work,
    gpu: GPUSpec,
    *,
    baseline_gpu: GPUSpec | None = None,
    retries: int = 0,
    baseline_retries: int = 0,
) -> Ratio:
    """Return how long a step with ``work`` takes beside one with ``baseline``, on ``gpu`` or each on its own.

    ``retries`` are the allocations of one step that freed the cache and tried again. Not a promise of seconds: the
    range holds what follows from the spans, ``unknown`` names what was not counted.
    """
    other = baseline_gpu if baseline_gpu is not None and baseline_gpu != gpu else None
    one, two = _Step(work, gpu, retries), _Step(baseline, other or gpu, baseline_retries)
    ratios = [_divide(one.seconds(figures).total, two.seconds(figures).total) for figures in _corners()]
    expected = _divide(one.seconds(_usual()).total, two.seconds(_usual()).total)
    low, high = min(*ratios, expected) * (1 - NOISE), max(*ratios, expected) * (1 + NOISE)
    unknown = list(dict.fromkeys((*work.uncounted, *baseline.uncounted, *one.unknown, *two.unknown)))
    if other is not None:
        low, high = low * OTHER_GPU[0], high * OTHER_GPU[1]
    if retries or baseline_retries:
        unknown.append("how long an allocation that tries again takes is assumed: no measurement is public")
    return Ratio(low=low, expected=expected, high=high, unknown=tuple(unknown))


def step_seconds(work: Work, gpu: GPUSpec, *, retries: int = 0) -> tuple[Seconds, Seconds, Seconds]:
    """Return a step's time at the best, the usual and the worst of everything: the ends are far apart."""
    step = _Step(work, gpu, retries)
    return step.seconds(_figures("high")), step.seconds(_usual()), step.seconds(_figures("low"))


# ---- the figures of one evaluation ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    products: float
    attention: float
    memory: float
    quantised: float
    gap: float
    launch: float
    pinned: float
    pageable: float
    link: float
    no_link: float
    latency: float
    network: float
    host: float
    overlap: float
    retry: float


_SECONDS = ("gap", "launch", "latency", "retry")
_GROUPS = (("products", "attention"), ("memory", "quantised"), ("gap", "launch"), ("host", "overlap"))
"""What is moved together, to the ends. All that leaves the GPU goes with the last."""
_LEAVES = ("pinned", "pageable", "link", "no_link", "latency", "network", "retry")


def _usual() -> _Figures:
    return _Figures(**{name: span.usual for name, span in SPANS.items()})


def _figures(end: str) -> _Figures:
    """Return the figures at one end: "high" is the fastest."""
    return _Figures(**{name: _end(name, end) for name in SPANS})


def _end(name: str, end: str) -> float:
    span = SPANS[name]
    return span.high if (end == "high") != (name in _SECONDS) else span.low


def _corners() -> Iterator[_Figures]:
    usual = _usual()
    groups = (*_GROUPS[:-1], (*_GROUPS[-1], *_LEAVES))
    for ends in itertools.product(("low", "high"), repeat=len(groups)):
        moved = {name: _end(name, end) for group, end in zip(groups, ends, strict=True) for name in group}
        yield replace(usual, **moved)


# ---- one step ------------------------------------------------------------------------------------------------------


class _Step:
    """A step on a GPU, summed once; each evaluation is a few multiplications."""

    def __init__(self, work: Work, gpu: GPUSpec, retries: int) -> None:
        self._work = work
        self._gpu = gpu
        self._retries = retries
        self.unknown: list[str] = []
        bandwidth = gpu.memory_bandwidth_bytes_per_s
        #: (kind, seconds at the peak, seconds at the bandwidth, calls)
        self._gpu_rows: list[tuple[str, float, float]] = []
        self._kernels = self._calls = 0
        self._host_bytes = 0
        for row in work.rows:
            if row.device != "cuda":
                self._host_bytes += row.bytes * row.calls
                if row.flops:
                    self._miss(f"FLOPs of {row.operator} on the CPU")
                continue
            peak = self._peak(row.dtype) if row.flops else None
            compute = row.flops / peak if peak else 0.0
            self._gpu_rows.append((_kind(row.operator), compute * row.calls, row.bytes / bandwidth * row.calls))
            self._kernels += row.kernels
            self._calls += row.calls

    def _miss(self, what: str) -> None:
        if what not in self.unknown:
            self.unknown.append(what)

    def _peak(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s; None, with the reason among the unknown, where there is no figure."""
        flops = self._gpu.flops
        if dtype in flops:
            return flops[dtype]
        if dtype in ("tf32", "bf16"):  # without units for them PyTorch computes in fp32
            return flops["fp32"]
        self._miss(f"FLOPs in {dtype}: the catalogue has no peak of {self._gpu.name} for it")
        return None

    def seconds(self, figures: _Figures) -> Seconds:
        products = memory = 0.0
        reached = {
            "products": figures.products,
            "attention": figures.attention,
            "quantised": figures.products,
        }
        for kind, compute, moved in self._gpu_rows:
            compute /= reached[kind]
            moved /= figures.quantised if kind == "quantised" else figures.memory
            if compute > moved:
                products += compute
            else:
                memory += moved
        memory += self._kernels * figures.gap
        launches = max(self._calls, self._kernels) * figures.launch
        waiting, beside = self._copies(figures)
        collectives = sum(self._collective(item, figures) for item in self._work.collectives)
        host = self._host_bytes / figures.host
        busy = max(products + memory, launches)
        others = (beside, collectives, host)
        total = figures.overlap * max(busy, *others) + (1 - figures.overlap) * (busy + sum(others))
        total += waiting + self._retries * figures.retry
        return Seconds(
            total=total,
            products=products,
            memory=memory,
            launches=launches,
            copies=waiting + beside,
            collectives=collectives,
            host=host,
            unknown=tuple(self.unknown),
        )

    def _copies(self, figures: _Figures) -> tuple[float, float]:
        """Return the seconds of copies that the host waits for, and of those beside kernels, both ways at once."""
        waiting = 0.0
        beside = {"h2d": 0.0, "d2h": 0.0}
        for copy in self._work.copies:
            rate = self._gpu.pcie_bytes_per_s * (figures.pinned if copy.pinned else figures.pageable)
            seconds = copy.bytes / rate
            if copy.pinned and not copy.blocking:
                beside[copy.direction] += seconds
            else:
                waiting += seconds + copy.count * figures.latency
        return waiting, max(beside.values())

    def _collective(self, item: Collective, figures: _Figures) -> float:
        gpu, ranks = self._gpu, item.ranks
        rate = gpu.link_bytes_per_s * figures.link if gpu.link_bytes_per_s else gpu.pcie_bytes_per_s * figures.no_link
        if item.nodes > 1:  # a ring over several machines is as fast as the network between them
            per_node = max(1, ranks // item.nodes)
            rate = min(rate, figures.network * per_node)
        rounds = _RING.get(item.kind)
        moved = item.bytes * (rounds * (ranks - 1) / ranks if rounds else 1.0)
        return item.calls * (moved / rate + figures.latency)


def _kind(operator: str) -> str:
    if operator.startswith(_QUANTISED):
        return "quantised"
    return "attention" if any(word in operator for word in _ATTENTION) else "products"


def _divide(seconds: float, baseline: float) -> float:
    if baseline <= 0:
        raise ValueError("the baseline's record has no work in it; measure it again")
    return seconds / baseline
