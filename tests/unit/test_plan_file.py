"""plan.toml and oomproof apply: what is read is what was written, and what would be wrong is refused with the cure."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

import oomproof
from oomproof.errors import PlanError, UsageError
from oomproof.plan.applying import Here, differences, look, with_ranks
from oomproof.plan.document import Plan, read_plan, write_plan
from oomproof.plan.technique import Change

PLAN = Plan(
    changes=(Change("checkpoint-blocks"), Change("optimizer-implementation", {"use": "fused"})),
    command=("python", "train.py", "--lr", "1e-4"),
    script_sha256="ab" * 32,
    gpu="t4",
    gpu_memory_bytes=15_637_086_208,
    capability=(7, 5),
    gpus=1,
    torch="2.14.1+cu130",
    packages={},
    fidelity="equal",
    relative_time=(1.1, 1.2, 1.4),
    device_bytes=12_000_000_000,
    allocated_bytes=11_000_000_000,
    reserved_bytes=11_500_000_000,
    steps=3,
    created="2026-01-02T03:04:05+00:00",
    tool="0.1.0",
)
HERE = Here(script_sha256="ab" * 32, torch="2.14.1", gpu="Tesla T4", gpu_memory_bytes=15_637_086_208, gpus=1)
COMMAND = ["python", "train.py", "--lr", "1e-4"]


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, relative_time=None, script_sha256="", changes=PLAN.changes[:1])])
def test_a_plan_reads_back_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.toml", plan)
    assert read_plan(tmp_path / "plan.toml") == plan
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not = [toml", "not TOML"),
        ('schema = "oomproof.plan/9"', "oomproof.plan/9"),
        ("", "schema"),
        ('schema = "oomproof.plan/1"', "missing"),
        ('schema = "oomproof.plan/1"\nchanges = 3', "damaged"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_cure(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(PlanError, match=said) as caught:
        read_plan(file)
    assert "plan again" in str(caught.value) or "oomproof plan -o" in str(caught.value)


def test_a_technique_of_another_version_is_named(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN.to_toml().replace("checkpoint-blocks", "checkpoint-everything"))
    with pytest.raises(PlanError, match="checkpoint-everything"):
        read_plan(file)


@pytest.mark.parametrize(("tool", "cure"), [("9.9.9", "install that version"), (oomproof.__version__, "techniques.md")])
def test_an_unknown_technique_is_no_reason_to_install_the_version_that_is_there(
    tool: str, cure: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(replace(PLAN, tool=tool).to_toml().replace("checkpoint-blocks", "checkpoint-everything"))
    with pytest.raises(PlanError, match=cure) as caught:
        read_plan(file)
    assert ("install" in str(caught.value)) == (tool != oomproof.__version__)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("gpu_memory_bytes = 15637086208", 'gpu_memory_bytes = "15 GB"'),
        ("gpu_memory_bytes = 15637086208", "gpu_memory_bytes = true"),
        ("steps = 3", "steps = [3]"),
        ('use = "fused"', "other = 1"),
        ("gpus = 1", "gpus = 1.5"),
        ("expected = 1.2", 'expected = "1.2"'),
        ('torch = "2.14.1+cu130"', ""),
        ("compute_capability = [\n    7,\n    5,\n]", "compute_capability = [7]"),
        (
            'schema = "oomproof.plan/1"',
            'schema = "oomproof.plan/1"\nmade_for = 3',
        ),
    ],
)
def test_a_plan_that_was_damaged_by_hand_is_told_with_exit_code_64(before: str, after: str, tmp_path: Path) -> None:
    """Whatever is in it, and never with a traceback later on."""
    text = PLAN.to_toml()
    assert before in text
    file = tmp_path / "plan.toml"
    file.write_text(text.replace(before, after))
    with pytest.raises(PlanError, match=r"plan again|oomproof plan -o") as caught:
        read_plan(file)
    assert caught.value.exit_code == 64


def test_changes_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(replace(PLAN, changes=(*PLAN.changes, Change("checkpoint-blocks"))).to_toml())
    with pytest.raises(PlanError, match="there twice"):
        read_plan(file)
    excluding = Change("optimizer-8bit", {"library": "bitsandbytes", "bits": 8})
    file.write_text(replace(PLAN, changes=(*PLAN.changes, excluding)).to_toml())
    with pytest.raises(PlanError, match="optimizer-implementation and optimizer-8bit exclude each other"):
        read_plan(file)


def test_a_plan_is_read_and_written_by_the_name_of_its_file(tmp_path: Path) -> None:
    name = str(tmp_path / "plan.toml")
    write_plan(name, PLAN)
    assert read_plan(name) == read_plan(Path(name)) == PLAN


def test_without_a_gpu_applying_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 64: nothing was trained."""

    def none() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", none)
    with pytest.raises(PlanError, match="--phantom") as caught:
        look(["python", "train.py"], [sys.executable], Path("/"), real=True)
    assert caught.value.exit_code == 64


def test_a_missing_file_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="oomproof plan -o"):
        read_plan(tmp_path / "none.toml")


def test_where_nothing_differs_nothing_is_said() -> None:
    assert differences(PLAN, COMMAND, HERE) == ([], [])


@pytest.mark.parametrize(
    ("here", "command", "wrong", "other"),
    [
        (replace(HERE, script_sha256="cd" * 32), ["python", "other.py"], "another script", ""),
        (replace(HERE, script_sha256="cd" * 32), COMMAND, "", "has changed"),
        (replace(HERE, torch="2.11.0"), COMMAND, "", "2.11.0"),
        (replace(HERE, gpu_memory_bytes=8 << 30, gpu="GTX 1080"), COMMAND, "GTX 1080", ""),
        (replace(HERE, gpu_memory_bytes=80 << 30, gpu="A100"), COMMAND, "", "A100"),
        (replace(HERE, gpus=0), COMMAND, "GPUs", ""),
        (HERE, ["python", "train.py", "--lr", "3e-4"], "", "--lr (planned 1e-4, given 3e-4)"),
        (HERE, ["/opt/venv/bin/python3", "./train.py"], "", "--lr (planned 1e-4, given without it)"),
        (HERE, [*COMMAND, "--fp16"], "", "--fp16 (planned without it, given with it)"),
        (HERE, ["python", "train.py", "data", "--lr=1e-4"], "", "arguments (planned none, given data)"),
        (HERE, [*COMMAND, "data.batch=-8"], "", "data.batch (planned without it, given -8)"),
        (HERE, ["torchrun", "--standalone", *COMMAND[1:]], "", "given torchrun --standalone"),
        (replace(HERE, script_sha256=None), ["python", "-m", "other"], "other", ""),
    ],
)
def test_what_differs_is_said_and_what_would_be_wrong_is_told_apart(
    here: Here, command: list[str], wrong: str, other: str
) -> None:
    found_wrong, found_other = differences(PLAN, command, here)
    assert bool(found_wrong) == bool(wrong)
    assert wrong in " ".join(found_wrong)
    assert bool(found_other) == bool(other)
    assert other in " ".join(found_other)


def test_a_change_that_only_a_person_can_make_is_not_applied() -> None:
    wrong, _ = differences(replace(PLAN, changes=(Change("drop-outputs"),)), COMMAND, HERE)
    assert "only you" in wrong[0]


def test_several_gpus_are_started_by_torchrun() -> None:
    line = with_ranks(["/usr/bin/python3", "train.py", "--lr", "1"], 4)
    assert line[:4] == ["/usr/bin/python3", "-m", "torch.distributed.run", "--standalone"]
    assert line[-3:] == ["train.py", "--lr", "1"]
    with pytest.raises(UsageError, match=r"train\.py"):
        with_ranks(["/usr/bin/torchrun", "train.py"], 4)
