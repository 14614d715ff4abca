"""Run a few lines of Python in a child process that has the phantom GPU, and get one value back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"

PREAMBLE = """
import json, os, sys
sys.path.insert(0, {source!r})
from oomproof.phantom import standins
from oomproof.phantom.device import Device
try:
    folder, manifest = standins.ensure(standins.find_torch())
except standins.NoCUDATorch as error:
    print(error)
    sys.exit(77)
os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
device = Device(standins.load(folder, manifest))
device.configure([dict(
    name="Tesla T4", memory=15642329088, nvml_memory=16106127360, context=141426688, l2=4 << 20,
    shared_per_block=49152, shared_per_block_optin=65536, shared_per_sm=65536, shared_reserved=0, major=7, minor=5,
    sm_count=40, threads_per_sm=1024, blocks_per_sm=16, registers_per_sm=65536, clock_khz=1590000,
    memory_clock_khz=5001000, bus_bits=256, binary_version=75, mig=0, pad=0,
)], state_path=None, unlimited=False, rising_addresses=False, keep_bytes=1 << 20,
    driver_version=manifest["cuda_version"])
import torch
import torch.nn.functional as F
from oomproof.measure.gate import Gate
from oomproof.measure.values import KeptValues, Mirror
unknown = []
bounds = []
def told(operation, affects_memory, between, assumed):
    unknown.append([operation, affects_memory])
    bounds.append([operation.split(" ")[0], *(between or (None, None)), assumed])
mirror = Mirror(device, many={many}, on_unknown=told)
def watch():
    device.on_read(mirror.on_read)
    Gate(mirror).__enter__()
if {mirrored}:
    watch()
"""


#: The interpreter whose torch is tested.
PYTHON = os.environ.get("OOMPROOF_TEST_PYTHON") or sys.executable


def in_child(code: str, *, mirrored: bool = True, many: bool = False) -> Any:
    """Run ``code``, which leaves its findings in ``result``, and return them; None without a CUDA build of torch."""
    script = PREAMBLE.format(source=str(SOURCE), mirrored=mirrored, many=many) + textwrap.dedent(code)
    # Leaving at once: torch 2.14 may abort when the interpreter ends while autograd's thread lets go of objects.
    script += "\nprint('\\nRESULT ' + json.dumps(result), flush=True)\nimport os\nos._exit(0)\n"
    environment = {"OOMPROOF_PYTHON": sys.executable, **os.environ}
    done = subprocess.run([PYTHON, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        return None
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("RESULT ")[2])
