"""Running a function's source in a child process under the phantom, and reading back what it returns."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomproof.gpus import GPUSpec, get_gpu
from oomproof.phantom import launch

#: The interpreter whose torch is tested; ``make test-versions`` names others.
PYTHON = os.environ.get("OOMPROOF_TEST_PYTHON") or sys.executable
MARKER = "result: "  # in front of the JSON among whatever else the child prints
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Ended:
    """A child process that has ended."""

    code: int
    stdout: str
    stderr: str
    result: Any = None


@dataclass
class Child:
    """Starts children; each test gets one with a folder of its own."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, body: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return what ``body(*arguments)`` returns in a child under the phantom; both ways as JSON.

        The function's source is all the child gets, so it imports what it needs itself. ``options`` are those of
        ``run``. Fails the test with the child's standard error when it ends with anything but 0.
        """
        ended = self.run(body, *arguments, **options)
        assert ended.code == 0, f"exit code {ended.code}\n{ended.stderr[-4000:]}"
        return ended.result

    def run(
        self,
        body: Callable[..., Any],
        *arguments: Any,
        gpu: str | GPUSpec = "t4",
        env: Mapping[str, str] | None = None,
        uses: Sequence[Callable[..., Any]] = (),
        **settings: Any,
    ) -> Ended:
        """Run ``body`` under the phantom whatever its end; ``uses`` are functions that it calls."""
        return self.run_script(self.script(body, *arguments, uses=uses), gpu=gpu, env=env, **settings)

    def run_script(
        self,
        script: Path,
        *,
        gpu: str | GPUSpec = "t4",
        env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Ended:
        """Run a script under the phantom, unobserved unless ``observe`` says so; ``settings`` are launch.Settings'."""
        settings.setdefault("observe", False)
        spec = gpu if isinstance(gpu, GPUSpec) else get_gpu(gpu)
        with tempfile.TemporaryDirectory(dir=self.folder) as run_folder:
            process = launch.start(
                [PYTHON, str(script)],
                launch.Settings(gpu=spec, **settings),
                Path(run_folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **self.environment, **(env or {})},
                cwd=self.folder,
            )
            try:
                stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # Inductor's compile workers outlive their parent
                process.kill()
        return Ended(process.returncode, stdout.decode(), stderr.decode(), _result(stdout.decode()))

    def script(self, body: Callable[..., Any], *arguments: Any, uses: Sequence[Callable[..., Any]] = ()) -> Path:
        """Write a script that prints what ``body(*arguments)`` returns."""
        path = self.folder / f"{body.__name__.lstrip('_')}.py"
        parts = [textwrap.dedent(inspect.getsource(part)) for part in (*uses, body)]
        call = f"{body.__name__}(*json.loads({json.dumps(json.dumps(arguments))}))"
        lines = f"if __name__ == '__main__':\n    import json\n    print({MARKER!r} + json.dumps({call}))\n"
        path.write_text("\n".join([*parts, lines]))
        return path


def _result(stdout: str) -> Any:
    lines = [line for line in stdout.splitlines() if line.startswith(MARKER)]
    return json.loads(lines[-1].removeprefix(MARKER)) if lines else None


def torch_version() -> tuple[int, ...]:
    """Return the version of the tested torch, (2, 14) for 2.14.1; (0,) without one."""
    code = "import importlib.metadata as m; print('.'.join(m.version('torch').split('.')[:2]))"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    return tuple(int(part) for part in done.stdout.split(".")) if done.returncode == 0 else (0,)


def has_module(name: str) -> bool:
    """Return whether the tested interpreter can import a module, without importing it."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], capture_output=True).returncode == 0
