"""Unpacking a foreign tar archive: what is no file, folder or link, and what leads out of the folder, is left out."""

import tarfile
from collections.abc import Callable
from pathlib import Path

Keep = Callable[[str], bool]


def unpack_members(archive: tarfile.TarFile, folder: Path, keep: Keep) -> None:
    """Write the harmless members whose names `keep` takes below `folder`.

    Python before 3.11.4 (Debian 12 has 3.11.2) has no filters for that; there links are left out, too.
    """

    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter=lambda member, path: _filter(member, path) if keep(member.name) else None)
        return
    chosen = (_check(member) for member in archive if keep(member.name))
    archive.extractall(folder, members=[member for member in chosen if member is not None])


def _filter(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """The member as it may be written below `folder`; None for devices and the like, and for paths that lead out."""
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None


def _check(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """As `_filter`, without its help, for files and folders, which alone are taken."""
    parts = member.name.split("/")
    if not (member.isfile() or member.isdir()) or member.name.startswith("/") or ".." in parts:
        return None
    member.mode = 0o755 if member.isdir() else member.mode & 0o755 | 0o600
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
