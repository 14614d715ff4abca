"""Run a script or a module with the CPU's weight initialisation left out: ``SCRIPT …`` or ``-m MODULE …``.

Some of the compared scripts draw billions of weights on the CPU before they move the model to the GPU, which takes
minutes on a small machine. No byte of device memory depends on those values.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def leave(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the tensor as it is; stands in for ``torch.nn.init.trunc_normal_``."""
    return tensor


torch.nn.init.trunc_normal_ = leave

if __name__ == "__main__":
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        sys.path.insert(0, "")
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
