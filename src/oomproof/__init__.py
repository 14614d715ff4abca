"""Exact GPU memory of an unmodified PyTorch training script, without a GPU."""

__version__ = "0.1.0"
