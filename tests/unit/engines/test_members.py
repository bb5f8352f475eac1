"""What of a foreign tar archive is written, with the filters of newer Pythons and without."""

import io
import tarfile
from pathlib import Path

import pytest

from mlbench_cli.engines.fetch import unpack_members


def archive_of(*members: tarfile.TarInfo) -> tarfile.TarFile:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size) if member.size else None)
    return tarfile.open(fileobj=io.BytesIO(sink.getvalue()))


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, mode: int = 0o644) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.size, found.mode, found.linkname = kind, size, mode, "/etc/passwd"
    found.uid = found.gid = 12345
    return found


@pytest.mark.parametrize("has_filters", [True, False])
def test_only_harmless_members_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_filters: bool) -> None:
    if not has_filters:  # as in Python 3.11.0 to 3.11.3
        for name in ("data_filter", "FilterError"):
            monkeypatch.delattr(tarfile, name, raising=False)
    folder = tmp_path / "inside"
    folder.mkdir()
    given = archive_of(
        member("output", tarfile.DIRTYPE, mode=0o700),
        member("output/a", size=3, mode=0o4777),
        member("output/link", tarfile.SYMTYPE),
        member("output/hard", tarfile.LNKTYPE),
        member("output/pipe", tarfile.FIFOTYPE),
        member("output/device", tarfile.CHRTYPE),
        member("output/../../out", size=1),
        member("/output/absolute", size=1),
        member("other", size=1),
    )
    with given:
        unpack_members(given, folder, lambda name: name.startswith(("output", "/output")))
    written = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    # The filter makes an absolute name a relative one.
    assert written - {"output/absolute"} == {"output", "output/a"}
    assert (folder / "output/a").read_bytes() == b"xxx"
    assert (folder / "output/a").stat().st_mode & 0o7022 == 0
    assert {path.name for path in tmp_path.iterdir()} == {"inside"}
