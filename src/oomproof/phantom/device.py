"""The device library seen from Python: describing the GPUs, and reading what happened on them.

Standard library only: this runs inside the user's interpreter. The structures repeat ``driver/device.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MOST_GPUS = 16  # OOM_MAX_DEVICES

EVENT_WORKSPACE = 1
EVENT_COMMUNICATION = 2
EVENT_OPTIONAL_WORKSPACE = 3
EVENT_FROM_HOST = 4
EVENT_COMMUNICATOR = 5


class GPUStruct(ctypes.Structure):
    """``struct oom_gpu``: one GPU as its driver would describe it."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("memory", ctypes.c_uint64),
        ("nvml_memory", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("l2", ctypes.c_uint64),
        ("shared_per_block", ctypes.c_uint64),
        ("shared_per_block_optin", ctypes.c_uint64),
        ("shared_per_sm", ctypes.c_uint64),
        ("shared_reserved", ctypes.c_uint64),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
        ("threads_per_sm", ctypes.c_int32),
        ("blocks_per_sm", ctypes.c_int32),
        ("registers_per_sm", ctypes.c_int32),
        ("clock_khz", ctypes.c_int32),
        ("memory_clock_khz", ctypes.c_int32),
        ("bus_bits", ctypes.c_int32),
        ("binary_version", ctypes.c_int32),
        ("mig", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    )


class EventStruct(ctypes.Structure):
    """``struct oom_event``: something a library did that the observer wants to know."""

    _fields_ = (
        ("time_ns", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("what", ctypes.c_char * 64),
    )


READ_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
ANSWER_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
PLACE_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
TAKE_BACK_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

USUAL_PLACE = ctypes.c_void_p(-1).value  # OOM_USUAL_PLACE


class Device:
    """The loaded device library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._callback: Any = None  # these keep the ctypes trampolines alive
        self._answer_callback: Any = None
        self._place_callbacks: Any = None
        library.oom_process_peak.restype = ctypes.c_uint64
        library.oom_device_peak.restype = ctypes.c_uint64
        library.oom_host_peak.restype = ctypes.c_uint64
        library.oom_managed_peak.restype = ctypes.c_uint64
        library.oom_events.restype = ctypes.c_size_t
        library.oom_refused.restype = ctypes.c_uint64
        library.oom_from_host.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        library.oom_fill.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_size_t)
        library.oom_fill.restype = None
        library.oom_unanswered.restype = ctypes.c_uint64
        library.oom_last_kernel.restype = ctypes.c_char_p
        library.oom_launches.restype = ctypes.c_uint64
        library.oom_graph_launches.restype = ctypes.c_uint64

    def configure(
        self,
        gpus: Iterable[Mapping[str, Any]],
        *,
        state_path: str | None,
        unlimited: bool,
        rising_addresses: bool,
        keep_bytes: int,
        driver_version: int,
    ) -> None:
        """Describe the GPUs; each mapping has the fields of ``GPUStruct``. Before any CUDA call."""
        structs = [GPUStruct(**{k: v.encode() if isinstance(v, str) else v for k, v in g.items()}) for g in gpus]
        array = (GPUStruct * len(structs))(*structs)
        path = state_path.encode() if state_path else None
        self._library.oom_configure(
            array,
            len(structs),
            ctypes.c_char_p(path),
            int(unlimited),
            int(rising_addresses),
            ctypes.c_uint64(keep_bytes),
            driver_version,
        )

    def set_binary_version(self, version: int) -> None:
        """Say which architecture torch's kernels were compiled for, 86 for sm_86."""
        self._library.oom_set_binary_version(version)

    def process_peak(self, device: int) -> int:
        """Return the most bytes this process had on the device, its context included."""
        return int(self._library.oom_process_peak(device))

    def device_peak(self, device: int) -> int:
        """Return the most bytes that all processes of the run together had on the device so far."""
        return int(self._library.oom_device_peak(device))

    def host_peak(self) -> int:
        """Return the most bytes of pinned host memory this process had."""
        return int(self._library.oom_host_peak())

    def managed_peak(self) -> int:
        """Return the most bytes of managed memory this process had, wherever the driver would keep it."""
        return int(self._library.oom_managed_peak())

    def refused(self) -> int:
        """Return how many allocations of this process failed for want of memory, PyTorch's own included."""
        return int(self._library.oom_refused())

    def from_host(self, address: int, size: int) -> bool:
        """Return whether these bytes of the device are a copy of the host's, not something a kernel computed."""
        return bool(self._library.oom_from_host(address, size))

    def zero(self, address: int, size: int) -> None:
        """Make ``size`` bytes at a device address read as zeros."""
        self._library.oom_fill(address, 0, 1, size)

    def on_read(self, callback: Callable[[int, int], None] | None) -> None:
        """Call ``callback(address, size)`` before each copy from the device to the host."""
        self._callback = READ_CALLBACK(callback) if callback else READ_CALLBACK()
        self._library.oom_on_read(self._callback)

    def on_place(self, place: Callable[[int], int | None], take_back: Callable[[int], None]) -> None:
        """Ask ``place(size)`` where an allocation lies: an address, None to refuse it, or USUAL_PLACE.

        ``take_back(address)`` is called before each free. Memory placed so is counted; there is nothing to touch.
        """
        self._place_callbacks = (PLACE_CALLBACK(place), TAKE_BACK_CALLBACK(take_back))
        self._library.oom_on_place(*self._place_callbacks)

    def share(self, folder: str) -> None:
        """Exchange small messages with the other processes of the run through files in this folder."""
        self._library.oom_share(folder.encode())

    def unanswered(self) -> int:
        """Return how many messages of other ranks were waited for and never came."""
        return int(self._library.oom_unanswered())

    def collective_begins(self, known: bool) -> None:
        """Say, before a collective of this thread, whether what this rank sends in it is known."""
        self._library.oom_collective_begin(int(known))

    def collective_ended(self) -> bool | None:
        """Return whether all that the collective brought is known; None when it was none of NCCL's."""
        known = self._library.oom_collective_end()
        return None if known < 0 else bool(known)

    def next_split(self, ranks: int) -> None:
        """Say how many ranks the communicators have that are now split off others; 0 for as many as their parent."""
        self._library.oom_next_split(ranks)

    def last_kernel(self) -> str:
        """Return the mangled name of the kernel that this thread launched last, "" for none or one of a JIT's."""
        name: bytes = self._library.oom_last_kernel()
        return name.decode()

    def launches(self) -> int:
        """Return how many kernels this process has launched, but for those of cuBLAS, cuDNN, NCCL and in graphs."""
        return int(self._library.oom_launches())

    def graph_launches(self) -> int:
        """Return how many times this process has launched a CUDA graph."""
        return int(self._library.oom_graph_launches())

    def lift_limit(self) -> None:
        """Have no allocation fail from now on."""
        self._library.oom_lift_limit()

    def on_answer(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(what)`` when a library answers with a number that only a kernel could have computed."""
        self._answer_callback = ANSWER_CALLBACK(lambda what: callback(what.decode()))
        self._library.oom_on_answer(self._answer_callback)

    def take_events(self) -> list[tuple[int, int, int, int, int, str]]:
        """Return and forget the events so far: (time in ns, kind, device, address, bytes, what)."""
        taken: list[tuple[int, int, int, int, int, str]] = []
        buffer = (EventStruct * 1024)()
        while count := self._library.oom_events(buffer, len(buffer)):
            for event in buffer[:count]:
                taken.append((event.time_ns, event.kind, event.device, event.address, event.size, event.what.decode()))
        return taken
