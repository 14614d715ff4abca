"""The one error that a guard ends with. Runs in the user's process; Python 3.9."""

from __future__ import annotations

from oomproof.errors import EXIT_GUARD_STOPPED, OomproofError


class GuardError(OomproofError, SystemExit):
    """The step could not be done, or not as the same step; the message says why and what to do.

    It is a SystemExit as well: a script that does not catch it ends with exit code 3, which a scheduler can tell from
    a crash. The interpreter then prints nothing, so the guard logs the message before it raises.
    """

    exit_code = EXIT_GUARD_STOPPED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = EXIT_GUARD_STOPPED
