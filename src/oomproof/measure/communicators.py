"""What NCCL's communicators take of the device: figures from public reports, as a range.

NCCL allocates past PyTorch's allocator, by how the GPUs of a machine are connected; there is no public formula.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Two GPUs, and more: 4 x A100 with NVLink, a 4 MB all-reduce in each group; github.com/NVIDIA/nccl/issues/964.
#: ``lowest_bytes`` in phantom/driver/nccl.c takes the same off the device.
PAIR_BYTES = 544_000_000
GROUP_BYTES = 688_000_000
#: The most that was reported for one communicator after an all-reduce; github.com/NVIDIA/nccl/issues/864.
MOST_BYTES = 1_600_000_000
#: What an all-to-all over 8 x H100 added (1.06 to 4.34 GB); github.com/NVIDIA/nccl/issues/1685. There are no more
#: connections than that within a machine, and "beyond 2 nodes it should no longer increase" (issues/864).
ALL_TO_ALL_BYTES = 3_280_000_000


def communication_bytes(communicators: Sequence[int], all_to_all: int) -> tuple[int, int]:
    """Return the least and the most that communicators take, given how many ranks each has.

    ``all_to_all`` is in how many of them every rank sent to every other.
    """
    low = sum(PAIR_BYTES if ranks == 2 else GROUP_BYTES for ranks in communicators)
    return low, MOST_BYTES * len(communicators) + ALL_TO_ALL_BYTES * all_to_all


def reason(communicators: Sequence[int], all_to_all: int) -> str:
    """Return where the range comes from, for the report."""
    text = (
        f"{len(communicators)} NCCL communicator(s); public reports state 544 MB for two GPUs, 688 MB for more, and up "
        "to 1.6 GB (NVIDIA/nccl issues 964 and 864)"
    )
    return text + ("; an all-to-all added 3.28 GB on 8 GPUs (issue 1685)" if all_to_all else "")
