"""Sizes and durations: what is read from people and shown to them."""

from __future__ import annotations

import pytest

from oomproof.units import GIB, KIB, MIB, TIB, format_bytes, format_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("21474836480", 20 * GIB),
        ("21_474_836_480", 20 * GIB),
        ("512 B", 512),
        ("1 byte", 1),
        ("2 bytes", 2),
        ("8KiB", 8 * KIB),
        ("8k", 8 * KIB),
        ("8kB", 8000),
        ("512 MiB", 512 * MIB),
        ("512m", 512 * MIB),
        ("512MB", 512 * 10**6),
        ("20GiB", 20 * GIB),
        ("20 gib", 20 * GIB),
        ("20G", 20 * GIB),
        ("20GB", 20 * 10**9),
        ("14.56 GiB", int(14.56 * GIB)),
        ("  1.5\tTiB ", 3 * TIB // 2),
        ("1tb", 10**12),
    ],
)
def test_a_size_is_read(text: str, size_bytes: int) -> None:
    """KiB and bare letters are binary, kB decimal; case and blanks do not matter."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "x", "1 GiG", "1 2", "-1GiB", "+1", "1,5GiB", "1.2.3", "0x10", "nan", "1GiB!", "1e9"],
)
def test_what_is_no_size(text: str) -> None:
    """The message repeats the text and shows how a size is written."""
    with pytest.raises(ValueError, match=r"is not a size; write it like 20GiB, 512MiB or 21474836480$") as caught:
        parse_size(text)
    assert str(caught.value).startswith(repr(text))


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0", "0.1 B"])
def test_a_size_is_above_zero(text: str) -> None:
    """Nothing, and less than a byte, is no size."""
    with pytest.raises(ValueError, match="is not above zero; write a size like 20GiB"):
        parse_size(text)


@pytest.mark.parametrize("power", range(50))
def test_a_plain_number_of_bytes_is_exact(power: int) -> None:
    """Parsing undoes str(), to the byte."""
    for size_bytes in (2**power, 2**power + 1):
        assert parse_size(str(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (MIB, "1.0 MiB"),
        (int(8.1 * MIB), "8.1 MiB"),
        (GIB, "1.00 GiB"),
        (int(61.24 * GIB), "61.24 GiB"),
        (5 * TIB, "5,120.00 GiB"),
        (-512, "-512 B"),
        (-3 * GIB, "-3.00 GiB"),
    ],
)
def test_a_size_is_shown(size_bytes: int, text: str) -> None:
    """Sizes are shown in the largest unit up to GiB that leaves a whole number before the point."""
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize("size_bytes", [1, 1023, KIB, 3 * MIB, 5 * GIB, 3 * TIB])
def test_what_is_shown_can_be_read(size_bytes: int) -> None:
    """Parsing a shown size gives it back where no digit was rounded away."""
    assert parse_size(format_bytes(size_bytes).replace(",", "")) == size_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (840e-6, "840 µs"),
        (0.023, "23 ms"),
        (1, "1.0 s"),
        (4.1, "4.1 s"),
        (60, "1 min 0 s"),
        (725, "12 min 5 s"),
        (3600, "1 h 0 min"),
        (10_920, "3 h 2 min"),
    ],
)
def test_a_duration_is_shown(seconds: float, text: str) -> None:
    """Durations are shown in the one or two largest units that say enough."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(2**30 - 512), "1.00 GiB"),
        (format_bytes(2**20 - 1), "1.0 MiB"),
        (format_bytes(1023), "1023 B"),
        (format_seconds(0.9999), "1.0 s"),
        (format_seconds(59.97), "1 min 0 s"),
        (format_seconds(0.00099999), "1 ms"),
    ],
)
def test_rounding_never_shows_a_full_unit_of_the_next(shown: str, expected: str) -> None:
    """1,024.0 MiB, 1000 ms and 60.0 s do not exist."""
    assert shown == expected


def test_an_absurd_size_is_refused() -> None:
    """Digits without end are a typing error, not a GPU."""
    with pytest.raises(ValueError, match="the number is too large"):
        parse_size("9" * 400 + "GiB")
