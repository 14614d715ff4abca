"""What is known of one GPU: the figures that decide what PyTorch allocates and how long a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
"""The names under which ``GPUSpec.flops`` may hold a peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUSpec:
    """One GPU, or one MIG slice of a GPU.

    Sizes are bytes, rates are per second and per direction. ``None`` means that there is no such figure;
    ``sources`` says why. Figures marked ``derived:`` in ``sources`` were reasoned from others.
    """

    key: str
    """Short name, as ``--gpu`` takes it: ``a100-40gb``."""
    name: str
    """Name that the driver and ``torch.cuda.get_device_name()`` report."""
    aliases: tuple[str, ...] = ()
    """Further names that ``get_gpu`` understands."""
    mig: bool = False
    """Whether this is a MIG slice."""

    memory_bytes: int
    """Memory as PyTorch reports it: ``total_memory``, the "total capacity" of its out-of-memory message."""
    nvml_memory_bytes: int | None = None
    """Memory as nvidia-smi shows it, which includes what the driver keeps."""
    context_bytes: tuple[int, int, int]
    """CUDA context of a PyTorch process with lazy module loading: low, typical while training, high."""

    compute_capability: tuple[int, int]
    sm_count: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_sm: int
    """32-bit registers of an SM."""
    shared_memory_per_block_bytes: int
    """Without opting in to more."""
    shared_memory_per_block_optin_bytes: int
    shared_memory_per_sm_bytes: int
    reserved_shared_memory_per_block_bytes: int
    """What the driver keeps for itself in every block."""
    l2_bytes: int
    clock_khz: int
    """Boost clock."""
    memory_clock_khz: int
    """As the driver reports it: half the data rate."""
    memory_bus_bits: int

    memory_bandwidth_bytes_per_s: int
    flops: Mapping[str, float] = field(hash=False)
    """Dense peak FLOP/s by dtype (``DTYPES``): fp32 accumulation, tensor cores where there are any."""
    link_bytes_per_s: int | None = None
    """NVLink in one direction, all links together; None without NVLink."""
    pcie_bytes_per_s: int
    """To the host in one direction; NVLink-C2C where that takes the place of PCIe."""

    sources: Mapping[str, str] = field(hash=False, repr=False)
    """Where each figure comes from, by field name."""
