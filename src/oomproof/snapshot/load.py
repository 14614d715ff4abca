"""Opening a snapshot: a file of ``torch.cuda.memory._dump_snapshot``, or the one in a capture."""

from __future__ import annotations

import gc
import mmap
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from oomproof.capture import DAMAGE, SNAPSHOT_MEMBER, Limited
from oomproof.errors import CaptureError, EnvironmentMissingError, SnapshotError, UsageError
from oomproof.snapshot import reader
from oomproof.snapshot.model import Snapshot

LIMIT_BYTES = 2 * 2**30  # of memory while reading; 1 GB with a million events takes 0.5 GiB
_LARGEST_FILE_BYTES = 16 * 2**30
_LARGEST_RATIO = 1100  # deflate's best is 1,032 to 1
_CHUNK_BYTES = 2**20


def load(
    path: str | os.PathLike[str],
    *,
    limit_bytes: int = LIMIT_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Snapshot:
    """Return the memory snapshot in a pickle of ``torch.cuda.memory._dump_snapshot``, or in a capture.

    Nothing in the file is run, and about ``limit_bytes`` of memory are taken at most; a capture's snapshot is
    unpacked to a temporary file first. ``progress(done, total)`` is called with bytes of the pickle. Raises
    UsageError when there is no such file, SnapshotError when it is not what it should be.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"{path} is no regular file; give a memory snapshot or a capture")
        with open(path, "rb") as file, _unpacked(file, Path(path)) as pickle:
            if os.fstat(pickle.fileno()).st_size == 0:
                raise SnapshotError("it is empty; write one with torch.cuda.memory._dump_snapshot(FILE)")
            with mmap.mmap(pickle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check_start(data)
                with _without_collecting():
                    snapshot, _ = reader.read(data, limit_bytes=limit_bytes, progress=progress)
                return snapshot
    except CaptureError as error:
        raise SnapshotError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give a file of torch.cuda.memory._dump_snapshot") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; check its permissions") from None


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Keep Python from looking for cycles: none are made, and it would look through millions of references."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_start(data: mmap.mmap) -> None:
    start = data[:16]
    if start[:2] == b"\x1f\x8b":
        raise SnapshotError("it is packed with gzip; unpack it first: gunzip FILE")
    if start.lstrip()[:1] == b"<":
        raise SnapshotError("it is a web page, not a pickle; give the file that _dump_snapshot wrote")
    if start.startswith(b"version https://"):
        raise SnapshotError("it is the pointer that Git LFS left in place of the file; fetch it with git lfs pull")
    if start[:1] not in (b"\x80", b"(", b"}", b"]"):  # how the pickle of a dict or list begins
        raise SnapshotError("it is no pickle; give the file that torch.cuda.memory._dump_snapshot wrote")


@contextmanager
def _unpacked(file: IO[bytes], path: Path) -> Any:
    magic = file.read(4)
    file.seek(0)
    if magic[:2] != b"PK":
        yield file
        return
    with tempfile.TemporaryFile() as target:
        with open(path, "rb", buffering=0) as raw, Limited(raw) as limited:
            _unpack(limited, target)
        target.flush()
        yield target


def _unpack(file: Any, target: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            found = [item for item in archive.infolist() if item.filename == SNAPSHOT_MEMBER]
            if not found:
                raise SnapshotError(
                    f"it is a capture without {SNAPSHOT_MEMBER}; measure again with `oomproof run --snapshot -o FILE`"
                )
            item = found[0]
            if len(found) > 1 or item.flag_bits & 1 or item.file_size > item.compress_size * _LARGEST_RATIO + 2**20:
                raise SnapshotError("no oomproof wrote this zip; write one with `oomproof run --snapshot -o FILE`")
            if item.file_size > _LARGEST_FILE_BYTES:
                raise SnapshotError("the snapshot in it is larger than 16 GiB; record fewer events")
            left = item.file_size
            with archive.open(item) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    left -= len(chunk)
                    if left < 0:
                        raise zipfile.BadZipFile
                    _write(target, chunk)
    except DAMAGE:
        raise SnapshotError(
            "it is cut short or damaged; copy it again, or write it anew with `oomproof run --snapshot -o FILE`"
        ) from None


def _write(target: IO[bytes], chunk: bytes) -> None:
    try:
        target.write(chunk)
    except OSError as error:
        raise EnvironmentMissingError(
            f"no room to unpack the snapshot in {tempfile.gettempdir()} ({error.strerror}); set TMPDIR to a folder "
            "with more"
        ) from error
