"""The canonical zip: read by others, the same everywhere, and beyond four gigabytes."""

import io
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from mlbench_cli.results.archive import canonical_zip
from mlbench_cli.results.archive.canonical_zip import Entry, Writer, ZipDamage, read_data, read_entries
from mlbench_cli.results.archive.pack import pack, unpack
from tests.unit.results.runs import sealed_run

FILES = {"a.txt": b"alpha", "empty": b"", "output/größe.bin": bytes(range(256)) * 5}


def write_zip(files: Iterable[tuple[str, bytes]]) -> io.BytesIO:
    target = io.BytesIO()
    writer = Writer(target)
    for name, data in files:
        writer.add(name, len(data), iter([data]))
    writer.finish()
    return target


def test_others_read_it(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(write_zip(FILES.items()).getvalue())
    with zipfile.ZipFile(path) as zipped:
        assert zipped.testzip() is None
        assert {name: zipped.read(name) for name in zipped.namelist()} == FILES
        assert {info.date_time for info in zipped.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {info.external_attr >> 16 for info in zipped.infolist()} == {0o100644}
    if shutil.which("unzip"):
        assert subprocess.run(["unzip", "-tqq", path], check=False).returncode == 0


def test_it_is_what_was_written() -> None:
    file = write_zip(FILES.items())
    entries = read_entries(file)
    assert {entry.name: b"".join(read_data(file, entry)) for entry in entries} == FILES


def test_bytes_are_fixed_for_all_times() -> None:
    """Another version of Python or of mlbench must write the same; a new form needs a new schema version."""
    assert write_zip({"a": b"x"}.items()).getvalue().hex() == (
        "504b03041400000000000000210083" + "16dc8c" + "01000000010000000100000061" + "78"
        "504b01021403140000000000000021008316dc8c01000000010000000100000000000000000000" + "00a4810000000061"
        "504b050600000000010001002f000000200000000000"
    )  # fmt: skip


def test_two_folders_with_equal_contents_give_equal_bytes(tmp_path: Path) -> None:
    first = sealed_run(tmp_path / "first")
    pack(first, tmp_path / "first.zip")
    unpack(tmp_path / "first.zip", tmp_path / "deep" / "second")
    for path in (tmp_path / "deep" / "second").rglob("*"):
        path.touch()
        path.chmod(0o700)
    pack(tmp_path / "deep" / "second", tmp_path / "second.zip")
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "second.zip").read_bytes()


@pytest.mark.parametrize("size", [0xFFFFFFFE, 0xFFFFFFFF, 0x100000000, 5 << 30])
def test_sizes_and_offsets_beyond_four_gigabytes(tmp_path: Path, size: int) -> None:
    """Sparse files: the data are holes, so only headers are written and read."""
    path = tmp_path / "large.zip"
    first = Entry("a", size, 0, 0)
    second = Entry("b", 3, zlib.crc32(bytes(3)), first.data_offset + size)
    with open(path, "w+b") as file:
        for entry in (first, second):
            file.seek(entry.offset)
            file.write(canonical_zip.local_header(entry))
        end = second.data_offset + second.size
        file.seek(end)
        file.writelines(canonical_zip.directory([first, second], end))
        assert read_entries(file) == [first, second]
    with zipfile.ZipFile(path) as zipped:
        assert [(info.filename, info.file_size) for info in zipped.infolist()] == [("a", size), ("b", 3)]
        assert zipped.read("b") == bytes(3)


def test_more_files_than_a_plain_zip_counts() -> None:
    names = [f"{index:05d}" for index in range(0x10000)]
    file = write_zip((name, b"") for name in names)
    assert [entry.name for entry in read_entries(file)] == names
    assert zipfile.ZipFile(file).namelist() == names


def test_a_file_that_grows_while_it_is_stored_is_refused() -> None:
    with pytest.raises(ZipDamage, match="changed from 1 to 2 bytes"):
        Writer(io.BytesIO()).add("a", 1, iter([b"x", b"y"]))
