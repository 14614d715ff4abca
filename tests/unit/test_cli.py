"""The command line: what is wrong with a request is said in one message, with exit code 64."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from measurement_samples import fitting

from oomproof import cli
from oomproof.cli.run import Progress, exit_code, larger_gpu, parse_steps
from oomproof.errors import UsageError
from oomproof.gpus import all_gpus
from oomproof.measure.measurement import Demand, Rank


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["oomproof", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script that would fail the test if it ran."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("raise SystemExit('must not run')")
    return "a.py"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "ommand"),
        (["run", "--"], "ommand"),
        (["run", "--gpu", "a10o", "--", "a.py"], "a100"),
        (["run", "--gpu", "", "--", "a.py"], "no GPU is called ''"),
        (["run", "--memory", "lots", "--", "a.py"], "lots"),
        (["run", "--memory", "20", "--", "a.py"], "write it with its unit"),
        (["run", "--memory", "-3GiB", "--", "a.py"], "-3GiB"),
        (["run", "--memory", "0", "--", "a.py"], "0"),
        (["run", "--gpu", "t4", "--gpu-file", "x.toml", "--", "a.py"], "one of them"),
        (["run", "--steps", "0", "--", "a.py"], "at least 1"),
        (["run", "--steps", "-1", "--", "a.py"], "at least 1"),
        (["run", "--steps", "some", "--", "a.py"], "or all"),
        (["run", "--world-size", "-1", "--", "a.py"], "a world of -1 ranks; it must have at least 1\n"),
        (["run", "--world-size", "8", "--gpus", "3", "--", "a.py"], "3 GPUs in each machine do not divide"),
        (["run", "--values", "guess", "--", "a.py"], "mirror, keep"),
        (["run", "--platform", "amiga", "--", "a.py"], "linux, wsl"),
        (["run", "--snapshot", "--", "a.py"], "-o FILE.oomp"),
        (["run", "-o", "no/such/folder/x.oomp", "--", "a.py"], "create it first"),
        (["run", "-o", ".", "--", "a.py"], "is a folder"),
        (["run", "--", "b.py"], "b.py"),
        (["run", "--", "no-such-program"], "no-such-program"),
        (["run", "--no-such-option", "--", "a.py"], "No such option"),
        (["plan", "--resume", "x", "--resume=y", "--", "a.py"], "--resume is given 2 times; give it once"),
        (["plan", "-o", "x", "--output", "y", "--", "a.py"], "--output is given 2 times"),
        (["plan", "--gpu", "t4", "a.py"], "write -- before the command"),
        (["plan", "a.py", "--gpu", "t4"], "oomproof plan [OPTIONS] -- python train.py"),
        (["plan", "--"], "ommand"),
        (["apply", "p.toml", "a.py"], "oomproof apply [OPTIONS] PLAN -- python train.py"),
        (["apply", "p.toml", "--phantom", "t4", "--", "a.py"], "options before that"),
        (["apply", "p.toml", "--"], "write -- before the command"),
        (["apply", "p.toml"], "ommand"),
        (["apply", "--phantom", "t4", "--phantom", "a100", "p.toml", "--", "a.py"], "--phantom is given 2 times"),
        (["apply", "--phantom", "t4", "--gpu-file", "x.toml", "a.py", "--", "a.py"], "a.py is no plan"),
        (["apply", "p.toml", "--", "a.py"], "cannot read p.toml"),
        (["no-such-verb"], "No such command"),
        (["gpus", "rtx-999"], "rtx"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, arguments: list[str], said: str
) -> None:
    """Exit code 64 and a message that names the fault; nothing is run."""
    assert call(monkeypatch, *arguments) == 64
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert "must not run" not in captured.err


def test_files_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, script: str
) -> None:
    """A malformed GPU file or capture is named, with what is wrong in it."""
    (tmp_path / "gpu.toml").write_text("name = ")
    assert call(monkeypatch, "run", "--gpu-file", "gpu.toml", "--", script) in (1, 64)
    assert "gpu.toml" in capsys.readouterr().err
    assert call(monkeypatch, "run", "--gpu-file", "none.toml", "--", script) in (1, 64)
    assert "none.toml" in capsys.readouterr().err
    (tmp_path / "x.oomp").write_text("nonsense")
    assert call(monkeypatch, "report", "x.oomp") == 1
    assert "x.oomp" in capsys.readouterr().err
    assert call(monkeypatch, "report", "none.oomp") in (1, 64)
    assert "none.oomp" in capsys.readouterr().err


def test_help_and_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every verb explains itself; --version prints one line."""
    for arguments in (["--help"], ["run", "-h"], ["report", "-h"], ["triage", "-h"], ["gpus", "-h"], ["doctor", "-h"]):
        assert call(monkeypatch, *arguments) == 0
        assert "Usage" in capsys.readouterr().out
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("oomproof ")


def test_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C is told in one line."""

    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    assert call(monkeypatch, "run") == 130
    assert "interrupted" in capsys.readouterr().err


def test_no_linux_no_phantom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str) -> None:
    """Elsewhere than on Linux run says where it would work."""
    monkeypatch.setattr("oomproof.api.sys.platform", "darwin")
    assert call(monkeypatch, "run", "--", script) == 1
    assert "needs Linux" in capsys.readouterr().err


def test_steps() -> None:
    """--steps is a number or all."""
    assert parse_steps("7") == 7
    assert parse_steps("all") is None
    with pytest.raises(UsageError):
        parse_steps("3.5")


def test_exit_codes() -> None:
    """0 fits, 2 does not, 1 no verdict."""
    from measurement_samples import fitting, not_fitting, untouched

    assert [exit_code(m) for m in (fitting(), not_fitting(), untouched())] == [0, 2, 1]


def demand(device_bytes: int) -> Demand:
    return Demand(allocated_bytes=device_bytes, reserved_bytes=device_bytes, device_bytes=device_bytes)


def test_the_larger_gpu_is_larger() -> None:
    """It is the smallest that every rank's demand fits, and has more memory than --memory gave the one measured."""
    from measurement_samples import T4, not_fitting, peak

    from oomproof.gpus import get_gpu
    from oomproof.units import GIB

    small, large = demand(3 * GIB), demand(22 * GIB)
    given = dataclasses.replace(T4, memory_bytes=20 * GIB)
    for measured, least in (
        (not_fitting(demand=small, gpu=dataclasses.replace(T4, memory_bytes=2 * GIB)), 3 * GIB),
        (not_fitting(demand=large, gpu=given), 22 * GIB),
        (not_fitting(demand=small, gpu=given), 20 * GIB + 1),  # fragmented: no room along the way
        (
            not_fitting(
                demand=small,
                ranks=(Rank(rank=3, device=0, peak=peak(30 * GIB, 35 * GIB), verdict="does-not-fit"),),
            ),
            35 * GIB,
        ),
    ):
        key = larger_gpu(measured)
        assert key is not None
        larger = get_gpu(key).memory_bytes
        assert larger >= least
        others = [g.memory_bytes for g in all_gpus() if not g.mig and g.compute_capability >= (7, 5)]
        assert not [size for size in others if 1.02 * least < size < larger]
    assert larger_gpu(not_fitting(demand=demand(900 * GIB))) is None


def told(rank: int, step: int, run: int = 1) -> dict[str, object]:
    """Return what the measuring says of a step."""
    figures = {"allocated_bytes": 1 << 30, "reserved_bytes": 2 << 30, "seconds": 1.0}
    return {"rank": rank, "step": step, "run": run, "purpose": "gpu", **figures}


def test_progress_has_the_rank_of_a_world(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0's lines too, where single ranks are measured; elsewhere there is no other rank to tell it from."""
    in_world = Progress("3", in_world=True)
    for rank in (0, 5):
        in_world(told(rank, 1, run=rank + 1))
    Progress("all")(told(0, 1))
    starts = [line.partition(": allocated")[0] for line in capsys.readouterr().err.splitlines()]
    assert starts == ["oomproof: rank 0: step 1 of 3", "oomproof: rank 5: step 1 of 3", "oomproof: step 1"]


def test_a_large_world_without_a_step_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Only while there is no step: then the steps themselves show that it goes on."""
    progress = Progress("3", in_world=True)
    progress.still_waiting(20_000)
    assert "no step yet; for a world of 20,000 ranks" in capsys.readouterr().err
    progress(told(0, 1))
    capsys.readouterr()
    progress.still_waiting(20_000)
    assert capsys.readouterr().err == ""


def test_what_was_typed_for_plan_is_typed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Options with their default are left out, flags have no value."""
    seen = {}

    def after(planned: object, saved: object, options: dict[str, str | None]) -> object:
        seen.update(options)
        raise UsageError("that was it")

    monkeypatch.setattr(cli.plan, "plan", lambda *_, **__: SimpleNamespace(plan=None))
    monkeypatch.setattr(cli.plan, "after", after)
    given = (
        "--memory 4GiB --only a,b --without c --allow equal --gpus 2 --steps 4 --resume r.jsonl --seconds 90 --explore"
    )
    assert call(monkeypatch, "plan", *given.split(), "--", script) == 64
    typed = " ".join(word for pair in seen.items() for word in pair if word is not None)
    assert sorted(typed.split()) == sorted(given.split())


def test_after_a_rehearsal_the_plan_is_kept() -> None:
    """What is proposed has the plan, or makes another for the same GPU."""
    options, command = ["--gpu", "t4", "--memory", "4GiB"], ["train.py", "a  b"]
    applied = [
        cli.apply._after(fitting(verdict=verdict), "my plan.toml", options, command).command
        for verdict in ("fits", "does-not-fit", "unknown")
    ]
    assert applied == [
        "oomproof apply 'my plan.toml' -- train.py 'a  b'",
        "oomproof plan --gpu t4 --memory 4GiB -- train.py 'a  b'",
        "oomproof apply --phantom t4 --memory 4GiB 'my plan.toml' -- train.py 'a  b'",
    ]
