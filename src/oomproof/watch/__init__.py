"""Watching real GPUs and the training processes on them; ``publish`` is called from a training script."""

from oomproof.watch.publish import publish

__all__ = ["publish"]
