"""Which settings a replay uses: those recorded that matter, and those it tries."""

from __future__ import annotations

import pytest

from oomproof.snapshot import Snapshot
from oomproof.snapshot.candidates import candidates, variable
from oomproof.snapshot.replay import _recorded_config


@pytest.mark.parametrize(
    ("recorded", "used"),
    [
        ("", ""),
        ("expandable_segments:True", "expandable_segments:True"),
        ("backend:cudaMallocAsync,max_split_size_mb:128", "max_split_size_mb:128"),
        (
            "roundup_power2_divisions:[256:1,512:2,>:8],pinned_use_background_threads:True",
            "roundup_power2_divisions:[256:1,512:2,>:8]",
        ),
        (" garbage_collection_threshold : 0.8 ", "garbage_collection_threshold:0.8"),
        ("no_such_setting:$(reboot)", ""),
        (5, ""),
    ],
)
def test_recorded_settings_that_change_the_layout(recorded: object, used: str) -> None:
    """Only those are replayed that decide where blocks lie: another version may not know the rest."""
    assert _recorded_config(Snapshot(settings={"PYTORCH_CUDA_ALLOC_CONF": recorded}), False) == used


def test_old_formats_show_expandable_segments_by_themselves() -> None:
    """Before torch 2.4 settings were not recorded."""
    assert _recorded_config(Snapshot(), True) == "expandable_segments:True"


def test_candidates() -> None:
    """The defaults come first; garbage collection needs a limit; the recorded setting is among them, once."""
    assert candidates(limited=False)[0] == ""
    assert not any("garbage" in config for config in candidates(limited=False))
    assert any("garbage" in config for config in candidates(limited=True))
    assert candidates(limited=True, recorded="max_split_size_mb:77")[-1] == "max_split_size_mb:77"
    for recorded in ("", "expandable_segments:True"):
        found = candidates(limited=True, recorded=recorded)
        assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.6.0+cu124", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.8.1", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.0", "PYTORCH_ALLOC_CONF"),
        ("2.14.1+cu130", "PYTORCH_ALLOC_CONF"),
        ("3.0.0a0+git", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_variable_that_a_torch_reads(version: str, name: str) -> None:
    """torch 2.9 renamed it."""
    assert variable(version) == name
