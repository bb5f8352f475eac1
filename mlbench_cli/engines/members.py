"""Unpacking a foreign tar archive: what is no file, folder or link, and what leads out of the folder, is left out."""

import tarfile
from collections.abc import Callable
from pathlib import Path

Keep = Callable[[str], bool]


def unpack_members(archive: tarfile.TarFile, folder: Path, keep: Keep) -> None:
    """Write the harmless members whose names `keep` takes below `folder`.

    Python before 3.11.4 (Debian 12 has 3.11.2) has no filters for that; there links are left out, too.
    """

    def choose(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        return _make_harmless(member, path) if keep(member.name) else None

    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter=choose)
        return
    chosen = (choose(member, str(folder)) for member in archive)
    archive.extractall(folder, members=[member for member in chosen if member is not None])


def _make_harmless(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """The member as it may be written below `folder`; None for devices and the like, and for paths that lead out."""
    if not hasattr(tarfile, "data_filter"):
        return _check_member(member)
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None


def _check_member(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """As `tarfile.data_filter` for files and folders, which alone are taken."""
    parts = member.name.split("/")
    if not (member.isfile() or member.isdir()) or member.name.startswith("/") or ".." in parts:
        return None
    member.mode = 0o755 if member.isdir() else member.mode & 0o755 | 0o600
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
