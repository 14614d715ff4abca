from typing import NamedTuple


class Ratio(NamedTuple):
    low: float
    expected: float
    high: float
