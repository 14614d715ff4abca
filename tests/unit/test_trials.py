"""plan/trials.py: what moves between host and device though no operator copies it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measurement_samples import fitting

from oomproof.measure.measurement import Demand
from oomproof.plan.trials import with_paging
from oomproof.plan.work import Work

GIB = 1 << 30


@pytest.mark.parametrize(("managed", "moved"), [(0, 0), (4 * GIB, 0), (5 * GIB, 1 * GIB), (9 * GIB, 5 * GIB)])
def test_managed_memory_that_does_not_fit_beside_the_rest_moves_both_ways_each_step(managed: int, moved: int) -> None:
    measured = fitting()
    rest = measured.gpu.memory_bytes - 4 * GIB
    demand = Demand(allocated_bytes=rest, reserved_bytes=rest, device_bytes=rest)
    work = with_paging(Work(), replace(measured, demand=demand), managed)
    assert {copy.direction: copy.bytes for copy in work.copies} == ({"h2d": moved, "d2h": moved} if moved else {})
    assert not any(copy.pinned for copy in work.copies)
