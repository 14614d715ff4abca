"""Which of the phantom's memory holds what a kernel would have left there.

Kernels are not run, so most device memory means nothing. The registry here lists the storages whose bytes are right.
An entry is keyed by the address of the StorageImpl and holds a weak reference to it: while that lives, PyTorch cannot
give the same StorageImpl to another storage, so neither a reused block nor a reused StorageImpl is taken for known.
The weak reference does not keep the memory: the allocator sees nothing of it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: More elements of floating point than this are never computed beside the phantom.
TINY = 4096  # a float mask of 64 x 64

FLOATS = frozenset(
    dtype for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)  # fmt: skip

_FIRST_PURGE = 4096


#: What __torch_dispatch__ is on a tensor type that does not handle operators itself.
PLAIN = torch._C._disabled_torch_dispatch_impl


class NotHere(Exception):
    """The bytes cannot be seen from the host, or nobody knows them."""


class Entry:
    """One storage whose contents are known, or ``assumed``: a possible result of numbers that nobody knows."""

    __slots__ = ("_weak", "address", "assumed", "pattern", "size")

    def __init__(self, storage: Any, pattern: bytes | None, assumed: bool) -> None:
        self._weak = storage._weak_ref()
        self.address: int = storage.data_ptr()
        self.size: int = storage.nbytes()
        #: The bytes of each element where all are equal and memory itself was not filled; None where memory is right.
        self.pattern = pattern
        self.assumed = assumed

    def alive(self, _expired: Callable[[int], bool] = torch.UntypedStorage._expired) -> bool:
        """Return whether the storage still exists."""
        return not _expired(self._weak)

    def __del__(self, _free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        _free(self._weak)


def is_ours(tensor: Any) -> bool:
    """Return whether this is a plain CUDA tensor with memory: no subclass, not sparse."""
    return tensor.is_cuda and type(tensor).__torch_dispatch__ is PLAIN and tensor.layout is torch.strided


def host_view(tensor: Any) -> Any:
    """Return a CPU tensor over the same memory as a CUDA tensor of the phantom."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise NotHere
    storage = tensor.untyped_storage()
    dtype = tensor.dtype
    size = storage.nbytes()
    buffer = (ctypes.c_char * size).from_address(storage.data_ptr())
    flat = torch.frombuffer(buffer, dtype=dtype, count=size // dtype.itemsize)
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def covers_storage(tensor: Any) -> bool:
    """Return whether a tensor that was written into is all there is in its storage."""
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


class Known:
    """The storages whose bytes are right."""

    def __init__(self) -> None:
        #: By ``untyped_storage()._cdata``; the dispatch mode looks here directly, where a call would cost too much.
        self.entries: dict[int, Entry] = {}
        #: Whether ``host`` gave assumed values since this was last set to False.
        self.saw_assumed = False
        self._purge_at = _FIRST_PURGE
        self._reachable: bool | None = None

    def entry(self, tensor: Any) -> Entry | None:
        """Return what is known of the tensor's storage."""
        storage = tensor.untyped_storage()
        entry = self.entries.get(storage._cdata)
        if entry is None or entry.address != storage.data_ptr() or entry.size != storage.nbytes():
            return None  # FSDP1 resizes a storage to nothing and back: the same StorageImpl, other memory
        return entry

    def add(self, tensor: Any, pattern: bytes | None = None, assumed: bool = False) -> None:
        """Say that the tensor's storage holds the right bytes, or that each of its elements is ``pattern``."""
        storage = tensor.untyped_storage()
        self.entries[storage._cdata] = Entry(storage, pattern, assumed)
        if len(self.entries) > self._purge_at:
            self.purge()

    def forget(self, tensor: Any) -> None:
        """Say that nobody knows what the tensor's storage holds."""
        self.entries.pop(tensor.untyped_storage()._cdata, None)

    def purge(self) -> None:
        """Drop the entries of storages that are gone."""
        for key, entry in list(self.entries.items()):
            if not entry.alive():
                self.entries.pop(key, None)
        self._purge_at = max(_FIRST_PURGE, 2 * len(self.entries))

    def at(self, address: int, size: int) -> Entry | None:
        """Return the living entry whose memory includes these bytes."""
        for entry in list(self.entries.values()):
            if entry.address <= address and address + size <= entry.address + entry.size and entry.alive():
                return entry
        return None

    def host(self, tensor: Any) -> Any:
        """Return the tensor's right values as a CPU tensor; raises NotHere when they are not known."""
        if not tensor.is_cuda:
            if tensor.device.type != "cpu":
                raise NotHere
            return tensor
        entry = self.entry(tensor)
        if entry is None:
            raise NotHere
        self.saw_assumed |= entry.assumed
        if entry.pattern is None:
            return host_view(tensor)
        one = torch.frombuffer(bytearray(entry.pattern), dtype=tensor.dtype)
        return one.expand(tensor.size()) if tensor.dim() else one[0]

    def reachable(self, address: int) -> bool:
        """Return whether the phantom's memory can be touched; it cannot where the system forbids overcommit."""
        if self._reachable is None and address:
            self._reachable = writable(address)
        return self._reachable is not False


def writable(address: int) -> bool:
    """Return whether this process may write at an address, as the kernel tells it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, rights = line.split(maxsplit=2)[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= address < end:
                return rights.startswith("rw")
    return False


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors of an operator's argument or result, those of lists included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(tensors_in, value))
