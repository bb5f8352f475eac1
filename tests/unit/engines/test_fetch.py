"""Bringing results home: digests of growing files, room on the disk, and what an archive may write where."""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from mlbench_cli.engines import fetch
from mlbench_cli.engines.fetch import Digest, FetchError, digest_file, download, read_fetched, unpack
from mlbench_cli.engines.kubernetes.fetch import HeldArchive, parse_held_archive, split_output

DATA = bytes(range(256)) * 9000  # a little over two blocks of a MiB
SHA = hashlib.sha256(DATA).hexdigest()


def fetch_data(part: Path, sent: bytes = DATA, size: int = len(DATA)) -> list[int]:
    """What was there at the beginning of each try, in bytes."""
    begun = []

    def receive(file: BinaryIO, digest: Digest) -> None:
        begun.append(file.tell())
        for at in range(file.tell(), len(sent), 1 << 20):
            file.write(sent[at : at + (1 << 20)])
            file.flush()
            digest.upto(min(file.tell(), size))

    download(part, size, SHA, receive, source="a file", keeper="the cluster")
    return begun


def test_a_download_is_verified(tmp_path: Path) -> None:
    part = tmp_path / "folder" / "part"
    assert fetch_data(part) == [0]
    assert part.read_bytes() == DATA
    assert digest_file(part) == SHA


def test_a_download_resumes_after_what_is_there(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(DATA[:1000])
    assert fetch_data(part) == [1000]
    assert part.read_bytes() == DATA


def test_what_is_more_than_the_file_is_cut_off(tmp_path: Path) -> None:
    assert fetch_data(tmp_path / "part", DATA + b"more") == [0]
    assert (tmp_path / "part").read_bytes() == DATA


def test_a_damaged_beginning_is_fetched_once_more_from_the_start(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"x" * 1000)
    assert fetch_data(part) == [1000, 0]
    assert part.read_bytes() == DATA


def test_a_file_that_arrives_damaged_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="a file arrived damaged twice") as caught:
        fetch_data(tmp_path / "part", b"x" * len(DATA))
    assert SHA[:16] in caught.value.message
    assert "still on the cluster" in str(caught.value.hint)
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize(("there", "free", "is_enough"), [(0, 20, True), (0, 19, False), (4, 16, True), (4, 15, False)])
def test_a_disk_needs_room_for_the_archive_and_for_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int, free: int, is_enough: bool
) -> None:
    """Twice 10 MiB, of which a part may be there."""
    mib = 1 << 20
    part = tmp_path / "part"
    part.write_bytes(b"x" * there * mib)
    usage = shutil.disk_usage(tmp_path)._replace(free=free * mib)
    monkeypatch.setattr(fetch, "shutil", type("Disk", (), {"disk_usage": staticmethod(lambda path: usage)}))

    def receive(file: BinaryIO, digest: Digest) -> None:
        raise InterruptedError("it began")

    def start() -> None:
        download(part, 10 * mib, SHA, receive, source="a file", keeper="the cluster")

    if is_enough:
        with pytest.raises(InterruptedError):
            start()
        return
    with pytest.raises(FetchError, match=f"need {20 - there} MiB, and .* has {free} MiB free"):
        start()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"files": 3, "bytes": 70}', (3, 70)),
        ('{"files": 0, "bytes": 0}', (0, 0)),
        ('{"files": 3}', None),
        ('{"files": null, "bytes": 0}', None),
        ("[]", None),
        ("{", None),
    ],
)
def test_what_was_fetched_before_is_read_from_its_marker(
    tmp_path: Path, text: str, found: tuple[int, int] | None
) -> None:
    assert read_fetched(tmp_path / "nothing") is None
    (tmp_path / "marker").write_text(text)
    assert read_fetched(tmp_path / "marker") == found


# --- unpacking -------------------------------------------------------------------------------------------------------


def pack(path: Path, members: Mapping[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                archive.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def link(target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def unpack_into(folder: Path, members: Mapping[str, Any], ranks: range = range(1), first: bool = True) -> Any:
    (folder / ".state").mkdir(parents=True, exist_ok=True)
    part = pack(folder / ".state" / "output.tar", members)
    result = unpack(
        part,
        folder,
        lambda output: split_output(output, ranks),
        folder / ".state" / "resources-0.jsonl",
        marker=folder / ".state" / "fetched-0.json",
        first=first,
    )
    assert not part.exists()
    return result


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_results_are_unpacked_to_their_places(tmp_path: Path) -> None:
    members = {
        "output/a": b"12345",
        "output/b/c": b"678",
        "resources.jsonl": b"{}\n",
        "faults.json": b"[]\n",
        "something": b"else",
    }
    assert unpack_into(tmp_path, members) == (2, 8)
    assert files_in(tmp_path) == {
        "output/rank-0/a": b"12345",
        "output/rank-0/b/c": b"678",
        ".state/resources-0.jsonl": b"{}\n",
        "faults.json": b"[]\n",
        ".state/fetched-0.json": json.dumps({"files": 2, "bytes": 8}).encode(),
    }


def test_only_the_first_archive_tells_of_faults(tmp_path: Path) -> None:
    assert unpack_into(tmp_path, {"faults.json": b"[]\n"}, first=False) == (0, 0)
    assert not (tmp_path / "faults.json").exists()


def test_results_take_the_place_of_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "output" / "rank-0").mkdir(parents=True)
    (tmp_path / "output" / "rank-0" / "old").touch()
    (tmp_path / "output" / "rank-7").mkdir()
    unpack_into(tmp_path, {"output/new": b"1"})
    assert {path.name for path in (tmp_path / "output" / "rank-0").iterdir()} == {"new"}
    assert (tmp_path / "output" / "rank-7").is_dir()


def test_what_could_escape_the_folder_is_left_out(tmp_path: Path) -> None:
    members = {
        "../outside": b"1",
        "output/../../outside": b"1",
        "output/good": b"12",
        "output/fifo": link("", tarfile.FIFOTYPE),
        "output/up": link("../../../outside"),
        "output/absolute": link("/etc/passwd"),
    }
    unpack_into(tmp_path / "run", members)
    assert [path.name for path in (tmp_path / "run" / "output" / "rank-0").iterdir()] == ["good"]
    assert not (tmp_path / "outside").exists()


def test_links_are_no_files_of_the_result(tmp_path: Path) -> None:
    assert unpack_into(tmp_path, {"output/a": b"12", "output/b": link("a")}) == (1, 2)


# --- folders of ranks, and what workers hold -------------------------------------------------------------------------


def test_a_worker_with_several_ranks_has_a_folder_for_each(tmp_path: Path) -> None:
    for name in ("rank-2/own", "model", "rank-9/other", "rank-2/log", "log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = split_output(tmp_path, range(2, 4))
    assert found == {2: tmp_path / "rank-2", 3: tmp_path / "rank-3"}
    assert files_in(tmp_path) == {
        "rank-2/own": b"rank-2/own",
        "rank-2/model": b"model",
        "rank-2/rank-9/other": b"rank-9/other",
        "rank-2/log": b"rank-2/log",
        "log": b"log",
    }
    assert (tmp_path / "rank-3").is_dir()
    assert split_output(tmp_path, range(5, 6)) == {5: tmp_path}


@pytest.mark.parametrize(
    ("summary", "held"),
    [
        ({"held": True, "archive": {"size": "7", "sha256": "ab"}}, HeldArchive(7, "ab")),
        ({"held": False, "archive": {"size": 7, "sha256": "ab"}}, None),
        ({"archive": {"size": 7, "sha256": "ab"}}, None),
        ({"held": True, "archive": None}, None),
        ({"held": True}, None),
        ({}, None),
        (None, None),
    ],
)
def test_what_a_worker_holds_is_in_its_last_word(summary: dict[str, Any] | None, held: HeldArchive | None) -> None:
    assert parse_held_archive(summary) == held
