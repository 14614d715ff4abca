"""The size of the CUDA context, for cards on which nobody has published it.

A context holds the driver's own structures, local memory for every thread that can be resident, and the
kernels loaded so far. Public figures of bare contexts lie within 15 % of 24 MiB + 2 KiB a resident thread:

    GPU             resident threads   formula   published
    RTX 5060 Ti               55,296   132 MiB   128 MiB
    RTX 3090                 125,952   270 MiB   256 MiB
    RTX 4090                 196,608   408 MiB   386 and 392 MiB
    RTX 6000 Ada             218,112   450 MiB   426 MiB
    A100                     221,184   456 MiB   414 and 418 MiB
    H100                     270,336   552 MiB   595 MiB, with cuBLAS started
    B200                     303,104   616 MiB   612 MiB

Training loads kernels on top, some 70 MiB: 478–484 MiB on a 4090-class card and 660–668 MiB on an
RTX PRO 6000 (torch 2.11), where the sum gives 478 and 658.
"""

from __future__ import annotations

from oomproof.units import KIB, MIB

SOURCE = "derived: 24 MiB + 2 KiB a resident thread + 70 MiB of kernels, after public figures of other cards"


def estimate_context_bytes(sm_count: int, max_threads_per_sm: int) -> tuple[int, int, int]:
    """Return (low, typical, high) bytes of the CUDA context that a training process has on such a GPU."""
    threads = sm_count * max_threads_per_sm
    low = 24 * MIB + threads * 18 * KIB // 10
    typical = 94 * MIB + threads * 2 * KIB
    return low, typical, typical * 5 // 4 + 64 * MIB
