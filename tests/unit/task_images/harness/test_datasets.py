"""Archives without a network: addresses, digests, space on the disk, what is tried again, and entries of the cache."""

import errno
import hashlib
import os
import shutil
import time
import urllib.error
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from task_images.contract import Contract
from task_images.harness import datasets
from task_images.harness.cache import cached_folder, data_folder, digest_folder, writable_folder
from task_images.harness.datasets import Archive, DownloadError, check_archive, check_space, fetch
from task_images.harness.errors import EnvironmentUnfitError

CONTENT = b"some bytes"
ARCHIVE = Archive("a.zip", "https://host.example/path/a.zip", 10, f"sha256:{hashlib.sha256(CONTENT).hexdigest()}")


def test_a_sites_mirror_is_the_only_address_of_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive("a", "https://host.example/x/a", 0, "", ("https://other.example/a",))
    own = Archive("a", "https://host.example/x/a", 0, "", is_mirrored=False)
    monkeypatch.delenv("MLBENCH_DATA_MIRROR", raising=False)
    assert list(archive.addresses) == ["https://host.example/x/a", "https://other.example/a"]
    monkeypatch.setenv("MLBENCH_DATA_MIRROR", "http://mirror.example/files/")
    assert list(archive.addresses) == ["http://mirror.example/files/host.example/x/a"]
    assert list(own.addresses) == ["https://host.example/x/a"]


def test_a_file_that_is_another_one_is_told_with_both_digests(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(CONTENT)
    check_archive(ARCHIVE, tmp_path / "a.zip")
    check_archive(Archive("a.zip", "", 0, f"md5:{hashlib.md5(CONTENT).hexdigest()}"), tmp_path / "a.zip")
    check_archive(Archive("a.zip", "", 0, ""), tmp_path / "a.zip")
    (tmp_path / "a.zip").write_bytes(b"other")
    found, wanted = hashlib.sha256(b"other").hexdigest(), hashlib.sha256(CONTENT).hexdigest()
    with pytest.raises(EnvironmentUnfitError) as caught:
        check_archive(ARCHIVE, tmp_path / "a.zip")
    assert str(caught.value) == (
        f"{tmp_path / 'a.zip'} has 5 bytes and sha256 {found}, but a.zip has 10 bytes and sha256 {wanted}"
    )
    assert ARCHIVE.url in str(caught.value.hint)
    with pytest.raises(EnvironmentUnfitError) as caught:
        check_archive(ARCHIVE, tmp_path / "a.zip", "ask somebody")
    assert caught.value.hint == "ask somebody"


@pytest.mark.parametrize(("missing", "is_enough"), [(5_000_000, True), (5_000_001, False), (0, True)])
def test_a_disk_needs_room_for_all_that_is_missing(
    tmp_path: Path, missing: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000_000))
    if is_enough:
        check_space(tmp_path, missing, "a.zip")
        return
    with pytest.raises(EnvironmentUnfitError, match=r"has 5 MB free; a\.zip needs 5 MB more"):
        check_space(tmp_path, missing, "a.zip")


def http_error(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("u", code, f"status {code}", Message(), None)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *outcomes: Exception | bytes) -> tuple[list[str], list[float]]:
    """Fetch, where each try has one of the outcomes."""
    left, said, slept = list(outcomes), [], []  # type: tuple[list[Exception | bytes], list[str], list[float]]

    def transfer(archive: Archive, partial: Path, say: object) -> None:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        partial.write_bytes(outcome)

    monkeypatch.setattr(datasets, "_transfer", transfer)
    monkeypatch.setattr(time, "sleep", slept.append)
    fetch(ARCHIVE, folder, said.append)
    assert not left
    return said, slept


def test_what_may_pass_is_tried_five_times_with_growing_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    troubles = [http_error(500), http_error(429), http_error(408), ConnectionResetError("reset\n by peer")]
    said, slept = run(monkeypatch, tmp_path, *troubles, CONTENT)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert not (tmp_path / "a.zip.part").exists()
    assert [line.rpartition("; ")[2] for line in said] == [f"attempt {number} of 5" for number in (2, 3, 4, 5)]
    assert said[3] == "a.zip: reset by peer; attempt 5 of 5"
    assert slept == pytest.approx([0.4, 0.8, 1.6, 3.2])


@pytest.mark.parametrize("outcomes", [[http_error(404)], [http_error(500)] * 5, [http_error(403)]])
def test_what_will_not_pass_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: list[Exception]
) -> None:
    (tmp_path / "a.zip.part").write_bytes(b"abc")
    with pytest.raises(DownloadError) as caught:
        run(monkeypatch, tmp_path, *outcomes)
    assert "3 of 10 bytes are here" in str(caught.value)
    assert f"put the file a.zip into {tmp_path}" in str(caught.value.hint)
    assert caught.value.exit_code == 75


def test_a_part_that_the_server_does_not_know_is_thrown_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(b"longer than it should be")
    run(monkeypatch, tmp_path, http_error(416), CONTENT)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


def test_a_full_disk_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES):
        with pytest.raises(EnvironmentUnfitError):
            run(monkeypatch, tmp_path, OSError(number, "no room"))


def test_a_part_of_another_version_is_fetched_anew_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(b"old")
    said, _ = run(monkeypatch, tmp_path, b"wrong file", CONTENT)
    assert said == ["a.zip: the partial file of an earlier download does not belong to it; starting again"]
    (tmp_path / "a.zip").unlink()
    with pytest.raises(EnvironmentUnfitError, match=r"but a\.zip has 10 bytes"):
        run(monkeypatch, tmp_path, b"wrong file")
    assert not (tmp_path / "a.zip.part").exists()


# --- the cache ------------------------------------------------------------------------------------------------------


def test_data_are_in_the_runs_folder_or_below_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_folder(Contract({"MLBENCH_DATA_DIR": "/data"})) == Path("/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_folder(Contract({})) == Path("/cache/mlbench/datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert data_folder(Contract({})) == Path.home() / ".cache" / "mlbench" / "datasets"


def test_a_folder_that_cannot_be_made_is_replaced_by_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert writable_folder(tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    assert writable_folder(tmp_path / "file" / "below") == tmp_path / "own" / "mlbench" / "datasets"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert writable_folder(tmp_path / "new") == tmp_path / "own" / "mlbench" / "datasets"


def test_the_digest_of_a_folder_is_sha256sums_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in (("z", b"1"), ("b/a", b"2"), (".hidden", b"3"), ("identity.json", b"4"), ("b/.more", b"5")):
        (tmp_path / name).write_bytes(content)
    lines = "".join(
        f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in (("b/a", b"2"), ("z", b"1"))
    )
    assert digest_folder(tmp_path) == f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def test_an_entry_is_rebuilt_for_another_key_or_source_and_kept_without_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    source = tmp_path / "source"
    source.write_text("1")
    built: list[str] = []

    def build(place: Path) -> None:
        built.append(place.name)
        (place / "content").write_text(str(len(built)))

    def get(key: object, *sources: Path) -> Any:
        return cached_folder(tmp_path, "x", key, lambda: sources, build)

    first = get([1, "a"], source)
    assert (first.folder, built) == (tmp_path / "x.cache", ["x.cache.partial"])
    assert get((1, "a"), source) == first  # as JSON, a tuple is a list
    assert get([1, "a"]) == first
    source.write_text("22")
    second = get([1, "a"], source)
    assert len(built) == 2
    assert second.digest != first.digest
    assert get([2, "a"], source) == cached_folder(tmp_path, "x", [2, "a"], lambda: [source], build)
    assert len(built) == 3
    (tmp_path / "x.cache" / "identity.json").write_text("{}")
    get([2, "a"], source)
    assert len(built) == 4
    assert sorted(path.name for path in (tmp_path / "x.cache").iterdir()) == ["content", "identity.json"]
