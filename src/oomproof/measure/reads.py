"""Value reads: numbers the script takes from the device though a kernel should have computed them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import Any

from oomproof.measure import surroundings
from oomproof.measure.answers import Bounds
from oomproof.measure.gate import Gate
from oomproof.measure.known import NotHere, covers_storage, host_view
from oomproof.measure.values import KeptValues, Mirror
from oomproof.phantom.device import Device
from oomproof.phantom.messages import Values

STACK_LINES = 8

#: What copies every parameter to the host and looks at none: one line for all of it.
SAVING = "saving a checkpoint"
_SAVERS = tuple(
    os.sep.join(("", *parts))
    for parts in (("torch", "serialization.py"), ("safetensors", "torch.py"), ("torch", "distributed", "checkpoint"))
)


class ValueReads(Values):
    """Counts value reads by line of the user's code and operation, and runs the value mirror."""

    def __init__(self, torch: ModuleType, device: Device, config: dict[str, Any]) -> None:
        self._torch = torch
        self._counts: dict[tuple[str, str], list[Any]] = {}
        #: Whether a number was read inside compiled code, where the mirror is off.
        self.in_compiled_code = False
        #: Whether memory may depend on a count that was answered with one of several possible ones.
        self.depends = False
        self._lock = threading.Lock()
        self._device = device
        self._many = config["unknown_counts"] == "many"
        self._gate: Gate | None = None
        if config["values"] == "mirror":
            mirror = Mirror(
                device,
                limit_bytes=config["keep_bytes"],
                many=self._many,
                on_unknown=self._unknown,
            )
            self._gate = Gate(mirror)
            self._on_read = mirror.on_read
        else:
            self._on_read = KeptValues(self._unknown).on_read
            fold_constants(device, config)

    def install(self) -> None:
        """Begin. At the import of torch no other mode can be active, so nobody's order of leaving modes is upset."""
        self._device.on_read(self._on_read)
        self._device.on_answer(lambda what: self._unknown(what, True, None, False))
        if self._gate:
            self._gate.__enter__()

    def leave(self) -> bool:
        """Take the gate off: for an optimizer's step, in a forked child; return True when it was on."""
        return self._gate is not None and self._gate.leave()

    def come_back(self) -> None:
        """Undo a ``leave`` that returned True."""
        if self._gate:
            self._gate.put_back()

    def written(self, tensors: Iterable[Any]) -> None:
        """Say that these no longer hold what was copied to them: an optimizer steps on them."""
        if self._gate:
            self._gate.forget(tensors)

    def told(self, tensor: Any) -> Any:
        """Return a tensor's values as a CPU tensor, and whether they are assumed; None when nobody knows them."""
        if self._gate is None:
            return None
        known = self._gate.mirror.known
        known.saw_assumed = False
        try:
            return known.host(tensor).clone(), known.saw_assumed
        except NotHere:
            return None

    def learn(self, tensor: Any, told: Any) -> None:
        """Give a tensor what another rank's ``told`` returned."""
        if self._gate is None:
            return
        known = self._gate.mirror.known
        if told is None:
            known.forget(tensor)
            return
        values, assumed = told
        whole = known.entry(tensor) is not None or covers_storage(tensor)
        host_view(tensor).copy_(values.view(tensor.shape))
        if whole:
            known.add(tensor, assumed=assumed)

    def _unknown(self, operation: str, affects_memory: bool | None, bounds: Bounds | None, assumed: bool) -> None:
        line, saving = _user_line(self._torch)
        if saving:
            operation, affects_memory, assumed = SAVING, False, False
            line = next((at for at, what in self._counts if what == SAVING), line)
        key = (line, operation)
        if affects_memory is not False and self._gate is not None and self._gate.paused:
            self.in_compiled_code = True
        with self._lock:
            entry = self._counts.setdefault(key, [0, affects_memory, None, None, None])
            entry[0] += 1
            if bounds is not None:
                entry[2] = bounds.least if entry[2] is None else min(entry[2], bounds.least)
                entry[3] = None if bounds.most is None else max(entry[3] or 0, bounds.most)
            entry[4] = self._taken(bounds, assumed, entry[4])
            one_of_several = bounds is None or (bounds.most is not None and bounds.most > bounds.least)
            self.depends |= assumed and one_of_several and affects_memory is not False

    def _taken(self, bounds: Bounds | None, assumed: bool, before: str | None) -> str | None:
        """Return how the counts of a line are answered: one that merely follows from assumed values says least."""
        if bounds is None or bounds.follows is not None:
            return before or ("assumed" if assumed else None)
        return "most" if self._many and bounds.most is not None else "least"

    def as_list(self) -> list[dict[str, Any]]:
        """Return the reads, those that can change the memory first."""
        order = {True: 0, None: 1, False: 2}
        found = sorted(self._counts.items(), key=lambda item: (order[item[1][1]], -item[1][0]))
        return [
            {
                "location": location,
                "operation": operation,
                "count": count,
                "affects_memory": affects,
                "least": least,
                "most": most,
                "taken": taken,
            }
            for (location, operation), (count, affects, least, most, taken) in found
        ]

    def notes(self) -> list[str]:
        """Return what must be said of the reads as a whole."""
        if not self.in_compiled_code:
            return []
        return [
            "numbers were read within torch.compile'd code, at its graph breaks; there small tensors are not computed "
            "on the CPU, so such a read is zero unless the number was known before"
        ]


def fold_constants(device: Device, config: dict[str, Any]) -> None:
    """Have torch.compile fold constants as on a GPU where no mirror is on: that's PyTorch's own, not the script's."""
    mirror = Mirror(device, limit_bytes=config["keep_bytes"], on_unknown=lambda *read: None)
    surroundings.cover_constant_folding(mirror)


def _user_line(torch: ModuleType) -> tuple[str, bool]:
    """Return "file.py:12" of the innermost frame of the user's own code, of a library's when there is none.

    And whether it is within saving tensors to a file.
    """
    frame: FrameType | None = sys._getframe(1)
    fallback, saving = "", False
    while frame is not None:
        saving = saving or any(saver in frame.f_code.co_filename for saver in _SAVERS)
        kind = _kind(frame.f_code.co_filename, torch)
        if kind != "ours":
            line = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
            if kind == "user":
                return line, saving
            fallback = fallback or line
        frame = frame.f_back
    return fallback or "(inside the backward pass)", saving


def user_stack(torch: ModuleType, frames: list[dict[str, Any]]) -> list[str]:
    """Return a recorded stack for people, innermost first: the user's lines and the libraries' that they call.

    Of a deep stack the innermost lines are shown, and the user's innermost line in any case.
    """
    shown = stack_lines(torch, frames)[:STACK_LINES]
    users = stack_lines(torch, [f for f in frames if _kind(f["filename"], torch) == "user"])
    if users and users[0] not in shown:
        shown[-1] = users[0]
    return shown


def stack_lines(torch: ModuleType, frames: list[dict[str, Any]]) -> list[str]:
    """Return "file.py:12 function" for each frame outside torch, innermost first."""
    return [
        f"{_short(frame['filename'])}:{frame['line']} {frame['name']}"
        for frame in frames
        if frame["filename"].endswith(".py") and _kind(frame["filename"], torch) != "ours"
    ]  # not the C++ frames that a script may have asked for


def _kind(filename: str, torch: ModuleType) -> str:
    torch_folder = os.path.dirname(torch.__file__ or "")
    own_folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if filename.startswith((torch_folder, own_folder, "<frozen", "<string>")):
        return "ours"
    return (
        "library"
        if f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}lib{os.sep}python" in filename
        else "user"
    )


def _short(filename: str) -> str:
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if generated and filename.startswith(generated + os.sep):
        return "(code generated by torch.compile)"
    if f"{os.sep}site-packages{os.sep}" in filename:
        return filename.rsplit(f"{os.sep}site-packages{os.sep}", 1)[1]
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
