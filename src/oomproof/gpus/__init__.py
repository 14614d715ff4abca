"""GPU specs: what a GPU is, the catalogue of known ones, and finding one by name."""

from oomproof.gpus.catalogue import all_gpus
from oomproof.gpus.gpu_file import load_gpu_file, with_memory
from oomproof.gpus.lookup import default_gpu, get_gpu
from oomproof.gpus.spec import GPUSpec

__all__ = ["GPUSpec", "all_gpus", "default_gpu", "get_gpu", "load_gpu_file", "with_memory"]
