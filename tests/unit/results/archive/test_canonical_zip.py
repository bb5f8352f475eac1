"""The canonical zip: read by others, the same everywhere, and beyond four gigabytes."""

import io
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from mlbench_cli.results.archive import canonical_zip
from mlbench_cli.results.archive.canonical_zip import (
    Entry,
    Writer,
    ZipDamage,
    directory,
    local_header,
    read_data,
    read_entries,
)
from mlbench_cli.results.archive.layout import MAX_NAME_BYTES
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


# --- damage ---------------------------------------------------------------------------------------------------------


def headers(*entries: Entry, start: int = 0) -> bytes:
    return b"".join(directory(entries, start))


def test_headers_of_large_files_by_hand() -> None:
    """The fields of zip64, byte by byte (APPNOTE 4.5.3, 4.3.14, 4.3.15), at the size from which they are needed."""
    edge = 0xFFFFFFFF
    assert len(local_header(Entry("a", edge - 1, 0, 0))) == 31
    assert local_header(Entry("a", edge, 7, 0)).hex() == (
        "504b0304" + "2d00" + "0000" + "0000" + "0000" + "2100" + "07000000" + "ffffffff" * 2 + "0100" + "1400" + "61"
        "0100" + "1000" + "ffffffff00000000" * 2
    )  # fmt: skip
    assert headers(Entry("a", edge, 7, edge), start=edge).hex() == (
        "504b0102" + "2d03" + "2d00" + "0000" + "0000" + "0000" + "2100" + "07000000" + "ffffffff" * 2 + "0100" + "1c00"
        "0000" + "0000" + "0000" + "0000a481" + "ffffffff" + "61"
        "0100" + "1800" + "ffffffff00000000" * 3
        + "504b0606" + "2c00000000000000" + "2d03" + "2d00" + "00000000" * 2 + "0100000000000000" * 2
        + "4b00000000000000" + "ffffffff00000000"
        + "504b0607" + "00000000" + "4a00000001000000" + "01000000"
        + "504b0506" + "0000" + "0000" + "0100" + "0100" + "4b000000" + "ffffffff" + "0000"
    )  # fmt: skip
    small = headers(Entry("a", edge - 1, 7, edge - 1), start=edge - 1)
    assert (len(small), b"PK\x06\x06" in small) == (47 + 22, False)


def test_more_files_than_16_bits_count_need_the_larger_end() -> None:
    entries = [Entry(f"{number:05}", 0, 0, 0) for number in range(0xFFFF)]
    assert b"PK\x06\x06" in headers(*entries)
    assert b"PK\x06\x06" not in headers(*entries[:-1])


def damage_of(data: bytes) -> tuple[str, str]:
    """Code and entry of what is wrong with a file."""

    def read() -> None:
        file = io.BytesIO(data)
        for entry in read_entries(file):
            list(read_data(file, entry))

    with pytest.raises(ZipDamage) as caught:
        read()
    assert str(caught.value)
    return caught.value.code, caught.value.name


def test_every_damage_has_its_code_and_names_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_zip({"a": b"x", "b": b"y"}.items()).getvalue()
    assert damage_of(b"") == ("not_an_archive", "")
    assert damage_of(b"GIF89a") == ("not_an_archive", "")
    assert damage_of(write_zip([("a", b"x"), ("a", b"x")]).getvalue()) == ("duplicate", "a")
    assert damage_of(write_zip([("b", b"x"), ("a", b"x")]).getvalue()) == ("order", "a")
    assert damage_of(whole + b"z") == ("trailing_data", "")
    assert damage_of(whole[:-1])[0] == "truncated"
    assert damage_of(whole[:20]) == ("truncated", "")
    assert damage_of(whole[:30]) == ("truncated", "")
    assert damage_of(whole[:31]) == ("truncated", "a")
    assert damage_of(whole.replace(b"ax", b"az", 1)) == ("changed", "a")
    assert damage_of(whole[:6] + b"\x01" + whole[7:]) == ("encrypted", "a")
    assert damage_of(whole[:8] + b"\x08" + whole[9:]) == ("compressed", "a")
    assert damage_of(whole[:4] + b"\x15" + whole[5:]) == ("header", "a")
    assert damage_of(write_zip([("../a", b"x")]).getvalue()) == ("unsafe_name", "../a")
    assert damage_of(whole[:26] + b"\xff\xff" + whole[28:]) == ("unsafe_name", "")
    place = whole.index(b"PK\x01\x02")
    assert damage_of(whole[: place + 6] + b"\x15" + whole[place + 7 :]) == ("header", "a")
    link = bytearray(whole)
    link[place + 41] = 0xA1  # S_IFLNK | 0o644 in the upper half of the attributes
    assert damage_of(bytes(link)) == ("link", "a")
    monkeypatch.setattr(canonical_zip, "MAX_FILES", 2)
    assert len(read_entries(io.BytesIO(whole))) == 2
    monkeypatch.setattr(canonical_zip, "MAX_FILES", 1)
    assert damage_of(whole) == ("too_large", "")


def test_a_file_that_is_cut_after_its_headers_were_read_is_truncated() -> None:
    file = write_zip({"a": b"x"}.items())
    [entry] = read_entries(file)
    file.truncate(entry.data_offset)
    with pytest.raises(ZipDamage) as caught:
        list(read_data(file, entry))
    assert (caught.value.code, caught.value.name) == ("truncated", "a")


def test_a_header_is_written_before_the_data_for_whoever_reads_along() -> None:
    target = io.BytesIO()

    def chunks() -> Iterator[bytes]:
        assert target.getvalue() == local_header(Entry("a", 1, 0, 0))
        yield b"x"

    Writer(target).add("a", 1, chunks())


def trouble_of(data: bytes) -> str:
    """The message about what is wrong with a file."""
    with pytest.raises(ZipDamage) as caught:
        read_entries(io.BytesIO(data))
    return str(caught.value)


def test_the_message_says_what_is_wrong() -> None:
    assert trouble_of(b"") == "it is empty"
    assert trouble_of(b"GIF89a") == "it does not start like a zip file"
    assert trouble_of(write_zip([("a", b"x"), ("a", b"x")]).getvalue()) == "it appears twice"
    assert trouble_of(write_zip([("b", b"x"), ("a", b"x")]).getvalue()) == "out of order"
    with pytest.raises(ZipDamage) as caught:
        Writer(io.BytesIO()).add("a", 1, iter([b"x", b"y"]))
    assert (caught.value.code, caught.value.name) == ("changed", "a")
    assert str(caught.value) == "it changed from 1 to 2 bytes while it was read"


def test_a_small_file_far_behind_needs_the_newer_version_too() -> None:
    assert headers(Entry("a", 1, 0, 0xFFFFFFFF), start=0)[4:8].hex() == "2d032d00"
    assert headers(Entry("a", 0xFFFFFFFF, 0, 0), start=0)[4:8].hex() == "2d032d00"
    assert headers(Entry("a", 1, 0, 0), start=0)[4:8].hex() == "14031400"


def test_the_longest_name_is_read_and_one_that_is_no_text_is_damage() -> None:
    name = "/".join(["d" * 200] * 5) + "/" + "f" * 19
    assert len(name) == MAX_NAME_BYTES
    assert [entry.name for entry in read_entries(write_zip({name: b""}.items()))] == [name]
    whole = write_zip({"ab": b"x"}.items()).getvalue()
    assert damage_of(whole.replace(b"ab", b"\xff\xfe"))[0] == "header"


def test_an_extra_field_without_a_large_file_and_a_large_file_without_it_are_damage() -> None:
    """20 bytes of zip64 are read as a size only if the plain size says so, and never if they are missing."""
    plain = bytearray(local_header(Entry("a", 1, 0, 0)))
    plain[28:30] = (20).to_bytes(2, "little")
    assert damage_of(bytes(plain) + b"\x01\x00\x10\x00" + bytes([5] + [0] * 7) * 2 + b"x") == ("header", "a")
    large = bytearray(local_header(Entry("a", 1, 0, 0)))
    large[18:26] = b"\xff" * 8
    assert damage_of(bytes(large) + b"x") == ("header", "a")


def test_what_is_missing_at_the_end_is_named() -> None:
    assert trouble_of(local_header(Entry("a", 5, 0, 0)) + b"x") == "5 bytes are declared, but 1 are present"
    assert trouble_of(local_header(Entry("a", 1, 0, 0)) + b"x") == "the zip directory ends early, at byte 32"


def test_a_directory_that_is_wrong_and_cut_is_still_named() -> None:
    whole = write_zip({"a": b"x"}.items()).getvalue()
    place = whole.index(b"PK\x01\x02")
    assert damage_of(whole[: place + 6] + b"\x15") == ("header", "a")
    link = bytearray(whole[: place + 46])
    link[place + 41] = 0xA1  # S_IFLNK | 0o644 in the upper half of the attributes
    assert damage_of(bytes(link)) == ("link", "a")


@pytest.mark.parametrize("data", [b"short", b"much too long"])
def test_a_file_that_changes_while_it_is_packed_is_refused(data: bytes) -> None:
    with pytest.raises(ZipDamage, match=f"changed from 8 to {len(data)} bytes"):
        Writer(io.BytesIO()).add("a", 8, iter([data]))
