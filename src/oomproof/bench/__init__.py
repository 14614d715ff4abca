"""Many runs of one command, beside one another: on this machine, or through Ray or Slurm."""

from oomproof.bench.bench import EXECUTORS, Bench
from oomproof.bench.request import Done, Request

__all__ = ["EXECUTORS", "Bench", "Done", "Request"]
