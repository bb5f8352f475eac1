"""Unpack a Helm chart's untrusted archive: no paths outside its folder, no links, no zip bombs."""

import io
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from mlbench_cli.errors import UsageError

MAX_PACKED = 20 << 20  # bytes; helm's own limit
MAX_UNPACKED = 100 << 20
MAX_FILES = 2_000


def unpack(data: bytes, into: Path, what: str) -> Path:
    """Unpack a gzipped tar file, all of which is in one folder, into `into`, and return that folder.

    Raises UsageError if it is damaged, too large, has paths outside the folder, or entries other than files and
    folders.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(_inflate(data, what)), mode="r:") as tar:
            return _extract(tar, into, what)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UsageError(f"{what} is damaged: {error}.") from None
    except OSError as error:
        raise UsageError(f"{what} cannot be unpacked: {error}.") from None


def _inflate(data: bytes, what: str) -> bytes:
    """The decompressed tar file, in memory, up to the limit."""
    machine = zlib.decompressobj(wbits=31)
    try:
        found = machine.decompress(data, MAX_UNPACKED + 1)
    except zlib.error as error:
        raise UsageError(f"{what} is damaged: {error}.") from None
    if len(found) > MAX_UNPACKED:
        raise UsageError(f"{what} is larger than {MAX_UNPACKED >> 20} MiB when unpacked, so it is rejected.")
    if not machine.eof:
        raise UsageError(f"{what} is damaged: it ends too early.")
    return found


def _extract(tar: tarfile.TarFile, into: Path, what: str) -> Path:
    top: str | None = None
    for number, member in enumerate(tar):
        path = _member_path(member, what)
        if number >= MAX_FILES:
            raise UsageError(f"{what} has more than {MAX_FILES} files, so it is rejected.")
        if path is None:
            continue
        if top is not None and path.parts[0] != top:
            raise UsageError(f'{what} has more than one folder: "{top}" and "{path.parts[0]}".')
        top = path.parts[0]
        target = into / path
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        assert source is not None
        content = source.read()
        if len(content) != member.size:
            raise UsageError(f'{what} is damaged: "{member.name}" ends too early.')
        with open(target, "xb") as file:
            file.write(content)
    if top is None:
        raise UsageError(f"{what} is empty.")
    return into / top


def _member_path(member: tarfile.TarInfo, what: str) -> PurePosixPath | None:
    """The member's path in the folder, None for the archive's root. Raises UsageError for entries not allowed in a
    chart."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
        raise UsageError(f'{what} has "{member.name}", which is outside its folder, so it is rejected.')
    if not (member.isfile() or member.isdir()):
        raise UsageError(f'{what} has "{member.name}", which is neither a file nor a folder, so it is rejected.')
    return path if path.parts else None
