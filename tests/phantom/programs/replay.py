"""Give segments to the device library and take them back as a recorded run did, and print their addresses.

An event may say how far from the first segment its own has to lie, as the replay of a snapshot does.

Runs in the tested interpreter, which may have neither pytest nor what oomproof needs.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from oomproof.phantom import standins
from oomproof.phantom.device import USUAL_PLACE, Device


def replay(job: dict[str, Any]) -> list[int]:
    folder, manifest = standins.ensure(standins.find_torch())
    library = ctypes.CDLL(str(folder / standins.DEVICE_LIBRARY))
    library.oom_alloc.restype = ctypes.c_void_p
    library.oom_alloc.argtypes = (ctypes.c_int, ctypes.c_size_t)
    library.oom_free.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    device = Device(library)
    device.configure(
        [job["gpu"]],
        state_path=None,
        unlimited=True,
        rising_addresses=job["rising"],
        keep_bytes=0,
        driver_version=int(str(manifest["cuda_version"])),
    )
    ours: dict[int, int] = {}
    given: list[int] = []
    wanted: list[int] = []
    if any(len(event) > 3 for event in job["events"]):
        device.on_place(lambda size: given[0] + wanted[0] if wanted else USUAL_PLACE, lambda address: None)
    for action, address, size, *distance in job["events"]:
        wanted[:] = distance
        if action == "segment_alloc":
            ours[address] = library.oom_alloc(0, size)
            given.append(ours[address])
        elif address in ours:
            assert library.oom_free(ours.pop(address), None) == 0
    return given


if __name__ == "__main__":
    print(json.dumps(replay(json.loads(Path(sys.argv[1]).read_text()))))
