"""Triage: what ended a run, told from its log."""

from __future__ import annotations

import gzip
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from measurement_samples import fitting, not_fitting
from triage_messages import EXPANDABLE, MADE, NEGATIVE, REAL, Row

from oomproof import cli
from oomproof.capture import write_capture
from oomproof.triage.figures import parse_figures
from oomproof.triage.kinds import classify
from oomproof.triage.lines import MAX_LINE_BYTES
from oomproof.triage.log import triage_log
from oomproof.triage.result import Triage
from oomproof.triage.source import triage_measurement
from oomproof.units import GIB, MIB

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of"
    " which 1.00 GiB is free. Including non-PyTorch memory, this process has 22.60 GiB memory in use. Of the allocated"
    " memory 22.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated." + EXPANDABLE
)
FRAGMENTED = FULL.replace("22.00 GiB is allocated", "18.00 GiB is allocated").replace("100.00 MiB is", "4.00 GiB is")
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n'
VALUE_ERROR = TRACEBACK + "ValueError: bad shape\n"
PROGRESS = "".join(f"step {step} loss 2.31\n" for step in range(5))


def of(text: str | bytes) -> Triage:
    """Return the triage of a log with this text."""
    return triage_log(io.BytesIO(text.encode() if isinstance(text, str) else text))


@pytest.mark.parametrize("row", REAL + MADE, ids=lambda row: f"{row.kind}: {row.source[-40:]}")
def test_messages(row: Row) -> None:
    """Each public message is of the kind that its figures, or its wording, say."""
    result = of(row.text)
    assert (result.kind, result.why != "") == (row.kind, True)
    assert result.evidence
    assert result.advice


@pytest.mark.parametrize("row", NEGATIVE, ids=lambda row: row.source[-40:])
def test_what_only_names_memory(row: Row) -> None:
    """Help texts, source lines, counters and other errors are no out-of-memory."""
    assert of(row.text).kind == "not-oom"


def test_enough_rows_are_real() -> None:
    """At least 30 messages come from public reports with an address."""
    assert sum(row.source.startswith("https://") for row in REAL) >= 30


# Figures


def test_figures_of_the_current_wording() -> None:
    """Every figure of a message of PyTorch 2.x comes out in bytes."""
    figures = parse_figures(FULL)
    assert figures.requested_bytes == 2 * GIB
    assert figures.total_bytes == round(23.65 * GIB)
    assert figures.free_bytes == GIB
    assert figures.own_bytes == round(22.6 * GIB)
    assert figures.allocated_bytes == 22 * GIB
    assert figures.unallocated_bytes == 100 * MIB
    assert figures.missing_bytes == GIB
    assert figures.device == 0
    assert figures.allowed_bytes is None


def test_old_messages_need_a_whole_segment() -> None:
    """Up to 1.3 the size is the tensor's: 1.12 MiB needs a segment of 20 MiB, as 3.56 MiB free could not give."""
    row = next(row for row in REAL if "787.74 MiB cached" in row.text)
    figures = parse_figures(row.text)
    assert figures.needed_bytes == 20 * MIB
    assert figures.missing_bytes == 20 * MIB - round(3.56 * MIB)


def test_own_process_under_the_hosts_id() -> None:
    """In a container PyTorch lists itself as another process: the one that holds what it has reserved."""
    figures = parse_figures(next(row.text for row in REAL if "Process 20398" in row.text))
    assert figures.own_bytes == round(14.52 * GIB)
    assert figures.others == ()


def test_figures_that_are_none() -> None:
    """2^64 bytes as a limit or as a process's memory mean that there is no figure."""
    assert parse_figures(next(row.text for row in REAL if "GPU 1 has" in row.text)).own_bytes is None
    assert parse_figures(next(row.text for row in REAL if "512.00 KiB" in row.text)).allowed_bytes is None


def test_two_ranks_messages_do_not_mix() -> None:
    """A message's figures end where the next message begins."""
    assert parse_figures("CUDA out of memory. Tried to allocate 1.00 GiB. " + FULL).total_bytes is None


@pytest.mark.parametrize(
    ("unallocated", "free", "kind"),
    [
        ("2.00 GiB", "1.99 GiB", "fragmentation"),
        ("1.99 GiB", "1.99 GiB", "device-full"),
        ("2.00 GiB", "2.00 GiB", "outside-pytorch"),
    ],
)
def test_the_rule_of_fragmentation(unallocated: str, free: str, kind: str) -> None:
    """Fragmentation is: cached and unused at least what was asked for, and less than that free."""
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which "
        f"{free} is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and {unallocated} is reserved by "
        "PyTorch but unallocated."
    )
    found = classify(text)
    assert found is not None
    assert found.kind == kind


def test_classify_serves_a_running_program() -> None:
    """One plain call gives the kind of an error's own text, and None for other errors."""
    found = classify(FRAGMENTED)
    assert found is not None
    assert (found.kind, found.confidence) == ("fragmentation", "high")
    assert classify("RuntimeError: expected scalar type Half but found Float") is None


# Which of several errors ended it


def test_first_of_several_decides() -> None:
    """Of several ranks' out-of-memories the first decides and the others are counted."""
    result = of(f"[rank1]: {FRAGMENTED}\n[rank0]: {FULL}\n")
    assert (result.kind, result.rank, result.ooms) == ("fragmentation", 1, 2)


def test_caught_and_another_error_ended_it() -> None:
    """An out-of-memory that the script went on from is not the cause of a later error."""
    result = of(f"{TRACEBACK}{FULL}\nretrying with half the batch\n{PROGRESS}{VALUE_ERROR}")
    assert (result.kind, result.survived, result.ooms) == ("not-oom", 1, 1)
    assert "ValueError: bad shape" in result.evidence[0].text


def test_batch_size_finder_then_another_error() -> None:
    """A finder's attempts, without progress between them, do not hide the error that ended it."""
    finder = f"Batch size 64 failed: {FULL}\nBatch size 32 failed: {FULL}\nBatch size 16 succeeded\n"
    result = of(finder + VALUE_ERROR)
    assert (result.kind, result.survived) == ("not-oom", 2)


def test_batch_size_finder_that_finds_none() -> None:
    """When no batch fits, the finder's own error is only fall-out."""
    text = f"{TRACEBACK}{FULL}\n{TRACEBACK}RuntimeError: No executable batch size found, reached zero.\n"
    assert of(text).kind == "device-full"


def test_caught_and_finished() -> None:
    """A run that went on to its end had no fatal out-of-memory."""
    result = of(f"skipping a batch: {FULL}\n{PROGRESS}done\n")
    assert (result.kind, result.survived) == ("not-oom", 1)
    assert any("went on" in item for item in result.advice)


def test_caught_once_and_fatal_later() -> None:
    """The out-of-memory that ended it decides, not one survived before it."""
    result = of(f"skipping a batch: {FULL}\n{PROGRESS}{TRACEBACK}{FRAGMENTED}\n")
    assert (result.kind, result.ooms, result.survived) == ("fragmentation", 2, 1)


def test_bars_drawn_once_more_are_no_progress() -> None:
    """tqdm redraws its bars as it dies; the same count again does not mean that training went on."""
    bars = "".join(f"  3%|3         | 30/1000 [00:{second}<10:00,  3.02it/s, loss=2.3]\r" for second in range(10, 30))
    assert of(f"{TRACEBACK}{FULL}\n{bars}\n").kind == "device-full"


def test_cause_of_another_error() -> None:
    """An out-of-memory that is the ``__cause__`` of another error is the cause."""
    text = (
        f"{TRACEBACK}{FULL}\n\nThe above exception was the direct cause of the following exception:\n\n"
        f"{TRACEBACK}MyTrainerError: step 3 failed\n"
    )
    result = of(text)
    assert (result.kind, result.confidence) == ("device-full", "high")
    assert "MyTrainerError: step 3 failed" in result.evidence[1].text


def test_error_while_handling_it() -> None:
    """An error in the handler of an out-of-memory leaves it the cause, less surely."""
    text = (
        f"{TRACEBACK}{FULL}\n\nDuring handling of the above exception, another exception occurred:\n\n"
        f"{TRACEBACK}KeyError: 'loss'\n"
    )
    assert (of(text).kind, of(text).confidence) == ("device-full", "medium")


def test_peers_and_launcher_are_fall_out() -> None:
    """Ranks that lose their peer, and torchrun's summary, do not hide the rank that ran out."""
    text = (
        f"[rank2]: {FULL}\n"
        "node1:15325:16199 [2] NCCL INFO [Service thread] Connection closed by localRank 2\n"
        + "[rank0]: step 7 loss 2.1\n[rank0]: step 8 loss 2.1\n[rank0]: step 9 loss 2.1\n"
        "[rank5]:[E ProcessGroupNCCL.cpp:563] [Rank 5] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=15734, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600037 milliseconds before timing out.\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    result = of(text)
    assert (result.kind, result.rank) == ("device-full", 2)


def test_peers_that_notice_after_more_steps() -> None:
    """Where ranks are not told apart, steps may follow the death of one until a collective times out."""
    text = (
        f"{TRACEBACK}{FULL}\n{PROGRESS}[E ProcessGroupNCCL.cpp:563] [Rank 5] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=15734)\n"
    )
    assert (of(text).kind, of(text).confidence) == ("device-full", "medium")


def test_other_ranks_death() -> None:
    """A rank that lost its peer first is told that another rank ran out of memory."""
    text = (
        "[rank0]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nRoot Cause (first observed failure):\n"
        "[0]:\n  time      : 2025-05-21_15:43:03\n  rank      : 3 (local_rank: 3)\n  exitcode  : -9 (pid: 14750)\n"
        "  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 14750\n"
    )
    result = of(text)
    assert (result.kind, result.cause, result.rank) == ("other-rank", "host", 3)


def test_sockets_that_warn_are_no_death() -> None:
    """A warning about a connection at the start does not make the log that of a bystander."""
    warning = "[rank0]:[W1130 12:00:00 socket.cpp:697] [c10d] Connection reset by peer\n"
    assert of(f"{warning}[rank1]: {TRACEBACK}[rank1]: {FULL}\n").kind == "device-full"


def test_peer_alone_is_not_known() -> None:
    """A lost peer without a reason is no out-of-memory, and says where to look."""
    result = of("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4242\n")
    assert (result.kind, result.confidence) == ("not-oom", "low")
    assert result.advice


def test_kill_beside_another_error() -> None:
    """A SIGKILL that follows an error of the script is not taken for the kernel's."""
    assert of(f"{VALUE_ERROR}train.sh: line 3:  4211 Killed                  python train.py\n").kind == "not-oom"


def test_errors_of_a_dying_process() -> None:
    """What finalizers raise as the interpreter ends does not hide what ended it."""
    text = (
        f"{TRACEBACK}{FULL}\nException ignored in: <function Env.__del__ at 0x7f>\n{TRACEBACK}"
        "AttributeError: 'NoneType' object has no attribute 'close'\n"
    )
    assert of(text).kind == "device-full"


def test_caught_in_a_replica() -> None:
    """DataParallel's and the DataLoader's wrapper is followed by the error it wraps."""
    text = (
        f"{TRACEBACK}torch.OutOfMemoryError: Caught OutOfMemoryError in replica 0 on device 0.\nOriginal {TRACEBACK}"
        f"{FULL}\n"
    )
    assert of(text).kind == "device-full"
    pinned = (
        f"{TRACEBACK}RuntimeError: Caught RuntimeError in pin memory thread for device 0.\nOriginal {TRACEBACK}"
        "RuntimeError: CUDA error: out of memory\n"
    )
    assert of(pinned).kind == "pinned-host"


# Advice


def test_advice_never_names_what_is_on() -> None:
    """What the log shows to be on is not advised again."""
    plain = of(f"{TRACEBACK}{FRAGMENTED}\n")
    assert any("expandable_segments:True" in item for item in plain.advice)
    on = of(f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n{TRACEBACK}{FRAGMENTED}\n")
    assert not any("set PYTORCH_ALLOC_CONF=expandable_segments" in item for item in on.advice)
    assert on.settings.allocator == {"expandable_segments": "True"}
    full = of(f"--gradient_checkpointing True --bf16 True --per_device_train_batch_size 8\n{TRACEBACK}{FULL}\n")
    assert not any("checkpointing" in item or "autocast" in item for item in full.advice)
    assert any("per_device_train_batch_size from 8" in item for item in full.advice)


def test_the_messages_own_hint_is_no_setting() -> None:
    """PyTorch's "try setting ..." does not mean that it is set."""
    assert of(FULL).settings.allocator == {}


def test_platforms_without_expandable_segments() -> None:
    """On Windows, and where PyTorch said that it cannot, expandable segments are not advised."""
    for before in (
        '  File "C:\\\\env\\\\train.py", line 1\n',
        "UserWarning: expandable_segments not supported on this platform\n",
    ):
        result = of(f"{before}{FRAGMENTED}\n")
        assert result.kind == "fragmentation"
        assert not any("set PYTORCH_ALLOC_CONF=expandable" in item for item in result.advice)


def test_advice_has_figures() -> None:
    """Bytes that are missing, cached or held by others are in the advice."""
    assert "1.00 GiB more was needed" in of(FULL).advice[0]
    assert any("4.00 GiB was cached and unused, 18 %" in item for item in of(FRAGMENTED).advice)
    other = next(row.text for row in MADE if "Process 4001" in row.text)
    assert any("process 4001 with 11.50 GiB" in item for item in of(other).advice)
    cap = of(next(row.text for row in REAL if "118.82 GiB allowed" in row.text)).advice
    assert any("set_per_process_memory_fraction(0.86)" in item for item in cap)


# Logs of any size and sort


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings(encoding: str) -> None:
    """UTF-8 and UTF-16 logs, with and without a mark, are read."""
    assert of((PROGRESS + TRACEBACK + FULL + "\n").encode(encoding)).kind == "device-full"


def test_line_ends_and_colours() -> None:
    """Windows line ends, carriage returns and colours do not hide a message; lines are counted as an editor does."""
    coloured = FULL.replace("CUDA out", "\x1b[0m: CUDA out").replace(": \x1b[0m:", "\x1b[0m:")
    result = of(f"a\r\n{TRACEBACK}".replace("\n", "\r\n") + f" 3%|   | 1/9 [00:01<00:02]\r{coloured}\r\n")
    assert (result.kind, result.evidence[0].line) == ("device-full", 5)


def test_escaped_logs() -> None:
    """A traceback kept as a JSON string, or as notebook output, is read."""
    as_json = json.dumps({"level": "ERROR", "exc": f"{TRACEBACK}{FULL}\n"})
    assert of(as_json + "\n").kind == "device-full"
    notebook = json.dumps(
        {"traceback": ["\x1b[0;31m-----\x1b[0m", f"\x1b[0;31mOutOfMemoryError\x1b[0m: {FULL[24:]}"]}, indent=1
    )
    assert of(notebook).kind == "device-full"


def test_notebook_and_rich_source_lines() -> None:
    """Source that IPython and rich show around a frame is no message."""
    text = (
        '---> 12     raise RuntimeError("CUDA error: out of memory")\n'
        "│ ❱ 1024 │   raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB') │\n"
        "ValueError: bad shape\n"
    )
    assert of(text).kind == "not-oom"


def test_binary_junk() -> None:
    """Bytes that are no text are passed over."""
    junk = bytes(range(256)) * 64
    assert of(junk).kind == "not-oom"
    assert of(junk + b"\n" + FULL.encode() + b"\n" + junk).kind == "device-full"


@pytest.mark.parametrize("content", [b"", b" \n\n", bytes(range(256)) * 64, b"\x7fELF" + bytes(5000)])
def test_what_has_no_log_text(content: bytes) -> None:
    """Of a file without text nothing is said with confidence."""
    result = of(content)
    assert (result.kind, result.confidence) == ("not-oom", "low")
    assert "no log text" in result.why
    assert result.advice
    assert of("epoch 1, loss 2.0: 73%|\u2588\u2588\u2588   |\n").confidence == "high"
    assert of("Schr\xf6dinger l\xe4uft\n".encode("latin-1")).confidence == "high"


@pytest.mark.parametrize("shift", [0, 1, 100, 400, 700, 2000])
def test_one_endless_line(shift: int) -> None:
    """A message within a line of megabytes is found wherever the line is cut, and counted once."""
    text = "x" * (3 * MAX_LINE_BYTES - shift) + " " + FULL + " " + "y" * (5 * MAX_LINE_BYTES)
    result = of(text)
    assert (result.kind, result.ooms) == ("device-full", 1)
    assert result.figures.unallocated_bytes == 100 * MIB


class Endless(io.RawIOBase):
    """A log of ``size`` bytes that is never in memory; each read is counted, none may ask for all."""

    def __init__(self, size: int, line: bytes, end: bytes) -> None:
        self.left, self.line, self.end, self.largest = size, line, end, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        assert size > 0
        self.largest = max(self.largest, size)
        if self.left > 0:
            self.left -= size
            return (self.line * (size // len(self.line) + 1))[:size]
        end, self.end = self.end, b""
        return end


@pytest.mark.parametrize(
    "line", [b"nothing of interest here\n", b"\x00" * 4096, b"memory: 12 error rate 3\n", b"error: " * 9 + b"\n"]
)
def test_large_logs_in_bounded_memory(line: bytes) -> None:
    """A log is read in chunks, and what is kept does not grow with it."""
    import tracemalloc

    tracemalloc.start()
    log = Endless((4 if b":" in line else 16) * MIB, line, b"\n" + FULL.encode() + b"\n")
    result = triage_log(log)  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.kind == "device-full"
    assert log.largest <= 4 * MIB
    assert peak < 24 * MIB


def test_many_errors_in_bounded_memory() -> None:
    """A log of nothing but errors is counted, not kept."""
    result = of((TRACEBACK + FULL + "\n") * 3000)
    assert (result.kind, result.ooms) == ("device-full", 3000)


# Captures and the command line


def test_captures() -> None:
    """A measurement's out-of-memory is judged by its message and its allocator's settings."""
    assert triage_measurement(fitting()).kind == "not-oom"
    measured = not_fitting()
    assert measured.oom is not None
    result = triage_measurement(
        replace(
            measured,
            oom=replace(measured.oom, message=FRAGMENTED.partition(": ")[2]),
            allocator=replace(measured.allocator, config="expandable_segments:True"),
        )
    )
    assert result.kind == "fragmentation"
    assert not any("set PYTORCH_ALLOC_CONF=expandable" in item for item in result.advice)
    assert triage_measurement(replace(measured, oom=None)).kind == "device-full"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["oomproof", "triage", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """0 an out-of-memory, 4 none, 64 no such file; a capture and standard input are taken, too."""
    monkeypatch.chdir(tmp_path)
    Path("full.log").write_text(f"{TRACEBACK}{FULL}\n")
    Path("fine.log").write_text(PROGRESS)
    assert call(monkeypatch, "full.log") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("DEVICE-FULL")
    assert "1.00 GiB more was needed" in shown
    assert call(monkeypatch, "fine.log") == 4
    assert capsys.readouterr().out.startswith("NOT-OOM")
    assert call(monkeypatch, "none.log") == 64
    assert call(monkeypatch, ".") == 64
    assert call(monkeypatch) == 64
    write_capture("run.oomp", not_fitting())
    assert call(monkeypatch, "run.oomp") == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FRAGMENTED.encode())))
    assert call(monkeypatch, "-") == 0
    assert "FRAGMENTATION" in capsys.readouterr().out


def test_compressed_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A log that was rotated away is read as it is; a damaged one is told."""
    packed = gzip.compress(f"{TRACEBACK}{FULL}\n".encode())
    (tmp_path / "full.log.gz").write_bytes(packed)
    assert call(monkeypatch, str(tmp_path / "full.log.gz")) == 0
    (tmp_path / "cut.log.gz").write_bytes(packed[:-20])
    assert call(monkeypatch, str(tmp_path / "cut.log.gz")) == 1
    assert "damaged" in capsys.readouterr().err


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--json has kind, confidence, evidence, advice, and the figures in bytes."""
    (tmp_path / "full.log").write_text(f"{TRACEBACK}{FULL}\n")
    assert call(monkeypatch, "--json", str(tmp_path / "full.log")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "oomproof.triage/1"
    assert (data["kind"], data["confidence"]) == ("device-full", "high")
    assert data["evidence"][0]["line"] == 4
    assert data["figures"]["requested_bytes"] == 2 * GIB
    assert data["figures"]["missing_bytes"] == GIB
    assert all(isinstance(item, str) for item in data["advice"])


def test_terminal_is_safe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a log contains cannot move the cursor or set colours."""
    (tmp_path / "full.log").write_bytes(b"RuntimeError: \x07\x1b]0;x\x07\x9b31m CUDA error: out of memory\n")
    assert call(monkeypatch, str(tmp_path / "full.log")) == 0
    shown = capsys.readouterr().out
    assert not any(ord(character) < 32 and character != "\n" for character in shown)


def test_snapshots_are_not_guessed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A pickle is never loaded, nor read as a log."""
    (tmp_path / "snapshot.pickle").write_bytes(b"\x80\x04\x95\x00")
    assert call(monkeypatch, str(tmp_path / "snapshot.pickle")) == 1
    assert "snapshot" in capsys.readouterr().err
