"""What ``oomproof.watch.publish()`` costs a training loop: the same 10 ms steps with and without it, in turns.

Run under the phantom, whose allocator is PyTorch's own, or on a GPU: ``python benchmarks/watch.py``.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from oomproof.watch import publish

STEP_SECONDS = 0.010
STEPS, TURNS = 50, 6


def loop(each: bool) -> float:
    """Return the seconds that a turn's steps took: each waits until 10 ms of its own have passed, then publishes."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        until = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < until:
            pass
        if each:
            publish()
    return time.perf_counter() - begin


def main() -> None:
    """Print the ratios of the turns, and the processor time within publish, which other load disturbs less."""
    blocks = [torch.empty(1 << 20, device="cuda") for _ in range(200)]
    loop(True)
    without, with_it = zip(*[(loop(False), loop(True)) for _ in range(TURNS)], strict=True)
    ratios = [after / before - 1 for before, after in zip(without, with_it, strict=True)]
    print(
        f"{len(blocks)} blocks, {STEPS} steps of 10 ms, {TURNS} turns side by side: "
        f"{statistics.median(ratios):+.2%} of a step, turns from {min(ratios):+.2%} to {max(ratios):+.2%}",
        file=sys.stderr,
    )
    spent, count = 0.0, STEPS * TURNS
    for _ in range(count):
        time.sleep(STEP_SECONDS)
        begin = time.thread_time()
        publish()
        spent += time.thread_time() - begin
    share = spent / (count * STEP_SECONDS)
    print(f"processor time within publish(): {share:.2%} of a 10 ms step, {count} steps", file=sys.stderr)


if __name__ == "__main__":
    main()
