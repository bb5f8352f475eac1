"""The LIBSVM reader: exact values, plain and compressed, re-use and renewal of the cache, errors with their place."""

import bz2
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_images.contract import EnvironmentUnfitError
from task_images.epsilon_logistic_regression.data import load, read_blocks

TEXT = b"""-1 1:0.5 2:-2.5e-3 4:1
+1 3:7

# a comment
1 1:1 2:2 3:3 4:4 # another
0
"""
ROWS = [[0.5, -2.5e-3, 0, 1], [0, 0, 7, 0], [1, 2, 3, 4], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "compress"), [("data", bytes), ("data.bz2", bz2.compress), ("data.xz", lzma.compress)]
)
def test_a_small_file(tmp_path: Path, name: str, compress: Callable[[bytes], bytes]) -> None:
    source = tmp_path / name
    source.write_bytes(compress(TEXT))

    rows, labels = load(source, 4)

    assert np.array_equal(rows, np.array(ROWS, np.float32))
    assert labels.tolist() == [0, 1, 1, 0]
    assert not rows.flags.writeable


def test_the_cache_is_used_until_the_file_changes(tmp_path: Path) -> None:
    source = tmp_path / "data"
    source.write_bytes(TEXT)
    load(source, 4)
    made = (tmp_path / "data.cache" / "rows.f32").stat().st_ino
    load(source, 4)
    assert (tmp_path / "data.cache" / "rows.f32").stat().st_ino == made

    source.write_bytes(b"1 1:9\n")
    assert load(source, 4).rows.tolist() == [[9, 0, 0, 0]]
    assert load(source, 2).rows.tolist() == [[9, 0]]


@given(st.data())
def test_any_matrix_survives_being_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    features = data.draw(st.integers(1, 6))
    number = st.floats(-(2.0**100), 2.0**100, width=32)
    matrix = data.draw(st.lists(st.lists(number, min_size=features, max_size=features), min_size=1, max_size=5))
    text = "".join(
        "1 " + " ".join(f"{place}:{value!r}" for place, value in enumerate(row, 1) if value) + "\n" for row in matrix
    )
    source = tmp_path_factory.mktemp("libsvm") / "data"
    source.write_text(text)
    read = np.concatenate([block.rows.copy() for block in read_blocks(source, features)])
    assert np.array_equal(read, np.array(matrix, np.float32))


def test_blocks_bound_the_memory(tmp_path: Path) -> None:
    source = tmp_path / "data"
    features = 1 << 20  # four megabytes a row, four rows a block
    source.write_bytes(b"".join(b"1 %d:1\n" % (place + 1) for place in range(9)))
    sizes, places = [], []
    for block in read_blocks(source, features):
        sizes.append(len(block.rows))
        places += [int(row.argmax()) for row in block.rows]
        assert all(np.count_nonzero(row) == 1 for row in block.rows)
    assert sizes == [4, 4, 1]
    assert places == list(range(9))


@pytest.mark.parametrize(
    "line",
    [
        *(b"2 1:1", b"spam 1:1", b"qid:3 1:1", b"1 1:1 x:2", b"1 1:1 2", b"1 1 1:2", b"1 1:0.5:3 4", b"1 1:1 2:1.5x"),
        *(b"1 1:nan", b"1 0:1", b"1 5:1", b"1 2:1 2:1", b"1 3:1 2:1", b"1 1:\xff"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    source = tmp_path / "data"
    source.write_bytes(b"1 1:1\n" + line + b"\n1 1:1\n")
    with pytest.raises(EnvironmentUnfitError, match=r"data, line 2 is .*, not LABEL INDEX:VALUE .* from 1 to 4"):
        load(source, 4)
    assert not (tmp_path / "data.cache").exists()


def test_a_cut_off_archive_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.bz2").write_bytes(bz2.compress(TEXT * 1000)[:-20])
    with pytest.raises(EnvironmentUnfitError, match="damaged"):
        load(tmp_path / "cut.bz2", 4)
    (tmp_path / "empty").write_bytes(b"\n# nothing\n")
    with pytest.raises(EnvironmentUnfitError, match="no sample"):
        load(tmp_path / "empty", 4)
