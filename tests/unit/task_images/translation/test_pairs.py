"""Parallel data: the official binary forms, encoding of text in one pass, the cache, what is wrong with bad files."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from task_images.contract import EnvironmentUnfitError
from task_images.translation.corpora import (
    Pairs,
    encode_text,
    parallel_lines,
    read_encoded,
    read_indexed,
)


def write_indexed(prefix: Path, sentences: list[list[int]], code: int = 4) -> None:
    """The form as other tools write it, built here from its description."""
    kind = {3: "<i2", 4: "<i4"}[code]
    flat = [number for sentence in sentences for number in sentence]
    prefix.with_name(prefix.name + ".bin").write_bytes(np.array(flat, kind).tobytes())
    count = len(sentences)
    ends = np.cumsum([0, *map(len, sentences)])
    head = b"TNTIDX\0\0" + struct.pack("<5Q", 1, code, int(kind[2]), count, count)
    tables = [*range(count + 1), *ends, *map(len, sentences)]
    prefix.with_name(prefix.name + ".idx").write_bytes(head + np.array(tables, "<i8").tobytes())


@pytest.mark.parametrize("code", [3, 4])
def test_the_indexed_form(tmp_path: Path, code: int) -> None:
    sentences = [[5, 6, 2], [7, 2], [8, 9, 10, 2]]
    write_indexed(tmp_path / "x", sentences, code)
    side = read_indexed(tmp_path / "x")
    assert [side.sentence(index) for index in range(3)] == sentences
    assert side.rows(np.array([2, 1]), 5, fill=1).tolist() == [[8, 9, 10, 2, 1], [7, 2, 1, 1, 1]]


def encode(line: str) -> list[int]:
    return [*(len(word) for word in line.split()), 2]


def write(folder: Path, source: bytes, target: bytes) -> tuple[Path, Path]:
    (folder / "a.en").write_bytes(source)
    (folder / "a.de").write_bytes(target)
    return folder / "a.en", folder / "a.de"


def test_text_is_encoded_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    texts = write(tmp_path, "\ufeffa bb\nx\n\na a a a\nö ü\r\n".encode(), b"ccc\n\nd\nb\ne\n")
    encode_text(texts, encode, tmp_path, 100, longest=4)
    pairs = read_encoded(tmp_path)
    assert [(pairs.source.sentence(i), pairs.target.sentence(i)) for i in range(len(pairs))] == [
        ([1, 2, 2], [3, 2]),
        ([1, 1, 2], [1, 2]),
    ]
    assert pairs.left_out == {"too long": 1, "empty": 2}
    encode_text(texts, encode, tmp_path, 100, longest=0)
    everything = read_encoded(tmp_path)
    assert len(everything) == 5
    assert everything.target.sentence(1) == [2]
    assert everything.within(4).left_out == {"too long": 1, "empty": 0}


def test_a_line_separator_of_unicode_does_not_end_a_line(tmp_path: Path) -> None:
    texts = write(tmp_path, "a\u2028b\x0bc\n".encode(), b"d\n")
    assert list(parallel_lines(*texts)) == [("a\u2028b\x0bc", "d")]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"a\nb\nc\n", b"a\nb\n", r"a\.de ends after 2 lines, .*a\.en does not"),
        (b"a\n", b"a\nb\n", r"a\.en ends after 1 lines"),
        (b"a\nb\xe4\n", b"a\nb\n", r"line 2 of .*a\.en is not UTF-8"),
    ],
)
def test_texts_that_are_not_parallel_or_not_utf8(tmp_path: Path, source: bytes, target: bytes, message: str) -> None:
    with pytest.raises(EnvironmentUnfitError, match=message):
        encode_text(write(tmp_path, source, target), encode, tmp_path, 100, 10)


def test_a_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match=r"nowhere\.en cannot be read: No such file"):
        list(parallel_lines(tmp_path / "nowhere.en", tmp_path / "nowhere.de"))


def test_damaged_and_mismatched_data(tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [[5, 6, 2], [7, 2]])
    write_indexed(tmp_path / "y", [[5, 6, 2]])
    x, y = read_indexed(tmp_path / "x"), read_indexed(tmp_path / "y")
    with pytest.raises(EnvironmentUnfitError, match="not parallel: 2 source sentences, 1 target"):
        Pairs(x, y)
    with pytest.raises(EnvironmentUnfitError, match="the word number 7, but the vocabulary holds 7 words"):
        Pairs(x, x).check(7, "it")
    with pytest.raises(EnvironmentUnfitError, match="holds no usable pair"):
        Pairs(x, x).within(1).check(100, "it")
    data = tmp_path / "x.bin"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(EnvironmentUnfitError, match="shorter than its index says"):
        read_indexed(tmp_path / "x")
    index = tmp_path / "y.idx"
    for damaged in (b"", b"something else", index.read_bytes()[:-8], index.read_bytes()[:60]):
        index.write_bytes(damaged)
        with pytest.raises(EnvironmentUnfitError, match="is not an index of this form"):
            read_indexed(tmp_path / "y")


def test_encoding_needs_no_more_memory_for_more_text(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        line = b" ".join([b"word"] * 50) + b"\n"
        texts = write(tmp_path, line * count, line * count)
        tracemalloc.start()
        encode_text(texts, encode, tmp_path, 100, 80)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # Eight bytes per sentence and side for the lengths, and the tables made of them at the end.
    assert peak(4000) - peak(400) < 3600 * 100
