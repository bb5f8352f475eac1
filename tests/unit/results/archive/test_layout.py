"""Which names and files an archive may have, and the list of their digests."""

import hashlib
import io
import stat
from pathlib import Path

import pytest

from mlbench_cli.results.archive.files import (
    CHUNK,
    digest,
    find_collisions,
    find_name_problem,
    find_portability_problem,
    is_in_layout,
    portable_part,
)
from mlbench_cli.results.archive.seal import make_portable


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "output/a/b.txt",
        "output/.hidden",
        "output/..two-dots",
        "logs/rank-0.log",
        "a b",
        "ü",
        "x" * 255,
        "/".join(["x" * 255] * 4),  # 1023 bytes
        "y" + "/".join(["x" * 254, *["x" * 255] * 3]),
        "é" * 127,
    ],
)
def test_ordinary_names_are_allowed_up_to_255_bytes_a_part_and_1024_in_all(name: str) -> None:
    assert find_name_problem(name) is None


@pytest.mark.parametrize("name", ["a", "output/a.txt", "output/conch", "output/com", "output/com10", "output/.b", "ü"])
def test_names_that_every_system_can_store_are_portable(name: str) -> None:
    assert find_portability_problem(name) is None


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("run.json", True),
        ("network.json", True),
        ("shaping.json", True),
        ("faults.json", True),
        ("observation.json", True),
        ("SHA256SUMS", True),
        ("SHA256SUMS.sig", True),
        ("output/anything", True),
        ("manifests/job.yaml", True),
        ("logs/rank-0.log", True),
        ("logs/rank-12.log", True),
        ("logs/rank-01.log", False),
        ("logs/rank-0.log.old", False),
        ("output", False),
        ("extra.json", False),
        ("more/run.json", False),
    ],
)
def test_an_archive_has_a_fixed_set_of_places(name: str, belongs: bool) -> None:
    assert is_in_layout(name) is belongs


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a", "b"], {}),
        (["A", "a"], {"a": "A"}),
        (["output/Readme", "output/README"], {"output/Readme": "output/README"}),
        (["e\u0301", "\u00e9"], {"\u00e9": "e\u0301"}),
        (["stra\u00dfe", "STRASSE"], {"stra\u00dfe": "STRASSE"}),
        (["a", "A/b"], {"a": "A/b"}),  # a file and a folder
        (["A", "a/b/c"], {"a/b/c": "A"}),
        (["A/b", "a/c"], {}),  # files of one folder, whose names do not collide
        (["x", "X", "x/y"], {"x": "X", "x/y": "X"}),
    ],
)
def test_names_that_differ_only_in_case_or_normalization_collide(names: list[str], found: dict[str, str]) -> None:
    assert find_collisions(names) == found
    assert find_collisions(reversed(names)) == found


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


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1])
def test_a_digest_is_the_sha256_of_the_rest_of_a_file(size: int) -> None:
    file = io.BytesIO(b"read" + b"x" * size)
    file.read(4)
    assert digest(file) == hashlib.sha256(b"x" * size).hexdigest()


@pytest.mark.parametrize(("mode", "after"), [(0o100, 0o500), (0o200, 0o600), (0o640, 0o640), (0o444, 0o444)])
def test_only_the_right_to_read_is_added(tmp_path: Path, mode: int, after: int) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "a").touch()
    (tmp_path / "output" / "a").chmod(mode)
    make_portable(tmp_path)
    assert stat.S_IMODE((tmp_path / "output" / "a").stat().st_mode) == after
