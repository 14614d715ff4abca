"""Training steps that survive an out-of-memory as the same step. Runs in the user's process; Python 3.9."""

from __future__ import annotations

from oomproof.guard.guard import Guard
from oomproof.guard.refusal import GuardError

__all__ = ["Guard", "GuardError"]
