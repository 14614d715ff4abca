"""The capture: one zip file ``NAME.oomp`` with ``measurement.json``, ``profile.json`` and, when asked for, a snapshot.

A capture is written to a temporary name beside its place and renamed, so that a file of its name is whole.
What is read is untrusted: sizes are checked before and while inflating, and the schema before anything else.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from oomproof.errors import CaptureError, EnvironmentMissingError, UsageError
from oomproof.measure.measurement import Measurement
from oomproof.measure.profile import Profile

MEASUREMENT_MEMBER = "measurement.json"
PROFILE_MEMBER = "profile.json"
SNAPSHOT_MEMBER = "snapshot.pickle"
MAX_MEASUREMENT_BYTES = 64 * 2**20  # uncompressed
MAX_PROFILE_BYTES = 256 * 2**20  # uncompressed

_CHUNK_BYTES = 2**16
_MAX_READ_BYTES = 2**20  # the largest single read: zipfile reads the table of contents at once, whatever its size
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,  # a compression method that zipfile does not know
    ValueError,  # a member name that is no text
    OSError,  # a seek before the file's start
    OverflowError,  # a seek past 2^63
)


def write_capture(
    path: str | os.PathLike[str],
    measurement: Measurement,
    snapshot: bytes | Path | None = None,
    profile: Profile | None = None,
) -> None:
    """Write ``measurement``, and the profile and the memory snapshot if given, to ``path`` in one atomic step.

    ``snapshot`` is PyTorch's pickle, as bytes or as the file that holds it. Raises UsageError when
    the place cannot be written or the snapshot not read, EnvironmentMissingError when the disk is full; what
    was at ``path`` before is then still there.
    """
    text = json.dumps(measurement.to_json(), indent=2, allow_nan=False).encode() + b"\n"
    if len(text) > MAX_MEASUREMENT_BYTES:
        raise CaptureError(f"{path}: the measurement is over 64 MiB of JSON; measure fewer steps with --steps")
    with replacing(Path(path)) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_member(MEASUREMENT_MEMBER), text)
        if profile is not None:
            archive.writestr(_member(PROFILE_MEMBER), json.dumps(profile.to_json(), separators=(",", ":")).encode())
        if snapshot is None:
            return
        with (
            _open_snapshot(snapshot) as source,
            archive.open(_member(SNAPSHOT_MEMBER), "w", force_zip64=True) as sink,
        ):
            shutil.copyfileobj(source, sink, 2**20)


def read_capture(path: str | os.PathLike[str]) -> Measurement:
    """Return the Measurement in the capture at ``path``, or in a plain JSON file as ``--json`` prints it.

    Raises UsageError when there is no such file, and CaptureError when it is not what it should be.
    """
    text = _contents(path, MEASUREMENT_MEMBER, MAX_MEASUREMENT_BYTES)
    try:
        return Measurement.from_json(_parse(text or b"", MEASUREMENT_MEMBER))
    except CaptureError as error:
        raise CaptureError(f"{path}: {error}") from None


def read_profile(path: str | os.PathLike[str]) -> Profile | None:
    """Return the profile in the capture at ``path``, None when it was written without one.

    Raises as ``read_capture`` does.
    """
    text = _contents(path, PROFILE_MEMBER, MAX_PROFILE_BYTES)
    if text is None:
        return None
    try:
        return Profile.from_json(_parse(text, PROFILE_MEMBER))
    except CaptureError as error:
        raise CaptureError(f"{path}: {error}") from None


def copy_snapshot(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
    """Copy the memory snapshot in the capture at ``path`` to ``target`` as PyTorch wrote it; False when it has none.

    Nothing is unpickled. Raises as ``read_capture`` does, and UsageError when ``target`` cannot be written.
    """
    read_capture(path)  # it is a capture, and says what is wrong if not
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            if SNAPSHOT_MEMBER not in archive.namelist():
                return False
            with archive.open(SNAPSHOT_MEMBER) as source:
                head = source.read(2)
                if head != b"\x80\x04":
                    raise CaptureError(f"{path}: its snapshot is no pickle of protocol 4; write the capture anew")
                with replacing(Path(target)) as sink:
                    sink.write(head)
                    shutil.copyfileobj(source, sink, 2**20)
    except DAMAGE:
        raise CaptureError(f"{path}: its snapshot is cut short or damaged; copy the capture again") from None
    return True


def _contents(path: str | os.PathLike[str], member: str, limit_bytes: int) -> bytes | None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"{path} is no regular file; give a capture written with `oomproof run -o FILE`")
        with open(path, "rb", buffering=0) as raw, Limited(raw) as file:
            return _read_text(file, member, limit_bytes)
    except CaptureError as error:
        raise CaptureError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; write a capture with `oomproof run -o FILE`") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; check its permissions") from None


def _read_text(file: io.BufferedReader, member: str, limit_bytes: int) -> bytes | None:
    magic = file.read(64)
    file.seek(0)
    if magic.startswith(b"PK"):
        return _read_member(file, member, limit_bytes)
    if magic.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):  # a measurement alone
        return _read_limited(file, member, limit_bytes) if member == MEASUREMENT_MEMBER else None
    what = "it is not a capture" if magic else "it is empty"
    raise CaptureError(f"{what}; write one with `oomproof run -o FILE`")


def _read_member(file: BinaryIO, member: str, limit_bytes: int) -> bytes | None:
    try:
        with zipfile.ZipFile(file) as archive:
            names = [item.filename for item in archive.infolist()]
            if MEASUREMENT_MEMBER not in names:
                raise CaptureError(
                    f"it is a zip without {MEASUREMENT_MEMBER}, so not a capture; write one with `oomproof run -o FILE`"
                )
            found = [item for item in archive.infolist() if item.filename == member]
            if not found:
                return None
            if len(found) > 1 or found[0].flag_bits & 1:
                raise CaptureError("no oomproof wrote this zip; write a capture with `oomproof run -o FILE`")
            if found[0].file_size > limit_bytes:
                _too_large(member)
            with archive.open(found[0]) as opened:
                return _read_limited(opened, member, limit_bytes)
    except DAMAGE:
        raise CaptureError(
            "it is cut short or damaged; copy it again, or write it anew with `oomproof run -o FILE`"
        ) from None


def _read_limited(file: Any, what: str, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size_bytes = 0
    while chunk := file.read(_CHUNK_BYTES):
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            _too_large(what)
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(text: bytes, what: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except (
        ValueError,
        RecursionError,
    ):  # ValueError: also bytes that are no UTF-8 and integers of 4,300 digits
        raise CaptureError(f"its {what} is not JSON; write it anew with `oomproof run -o FILE`") from None


class Limited(io.BufferedReader):
    """A file that refuses the large reads that a forged table of contents asks of zipfile."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_READ_BYTES:
            _too_large("the table of contents")
        return super().read(size)


def _too_large(what: str) -> NoReturn:
    raise CaptureError(f"{what} is larger than any measurement; write it anew with `oomproof run -o FILE`")


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)  # its fixed date makes equal measurements equal files
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    return info


@contextmanager
def _open_snapshot(snapshot: bytes | Path) -> Iterator[BinaryIO]:
    if isinstance(snapshot, bytes):
        yield io.BytesIO(snapshot)
        return
    try:
        file = snapshot.open("rb")
    except OSError as error:
        raise UsageError(f"the snapshot {snapshot} cannot be read: {error.strerror}; give the right path") from None
    with file:
        yield file


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file in the folder of ``path`` that takes its place once whole and on disk."""
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(f".oomproof-{secrets.token_hex(6)}.tmp")
    try:
        if target.exists() and not target.is_file():  # /dev/null must not be renamed away
            raise UsageError(f"{path} is no regular file; name a file such as run.oomp")
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except FileNotFoundError:
        if target.parent.is_dir():  # such as /proc
            raise UsageError(
                f"{path} cannot be written: {target.parent} takes no files; choose another place"
            ) from None
        raise UsageError(f"{path} cannot be written: there is no folder {target.parent}; create it first") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EnvironmentMissingError(f"{path}: no room left on the disk; free some, or write elsewhere") from None
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another place") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some network file systems refuse to sync a folder; the file itself is on disk
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
