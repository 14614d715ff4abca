"""How long the choice per block takes: 128 blocks with 5 actions each.

    python benchmarks/blocks.py [--busy]        (under a minute; numpy and scipy, no torch)

Once all blocks are different, once all are the same and once they are the same but no order of actions serves both
directions, so that each block is decided for itself. Budgets go from 5 % to 100 % of what all blocks retain when they
keep everything, above what is there without them. Fails if more memory ever gives a slower choice. ``--busy`` keeps
each core busy with another process meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time

from oomproof.plan.blocks import Action, BlockGroup, Choice, Problem, solve

BLOCKS = 128
SEEDS = 3
MIB = 1 << 20
BUSY_SECONDS = 600


def group(draw: random.Random, count: int = 1, *, ordered: bool = True) -> BlockGroup:
    """Return blocks like those of a language model: bytes of a multiple of 512, times of a roofline."""
    kept = draw.randint(400, 1800) * 1024 * 512
    entered = int(kept * draw.uniform(0.03, 0.06)) // 512 * 512
    part = int(kept * draw.uniform(0.35, 0.6)) // 512 * 512
    inner = kept // 5
    copied = kept / 20e9  # over the bus, of which some is hidden
    forward = copied * draw.uniform(0.8, 2.0)
    # An offload whose blocks come back in parts is best first in forward and best last in backward.
    returned = kept if ordered else kept // 2
    figures = [
        ("keep", kept, kept + inner, inner, 0.0),
        ("recompute", entered, entered + inner + kept // 3, kept + inner, forward),
        ("selective", part, part + inner + kept // 8, kept - part + inner, forward * draw.uniform(0.05, 0.3)),
        ("offload", entered // 2, inner + kept - kept // 3, returned + inner, copied * draw.uniform(0.4, 1.0)),
        ("recompute, input offloaded", 0, entered + inner + kept // 3, kept + inner, forward + copied * entered / kept),
    ]
    actions = tuple(
        Action(
            name=name,
            retained_bytes=retained,
            forward_transient_bytes=up,
            backward_transient_bytes=down,
            seconds=seconds,
        )
        for name, retained, up, down, seconds in figures
    )
    return BlockGroup(actions=actions, gradient_bytes=draw.randint(1, 3) * MIB, count=count)


def problems(seed: int) -> dict[str, Problem]:
    """Return one problem of each kind."""
    draw = random.Random(seed)
    outside = {"base_bytes": 10 << 30, "tail_bytes": 1 << 30, "tail_left_bytes": 64 * MIB}
    return {
        "all different": Problem(groups=tuple(group(draw) for _ in range(BLOCKS)), **outside),
        "identical": Problem(groups=(group(draw, BLOCKS),), **outside),
        "identical, no order": Problem(groups=(group(draw, BLOCKS, ordered=False),), **outside),
    }


def main() -> None:
    """Print the longest and the median time of a solve, for each kind of problem."""
    parser = argparse.ArgumentParser(description="Time the choice per block.")
    parser.add_argument("--busy", action="store_true", help="keep each core busy with another process")
    busy = []
    if parser.parse_args().busy:
        busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
        for process in busy:
            process.start()
    solve(next(iter(problems(0).values())), 1 << 50)  # imports scipy
    times: dict[str, list[tuple[float, float]]] = {}
    fitting: dict[str, int] = {}
    for seed in range(SEEDS):
        for kind, problem in problems(seed).items():
            kept = sum(block.actions[0].retained_bytes for block in problem.blocks)
            above = problem.predict(["keep"] * BLOCKS).peak_bytes - problem.base_bytes - kept
            slowest = float("inf")
            for percent in range(5, 101, 5):
                budget = problem.base_bytes + above + kept * percent // 100
                started, cpu = time.perf_counter(), time.process_time()
                found = solve(problem, budget)
                times.setdefault(kind, []).append((time.perf_counter() - started, time.process_time() - cpu))
                if isinstance(found, Choice):
                    fitting[kind] = fitting.get(kind, 0) + 1
                    assert found.proven
                    assert found.peak_bytes <= budget
                    assert found.seconds <= slowest, (kind, seed, percent)
                    slowest = found.seconds
                else:
                    assert slowest == float("inf"), (kind, seed, percent)
    for process in busy:
        process.terminate()
    print(f"{BLOCKS} blocks x 5 actions, {os.cpu_count()} cores{', busy' if busy else ''}")
    for kind, taken in times.items():
        wall, cpu_time = (sorted(column) for column in zip(*taken, strict=True))
        print(
            f"{kind:22} longest {wall[-1]:5.2f} s ({cpu_time[-1]:.2f} s CPU)   median {wall[len(wall) // 2]:5.2f} s   "
            f"{len(taken)} budgets, {fitting[kind]} can be met; monotone"
        )


def spin() -> None:
    """Keep a core busy, but not for ever."""
    end = time.monotonic() + BUSY_SECONDS
    while time.monotonic() < end:
        pass


if __name__ == "__main__":
    main()
