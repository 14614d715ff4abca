"""PyTorch's memory snapshots: reading them safely, the state at any event, and replays under other settings."""

from oomproof.snapshot.load import load
from oomproof.snapshot.model import Action, Annotation, Block, Events, Frame, Segment, Snapshot, Stacks

__all__ = ["Action", "Annotation", "Block", "Events", "Frame", "Segment", "Snapshot", "Stacks", "load"]
