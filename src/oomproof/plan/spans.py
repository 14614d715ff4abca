"""What GPUs and hosts reach of their figures: everything that the cost model takes from elsewhere, with its source.

Where no measurement is public, the source says "assumed".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The least, the usual and the most of something, and where these are from."""

    low: float
    usual: float
    high: float
    source: str


SPANS = {
    "products": Span(
        low=0.40,
        usual=0.65,
        high=0.85,
        source="of the dense peak, matrix products and convolutions. Whole steps, with all that is no product, "
        "reach 0.54 (arXiv:2205.05198) to 0.61 (torchtitan, pull request 712) on A100 and 0.33 to 0.39 on "
        "H100 (torchtitan, benchmarks of December 2024); products alone reach more, by how much is assumed",
    ),
    "attention": Span(
        low=0.25,
        usual=0.45,
        high=0.73,
        source="of the dense peak, fused attention: FlashAttention-2 0.50 to 0.73 on A100 (arXiv:2307.08691) and "
        "0.35 on H100 (arXiv:2407.08608); that other kernels reach less is assumed",
    ),
    "memory": Span(
        low=0.65,
        usual=0.8,
        high=0.92,
        source="of the memory bandwidth, operators that it bounds. Assumed: long streams reach 0.9, kernels that "
        "reduce or read with strides less",
    ),
    "quantised": Span(
        low=0.2,
        usual=0.4,
        high=0.8,
        source="of the memory bandwidth, updates of 8-bit optimizer states. Assumed from the rates that "
        "docs/cost.md compares with: at the full bandwidth they would be faster than the update that they "
        "replace, and some are slower",
    ),
    "gap": Span(
        low=0.5e-6,
        usual=1e-6,
        high=2.5e-6,
        source="seconds from the end of a kernel to the begin of the next in the queue. Assumed",
    ),
    "launch": Span(
        low=3e-6,
        usual=7e-6,
        high=20e-6,
        source="seconds of the host for an operator, from Python to its kernel's launch; while the host needs "
        "longer than the GPU, the step is launch-bound. Write-ups of PyTorch's dispatch say 5 to 25 µs; "
        "less in compiled code is assumed",
    ),
    "pinned": Span(
        low=0.7,
        usual=0.8,
        high=0.9,
        source="of the host link, copies of pinned memory. Assumed: what NVIDIA's bandwidthTest usually shows",
    ),
    "pageable": Span(
        low=0.1,
        usual=0.25,
        high=0.5,
        source="of the host link, copies of pageable memory, which the driver stages. Assumed, likewise",
    ),
    "link": Span(
        low=0.5,
        usual=0.7,
        high=0.82,
        source="of NVLink in one direction: about 370 of 450 GB/s after the protocol's overhead (NCCL's authors in"
        " nccl-tests issue 212), 200 to 208 of 300 on A100 (issues 149 and 178); less for small messages is"
        " assumed",
    ),
    "no_link": Span(
        low=0.2,
        usual=0.4,
        high=0.75,
        source="of the host link, collectives of GPUs without NVLink, some through host memory. Assumed",
    ),
    "latency": Span(
        low=8e-6,
        usual=20e-6,
        high=60e-6,
        source="seconds of a collective, or of a copy that blocks, of hardly any bytes. Assumed",
    ),
    "network": Span(
        low=10e9,
        usual=25e9,
        high=48e9,
        source="bytes/s of a GPU to other machines, which is no figure of a GPU. Assumed: 100 and 200 Gbit/s; the "
        "400 of torchtitan's H100",
    ),
    "host": Span(
        low=12e9,
        usual=35e9,
        high=150e9,
        source="bytes/s of operators on the CPU, which is no figure of a GPU. Assumed: two channels of DDR4-3200 "
        "have 51 GB/s, a server's socket 200 and more",
    ),
    "overlap": Span(
        low=0.0,
        usual=0.8,
        high=1.0,
        source="how much of collectives, copies that do not block and the CPU's operators runs beside kernels: "
        "none to all; the usual is assumed",
    ),
    "retry": Span(
        low=1e-3,
        usual=10e-3,
        high=0.1,
        source="seconds of an allocation that frees the cache and tries again: it waits for the GPU, and what was "
        "freed is allocated anew. Assumed",
    ),
}

NOISE = 0.02
"""Two public measurements of the same step differ by about so much (assumed): no ratio is more certain than that."""

OTHER_GPU = 0.6, 1.65
"""How the fractions of their peaks that two GPUs reach may differ: whole steps reach 0.58 on A100 and 0.33 to 0.39 on
H100 in torchtitan's reports of Llama 3 8B."""
