"""The canonical zip: read by others, the same everywhere, and checked to its last byte."""

import io
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from mlbench_cli.errors import DamagedArchive
from mlbench_cli.results.archive import files
from mlbench_cli.results.archive.files import Zip, check_canonical, pack
from tests.unit.results.runs import sealed_run

FILES = {"a.txt": b"alpha", "empty": b"", "output/größe.bin": bytes(range(256)) * 5}


def write_zip(contents: Iterable[tuple[str, bytes]]) -> io.BytesIO:
    target = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of duplicate names
        files.write_zip(target, [(name, len(data), io.BytesIO(data)) for name, data in contents], "x.zip")
    return target


def test_it_is_what_was_written_and_others_read_it(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(write_zip(FILES.items()).getvalue())
    with zipfile.ZipFile(path) as zipped:
        assert zipped.testzip() is None
        assert {name: zipped.read(name) for name in zipped.namelist()} == FILES
    own = Zip(write_zip(FILES.items()), "x.zip")
    check_canonical(own)
    assert {name: own.read(name) for name in own.names} == FILES
    if shutil.which("unzip"):
        assert subprocess.run(["unzip", "-tqq", path], check=False).returncode == 0


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
    shutil.unpack_archive(tmp_path / "first.zip", tmp_path / "deep" / "second")
    for path in (tmp_path / "deep" / "second").rglob("*"):
        path.touch()
        path.chmod(0o700)
    pack(tmp_path / "deep" / "second", tmp_path / "second.zip")
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "second.zip").read_bytes()


@pytest.mark.nightly  # 65,536 files
def test_more_files_than_a_plain_zip_counts() -> None:
    names = [f"{index:05d}" for index in range(0x10000)]
    zipped = Zip(write_zip((name, b"") for name in names), "x.zip")
    check_canonical(zipped)
    assert list(zipped.names) == names


@pytest.mark.parametrize("data", [b"short", b"much too long"])
def test_a_file_that_changes_while_it_is_packed_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedArchive, match=f"changed from 8 to {len(data)} bytes"):
        files.write_zip(io.BytesIO(), [("a", 8, io.BytesIO(data))], "x.zip")


def damage_of(data: bytes) -> tuple[str, str]:
    """Code and entry of what is wrong with a file."""
    with pytest.raises(DamagedArchive) as caught:
        check_canonical(Zip(io.BytesIO(data), "x.zip"))
    return caught.value.problem, caught.value.file


def test_every_damage_has_its_code_and_names_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_zip({"a": b"x", "b": b"y"}.items()).getvalue()
    assert damage_of(b"") == ("not_an_archive", "")
    assert damage_of(b"GIF89a") == ("not_an_archive", "")
    assert damage_of(write_zip([("a", b"x"), ("a", b"x")]).getvalue()) == ("duplicate", "a")
    assert damage_of(write_zip([("b", b"x"), ("a", b"x")]).getvalue()) == ("order", "a")
    assert damage_of(whole + b"z") == ("trailing_data", "")
    for length in (4, 20, 31, len(whole) - 22, len(whole) - 1):
        assert damage_of(whole[:length]) == ("truncated", "")
    assert damage_of(whole.replace(b"ax", b"az", 1)) == ("changed", "a")
    assert damage_of(whole[:4] + b"\x15" + whole[5:])[0] == "header"
    assert damage_of(write_zip([("../a", b"x")]).getvalue()) == ("unsafe_name", "../a")
    place = whole.index(b"PK\x01\x02")
    for offset, value, code in ((8, 1, "encrypted"), (10, 8, "compressed"), (41, 0xA1, "link"), (6, 0x15, "header")):
        assert damage_of(whole[: place + offset] + bytes([value]) + whole[place + offset + 1 :])[0] == code
    monkeypatch.setattr(files, "MAX_FILES", 1)
    assert damage_of(whole) == ("too_large", "")


def test_a_file_that_is_cut_after_its_headers_were_read_is_found() -> None:
    file = write_zip({"a": b"x"}.items())
    zipped = Zip(file, "x.zip")
    file.truncate(31)
    with pytest.raises(DamagedArchive):
        check_canonical(zipped)
