"""Files that are replaced as a whole, their ends, and folders that disappear at once."""

import fcntl
import os
import stat
from datetime import date
from pathlib import Path

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.util.files import is_lock_held, read_end, remove_folder, replace_file, size_of, write_atomically
from mlbench_cli.util.yaml_text import MAX_DEPTH, read_yaml


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with replace_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_a_file_stays_as_it_was_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def interrupt() -> None:
        with replace_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_what_is_written_is_on_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    replace = os.replace

    def sync(descriptor: int) -> None:
        done.append(f"sync {'folder' if stat.S_ISDIR(os.fstat(descriptor).st_mode) else 'file'}")

    def rename(old: Path, new: Path) -> None:
        done.append(f"rename {Path(old).read_text()}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write_atomically(tmp_path / "x", b"new")
    assert done == ["sync file", "rename new", "sync folder"]


def test_all_that_was_written_is_synced_and_no_file_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def sync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            sizes.append(found.st_size)

    monkeypatch.setattr(os, "fsync", sync)
    before = len(os.listdir("/dev/fd"))
    write_atomically(tmp_path / "x", b"0123456789")
    is_lock_held(tmp_path / "x")
    assert (sizes, len(os.listdir("/dev/fd"))) == ([10], before)


def test_an_interruption_is_told_even_if_somebody_has_removed_the_unfinished_file(tmp_path: Path) -> None:
    def interrupt() -> None:
        with replace_file(tmp_path / "x"):
            for path in tmp_path.iterdir():
                path.unlink()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()


@pytest.mark.parametrize(
    ("limit", "end"), [(4, b"6789"), (10, b"0123456789"), (11, b"0123456789"), (1, b"9"), (0, b"")]
)
def test_the_end_of_a_file(tmp_path: Path, limit: int, end: bytes) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    assert read_end(tmp_path / "x", limit) == end


def test_a_file_that_is_missing_is_empty(tmp_path: Path) -> None:
    assert read_end(tmp_path / "no") == b""
    assert size_of(tmp_path / "no") == 0
    (tmp_path / "x").write_bytes(b"0" * 70000)
    assert size_of(tmp_path / "x") == 70000
    assert len(read_end(tmp_path / "x")) == 65536


def test_a_folder_is_removed_but_neither_a_link_nor_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("link", "file", "no"):
        remove_folder(tmp_path / name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder", "link"]
    remove_folder(tmp_path / "folder")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]


def test_a_lock_is_held_by_whoever_has_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    assert not is_lock_held(path)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_lock_held(path)
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not is_lock_held(path)
        fcntl.flock(file, fcntl.LOCK_EX)
    assert not is_lock_held(path)
    with pytest.raises(FileNotFoundError):
        is_lock_held(tmp_path / "no")


# --- YAML -------------------------------------------------------------------------------------------------------------


def test_dates_are_dates_or_texts() -> None:
    assert read_yaml("a: 2026-01-02") == {"a": date(2026, 1, 2)}
    assert read_yaml("a: 2026-01-02", dates_as_text=True) == {"a": "2026-01-02"}
    assert read_yaml("a: 12\nb: true\nc: null\nd: 1.5", dates_as_text=True) == {"a": 12, "b": True, "c": None, "d": 1.5}
    assert read_yaml(b"- a\n- b") == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: !!float ''",
        "a: 0000-01-01",
        "? [a]\n: b",
        "!!python/object:os.system {}",
        "1" * 5000 + ": a",
        "0x" + "f" * 5000 + ": a",
    ],
)
def test_what_is_not_valid_is_said_with_its_subject(text: str) -> None:
    with pytest.raises(UsageError, match=r"^values\.yaml is not valid YAML: "):
        read_yaml(text, "values.yaml")
    with pytest.raises(UsageError, match=r"^Not valid YAML: "):
        read_yaml(text)


def test_lists_may_be_nested_to_a_depth() -> None:
    assert read_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(UsageError, match=f"more than {MAX_DEPTH} lists or mappings inside each other"):
        read_yaml("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    siblings = ",".join(["[a]"] * (MAX_DEPTH + 5))
    assert len(read_yaml(f"[{siblings}]")) == MAX_DEPTH + 5
    with pytest.raises(UsageError, match="inside each other"):
        read_yaml(f"[{siblings},{'[' * MAX_DEPTH}{']' * MAX_DEPTH}]")
