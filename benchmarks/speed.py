"""How fast the phantom is, as ratios measured side by side in one run.

    python benchmarks/speed.py            (a few minutes; needs the CUDA build of torch, no GPU)

The model is examples/train_llama.py in the shape of Llama 3 8B: bfloat16, AdamW, one sequence of 4,096 tokens.

1. whole run: ``oomproof run`` with 3 steps, against ``python -c "import torch"``
2. step: a step under the phantom, observed as ``oomproof run`` does, against one of torch's own MemTracker under
   FakeTensorMode
3. observing: the same training without and with observation, whole process and step
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oomproof.gpus import get_gpu
from oomproof.phantom import launch

SCRIPT = Path(__file__).parents[1] / "examples" / "train_llama.py"
REPEATS = 5
STEPS = 12
SETTLED = 3  # the first steps fill caches

TRACKER = """
import sys, time, torch
sys.path.insert(0, {folder!r})
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from train_llama import Llama
import torch.nn.functional as F

torch.set_default_dtype(torch.bfloat16)
with FakeTensorMode(), torch.device("cuda"):
    model = Llama(vocabulary=128256, hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, recompute=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    times = []
    with tracker:
        for _ in range(2):
            started = time.perf_counter()
            tokens = torch.randint(128256, (1, 4097))
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
            tracker.reset_mod_stats()
    print("STEP", min(times))
"""


def main() -> None:
    """Measure and print every ratio with the times it comes from."""
    subprocess.run([sys.executable, "-c", "import torch"], check=True)  # files into the page cache
    oomproof_run([])  # compiles the stand-ins on a new machine
    imports, runs = alternating(lambda: wall([sys.executable, "-c", "import torch"]), lambda: oomproof_run([]))
    print(f"whole run         {runs:6.2f} s   import torch {imports:5.2f} s   {runs / imports:5.2f} x")
    print(f"                  against 2 x import torch + 2 s = {2 * imports + 2:.2f} s")
    bare, watched = alternating(lambda: trained(False), lambda: trained(True))
    print(f"observed step     {watched[0] * 1e3:6.1f} ms  bare {bare[0] * 1e3:6.1f} ms   {watched[0] / bare[0]:5.2f} x")
    print(f"observed 12 steps {watched[1]:6.2f} s   bare {bare[1]:6.2f} s    {watched[1] / bare[1]:5.2f} x")
    three = alternating(lambda: trained(False, 3), lambda: trained(True, 3))
    print(f"observed 3 steps  {three[1][1]:6.2f} s   bare {three[0][1]:6.2f} s    {three[1][1] / three[0][1]:5.2f} x")
    tracked = tracker_step()
    print(
        f"MemTracker step   {tracked:6.2f} s   observed step {watched[0] * 1e3:6.1f} ms  {tracked / watched[0]:5.0f} x"
    )


def alternating(first, second):  # type: ignore[no-untyped-def]
    """Return the medians of two measurements taken in turn, so that a slow spell of the machine hits both."""
    pairs = [(first(), second()) for _ in range(REPEATS)]
    return tuple(middle([pair[i] for pair in pairs]) for i in range(2))


def middle(values):  # type: ignore[no-untyped-def]
    """Return the median of numbers, or of each place of tuples."""
    if isinstance(values[0], tuple):
        return tuple(statistics.median(column) for column in zip(*values, strict=True))
    return statistics.median(values)


def wall(command: list[str]) -> float:
    """Return the seconds a command takes."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def oomproof_run(options: list[str]) -> float:
    """Return the seconds of a whole ``oomproof run`` of the example with 3 steps."""
    return wall([sys.executable, "-m", "oomproof", "run", "-q", "--gpu", "b200", *options, "--", str(SCRIPT)])


def trained(observe: bool, steps: int = STEPS) -> tuple[float, float]:
    """Return (seconds of the fastest settled step, seconds of the whole process) of the example on the phantom."""
    settings = launch.Settings(gpu=get_gpu("b200"), observe=observe, steps=None)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        process = launch.start(
            [sys.executable, str(SCRIPT), "--steps", str(steps)],
            settings,
            Path(folder),
            stdout=subprocess.PIPE,
        )
        output = process.communicate()[0].decode()
        seconds = time.perf_counter() - started
        if process.returncode:
            raise SystemExit(f"{SCRIPT} failed under the phantom:\n{output}")
        if observe:
            json.loads(next(Path(folder).glob("process-*.json")).read_text())  # it was observed
    times = [float(t) for t in re.findall(r"loss \S+, ([\d.]+) s", output)]
    return min(times[SETTLED:] or times), seconds  # the least disturbed step: all settled steps do the same


def tracker_step() -> float:
    """Return the seconds of the faster of two steps of MemTracker under FakeTensorMode.

    It too needs a GPU to exist, so it gets the phantom, unobserved.
    """
    command = [sys.executable, "-c", TRACKER.format(folder=str(SCRIPT.parent))]
    settings = launch.Settings(gpu=get_gpu("b200"), observe=False, steps=None)
    with tempfile.TemporaryDirectory() as folder:
        process = launch.start(command, settings, Path(folder), stdout=subprocess.PIPE)
        output = process.communicate()[0].decode()
    if process.returncode:
        raise SystemExit("MemTracker failed")
    return float(output.split("STEP")[1])


if __name__ == "__main__":
    main()
