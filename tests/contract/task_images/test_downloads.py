"""Fetching an archive from a server with bad habits, by processes that come at the same time, onto a full disk."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from task_images.contract import EnvironmentUnfitError
from task_images.fetch import Archive, DownloadError, fetch
from tests.contract.task_images.ranks import ROOT
from tests.fakes.file_server import FileServer, serving

CONTENT = bytes(range(256)) * 4000
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


def archive(server: FileServer) -> Archive:
    return Archive("data.tar", server.url, len(CONTENT), DIGEST)


def test_a_download_that_breaks_off_goes_on_where_it_was(tmp_path: Path) -> None:
    said: list[str] = []
    with serving(FileServer(CONTENT, break_off_after=[1000, 5000], refuse_with=[503, 429])) as server:
        path = fetch(archive(server), tmp_path, said.append)
    assert path.read_bytes() == CONTENT
    assert server.asked == [None, None, None, "bytes=1000-", "bytes=6000-"]
    assert len(said) == 4
    assert [item.name for item in tmp_path.iterdir()] == ["data.tar"]


def test_a_server_without_ranges_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "data.tar.part").write_bytes(b"x" * 70_000)
    with serving(FileServer(CONTENT, ranges=False)) as server:
        assert fetch(archive(server), tmp_path, print).read_bytes() == CONTENT


@pytest.mark.parametrize("left", [b"<html>not here</html>", b"x" * (len(CONTENT) + 5), b"y" * len(CONTENT)])
def test_a_wrong_beginning_is_thrown_away(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "data.tar.part").write_bytes(left)
    with serving(FileServer(CONTENT)) as server:
        assert fetch(archive(server), tmp_path, print).read_bytes() == CONTENT


def test_a_wrong_checksum_is_quoted_and_nothing_kept(tmp_path: Path) -> None:
    with serving(FileServer(CONTENT, wrong_start=b"?")) as server, pytest.raises(EnvironmentUnfitError) as caught:
        fetch(archive(server), tmp_path, print)
    assert DIGEST.removeprefix("sha256:") in str(caught.value)
    assert hashlib.sha256(b"?" + CONTENT[1:]).hexdigest() in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_archive_that_is_here_is_checked_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "data.tar").write_bytes(CONTENT[:-1])
    with (
        serving(FileServer(CONTENT)) as server,
        pytest.raises(EnvironmentUnfitError, match=f"{len(CONTENT) - 1} bytes"),
    ):
        fetch(archive(server), tmp_path, print)
    assert server.asked == []
    (tmp_path / "data.tar").write_bytes(CONTENT)
    assert fetch(archive(server), tmp_path, print) == tmp_path / "data.tar"


def test_what_is_not_there_is_not_asked_for_again(tmp_path: Path) -> None:
    with (
        serving(FileServer(CONTENT, refuse_with=[404] * 9)) as server,
        pytest.raises(DownloadError, match="404") as caught,
    ):
        fetch(archive(server), tmp_path, print)
    assert len(server.asked) == 1
    assert caught.value.exit_code == 75
    assert "data.tar" in str(caught.value.hint)


def test_only_what_is_missing_needs_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with serving(FileServer(CONTENT)) as server:
        (tmp_path / "data.tar.part").write_bytes(CONTENT[:-1001])
        with pytest.raises(EnvironmentUnfitError, match="MB free"):
            fetch(archive(server), tmp_path, print)
        (tmp_path / "data.tar.part").write_bytes(CONTENT[:-1000])
        assert fetch(archive(server), tmp_path, print).read_bytes() == CONTENT


def test_a_mirror_is_asked_only_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_DATA_MIRROR", "http://site/data/")
    url, others = "https://host/path/x", ("https://other/x",)
    assert Archive("x", url, 0, "", others).addresses == ("http://site/data/host/path/x",)
    assert Archive("x", url, 0, "", others, is_mirrored=False).addresses == (url, *others)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """A limit on the size of files takes the part of the disk; both are refused by the system while writing."""
    with serving(FileServer(CONTENT)) as server:
        ended = fetcher(
            server, tmp_path, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))"
        )
        _, stderr = ended.communicate(timeout=180)
    assert ended.returncode == 78
    assert "data.tar.part: File too large" in stderr
    assert "--data-dir" in stderr
    with serving(FileServer(CONTENT)) as server:
        assert fetch(archive(server), tmp_path, print).read_bytes() == CONTENT
    assert server.asked == ["bytes=100000-"]


def test_ranks_that_come_together_download_once(tmp_path: Path) -> None:
    with serving(FileServer(CONTENT, break_off_after=[100])) as server:
        both = [fetcher(server, tmp_path, "") for _ in range(3)]
        assert [process.communicate(timeout=180)[1] for process in both] == [""] * 3
    assert [process.returncode for process in both] == [0] * 3
    assert server.asked == [None, "bytes=100-"]


def fetcher(server: FileServer, folder: Path, first: str) -> subprocess.Popen[str]:
    wanted = json.dumps([str(folder), "data.tar", server.url, len(CONTENT), DIGEST])
    program = f"""
{first}
import json, sys
from pathlib import Path
from task_images.cache import hold_lock
from task_images.fetch import Archive, fetch
from task_images.contract import TaskError
folder, *archive = json.loads(sys.argv[1])
try:
    with hold_lock(Path(folder, "lock")):
        fetch(Archive(*archive), Path(folder), print)
except TaskError as error:
    sys.exit((sys.stderr.write(f"{{error}} {{error.hint}}"), error.exit_code)[1])
"""
    command = [sys.executable, "-c", program, wanted]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
