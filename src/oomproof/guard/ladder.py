"""How large the micro-batches of a step may be, from the whole batch down. Runs in the user's process; Python 3.9."""

from __future__ import annotations

from collections.abc import Iterable

from oomproof.errors import UsageError


class Ladder:
    """Sizes to go down and up: the user's, or divisors of the batch, each at most half of the one above it."""

    def __init__(self, sizes: Iterable[int] | None = None) -> None:
        self._sizes = None if sizes is None else sorted(set(sizes), reverse=True)
        if self._sizes is not None and (not self._sizes or self._sizes[-1] < 1):
            raise UsageError(f"sizes must be positive numbers of samples, such as (32, 16, 8), not {self._sizes}")

    def rungs(self, total: int) -> list[int]:
        """Return the sizes for a batch of ``total`` samples, the whole batch first."""
        if self._sizes is not None:
            return [total, *(size for size in self._sizes if size < total)]
        found = [total]
        for size in range(total // 2, 0, -1):
            if total % size == 0 and size <= found[-1] // 2:
                found.append(size)
        return found

    def below(self, total: int, size: int) -> int | None:
        """Return the next size below ``size``, None at the end."""
        return next((rung for rung in self.rungs(total) if rung < size), None)

    def above(self, total: int, size: int) -> int:
        """Return the next size above ``size``; the whole batch at the top."""
        return next((rung for rung in reversed(self.rungs(total)) if rung > size), total)
