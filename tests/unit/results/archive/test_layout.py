"""Which names and files an archive may have, and the list of their digests."""

import hashlib

import pytest

from mlbench_cli.results.archive.files import portable_part


@pytest.mark.parametrize(
    ("part", "portable"),
    [
        ("plain.txt", "plain.txt"),
        ("a:b", "a%3Ab"),
        ("a\nb", "a%0Ab"),
        ("a\\b", "a%5Cb"),
        ("\udcff", "%FF"),
        ("\u202e", "%E2%80%AE"),
        ("end.", "end%2E"),
        ("end ", "end%20"),
        ("a. b", "a. b"),
        ("con", "%63on"),
        ("nul.txt", "%6Eul.txt"),
        ("x" * 255, "x" * 255),
    ],
)
def test_invalid_characters_become_their_bytes_in_hexadecimal(part: str, portable: str) -> None:
    assert portable_part(part) == portable


@pytest.mark.parametrize("part", ["x" * 256, "é" * 200, ":" * 100])
def test_a_name_that_is_too_long_is_cut_and_stays_unique(part: str) -> None:
    written = "".join(f"%{ord(char):02X}" if char == ":" else char for char in part)
    short = portable_part(part)
    assert 253 <= len(short.encode()) <= 255
    assert written.startswith(short[:-17])
    assert short.endswith("-" + hashlib.sha256(written.encode()).hexdigest()[:16])
    assert portable_part(f"{part}y")[-17:] != short[-17:]
