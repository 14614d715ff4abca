"""Run one memory measurement of Liger-Kernel's benchmark scripts: ``liger.py NAME PROVIDER MODE X CONFIG_JSON``.

Start it in ``benchmark/scripts`` of a Liger-Kernel checkout with that checkout's package installed. Prints the peak in
MiB, as the scripts do. Several modes with commas run in one process, as the scripts do it; the last one's peak counts.
"""

import importlib
import json
import os
import sys
from typing import Any

import torch


def main(name: str, provider: str, mode: str, x: str, config: dict[str, Any]) -> None:
    sys.path.insert(0, os.getcwd())
    if "dtype" in config:
        config["dtype"] = getattr(torch, config["dtype"].removeprefix("torch."))
    script = importlib.import_module(f"benchmark_{name}")
    measure = next(getattr(script, f) for f in dir(script) if f.startswith("bench_memory_"))
    wanted = importlib.import_module("utils").SingleBenchmarkRunInput
    peak = 0.0
    for each in mode.split(","):
        peak = measure(
            wanted(x=int(x), kernel_provider=provider, kernel_operation_mode=each, extra_benchmark_config=config)
        ).y_50
    print("peak MiB", repr(peak))


if __name__ == "__main__":
    main(*sys.argv[1:5], json.loads(sys.argv[5]))
