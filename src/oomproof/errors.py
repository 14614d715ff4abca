"""The exception tree; each class carries the exit code that the command line ends with.

    OomproofError                1   the tool failed
    ├── UsageError              64   what the person asked for cannot be right
    │   ├── UnknownGPUError     64
    │   └── PlanError           64   a plan cannot be applied: damaged, of another version, or not on this machine
    ├── EnvironmentMissingError  1   this machine lacks something (torch, a compiler, room on disk)
    │   └── BuildError           1   the stand-ins could not be compiled
    ├── guard.GuardError         3   a guarded step could not be done, or not as the same step
    ├── ScriptError              1   the script itself failed or never used what was to be measured
    └── CaptureError             1   a file is not what it should be
        └── SnapshotError        1   a memory snapshot is not what it should be, or too large

Every message ends with the cure.
"""

from __future__ import annotations

EXIT_FITS = 0
EXIT_FAILED = 1
EXIT_DOES_NOT_FIT = 2
EXIT_GUARD_STOPPED = 3
EXIT_NOT_OOM = 4  # triage: no out-of-memory in it
EXIT_USAGE = 64
EXIT_INTERRUPTED = 130


class OomproofError(Exception):
    """Base of every error that is told to the user without a traceback."""

    exit_code = EXIT_FAILED
    measurement: object = None  # what was measured before the error, when that was anything


class UsageError(OomproofError):
    """The request itself is wrong; the message lists every fault found."""

    exit_code = EXIT_USAGE


class UnknownGPUError(UsageError):
    """No GPU of that name is in the catalogue; the message suggests the nearest names."""


class PlanError(UsageError):
    """A plan is damaged, names what this version does not know, or cannot be applied on this machine."""


class EnvironmentMissingError(OomproofError):
    """Something this machine needs is missing; the message says how to get it."""


class BuildError(EnvironmentMissingError):
    """The stand-in libraries could not be compiled."""


class ScriptError(OomproofError):
    """The user's script failed before there was anything to measure."""


class CaptureError(OomproofError):
    """A capture, GPU file or measurement on disk is malformed or too new."""


class SnapshotError(CaptureError):
    """A memory snapshot is malformed, asks to run code, or takes more memory to read than is allowed."""
