"""``oomproof run`` on the command line: output, exit codes, interruption, the cache of stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child import PYTHON, Child

from oomproof.capture import read_capture

MARKED = "OOMPROOF_TEST_RUN"  # an environment variable by which the processes of one run are found


def oomproof(*arguments: str, folder: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    command = [sys.executable, "-m", "oomproof", *arguments]
    environment = {**os.environ, "COLUMNS": "100", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def train(size):
    import torch

    net = torch.nn.Linear(1024, size * 256, bias=False).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        net(torch.zeros(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("the script says", step)


def test_report_json_and_capture_agree(child: Child) -> None:
    """The report names verdict and peak; JSON is alone on standard output; the capture holds the same figures."""
    script = str(child.script(train, 64))
    shown = oomproof("run", "--gpu", "t4", "-o", "a.oomp", "--", PYTHON, script, folder=child.folder)
    assert shown.returncode == 0, shown.stderr
    assert "the script says 0" in shown.stdout
    assert "FITS" in shown.stdout
    assert "Tesla T4" in shown.stdout
    assert "step 1 of 3" in shown.stderr
    captured = read_capture(child.folder / "a.oomp")
    assert f"{captured.peak.allocated_bytes:,}" in shown.stdout

    plain = oomproof("run", "--gpu", "t4", "--json", "--", PYTHON, script, folder=child.folder)
    assert plain.returncode == 0
    data = json.loads(plain.stdout)
    assert data["schema"] == "oomproof.measurement/1"
    assert data["peak"] == captured.to_json()["peak"]
    assert data["breakdown"] == captured.to_json()["breakdown"]
    assert "the script says 0" in plain.stderr

    again = oomproof("report", "--json", "a.oomp", folder=child.folder)
    assert json.loads(again.stdout) == captured.to_json()


def test_exit_code_says_whether_it_fits(child: Child) -> None:
    """2 when it does not fit, 1 when the script fails; -q hides what the script prints."""
    script = str(child.script(train, 1024))
    small = oomproof("run", "-q", "--memory", "2GiB", "--", PYTHON, script, folder=child.folder)
    assert small.returncode == 2, small.stderr
    assert "DOES NOT FIT" in small.stdout.upper()
    assert "the script says" not in small.stdout + small.stderr

    (child.folder / "bad.py").write_text("import torch\ntorch.zeros(1, device='cuda')\n1 / 0\n")
    failed = oomproof("run", "--", PYTHON, "bad.py", folder=child.folder)
    assert failed.returncode == 1
    assert "ZeroDivisionError" in failed.stderr


def test_modules_and_shell_scripts(child: Child) -> None:
    """What follows -- may be a script, -m module, -c code or any command that starts Python somewhere below."""
    package = child.folder / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(child.script(train, 16).read_text())
    (child.folder / "go.sh").write_text(f"cd . && {PYTHON} -m pkg | cat\n")
    peaks = set()
    for command in ([PYTHON, "-m", "pkg"], ["bash", "go.sh"]):
        done = oomproof("run", "-q", "--json", "--", *command, folder=child.folder)
        assert done.returncode == 0, done.stderr
        peaks.add(json.loads(done.stdout)["peak"]["allocated_bytes"])
    assert len(peaks) == 1


def test_snapshot_goes_into_the_capture(child: Child) -> None:
    """With --snapshot the capture has PyTorch's own pickle beside the measurement and the profile."""
    import zipfile

    script = str(child.script(train, 16))
    done = oomproof("run", "-q", "--snapshot", "-o", "s.oomp", "--", PYTHON, script, folder=child.folder)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(child.folder / "s.oomp") as archive:
        assert sorted(archive.namelist()) == ["measurement.json", "profile.json", "snapshot.pickle"]


def processes(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARKED}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


def interruptible() -> None:
    """Undo what a shell does to its background jobs: it has them ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("stubborn", [False, True])
def test_interrupt_ends_everything(child: Child, stubborn: bool, tmp_path: Path) -> None:
    """Ctrl-C: exit code 130, no process or folder left, a capture whole or none; also when a script ignores it."""

    def body(stubborn):
        import signal
        import subprocess
        import sys
        from pathlib import Path

        import torch

        if stubborn:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        torch.zeros(1, device="cuda")
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path("ready").write_text("")
        while True:
            torch.zeros(1, device="cuda")

    script = child.script(body, stubborn)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    mark = str(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "oomproof", "run", "-o", "x.oomp", "--", PYTHON, str(script)],
        cwd=child.folder,
        env={**os.environ, MARKED: mark, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    while not (child.folder / "ready").exists() and process.poll() is None:
        time.sleep(0.05)
    for _ in range(100):  # the last one may still be starting
        if len(processes(mark)) >= 3:
            break
        time.sleep(0.1)
    assert len(processes(mark)) >= 3
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr.split("KeyboardInterrupt")[-1]
    for _ in range(100):
        if not processes(mark):
            break
        time.sleep(0.05)
    assert processes(mark) == []
    capture = child.folder / "x.oomp"
    assert not capture.exists() or read_capture(capture).ended == "interrupted"
    assert [path.name for path in child.folder.glob("*.oomp*")] in ([], ["x.oomp"])
    assert list(temporary.glob("oomproof-*")) == []


def test_no_room_in_the_cache_folder(child: Child) -> None:
    """A cache folder that cannot be written is told with the way out."""
    (child.folder / "cache").write_text("a file, not a folder")
    done = oomproof(
        "run", "--", PYTHON, str(child.script(train, 1)), folder=child.folder, env={"OOMPROOF_CACHE": "cache/below"}
    )
    assert done.returncode == 1
    assert "OOMPROOF_CACHE" in done.stderr
    assert "Traceback" not in done.stderr


def small_programs(folder: Path, *names: str) -> str:
    """Return a folder with links to these programs only, to stand as PATH."""
    import shutil

    there = folder / "bin"
    there.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found, name
        (there / name).symlink_to(found)
    return str(there)


def test_doctor_names_both_cures_for_a_missing_compiler(child: Child) -> None:
    """Neither cc nor ziglang: doctor names both cures, and how to get one without any rights."""
    env = {
        "PATH": small_programs(child.folder, "ls"),
        "OOMPROOF_CACHE": str(child.folder / "cache"),
        "CC": "",
        "PYTHONPATH": str(_hiding(child.folder, "ziglang")),
    }
    checked = oomproof("doctor", folder=child.folder, env=env)
    said = " ".join(checked.stdout.split())
    assert checked.returncode == 1
    assert "gcc" in said
    assert "pip install ziglang" in said


def _hiding(folder: Path, module: str) -> Path:
    """Return a folder that, on PYTHONPATH, makes a module impossible to find."""
    there = folder / "hiding"
    there.mkdir()
    (there / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, package=None: None if name == {module!r} else find(name, package)\n"
    )
    return there
