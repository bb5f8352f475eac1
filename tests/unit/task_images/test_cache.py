"""The cache of converted data: built once, found in read-only folders, renewed, and identified by its contents."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from task_images.cache import Arrays, cached_arrays, cached_folder, digest_folder
from task_images.contract import EnvironmentUnfitError


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return tmp_path / "own" / "mlbench" / "datasets"


class Builds:
    """Counts how often an entry is built."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, place: Path) -> None:
        self.number += 1
        (place / "x").write_text("y")


def test_an_entry_is_built_once_and_again_for_other_input(tmp_path: Path) -> None:
    text, build = tmp_path / "text", Builds()
    text.write_text("one")
    first = cached_folder(tmp_path, "name", 5, lambda: [text], build)
    assert cached_folder(tmp_path, "name", 5, lambda: [text], build) == first
    assert (first.folder / "x").read_text() == "y"
    assert build.number == 1
    cached_folder(tmp_path, "name", 6, lambda: [text], build)
    text.write_text("another")
    cached_folder(tmp_path, "name", 6, lambda: [text], build)
    assert build.number == 3
    text.write_text("ANOTHER")  # of the same size
    os.utime(text, (1e9, 1e9))
    cached_folder(tmp_path, "name", 6, lambda: [text], build)
    assert build.number == 4
    with pytest.raises(EnvironmentUnfitError, match="missing: No such file"):
        cached_folder(tmp_path, "name", 6, lambda: [tmp_path / "missing"], build)


def test_an_entry_outlives_its_sources(tmp_path: Path) -> None:
    build, files = Builds(), [tmp_path / "text"]
    files[0].write_text("one")
    cached_folder(tmp_path, "name", 1, lambda: files, build)
    files.clear()
    cached_folder(tmp_path, "name", 1, lambda: files, build)
    assert build.number == 1


def test_what_an_interrupted_build_left_is_not_taken_for_data(tmp_path: Path) -> None:
    def interrupt(place: Path) -> None:
        (place / "lines").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder(tmp_path, "name", 1, list, interrupt)
    assert not (tmp_path / "name.cache.partial").exists()
    (tmp_path / "name.cache").mkdir()
    (tmp_path / "name.cache" / "identity.json").write_text("{")
    (tmp_path / "name.cache.partial").mkdir()
    (tmp_path / "name.cache.partial" / "lines").write_text("half")  # of a process that was killed
    entry = cached_folder(tmp_path, "name", 1, list, lambda place: (place / "whole").touch())
    assert sorted(path.name for path in entry.folder.iterdir()) == ["identity.json", "whole"]


def test_a_read_only_folder_is_used_as_it_is_and_never_written(
    tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, claim = Builds(), tmp_path / "claim"
    entry = cached_folder(claim, "name", 1, list, build)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(str(own_folder)))
    assert cached_folder(claim, "name", 1, list, build) == entry
    other = cached_folder(claim, "other", 1, list, build)
    assert other.folder == own_folder / "other.cache"
    assert cached_folder(claim, "other", 1, list, build) == other
    assert build.number == 2
    assert sorted(path.name for path in claim.iterdir()) == ["name.cache", "name.lock"]


def test_equal_data_have_equal_digests_wherever_they_are(tmp_path: Path) -> None:
    def digest(name: str, value: int) -> str:
        def arrays() -> Arrays:
            return {"images": np.full((3, 4), value, np.uint8), "labels": np.arange(3)}

        return cached_arrays(tmp_path / name, "data", 1, list, arrays)[1].digest

    digests = [digest(name, value) for name, value in (("a", 7), ("b", 7), ("c", 8))]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] == digest_folder(tmp_path / "a" / "data.cache")


def test_a_process_that_waits_says_so(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from task_images.cache import cached_folder\n"
        "def build(place):\n"
        "    print('building', flush=True); sys.stdin.readline(); (place / 'x').write_text('y')\n"
        "print(cached_folder(Path(sys.argv[1]), 'name', 1, list, build, lambda text: print(text, flush=True)).digest)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    assert first.stdout.readline() == "building\n"
    second = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    assert "waiting for another process" in second.stdout.readline()
    digest = first.communicate("\n", timeout=60)[0]
    assert second.communicate(timeout=180)[0] == digest
