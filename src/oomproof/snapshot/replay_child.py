"""Replay a recorded run's allocations through PyTorch's own allocator, in a process under the phantom.

Runs in the user's interpreter: standard library and torch only, Python 3.9. Each run under one setting is a forked
child, since torch reads most settings once and an allocator that was used is never quite new again. Reads
``job.json`` and the columns beside it from the folder given, and writes ``result.json``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from array import array
from pathlib import Path
from typing import Any

from oomproof.phantom import standins
from oomproof.phantom.device import USUAL_PLACE, Device

# Operations; oomproof.snapshot.replay writes them.
ALLOCATE, FREE, REFUSED, EMPTY_CACHE, RELEASED, DRIVER_CALL, POOL, REGION, RELEASE_POOL = range(9)

SMALL_LIMIT = 1 << 20
COLUMNS = {"kind": "B", "size": "Q", "address": "Q", "stream": "I", "slot": "I", "event": "I"}


class Parted(Exception):
    """The replay and the record are no longer the same."""

    def __init__(self, event: int, recorded: str, replayed: str) -> None:
        super().__init__(f"{event}: {recorded}; {replayed}")
        self.event = event
        self.recorded = recorded
        self.replayed = replayed


class Operations:
    """The recorded run as columns."""

    def __init__(self, folder: Path) -> None:
        for name, code in COLUMNS.items():
            column = array(code)
            column.frombytes((folder / (name + ".column")).read_bytes())
            setattr(self, name, column)

    kind: Any
    size: Any
    address: Any
    stream: Any
    slot: Any
    event: Any


class Script:
    """Gives segments the recorded addresses, and refuses them where the recorded driver did."""

    def __init__(self, calls: list[list[int]], *, translate: bool = False, pools_known: bool = False) -> None:
        self.calls = calls  # [1 for an allocation or 0 for a free, address, bytes]
        self.pools_known = pools_known  # whether a request that was refused says from which pool
        self.refusing = False
        self.translate = translate  # expandable segments lie where the driver puts them
        self.done = 0
        self.next_address = 0  # while the start is built
        self.following = False
        self.parted = ""
        self.allocations = 0
        self.frees = 0

    def place(self, size: int) -> int | None:
        if self.refusing:
            return None
        self.allocations += 1
        if self.next_address:
            return self.next_address
        if not self.following or self.parted:
            return USUAL_PLACE
        if self.done < len(self.calls):
            allocates, address, recorded = self.calls[self.done]
            if allocates and recorded == size:
                self.done += 1
                return address
            if not allocates:
                self.allocations -= 1
                return None  # the recorded allocator freed something first: its driver had refused
            self.parted = f"a segment of {size:,} B where one of {recorded:,} B was recorded"
            return USUAL_PLACE
        return USUAL_PLACE

    def take_back(self, address: int) -> None:
        self.frees += 1
        if not self.following or self.parted:
            return
        # A release frees whatever is unused; in which order depends on the version of PyTorch.
        place = self.done
        while place < len(self.calls) and not self.calls[place][0]:
            if self.calls[place][1] == address:
                self.calls[place], self.calls[self.done] = self.calls[self.done], self.calls[place]
                self.done += 1
                return
            place += 1
        self.parted = f"the segment at {address:#x} is freed, which was not recorded"


class Allocator:
    """PyTorch's caching allocator on device 0."""

    def __init__(self, torch: Any, config: str, streams: int, pools: int, fraction: bool) -> None:
        # Both: the environment for what is read once, the call where torch has read it already.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = config
        self.torch = torch
        settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.11 has it, 2.7 has not
        self.set = settings or torch._C._cuda_cudaCachingAllocator_set_allocator_settings
        if config:
            self.set(config)
        torch.cuda.init()
        torch.cuda.set_device(0)
        if fraction:
            torch.cuda.set_per_process_memory_fraction(1.0)
        self.allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self.delete = torch._C._cuda_cudaCachingAllocator_raw_delete
        self.empty_cache = torch._C._cuda_emptyCache
        self.streams = [0] + [_new_stream() for _ in range(streams - 1)]
        self.pools = [None] + [(1 << 20, number + 1) for number in range(pools - 1)]
        self.pool = 0
        # torch 2.11 has the first, 2.6 the second; 2.4 takes from pools only while it captures a graph
        self.begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None) or getattr(
            torch._C, "_cuda_beginAllocateToPool", None
        )
        self.entered: dict[int, int] = {}  # pool -> how often; each holds it

    def enter(self, number: int) -> None:
        """Take blocks from this pool from now on; 0 is the usual one."""
        c = self.torch._C
        if self.pool == number or self.begin is None:
            return
        if self.pool:
            # torch 2.11 has the first; the second, whatever its name, ends for all streams
            end = getattr(c, "_cuda_endAllocateToPool", None) or c._cuda_endAllocateCurrentStreamToPool
            end(0, self.pools[self.pool])
        if number:
            self.begin(0, self.pools[number])
            self.entered[number] = self.entered.get(number, 0) + 1
        self.pool = number

    def release(self, number: int) -> None:
        """Let go of a pool, as a program does that deletes its CUDA graph: unused segments of it may be freed then."""
        self.enter(0)
        for _ in range(self.entered.pop(number, 0)):
            self.torch._C._cuda_releasePool(0, self.pools[number])

    def stats(self) -> dict[str, int]:
        found: dict[str, int] = self.torch.cuda.memory_stats(0)
        return found


def _new_stream() -> int:
    stream = ctypes.c_void_p()
    assert ctypes.CDLL(None).cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    return stream.value or 0


def takes_oldest(allocator: Allocator, script: Script) -> bool:
    """Return whether PyTorch takes the oldest of equal free blocks (2.14), not the one lowest in memory (2.11).

    Asked of the allocator itself, before anything is in it: two segments, the younger one below the older one.
    """
    size = 20 << 20
    script.next_address = 1 << 40
    older = allocator.allocate(size, 0)
    script.next_address = 1 << 39
    younger = allocator.allocate(size, 0)
    script.next_address = 0
    allocator.delete(older)
    allocator.delete(younger)
    taken = allocator.allocate(size, 0)
    allocator.delete(taken)
    allocator.empty_cache()
    return bool(taken == older)


def build(allocator: Allocator, script: Script, start: list[dict[str, Any]], slots: list[int]) -> list[int]:
    """Make the recorded start: each segment whole first, then cut to its blocks; return offsets of expandable ones.

    Only one segment has room while it is cut, so PyTorch can take the blocks from nowhere else, in order of address.
    """
    allocate, delete = allocator.allocate, allocator.delete
    whole: list[list[int]] = []
    offsets = []
    for segment in start:
        allocator.enter(segment["pool"])
        stream = allocator.streams[segment["stream"]]
        script.next_address = 0 if segment["expandable"] else segment["address"]
        sizes = _parts(segment["size"], segment["small"])
        whole.append([allocate(size, stream) for size in sizes])
        script.next_address = 0
        offsets.append(segment["address"] - whole[-1][0])
        if not segment["expandable"] and offsets[-1]:
            raise Parted(-1, f"a segment at {segment['address']:#x}", f"it lies at {whole[-1][0]:#x}")
    unused: list[int] = []
    holes: list[int] = []
    for segment, pointers, offset in zip(start, whole, offsets):
        allocator.enter(segment["pool"])
        for pointer in pointers:
            delete(pointer)
        stream = allocator.streams[segment["stream"]]
        cut: list[tuple[int, int, int]] = []
        for address, size, slot, hole, tail in segment["pieces"]:
            for part in _parts(size + tail, segment["small"]) if slot < 0 else [size + tail]:
                pointer = allocate(part, stream)
                if pointer + offset != address:
                    raise Parted(-1, f"a block at {address:#x}", f"it lies at {pointer + offset:#x}")
                address += part
                if slot < 0:
                    (holes if hole else unused).append(pointer)
                elif tail:
                    cut.append((pointer, size, slot))
                else:
                    slots[slot] = pointer
        for pointer, size, slot in cut:  # free room up to 1 MiB behind a block, which cannot be asked for itself
            delete(pointer)
            slots[slot] = allocate(size, stream)
    allocator.enter(0)
    for pointer in holes:
        delete(pointer)
    if holes:
        allocator.empty_cache()
    for pointer in unused:
        delete(pointer)
    return offsets


def _parts(size: int, small: bool) -> list[int]:
    if not small:
        return [size]
    return [SMALL_LIMIT] * (size // SMALL_LIMIT) + ([size % SMALL_LIMIT] if size % SMALL_LIMIT else [])


def pack(allocator: Allocator, blocks: list[list[int]], slots: list[int]) -> None:
    """Allocate the blocks of the start one after the other, as if nothing had ever been freed before them."""
    for size, stream, pool, slot in blocks:
        allocator.enter(pool)
        slots[slot] = allocator.allocate(size, allocator.streams[stream])
    allocator.enter(0)


def follow(
    allocator: Allocator,
    script: Script,
    ops: Operations,
    slots: list[int],
    offsets: dict[tuple[int, int, bool], list[int]],
) -> Parted | None:
    """Replay and compare each address and driver call; return where the two part, after replaying the rest."""
    out_of_memory = allocator.torch.cuda.OutOfMemoryError
    streams = allocator.streams
    expected = 0
    fresh = 0  # expandable segments that were made and of which no block is known yet
    parted: Parted | None = None
    script.following = True
    for kind, size, address, stream, slot, event in zip(
        ops.kind, ops.size, ops.address, ops.stream, ops.slot, ops.event
    ):
        if kind == ALLOCATE:
            try:
                pointer = allocator.allocate(size, streams[stream])
            except out_of_memory:
                parted = parted or Parted(event, f"{size:,} B allocated", "out of memory after the driver's refusal")
                script.following = False
                pointer = allocator.allocate(size, streams[stream])
            slots[slot] = pointer
            if parted is None:
                if script.parted:
                    parted = Parted(event, f"{size:,} B allocated", script.parted)
                elif script.done != expected:
                    parted = Parted(event, *_calls(script, expected))
                elif pointer != address:
                    known = offsets.setdefault((stream, allocator.pool, size <= SMALL_LIMIT), [])
                    if address - pointer not in known:
                        if fresh:
                            fresh -= 1
                            known.append(address - pointer)
                        else:
                            at = pointer + (known[-1] if known else 0)
                            parted = Parted(event, f"{size:,} B at {address:#x}", f"they lie at {at:#x}")
        elif kind == FREE:
            allocator.delete(slots[slot])
        elif kind == DRIVER_CALL:
            expected += 1
        elif kind == RELEASED:
            if script.translate:  # nothing refuses it pages here, so it is told to release what is unused
                allocator.empty_cache()
        elif kind == REGION:
            fresh += 1
        elif kind == REFUSED and script.pools_known and not script.translate:
            script.refusing = True
            try:
                allocator.delete(allocator.allocate(size, streams[stream]))
                parted = parted or Parted(event, f"out of memory for {size:,} B", "there is room")
            except out_of_memory:
                if parted is None and script.parted:
                    parted = Parted(event, f"out of memory for {size:,} B", script.parted)
            script.refusing = False
        elif kind in (EMPTY_CACHE, REFUSED):  # before it gives up, the allocator releases all that is unused
            allocator.empty_cache()
            if parted is None and script.parted:
                parted = Parted(event, "a release of unused segments", script.parted)
        elif kind == POOL:
            allocator.enter(size)
        elif kind == RELEASE_POOL:
            allocator.release(size)
        if parted is not None and script.following:
            script.following = False
    script.following = False
    allocator.enter(0)
    return parted


def _calls(script: Script, expected: int) -> tuple[str, str]:
    if script.done < expected:
        allocates, address, size = script.calls[script.done]
        return f"a segment of {size:,} B at {address:#x} is {'allocated' if allocates else 'freed'}", "it is not"
    return "no segment is allocated", "one is"


def run(allocator: Allocator, ops: Operations, slots: list[int]) -> tuple[int, int]:
    """Replay without comparing; return the event and bytes at which memory ran out, or (-1, 0)."""
    out_of_memory = allocator.torch.cuda.OutOfMemoryError
    allocate, delete, streams = allocator.allocate, allocator.delete, allocator.streams
    event_of = ops.event
    for place, (kind, size, stream, slot) in enumerate(zip(ops.kind, ops.size, ops.stream, ops.slot)):
        if kind == FREE:
            delete(slots[slot])
            continue
        if kind == DRIVER_CALL:
            continue
        try:
            if kind == ALLOCATE:
                slots[slot] = allocate(size, streams[stream])
            elif kind == REFUSED:
                delete(allocate(size, streams[stream]))
            elif kind == EMPTY_CACHE:
                allocator.empty_cache()
            elif kind == POOL:
                allocator.enter(size)
            elif kind == RELEASE_POOL:
                allocator.release(size)
        except out_of_memory:
            return event_of[place], size
    return -1, 0


def final_layout(torch: Any) -> dict[str, Any]:
    """Return the segments as {address: [bytes, [[address, bytes] of each block in use]]}."""
    found = {}
    for segment in torch.cuda.memory_snapshot():
        blocks, cursor = [], segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                blocks.append([block.get("address", cursor), block["size"]])
            cursor += block["size"]
        found[str(segment["address"])] = [segment["total_size"], blocks]
    return found


def baseline(torch: Any, device: Device, job: dict[str, Any], ops: Operations) -> dict[str, Any]:
    """Replay as recorded; the result says whether everything was the same."""
    script = Script(job["driver_calls"], translate=job["expandable"], pools_known=job["pools_known"])
    device.on_place(script.place, script.take_back)
    plain = "expandable_segments:True" if job["expandable"] else ""
    allocator = Allocator(torch, plain, job["streams"], job["pools"], False)
    oldest = None if job["expandable"] else takes_oldest(allocator, script)
    slots = [0] * job["slots"]
    offsets: dict[tuple[int, int, bool], list[int]] = {}
    try:
        for segment, offset in zip(job["start"], build(allocator, script, job["start"], slots)):
            offsets.setdefault((segment["stream"], segment["pool"], segment["small"]), []).append(offset)
    except Parted as error:
        return {"parted": vars(error), "takes_oldest": oldest}
    if job["config"]:
        allocator.set(job["config"])
    if job["fraction"]:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.reset_peak_memory_stats(0)
    before = allocator.stats()
    script.allocations = script.frees = 0
    began = time.perf_counter()
    parted = follow(allocator, script, ops, slots, offsets)
    seconds = time.perf_counter() - began
    if parted is None and not job["expandable"]:
        parted = _compare_end(final_layout(torch), job["final"], ops)
    figures = _figures(allocator, before, script, seconds)
    able = {"takes_oldest": oldest, "takes_from_pools": allocator.begin is not None}
    return {**figures, "parted": vars(parted) if parted else None, **able}


def _compare_end(found: dict[str, Any], recorded: dict[str, Any], ops: Operations) -> Parted | None:
    for address in sorted({*found, *recorded}, key=int):
        if found.get(address) != recorded.get(address):
            at = f"the segment at {int(address):#x}"
            there = [f"{at} has {_layout(layout.get(address))} at the end" for layout in (recorded, found)]
            return Parted(ops.event[-1] if len(ops.event) else -1, *there)
    return None


def _layout(segment: Any) -> str:
    return f"{segment[0]:,} B with {len(segment[1])} blocks in use" if segment else "gone"


def setting(torch: Any, device: Device, job: dict[str, Any], ops: Operations, config: str) -> dict[str, Any]:
    """Replay under a setting of the allocator."""
    script = Script([])
    device.on_place(script.place, script.take_back)
    collects = "garbage_collection_threshold" in config
    allocator = Allocator(torch, config, job["streams"], job["pools"], collects)
    slots = [0] * job["slots"]
    try:
        pack(allocator, job["packed"], slots)
    except torch.cuda.OutOfMemoryError:
        return {"failed_at": -1, "failed_bytes": 0, **_figures(allocator, allocator.stats(), script, 0.0)}
    torch.cuda.reset_peak_memory_stats(0)
    before = allocator.stats()
    script.allocations = script.frees = 0
    began = time.perf_counter()
    failed_at, failed_bytes = run(allocator, ops, slots)
    seconds = time.perf_counter() - began
    failed = failed_at >= 0
    return {
        "failed_at": failed_at if failed else None,
        "failed_bytes": failed_bytes,
        **_figures(allocator, before, script, seconds),
    }


def _figures(allocator: Allocator, before: dict[str, int], script: Script, seconds: float) -> dict[str, Any]:
    after = allocator.stats()

    def grown(key: str, otherwise: int) -> int:
        return after[key] - before[key] if key in after else otherwise

    return {
        "peak_allocated_bytes": after["allocated_bytes.all.peak"],
        "peak_reserved_bytes": after["reserved_bytes.all.peak"],
        "device_allocations": grown("num_device_alloc", script.allocations),  # torch 2.3 or newer counts them
        "device_frees": grown("num_device_free", script.frees),
        "retries": grown("num_alloc_retries", 0),
        "seconds": seconds,
    }


def in_child(work: Any) -> dict[str, Any]:
    """Return what ``work()`` returns in a forked child, or {"error": text}."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = work()
        except BaseException:  # noqa: BLE001 - a child that goes on would run the parent's code
            result = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return {"error": f"the replay ended with status {status}"}
    result = json.loads(text)
    assert isinstance(result, dict)
    return result


def main(folder: Path) -> None:
    """Do the job in the folder; results are written one line each as they come."""
    job = json.loads((folder / "job.json").read_text())
    import torch

    place, manifest = standins.ensure(standins.find_torch())
    device = Device(ctypes.CDLL(str(place / standins.DEVICE_LIBRARY)))
    version = manifest["cuda_version"]
    assert isinstance(version, int)

    def configured(unlimited: bool) -> None:
        device.configure(
            [job["largest_gpu" if unlimited else "gpu"]],
            state_path=None,
            unlimited=unlimited,
            rising_addresses=job["rising"],
            keep_bytes=0,
            driver_version=version,
        )

    ops = Operations(folder)

    def first() -> dict[str, Any]:
        configured(True)
        return baseline(torch, device, job, ops)

    def another(config: str) -> dict[str, Any]:
        configured(job["unlimited"])
        return setting(torch, device, job, ops, config)

    with (folder / "result.jsonl").open("w") as results:
        print(json.dumps({"torch": torch.__version__, **in_child(first)}), file=results, flush=True)
        for config in job["settings"]:
            print(json.dumps(in_child(lambda: another(config))), file=results, flush=True)  # noqa: B023 - called at once


if __name__ == "__main__":
    # The names of the modules beside this file are no one else's business.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    main(Path(sys.argv[1]))
