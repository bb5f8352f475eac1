"""Sizes of messages as a person writes them, on their own and as a task's parameter."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbench_cli.errors import UsageError
from mlbench_cli.tasks.catalog import load_task
from mlbench_cli.util.sizes import parse_sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8B:64B:x2", [8, 16, 32, 64]),
        ("8:64", [8, 16, 32, 64]),
        ("1KiB:3KiB:+1KiB", [1024, 2048, 3072]),
        ("4k, 1MiB,4KiB", [4096, 2**20]),
        ("[8,16]", [8, 16]),
        ("1KB:1MB:x10", [1000, 10_000, 100_000, 1_000_000]),
        ("1:10:x1.5", [1, 2, 3, 5, 7]),
        ("8:100:x4,1GiB", [8, 32, 2**30]),
        ("", []),
    ],
)
def test_ranges_and_lists(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("64MiBx2", '"64MiBx2" is not a size; write 8B:64MiB:x2'),
        ("8:4", '"8:4" ends below its beginning'),
        ("1:8:x1", '"x1" in "1:8:x1" is neither a factor'),
        ("1:8:2", '"2" in "1:8:2" is neither a factor'),
        ("1:8:xnan", "neither a factor"),
        ("1:8:+0", '"0" is not a size'),
        ("1:2:3:4", "more than three parts"),
        ("0", '"0" is not a size'),
        ("-8", '"-8" is not a size'),
        ("8 apples", '"8 apples" is not a size'),
        ("1:1GiB:+1", "is more than 10000 sizes"),
        ("1:9000:+1,100000:109000:+1", "these are more than 10000 sizes"),
    ],
)
def test_what_is_no_size_is_said(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"size|below|factor|parts") as caught:
        parse_sizes(text)
    assert words in str(caught.value)


@given(st.text(alphabet="0123456789:,.x+-kKMiB []e", max_size=30))
def test_any_text_gives_sizes_or_a_reason(text: str) -> None:
    with suppress(ValueError):
        sizes = parse_sizes(text)
        assert sizes == sorted(set(sizes))
        assert len(sizes) <= 10_000
        assert all(size > 0 for size in sizes)


def test_as_a_parameter_they_are_checked_before_anything_runs() -> None:
    task = load_task("allreduce")
    assert task.resolve("spec", {"sizes": "8B:32B:x2"})["sizes"] == [8, 16, 32]
    assert task.resolve("spec", {"sizes": [8, "1KiB"]})["sizes"] == [8, 1024]
    assert task.resolve("collectives")["sizes"][-1] == 2**26
    for wrong, words in (
        ("8:4", 'The parameter "sizes": "8:4" ends below'),
        (8, "not of type sizes"),
        ([1.5], '"1.5" is'),
    ):
        with pytest.raises(UsageError) as caught:
            task.resolve("spec", {"sizes": wrong})
        assert words in caught.value.message


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3", 3), ("3B", 3), ("3K", 3 * 1024), ("3k", 3 * 1024), ("3KiB", 3 * 1024), ("3KB", 3000),
        ("3M", 3 * 1024**2), ("3MiB", 3 * 1024**2), ("3MB", 3_000_000),
        ("3G", 3 * 1024**3), ("3GiB", 3 * 1024**3), ("3gb", 3_000_000_000),
    ],
)  # fmt: skip
def test_units_of_sizes(text: str, size: int) -> None:
    """KiB is a power of two and KB one of ten (IEC 80000-13); K alone is a power of two, as in most tools."""
    assert parse_sizes(text) == [size]
