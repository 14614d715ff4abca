"""The command line: what is wrong with a request is said in one message, with exit code 64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oomproof import cli
from oomproof.cli.run import exit_code, parse_steps
from oomproof.errors import UsageError


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
        (["run", "--values", "guess", "--", "a.py"], "mirror, keep"),
        (["run", "--platform", "amiga", "--", "a.py"], "linux, wsl"),
        (["run", "--snapshot", "--", "a.py"], "-o FILE.oomp"),
        (["run", "-o", "no/such/folder/x.oomp", "--", "a.py"], "create it first"),
        (["run", "-o", ".", "--", "a.py"], "is a folder"),
        (["run", "--", "b.py"], "b.py"),
        (["run", "--", "no-such-program"], "no-such-program"),
        (["run", "--no-such-option", "--", "a.py"], "No such option"),
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
    for arguments in (["--help"], ["run", "-h"], ["report", "-h"], ["gpus", "-h"], ["doctor", "-h"]):
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
