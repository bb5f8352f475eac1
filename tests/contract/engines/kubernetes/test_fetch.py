"""Results come home whole or not at all: by exec in chunks, over connections that break, cut short and lie."""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mlbench_cli.engines.fetch import BLOCK, FetchError, read_fetched
from mlbench_cli.engines.fetch import unpack as unpack_archive
from mlbench_cli.engines.kubernetes import fetch
from mlbench_cli.engines.kubernetes.fetch import (
    HeldArchive,
    acknowledge,
    download,
    parse_held_archive,
    read_summary,
    split_output,
)
from mlbench_cli.kube.api import ApiError
from mlbench_cli.kube.execute import ExecBroken, execute
from tests.fakes.kube_api import Fault, KubeApi

POD = "r-0-x"
SIZE = 5 * BLOCK + 12345


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The pod's /results."""
    folder = tmp_path / "results"
    folder.mkdir()
    block = hashlib.sha256(b"seed").digest()
    (folder / "archive.tar").write_bytes((block * (SIZE // len(block) + 1))[:SIZE])
    return folder


@pytest.fixture
def server(results: Path) -> Iterator[KubeApi]:
    with KubeApi() as server:
        server.folders[POD] = results
        yield server


def what(results: Path) -> HeldArchive:
    data = (results / "archive.tar").read_bytes()
    return HeldArchive(len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [Fault("exec", cut=1_500_000), Fault("exec", cut=10), Fault("exec", cut=2 * BLOCK + 7)],
        [Fault("exec", short=3 * BLOCK)],  # the end of the output is lost, and yet the exit code is 0
        [Fault("exec", short=0)],
        [Fault("exec", status=500), Fault("exec", status=503)],
    ],
)
def test_what_arrives_is_what_was_held(server: KubeApi, results: Path, tmp_path: Path, faults: list[Fault]) -> None:
    server.faults += faults
    part = tmp_path / "here" / "part.tar"
    download(server.access, "default", POD, what(results), part)
    assert part.read_bytes() == (results / "archive.tar").read_bytes()
    assert all(fault.times == 0 for fault in faults)


def test_a_killed_client_goes_on_where_it_was(server: KubeApi, results: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.tar"
    part.write_bytes((results / "archive.tar").read_bytes()[: 3 * BLOCK + 99])
    # Were it to begin at the front, this would cut it.
    server.faults.append(Fault("exec", times=100, cut=SIZE - 3 * BLOCK + 1000))
    download(server.access, "default", POD, what(results), part)
    assert part.read_bytes() == (results / "archive.tar").read_bytes()


def test_a_beginning_that_is_not_of_this_archive_is_dropped(server: KubeApi, results: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.tar"
    part.write_bytes(b"z" * (2 * BLOCK))
    download(server.access, "default", POD, what(results), part)
    assert part.read_bytes() == (results / "archive.tar").read_bytes()


def test_damage_is_told(server: KubeApi, results: Path, tmp_path: Path) -> None:
    wrong = HeldArchive(SIZE, "0" * 64)
    with pytest.raises(FetchError, match="damaged twice"):
        download(server.access, "default", POD, wrong, tmp_path / "part.tar")


def test_no_room_is_told_before_anything_is_fetched(server: KubeApi, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="MiB free"):
        download(server.access, "default", POD, HeldArchive(1 << 60, "0" * 64), tmp_path / "part.tar")
    assert not server.requests


def test_a_container_that_has_ended_is_told_apart(server: KubeApi, results: Path, tmp_path: Path) -> None:
    with pytest.raises(ApiError) as caught:
        download(server.access, "default", "another", what(results), tmp_path / "part.tar")
    assert caught.value.status == 400


def test_exec_tells_output_error_and_exit_code(server: KubeApi) -> None:
    done = execute(server.access, "default", POD, ["sh", "-c", "echo out; echo err >&2; exit 9"])
    assert (done.code, done.stdout, done.stderr) == (9, b"out\n", "err\n")


@pytest.mark.parametrize("fault", [Fault("exec", cut=2), Fault("exec", stall=2)])
def test_exec_never_takes_a_beginning_for_the_whole(server: KubeApi, fault: Fault) -> None:
    server.faults.append(fault)
    with pytest.raises(ExecBroken):
        execute(server.access, "default", POD, ["echo", "output"], idle_seconds=0.5)


def test_acknowledge(server: KubeApi, results: Path) -> None:
    server.faults.append(Fault("exec", cut=0))
    acknowledge(server.access, "default", POD)
    assert (results / "ack").exists()
    acknowledge(server.access, "default", "ended long ago")


def test_the_workers_last_word(server: KubeApi, results: Path) -> None:
    assert read_summary(server.access, "default", POD) is None
    (results / "summary.json").write_text('{"worker":0,"held":true,"archive":{"size":3,"sha256":"ab"}}')
    summary = read_summary(server.access, "default", POD)
    assert parse_held_archive(summary) == HeldArchive(3, "ab")
    assert parse_held_archive({"held": False, "archive": {"size": 3, "sha256": "ab"}}) is None
    assert parse_held_archive({"held": True, "archive": None}) is None
    assert parse_held_archive(None) is None


# --- unpacking ------------------------------------------------------------------------------------------------------


def tar_of(path: Path, *members: tuple[str, bytes | str]) -> Path:
    """A tar; a text stands for the target of a symbolic link."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def unpack(part: Path, output: Path, ranks: list[int], resources: Path) -> tuple[int, int]:
    split, marker = partial(split_output, ranks=ranks), part.with_name("fetched")
    found = unpack_archive(part, output.parent, split, resources, marker=marker, first=ranks[0] == 0)
    assert read_fetched(marker) == found
    assert not part.exists()
    return found


def test_unpack(tmp_path: Path) -> None:
    members: tuple[tuple[str, bytes], ...] = (("output/a/b.txt", b"12345"), ("output/.hidden", b""))
    output, resources = tmp_path / "run/output/rank-0", tmp_path / "resources-0.jsonl"
    (tmp_path / "run").mkdir()
    for _ in range(2):  # a killed client does it again
        part = tar_of(tmp_path / "part.tar", *members, ("resources.jsonl", b"{}\n"))
        assert unpack(part, output.parent, [0], resources) == (2, 5)
        assert (output / "a/b.txt").read_bytes() == b"12345"
        assert resources.read_bytes() == b"{}\n"
        assert sorted(path.name for path in output.iterdir()) == [".hidden", "a"]


def test_each_process_of_a_worker_has_an_output_folder_of_its_own(tmp_path: Path) -> None:
    part = tar_of(tmp_path / "part.tar", ("output/rank-2/a", b"2"), ("output/rank-3/a", b"3"), ("output/of-both", b"x"))
    (tmp_path / "output/rank-3").mkdir(parents=True)
    (tmp_path / "output/rank-3/old").write_text("gone after this")
    assert unpack(part, tmp_path / "output", [2, 3], tmp_path / "resources") == (3, 3)
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.glob("output/*/*")}
    assert found == {"output/rank-2/a": "2", "output/rank-3/a": "3", "output/rank-2/of-both": "x"}


def test_nothing_gets_out_of_the_folder(tmp_path: Path) -> None:
    part = tar_of(
        tmp_path / "part.tar",
        ("../evil", b"1"),
        ("/etc/evil", b"1"),
        ("output/../../evil", b"1"),
        ("elsewhere/evil", b"1"),
        ("output/link", "/etc/passwd"),
        ("output/up", "../../.."),
        ("output/up/evil", b"1"),
        ("output/fine", b"1"),
    )
    home = tmp_path / "run"
    home.mkdir()
    unpack(part, home / "output", [0], tmp_path / "resources")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir())
    assert [name for name in found if "evil" in name] == ["run/output/rank-0/up/evil"]  # `up` is a folder, not the link
    assert (home / "output/rank-0/fine").read_bytes() == b"1"
    assert not (home / "output/rank-0/link").exists()


def test_chunks_are_smaller_than_what_is_held_in_the_tests() -> None:
    assert fetch.CHUNK_BLOCKS * BLOCK > SIZE  # else `short` would not end the last chunk
