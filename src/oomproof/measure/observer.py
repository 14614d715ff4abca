"""Watching one process: steps, phases, modules and blocks, without changing one byte of what it allocates.

Runs inside the user's process after torch is imported. Hooks tell it where the script is; PyTorch's own counters and
allocator trace tell it what the memory does. Python 3.9.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from time import time_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oomproof.measure import leaving, modules, versions
from oomproof.measure.counters import Counters
from oomproof.measure.hooks import Hooks
from oomproof.measure.ledger import Label, Ledger, Mark, Tag, breakdown
from oomproof.measure.profiling import profile
from oomproof.measure.reads import ValueReads, user_stack
from oomproof.measure.series import Series
from oomproof.measure.surroundings import choices_by_time
from oomproof.phantom import device as phantom_device
from oomproof.phantom.device import Device
from oomproof.phantom.world import Layout

if TYPE_CHECKING:
    from oomproof.measure.meter import Meter

#: Allocator events kept between two readings of the trace; each costs about 200 bytes of host memory.
TRACE_ENTRIES = 2_000_000

#: Python stacks are a quarter of what observing costs; a steady run peaks first in one of these steps.
STEPS_WITH_STACKS = 2

#: How much longer than it took itself a rank that was stopped waits for the others.
PATIENCE_SECONDS = 60.0

TOO_FEW_STEPS = "the script ended before a whole step could be counted; let it make more steps"

LABEL_OF_EVENT = {
    phantom_device.EVENT_WORKSPACE: "workspace",
    phantom_device.EVENT_COMMUNICATION: "communication",
    phantom_device.EVENT_FROM_HOST: "input",
}


class Observer:
    """What is known of this process so far, and the callbacks that learn more."""

    def __init__(
        self, torch: ModuleType, device: Device, config: dict[str, Any], folder: Path, layout: Layout | None = None
    ) -> None:
        self.torch: Any = torch
        self.layout = layout
        self.device = device
        self.config = config
        self.profiling = bool(config["profile"])
        self.folder = folder
        self.started = time.perf_counter()
        self.pid = os.getpid()
        self.counters = Counters(torch)
        self.reads = ValueReads(torch, device, config)
        if layout is not None:
            layout.values = self.reads
        self.ledger: dict[int, Ledger] = {}
        self.marks: list[tuple[int, int, str, str | None]] = [(0, 1, "init", None)]
        self.labels: list[Label] = []
        self.step = 1
        self.step_started = self.started
        self.told = 0.0
        self.per_step: list[dict[str, Any]] = []
        self.place = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.merged: dict[str, Any] | None = None  # a step whose end was taken back
        self.calls: dict[str, dict[str, Any]] = {}
        self.oom: dict[str, Any] | None = None
        self.communicators: list[int] = []  # how many ranks each has
        self.all_to_all = 0  # communicators in which all ranks are connected with all
        untested = versions.note(torch.__version__)
        self.notes: list[str] = [untested] if untested else []
        self.forked = False
        self.left_gate = False
        self.finished = False
        self.measured: dict[str, Any] | None = None  # the findings, while one step more is counted
        self.metering: Meter | None = None
        self.metered_again = False
        self.recording = False
        self.trace_entries = TRACE_ENTRIES
        self.hooks = Hooks(torch, self)

    def install(self) -> None:
        """Start observing: hooks at once, the allocator's trace as soon as CUDA is initialised."""
        self.hooks.install()
        self.counters.install()
        self.reads.install()
        self.torch.cuda._lazy_call(self._cuda_ready)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forked)

    def wake(self, folder: Path) -> None:
        """Begin in the fork of a process that has imported modules and done nothing else: this process is the run."""
        if self.left_gate:
            self.reads.come_back()
        self.left_gate = self.forked = False
        self.folder = folder
        self.pid = os.getpid()
        self.profiling = bool(self.config["profile"])
        self.started = self.step_started = time.perf_counter()

    def _forked(self) -> None:
        """A forked child: a DataLoader worker, or a process that will use the GPU itself if its parent has not."""
        self.left_gate = self.reads.leave()
        if self.metering is not None:
            self.metering.stop()
        if self.counters.ready:
            self.finished = True
            self.hooks.active = False
        else:
            self.pid = os.getpid()
            self.forked = True

    def _cuda_ready(self) -> None:
        self.counters.ready = True
        leaving.register(self.folder)
        if self.forked:
            from multiprocessing import util

            if self.left_gate:
                self.reads.come_back()
            util.Finalize(None, self._at_exit, exitpriority=0)  # such a child ends without atexit
        if self.torch.cuda.get_allocator_backend() == "native":  # cudaMallocAsync refuses observers
            self.torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)
        self._record(True)
        self._list_modules()  # a process may end without coming to its end

    def _list_modules(self) -> None:
        if self.config.get("list_modules"):
            _write(self.folder / f"modules-{self.pid}.json", modules.imported())

    def _record(self, on: bool) -> None:
        """Switch the allocator's trace on or off; off forgets what was recorded."""
        if self.torch.cuda.get_allocator_backend() != "native":
            self._note(
                "the cudaMallocAsync backend records no history, so there is no breakdown; and how the driver's pool "
                "would fragment is not public, so reserved is a lower bound"
            )
            return
        record = self.hooks.originals.get("record_history", self.torch.cuda.memory._record_memory_history)
        if on:
            context = "alloc" if self.profiling or self.step <= STEPS_WITH_STACKS else None
            record(enabled="all", context=context, stacks="python", max_entries=TRACE_ENTRIES)
        else:
            record(enabled=None)
        self.recording = on

    # ---- where the script is: called by the hooks ------------------------------------------------------------------

    def mark(self, phase: str, module: str | None) -> None:
        """Note that from now on the process is in this phase and module."""
        self.marks.append((time_ns(), self.step, phase, module))

    def label(self, category: str | None, addresses: list[int], tags: Sequence[Tag]) -> None:
        """Note that these addresses now hold this category; of None only the tags are new."""
        if addresses:
            self.labels.append((time_ns() // 1000, category, addresses, tags))

    def end_call(self, name: str) -> None:
        """Note the peak of one outermost module call; kept only for scripts that never step."""
        if self.oom is not None:
            self.oom["caught"] = True  # the script went on
        if self.per_step or not self.counters.ready:
            return
        allocated, reserved = self.counters.fold()
        call = self.calls.setdefault(name, {"module": name, "count": 0, "allocated_bytes": 0, "reserved_bytes": 0})
        call["count"] += 1
        call["allocated_bytes"] = max(call["allocated_bytes"], allocated)
        call["reserved_bytes"] = max(call["reserved_bytes"], reserved)

    def _in_a_world(self) -> bool:
        """Return whether a process group is there, and note this process's place in it: mp.spawn sets no RANK."""
        distributed = self.torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return False
        self.place = distributed.get_rank(), distributed.get_world_size()
        return True

    def _let_go(self) -> None:
        """Wait until NCCL's watchdog has let go of the tensors of finished collectives; it looks every 0.1 s.

        On a real GPU a step lasts longer than that. Here the next one would begin with DDP's first buckets still there
        or not, as the threads happen to run: 3 % of nanoGPT's peak on two GPUs.
        """
        group = self.torch.distributed.distributed_c10d._get_default_group()
        if self.torch.distributed.get_backend() == "nccl" and hasattr(group, "_wait_for_pending_works"):
            group._wait_for_pending_works()

    def end_step(self) -> None:
        """Close an optimizer step; ends the process when enough steps were made."""
        if self.finished:
            return
        if self._in_a_world():
            self._let_go()
        if self.measured is not None:
            self._end_metering()
            return
        if self.oom is not None:
            self.oom["caught"] = True
        now = time.perf_counter()
        allocated, reserved = self.counters.end_window() if self.counters.ready else (0, 0)
        record = {
            "step": self.step,
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "seconds": round(now - self.step_started, 6),
        }
        if self.merged is not None:
            record["allocated_bytes"] = max(allocated, self.merged["allocated_bytes"])
            record["reserved_bytes"] = max(reserved, self.merged["reserved_bytes"])
            record["seconds"] = round(record["seconds"] + self.merged["seconds"], 6)
            self.merged = None
        self.per_step.append(record)
        self._progress()
        wanted = self.config["steps"]
        last, before = self.per_step[-1], self.per_step[-2] if len(self.per_step) > 1 else None
        stable = before is not None and all(last[key] == before[key] for key in ("allocated_bytes", "reserved_bytes"))
        if self.config["until_stable"] and stable:
            self.stop("stable")
        elif not self.config["until_stable"] and wanted is not None and self.step >= wanted:
            self.stop("steps-reached")
        self.step += 1
        self.mark(*self.marks[-1][2:])  # what follows belongs to the next step
        self.step_started = time.perf_counter()
        if self.recording and self.step == STEPS_WITH_STACKS + 1:
            self._record(True)  # goes on with the same trace
        if self.recording and self.counters.events_since_read() > TRACE_ENTRIES * 0.6:
            self._read_trace(more=True)

    def merge_last_step(self) -> None:
        """Take back the end of the last step: another optimizer call turned out to belong to it."""
        if self.per_step:
            self.merged = self.per_step.pop()
            self.step -= 1
        if self.metering is not None:
            self.metering.restart()

    # ---- the work of one step more ---------------------------------------------------------------------------------

    def _begin_metering(self, why: str) -> None:
        """Take the findings as they are and count what the next step executes, however much memory that takes."""
        from oomproof.measure.meter import Meter

        # through JSON: what goes on must not change them
        self.measured = json.loads(json.dumps(self._findings(why, None)))
        self.device.lift_limit()
        self.metering = Meter(self.device, self._part_of_step)
        if not self.hooks.in_backward:
            self.start_metering()

    def start_metering(self) -> None:
        """Begin to count, on the script's own thread: a step that is made in backward ends on autograd's."""
        if self.metering is not None and not self.metering.on:
            reason = self.metering.start()
            if reason is not None:
                self._end_metering(reason)

    def _part_of_step(self) -> str:
        hooks = self.hooks
        if hooks.phase == "optimizer" or not hooks.in_backward:
            return hooks.phase
        # compiled code runs without grad mode, and checkpoints of plain functions call no module
        again = self.torch.is_grad_enabled() or getattr(hooks.local, "stack", None)
        return "recompute" if again else "backward"

    def _end_metering(self, reason: str | None = None) -> None:
        assert self.measured is not None
        assert self.metering is not None
        if reason is None:
            if not self.metering.on:
                return  # still in the backward pass in which the last measured step ended
            if self.metering.compiled() and not self.metered_again:
                self.metered_again = True
                self.metering.restart()
                return
            self.metering.stop()
            self.measured["work"] = self.metering.record(self.hooks.stepping(), self.device.managed_peak())
        self.measured["no_work"] = reason
        self.stop(self.measured["ended"])

    # ---- reading the trace -----------------------------------------------------------------------------------------

    def _read_trace(self, more: bool) -> None:
        """Hand the recorded events to the ledgers, and forget them if ``more`` are to come."""
        if not self.recording:
            return
        snapshot = self.torch.cuda.memory._snapshot()
        optional: list[tuple[int, str, int]] = []
        labels = self.labels
        for at, kind, _, address, size, what in self.device.take_events():
            if kind == phantom_device.EVENT_COMMUNICATOR:
                if what == "NCCL":
                    self.communicators.append(size)
                else:
                    self.all_to_all += 1
            elif kind == phantom_device.EVENT_OPTIONAL_WORKSPACE:
                optional.append((at // 1000, what, size))
            else:
                labels.append((at // 1000, LABEL_OF_EVENT[kind], [address], None))
        labels.sort(key=lambda item: item[0])
        marks = [Mark(at // 1000, step, phase, module) for at, step, phase, module in self.marks]
        for index, events in enumerate(snapshot["device_traces"]):
            if index not in self.ledger:
                self.ledger[index] = Ledger(Series() if self.profiling else None)
            ledger = self.ledger[index]
            ledger.feed(events, marks, labels, optional, self._highest_step())
            ledger.correct_sizes(s for s in snapshot["segments"] if s["device"] == index)
        self.labels, self.marks = [], [self.marks[-1]]
        if more:
            self._record(False)
            self._record(True)
            self.counters.trace_was_read()

    def _highest_step(self) -> int | None:
        """Return the step in which the counters peaked; None before the first step has ended."""
        if not self.per_step:
            return None
        top = max(self.per_step, key=lambda s: s["allocated_bytes"])  # the first of equals
        after = self.counters.window_peak()
        return top["step"] if top["allocated_bytes"] >= after else self.step

    # ---- out of memory, the end ------------------------------------------------------------------------------------

    def _out_of_memory(self, device: int, size: int, device_total: int, device_free: int) -> None:
        if self.measured is not None:
            return
        if self.oom is None or self.oom["caught"]:  # the last one is the one that ends a script
            free = f"{device_free / 2**30:.2f} GiB of {device_total / 2**30:.2f} GiB is free"
            self._note_oom(
                f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB on GPU {device}; {free}.", size
            )
        self.hooks.leave_optimizer()

    def _note_oom(self, message: str, size: int | None) -> None:
        self.oom = {
            "message": message,
            "step": self.step,
            "phase": self.marks[-1][2],
            "module": _plain(self.marks[-1][3]),
            "requested_bytes": size,
            "caught": False,  # until the script makes another call or step
        }
        # a process that is killed or leaves with os._exit has said so much
        _write(self.folder / f"process-{self.pid}.json", self._findings("oom", None, brief=True))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _progress(self) -> None:
        """Tell the parent of the step, ten times a second at most: writing costs as much as hooking a layer."""
        now = time.perf_counter()
        alone = self.config["world"] is not None or self.place[0] == 0
        if alone and now - self.told > 0.1:
            self.told = now
            _write(self.folder / "progress.json", self.per_step[-1])

    def stop(self, why: str) -> None:
        """Write what was measured and end the process, whatever the script has wrapped around its loop.

        An exception could be caught by the script or make it save, evaluate and clean up for minutes.
        """
        if os.getpid() != self.pid:
            return
        if self.config["meter"] and self.measured is None:
            self._begin_metering(why)
            return
        self.finish(why)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # the script closed it, or nobody reads any more
        if self._in_a_world() and self.config["world"] is None:
            leaving.wait_for_others(self.folder, time.perf_counter() - self.started + PATIENCE_SECONDS)
        for child in sys.modules["multiprocessing"].active_children() if "multiprocessing" in sys.modules else ():
            child.terminate()
        os._exit(0)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self.finish("finished" if error is None else "raised", error)

    def finish(self, why: str, error: BaseException | None = None) -> None:
        """Write this process's findings, once."""
        if error is None and os.getpid() == self.pid:
            self.hooks.settle()
        if self.finished or os.getpid() != self.pid:
            return
        self.finished = True
        self.hooks.remove()
        _write(self.folder / f"process-{self.pid}.json", self.measured or self._findings(why, error))
        self._list_modules()

    def _findings(self, why: str, error: BaseException | None, brief: bool = False) -> dict[str, Any]:
        """Return what is known of this process; ``brief`` leaves the trace unread, and with it the breakdown."""
        torch = self.torch
        self._in_a_world()
        used = self.counters.ready
        if used:
            self.counters.fold()
        snapshot_path = None
        if used and self.config.get("snapshot") and self.recording and not brief:
            snapshot_path = str(self.folder / f"snapshot-{self.pid}.pickle")
            self._dump(snapshot_path)
        if used and not brief:
            self._read_trace(more=False)
            self._record(False)
        index = self.counters.worst_device()
        allocated, reserved = self.counters.peaks(index)
        moment = self.ledger[index].peak if index in self.ledger else None
        profile_path = None
        if moment is not None and self.profiling and not brief:
            profile_path = str(self.folder / f"profile-{self.pid}.json")
            made = profile(torch, self.ledger[index], index, allocated, reserved, len(self.per_step))
            _write(Path(profile_path), made.to_json())
        ooms, retries = self.counters.troubles(index)
        cause = self._out_of_memory_in(error)
        if cause is not None:
            if self.oom is None:  # the cudaMallocAsync backend tells no observer
                self._note_oom(str(cause), None)
                ooms += 1
            assert self.oom is not None
            self.oom.update(message=str(cause), caught=False)
        if self.oom is not None and not self.oom["caught"]:
            why = "oom"
        findings: dict[str, Any] = {
            "pid": self.pid,
            "argv": sys.argv,
            "used_gpu": used and reserved > 0,
            "rank": self.place[0],
            "world_size": self.place[1],
            "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "device": index,
            "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
            "allocator": {"config": versions.allocator_config(), "retries": retries, "ooms": ooms},
            "ended": why,
            "error": f"{type(error).__name__}: {error}" if error is not None else None,
            "gathers_states": gathers_states(error),
            "alone": self.config["world"] is not None,
            "gpus": len(self.config["gpus"]),
            "steps": len(self.per_step),
            "per_step": self.per_step,
            "calls": [] if self.per_step else list(self.calls.values()),
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "process_peak_bytes": self.device.process_peak(index),
            "device_peak_bytes": self.device.device_peak(index),
            "communicators": self.communicators,
            "all_to_all": self.all_to_all,
            "groups": self.layout.as_list() if self.layout else [],
            "unanswered": self.device.unanswered(),
            "in_kind": self.layout.values.in_kind if self.layout else 0,
            "on_first_gpu": used and index == 0 and self._has_another_gpu(),
            "refused": self.device.refused(),
            "no_kernels": bool(self.config.get("no_kernels")),
            "pinned_host_bytes": self.device.host_peak(),
            "managed_bytes": self.device.managed_peak(),
            "step": moment.mark.step if moment else None,
            "phase": moment.mark.phase if moment else None,
            "module": _plain(moment.mark.module) if moment else None,
            "stack": user_stack(torch, moment.stack) if moment else [],
            "breakdown": breakdown(moment, allocated) if moment else None,
            "optional_workspaces": self._optional(index, allocated),
            "values": self.config["values"],
            "value_reads": self.reads.as_list(),
            "depends_on_counts": self.reads.depends,
            "oom": self.oom,
            "notes": [*self.config.get("notes", []), *self.notes, *self.reads.notes(), *choices_by_time()],
            "snapshot": snapshot_path,
            "profile": profile_path,
            "work": None,
            "no_work": TOO_FEW_STEPS if self.config["meter"] else None,
            "seconds": time.perf_counter() - self.started,
        }
        if not self.per_step:
            findings["step"] = None
        return findings

    def _has_another_gpu(self) -> bool:
        """Return whether this rank of a world that does not exist should use another GPU than the first."""
        elsewhere = self.config["world"] is not None and os.environ.get("LOCAL_RANK", "0") != "0"
        return elsewhere and "CUDA_VISIBLE_DEVICES" not in os.environ

    def _out_of_memory_in(self, error: BaseException | None) -> BaseException | None:
        """Return the out-of-memory error that ended the script, also when another was raised because of it."""
        seen: list[BaseException] = []
        while error is not None and error not in seen:
            if isinstance(error, self.torch.OutOfMemoryError):
                found: BaseException = error
                return found
            seen.append(error)
            error = error.__cause__ or error.__context__
        return None

    def _optional(self, index: int, allocated: int) -> dict[str, int]:
        """Return by how much each library's unknown workspaces could raise what the device holds.

        A workspace lifts the allocated peak only where it is asked for near the peak, but its block stays reserved.
        """
        ledger = self.ledger.get(index)
        if ledger is None:
            return {}
        return {what: max(top - allocated, size) if size else 0 for what, (top, size) in ledger.optional.items()}

    def _dump(self, path: str) -> None:
        import pickle

        with open(path, "wb") as file:
            pickle.dump(self.torch.cuda.memory._snapshot(), file, protocol=4)


#: Where PyTorch puts the states of all ranks together, and compares them.
_STATES = (os.path.join("torch", "distributed", "checkpoint", ""), "_optim_utils.py", "_state_dict_utils.py")
_GATHERERS = frozenset(("state_dict", "optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict"))


def gathers_states(error: BaseException | None) -> bool:
    """Return whether an error came from saving a checkpoint of several ranks, or gathering their states."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_name in _GATHERERS or any(part in code.co_filename for part in _STATES):
                return True
            trace = trace.tb_next
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _plain(module: str | None) -> str | None:
    return module.lstrip("+") if module else None


def _write(path: Path, data: dict[str, Any]) -> None:
    scratch = path.with_suffix(f".{threading.get_ident()}.tmp")
    scratch.write_text(json.dumps(data))
    scratch.replace(path)
