from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from oomproof.errors import UsageError
from oomproof.gpus import get_gpu
from oomproof.watch.slices import print_slices, slices_of, verdict


def test_slices_are_those_of_the_card_smallest_first() -> None:
    """A100 40 GB has its own slices only; a slice leads to its card's."""
    found = slices_of(get_gpu("a100-40gb"))
    assert found == sorted(found, key=lambda gpu: gpu.memory_bytes)
    assert {gpu.key.partition("-mig-")[0] for gpu in found} == {"a100-40gb"}
    assert slices_of(found[0]) == found


def test_a_card_without_slices_is_refused_with_those_that_have_them() -> None:
    """A T4 has no MIG; the message names cards that do."""
    with pytest.raises(UsageError, match="a100-40gb"):
        print_slices("t4")


def test_a_slice_fits_only_above_the_whole_range() -> None:
    """At the high bound it fits, below it perhaps, below the low bound not."""
    from measurement_samples import fitting

    measurement = fitting()
    measurement = dataclasses.replace(
        measurement, demand=dataclasses.replace(measurement.demand, device_bytes=measurement.peak.device_bytes),
        demand_if_many=None,
    )  # fmt: skip
    low, high = measurement.device_bounds
    assert low < high
    assert [verdict(measurement, size) for size in (high, high - 1, low, low - 1)] == [
        "fits", "perhaps", "perhaps", "does not fit",
    ]  # fmt: skip
