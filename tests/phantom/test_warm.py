"""Forks of a warm process measure what fresh processes do, and end as they do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import child as child_module
import pytest

from oomproof.bench import Bench, Done, Request
from oomproof.gpus import get_gpu, with_memory
from oomproof.phantom.launch import Settings, World

EXAMPLES = Path(__file__).parents[2] / "examples"
T4 = get_gpu("t4")
GIB = 2**30

MODEL = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step():
    loss = model(torch.randn(64, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""

#: Scripts by what they try.
SCRIPTS = {
    "trains": MODEL + "for i in range(5): print(i, step().item())\n",
    "counts": MODEL + "x = torch.randn(4096, device='cuda'); y = x[x > 0].repeat(100); [step() for _ in range(3)]\n",
    "fails": MODEL + "step()\nraise ValueError('no such thing')\n",
    "fails at import": MODEL + "import no_such_module\n",
    "out of memory": MODEL + "step()\nx = [torch.empty(2**30, device='cuda') for _ in range(100)]\n",
    "catches out of memory": MODEL
    + textwrap.dedent("""
        try:
            x = torch.empty(10**12, device="cuda")
        except torch.OutOfMemoryError:
            step(); step()
        """),
    "exit code": MODEL + "step()\nsys.exit(7)\n",
    "exit message": MODEL + "step()\nsys.exit('that is all')\n",
    "os._exit": MODEL + "step()\nimport os; os._exit(5)\n",
    "killed": MODEL + "step()\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "compiles": MODEL
    + textwrap.dedent("""
        model = torch.compile(model)
        for _ in range(3):
            step()
        """),
    "says who it is": textwrap.dedent("""
        import atexit, os, sys, torch
        print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), sys.orig_argv, __spec__, sys.flags)
        print(sorted(vars()), os.environ["OF_THE_RUN"], os.path.isdir(os.environ["OOMPROOF_RUN"]), sorted(os.environ))
        print(os.getpid() == os.getpgrp() == os.getsid(0), sys.stdin.read(), file=sys.stderr)
        import threading, multiprocessing
        print(threading.current_thread() is threading.main_thread(), multiprocessing.current_process())
        atexit.register(print, "at exit")
        torch.zeros(10, device="cuda")
        sys.exit(3)
        """),
    "a local module": "import beside, torch\nprint(beside.VALUE); torch.zeros(beside.VALUE, device='cuda')\n",
    "spawns": textwrap.dedent("""
        import torch, torch.multiprocessing as mp
        def work(rank, both):
            x = torch.zeros(2**20 * (rank + 1), device="cuda")
            both.wait()  # what they hold together is looked at, too
        if __name__ == "__main__":
            mp.spawn(work, (mp.get_context("spawn").Barrier(2),), nprocs=2)
        """),
    "forks": textwrap.dedent("""
        import torch, torch.multiprocessing as mp
        def work(rank):
            x = torch.zeros(2**20 * (rank + 1), device="cuda")
        if __name__ == "__main__":
            p = mp.get_context("fork").Process(target=work, args=(1,)); p.start(); p.join(); print(p.exitcode)
        """),
    "loads data": MODEL
    + textwrap.dedent("""
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                data = TensorDataset(torch.randn(256, 512))
                for (x,) in DataLoader(data, 64, num_workers=2, multiprocessing_context=method):
                    model(x.cuda()).sum().backward()
                    optimizer.step()
        """),
}


def _figures(value: Any) -> Any:
    """What was measured: everything but times, process numbers and the run's own folder."""
    if isinstance(value, dict):
        return {k: _figures(v) for k, v in value.items() if k not in ("pid", "seconds", "snapshot", "profile")}
    if isinstance(value, list | tuple):
        return [_figures(v) for v in value]
    return value


def _measured(done: Done, ignored: tuple[str, ...] = ()) -> Any:
    assert done.outcome is not None, done.error
    kept = [{k: v for k, v in finding.items() if k not in ignored} for finding in done.outcome.findings]
    return done.outcome.exit_code, sorted((_figures(finding) for finding in kept), key=json.dumps)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("VALUE = 12345\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\nSIZE = 1000\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom package import SIZE\nimport torch\nprint(__name__, __file__, sys.argv, __package__)\n"
        "torch.zeros(SIZE, device='cuda')\n"
    )
    return tmp_path


def fresh_and_warm(
    folder: Path,
    words: list[str],
    *,
    settings: Settings | None = None,
    env: Mapping[str, str] | None = None,
    ignored: tuple[str, ...] = (),
) -> tuple[Done, Done]:
    """Return the same run from a fresh process and as the second fork of a warm one."""
    request = Request(settings=settings or Settings(gpu=T4), env=env or {}, timeout_seconds=300)
    with Bench([child_module.PYTHON, *words], cwd=folder, workers=1) as bench:
        fresh, first, second = bench.run([request] * 3)
    assert not fresh.forked
    assert first.forked
    assert second.forked
    assert _measured(first, ignored) == _measured(second, ignored)
    return fresh, second


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Done, Done]]]:
    """Run one of SCRIPTS in a fresh process and in a fork; all forks are of one process."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "beside.py").write_text("VALUE = 12345\n")
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(text)
    # spawned processes run it again, with the same arguments
    (folder / "script.py").write_text("import sys; exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'))\n")
    command = [child_module.PYTHON, "script.py"]

    def run(bench: Bench, name: str) -> Done:
        arguments = (f"{name}.py", "an argument")
        settings = Settings(gpu=T4)
        env = {"OF_THE_RUN": "yes"}
        (done,) = bench.run([Request(settings=settings, arguments=arguments, env=env, timeout_seconds=300)])
        return done

    with Bench(command, cwd=folder, workers=1, warm=False) as fresh, Bench(command, cwd=folder, workers=1) as warm:
        run(warm, "trains")  # tells what is imported
        yield lambda name: (run(fresh, name), run(warm, name))


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_fork_measures_what_a_fresh_process_does(both: Callable[[str], tuple[Done, Done]], what: str) -> None:
    """Exit codes, findings and what a failing script prints are those of a fresh process, to the byte."""
    fresh, warm = both(what)
    assert not fresh.forked
    assert warm.forked
    assert _measured(fresh) == _measured(warm)
    assert fresh.output == warm.output


def test_compiled_code_is_measured_the_same_with_the_compiler_imported_beforehand(folder: Path) -> None:
    """Findings of torch.compile are the same, each run with an empty cache of its own."""
    (folder / "script.py").write_text(SCRIPTS["compiles"])
    fresh, warm = fresh_and_warm(folder, ["script.py"])
    assert _measured(fresh) == _measured(warm)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("train_gpt2.py", ["--layers", "2", "--sequence", "128"]),
        ("train_resnet.py", []),
        ("train_llama.py", ["--layers", "2"]),
    ],
)
def test_a_fork_measures_the_examples_as_a_fresh_process_does(folder: Path, script: str, arguments: list[str]) -> None:
    """Findings of real training scripts are the same to the byte, with the recorded profile."""
    settings = Settings(gpu=get_gpu("a100-80gb"), profile=True)
    ignored = ("pinned_host_bytes",) if script == "train_resnet.py" else ()  # as its pinning thread happens to run
    fresh, warm = fresh_and_warm(folder, [str(EXAMPLES / script), *arguments], settings=settings, ignored=ignored)
    assert _measured(fresh, ignored) == _measured(warm, ignored)
    assert fresh.outcome is not None
    assert fresh.outcome.findings[0]["steps"] == 3


def test_a_module_is_run_as_python_does(folder: Path) -> None:
    """``-m package`` is the same in a fork; the package is the script's own and not imported beforehand."""
    fresh, warm = fresh_and_warm(folder, ["-m", "package", "first"])
    assert _measured(fresh) == _measured(warm)


def test_a_script_without_torch_is_never_forked(folder: Path) -> None:
    """Who does not import torch has nothing to share, and leaves no findings."""
    (folder / "script.py").write_text("import sys; sys.exit('torch' in sys.modules)\n")
    with Bench([child_module.PYTHON, "script.py"], cwd=folder, workers=1) as bench:
        for done in bench.run([Request(settings=Settings(gpu=T4))] * 2):
            assert not done.forked
            assert done.outcome is not None
            assert done.outcome.exit_code == 0
            assert done.outcome.findings == ()


def test_other_arguments_memory_and_limits_share_a_process(folder: Path) -> None:
    """Each fork has its own arguments, memory, limit and steps; the device is its alone."""
    (folder / "script.py").write_text(
        "import sys, torch\n"
        "x = torch.zeros(int(sys.argv[1]), dtype=torch.uint8, device='cuda')\n"
        "print(torch.cuda.mem_get_info()[1], file=sys.stderr)\n"
    )
    small, large = Settings(gpu=with_memory(T4, 4 * GIB)), Settings(gpu=T4)
    asked = [
        Request(settings=large, arguments=("1024",), tag="first"),
        Request(settings=large, arguments=(str(8 * GIB),), tag="fits"),
        Request(settings=small, arguments=(str(8 * GIB),), tag="does not fit"),
        Request(settings=Settings(gpu=small.gpu, unlimited=True), arguments=(str(8 * GIB),), tag="without limit"),
    ]
    with Bench([child_module.PYTHON, "script.py", "1"], cwd=folder, workers=1) as bench:
        done = {d.request.tag: d for d in bench.run(asked)}
    assert [d.forked for d in done.values()] == [False, True, True, True]
    ended = {tag: d.outcome.findings[0]["ended"] for tag, d in done.items() if d.outcome is not None}
    assert ended == {"first": "finished", "fits": "finished", "does not fit": "oom", "without limit": "finished"}
    without = done["without limit"].outcome
    assert without is not None
    assert without.findings[0]["allocated_bytes"] == 8 * GIB


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_allocator_settings_take_effect_in_forks(folder: Path, name: str) -> None:
    """Settings that torch reads when it is imported are read by a process of their own."""
    (folder / "script.py").write_text(MODEL + "for i in range(3): step()\n")
    values = ("", "expandable_segments:True", "backend:cudaMallocAsync", "max_split_size_mb:21")
    found = {}
    for warm in (False, True):
        with Bench([child_module.PYTHON, "script.py"], cwd=folder, workers=1, warm=warm) as bench:
            asked = [Request(settings=Settings(gpu=T4), env={name: value}) for value in values]
            found[warm] = [_measured(d) for d in bench.run(asked)]
    assert found[False] == found[True]
    assert len({json.dumps(f) for f in found[True]}) > 1


def test_forks_of_one_process_have_different_gpus(folder: Path) -> None:
    """A GPU's properties, and what torch chooses by them, are those of the fork's own GPU."""
    (folder / "script.py").write_text(MODEL + "for i in range(3): step()\n")
    found = {}
    for warm in (False, True):
        with Bench([child_module.PYTHON, "script.py"], cwd=folder, workers=1, warm=warm) as bench:
            asked = [Request(settings=Settings(gpu=get_gpu(name))) for name in ("t4", "h100-80gb", "t4", "a100-80gb")]
            found[warm] = [_measured(d) for d in bench.run(asked)]
    assert found[False] == found[True]
    assert len({json.dumps(f) for f in found[True]}) > 1


#: What bitsandbytes, torchao and transformers ask while they are imported.
ASKING = (
    "import torch\n"
    "COUNT, SM = torch.cuda.device_count(), torch.cuda.get_device_capability(torch.device('cuda', 0))\n"
    "BF16, NAME = torch.cuda.is_available() and torch.cuda.is_bf16_supported(), torch.cuda.get_device_name()\n"
    "from torch.cuda import get_device_capability\n"
)


def test_a_library_may_ask_for_the_gpu_while_it_is_imported(folder: Path) -> None:
    """It gets the answers of the run's GPU, and still the runs on that GPU are forks; on another they are not."""
    library = folder / "site-packages"
    library.mkdir()
    (library / "asking.py").write_text(ASKING)
    (folder / "script.py").write_text(
        MODEL + "import asking\n"
        "with open('answers', 'a') as file:\n"
        "    print(asking.COUNT, asking.SM, asking.BF16, asking.NAME, asking.get_device_capability(), file=file)\n"
        "for i in range(3): step()\n"
    )
    with Bench([child_module.PYTHON, "script.py"], cwd=folder, workers=1) as bench:
        found = []
        for name in ("t4", "t4", "t4", "a100-80gb"):
            env = {"PYTHONPATH": str(library)}
            found += bench.run([Request(settings=Settings(gpu=get_gpu(name)), env=env)])
    assert [done.forked for done in found] == [False, True, True, False]
    assert _measured(found[0]) == _measured(found[1]) == _measured(found[2])
    lines = (folder / "answers").read_text().splitlines()
    t4 = f"1 (7, 5) {lines[0].split()[3]} Tesla T4 (7, 5)"
    assert lines[:3] == [t4] * 3
    assert lines[3].startswith("1 (8, 0) True NVIDIA A100")


def test_a_rank_of_a_world_is_measured_in_a_fork(folder: Path) -> None:
    """One rank of FSDP over 8 GPUs is the same from a fork, whose messages have a folder of their own."""
    (folder / "script.py").write_text(
        textwrap.dedent("""
        import os, torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = fully_shard(nn.Sequential(nn.Linear(512, 4096), nn.Linear(4096, 512)).cuda())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 512, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
        """)
    )
    done = []
    with Bench([child_module.PYTHON, "script.py"], cwd=folder, workers=1) as bench:
        for number in range(3):
            messages = folder / f"messages{number}"
            messages.mkdir()
            place = World(size=8, rank=3, local_size=8, folder=messages)
            done += bench.run([Request(settings=Settings(gpu=T4, gpu_count=8, world=place))])
    assert [d.forked for d in done] == [False, True, True]
    assert _measured(done[0]) == _measured(done[1]) == _measured(done[2])
    assert done[0].outcome is not None
    assert done[0].outcome.findings[0]["world_size"] == 8


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


SLEEPER = (
    "import os, pathlib, sys, time, torch\n"
    "torch.zeros(1, device='cuda')\n"
    "if os.fork() == 0:\n"
    "    pathlib.Path(f'pid-{os.getpid()}').touch(); time.sleep(1000)\n"
    "pathlib.Path(f'pid-{os.getpid()}').touch()\n"
    "if sys.argv[1] == 'sleep': time.sleep(1000)\n"
)


def _pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def _gone(folder: Path, *, within_seconds: float = 30.0) -> bool:
    end = time.monotonic() + within_seconds
    while any(_alive(pid) for pid in _pids(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(_alive(pid) for pid in _pids(folder))


def _processes_in(folder: Path) -> list[str]:
    """Processes whose current folder this is, the warm ones among them."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(path / "cwd")) == folder and _alive(int(path.name)):
                found.append((path / "cmdline").read_text())
    return found


def test_a_run_that_takes_too_long_is_ended_with_all_it_started(folder: Path) -> None:
    """A time limit ends the fork and its children, and the next run is not affected."""
    (folder / "script.py").write_text(SLEEPER)
    asked = [
        Request(settings=Settings(gpu=T4), arguments=("go on",)),
        Request(settings=Settings(gpu=T4), arguments=("sleep",), timeout_seconds=2.0),
        Request(settings=Settings(gpu=T4), arguments=("go on",)),
    ]
    with Bench([child_module.PYTHON, "script.py", ""], cwd=folder, workers=1) as bench:
        done = list(bench.run(asked))
        assert [d.error for d in done] == [None, "timed out", None]
        assert [d.forked for d in done] == [False, True, True]
        assert _gone(folder)


def test_a_budget_of_seconds_ends_what_runs_and_skips_the_rest(folder: Path) -> None:
    """When the time is over, running and waiting requests are answered with "stopped", and nothing is left."""
    (folder / "script.py").write_text(SLEEPER)
    asked = [Request(settings=Settings(gpu=T4), tag=i) for i in range(4)]
    with Bench([child_module.PYTHON, "script.py", "sleep"], cwd=folder, workers=2) as bench:
        done = list(bench.run(asked, seconds=10.0))
    assert sorted(d.request.tag for d in done) == [0, 1, 2, 3]
    assert {d.error for d in done} == {"stopped"}
    assert _gone(folder)


def test_a_warm_process_that_is_killed_takes_no_run_with_it(folder: Path) -> None:
    """When the process that runs are forked from dies, its runs end, and are made again as fresh processes."""
    (folder / "script.py").write_text(
        "import os, signal, sys, torch\ntorch.zeros(1000, device='cuda')\n"
        "parent = open(f'/proc/{os.getppid()}/cmdline').read()\n"
        "if 'script.py' in parent: os.kill(os.getppid(), signal.SIGKILL); signal.pause()\n"
    )
    with Bench([child_module.PYTHON, "script.py"], cwd=folder, workers=1) as bench:
        done = list(bench.run([Request(settings=Settings(gpu=T4), timeout_seconds=300)] * 3))
    assert [d.error for d in done] == [None] * 3
    assert all(d.outcome is not None and d.outcome.findings[0]["ended"] == "finished" for d in done)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_its_bench(folder: Path, signal_number: int) -> None:
    """When the process that has the bench is killed or interrupted, warm processes and their forks end."""
    (folder / "script.py").write_text(SLEEPER)
    (folder / "host.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "from oomproof.bench import Bench, Request\nfrom oomproof.gpus import get_gpu\n"
        "from oomproof.phantom.launch import Settings\n"
        "s = Settings(gpu=get_gpu('t4'))\n"
        "with Bench([sys.argv[1], 'script.py', ''], workers=1) as bench:\n"
        "    list(bench.run([Request(settings=s, arguments=('go on',))] * 2))\n"
        "    Path('ready').touch()\n"
        "    list(bench.run([Request(settings=s, arguments=('sleep',))] * 2))\n"
    )
    host = subprocess.Popen(
        [sys.executable, "host.py", child_module.PYTHON],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 400
        while len(_pids(folder)) < 6 and time.monotonic() < end and host.poll() is None:
            time.sleep(0.1)
        assert (folder / "ready").exists()
        host.send_signal(signal_number)
        host.wait(60)
        assert _gone(folder)
        assert not _processes_in(folder)
    finally:
        host.kill()
        host.wait()
