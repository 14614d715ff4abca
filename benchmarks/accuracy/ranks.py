"""Run the worker of a benchmark on two ranks and print what it reports: ``ranks.py MODULE ARGUMENT``.

For benchmark modules whose ``_worker(rank, world_size, queue, argument)`` is otherwise started on a cloud service.
"""

import importlib
import json
import sys
from typing import Any

import torch.multiprocessing as mp

WORLD_SIZE = 2


def child(rank: int, module: str, queue: Any, argument: Any) -> None:
    """Be one rank, without the CPU's weight initialisation (see without_init.py)."""
    import without_init  # noqa: F401

    importlib.import_module(module)._worker(rank, WORLD_SIZE, queue, argument)


if __name__ == "__main__":
    queue = mp.get_context("spawn").Queue()
    argument = {"true": True, "false": False}.get(sys.argv[2], sys.argv[2])
    mp.spawn(child, args=(sys.argv[1], queue, argument), nprocs=WORLD_SIZE, join=True)
    print(json.dumps(queue.get()))
