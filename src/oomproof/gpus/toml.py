"""TOML parsing on every supported Python: tomllib from 3.11 on, the tomli package before."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_parser: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table that ``text`` holds; raises ValueError where it is not TOML."""
    table: dict[str, Any] = _parser.loads(text)
    return table
