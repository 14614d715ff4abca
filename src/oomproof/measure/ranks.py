"""Which ranks of a world can differ in memory, told from the process groups of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: More ranks than this are not measured: of a longer group, ranks evenly apart.
MOST_RANKS = 32


def that_can_differ(groups: Sequence[Mapping[str, Any]], size: int, rank: int) -> list[int]:
    """Return the ranks worth measuring beside ``rank``, in ascending order, ``rank`` included.

    ``groups`` are the findings' ``groups`` of that rank: its position along each dimension of the parallel layout.
    Where ranks of a group send to single others (pipeline stages, rings) each may do different work. Elsewhere shards
    are cut by ``torch.chunk``: the first ranks hold full ones, the last rank the rest.
    """
    chosen = {rank, 0, size - 1}
    for group in groups:
        ranks = group["ranks"]
        chosen.update(ranks if group["sends"] else (ranks[0], ranks[-1]))
    every = sorted(r for r in chosen if r < size)
    if len(every) <= MOST_RANKS:
        return every
    apart = {every[round(i * (len(every) - 1) / (MOST_RANKS - 1))] for i in range(MOST_RANKS)}
    return sorted(apart | {rank})


def which_were_measured(
    ranks: Sequence[int], wanted: Sequence[int], size: int, senders: Sequence[int] = ()
) -> list[str]:
    """Return the notes that say which ranks of a world the figures are of, out of those ``wanted``.

    ``senders`` were run beside them.
    """
    if size == 1:
        return ["measured: the only rank of a world of 1"]
    if len(ranks) == size:
        note = f"measured: {_named(ranks)}, which are all of a world of {size}"
    else:
        note = f"measured: {_named(ranks)} of a world of {size}, whose other ranks do not exist"
    if len(wanted) == 1:
        note += "; --ranks worst measures every rank that can differ"
    beside = "it" if len(ranks) == 1 else "them"
    return [note, *([f"run beside {beside} for what they send: {_named(senders)}"] if senders else [])]


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
