"""Bringing results into a run's folder: room, digests, and archives that are unpacked in place of what was there."""

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from mlbench_cli.errors import MlbenchError
from mlbench_cli.storage.run_folder import FAULTS
from mlbench_cli.util.files import size_of, sync_folder, write_atomically

BLOCK = 1 << 20
ATTEMPTS = 2


class FetchError(MlbenchError):
    """The results exist but could not be fetched completely; a retry may help."""

    code = "fetch_failed"


def download(
    part: Path, size: int, sha256: str, receive: Callable[[BinaryIO, "Digest"], None], *, source: str, place: str
) -> None:
    """Complete `part`, which may hold the beginning of a file of this size and digest. On return, it is on disk.

    `receive` appends what is missing, and may tell the digest how many bytes are final. `source` names the file in
    messages, `place` where it stays meanwhile. Raises FetchError, and what `receive` raises.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    _check_room(part, size, place)
    for _ in range(ATTEMPTS):
        with ThreadPoolExecutor(1) as pool, open(part, "ab") as file:
            digest = Digest(part, pool)
            receive(file, digest)
            file.truncate(min(size, file.seek(0, os.SEEK_END)))
            file.flush()
            digest.upto(size)
            if digest.hexdigest() == sha256:
                os.fsync(file.fileno())
                return
        part.unlink()
    raise FetchError(
        f"{source} arrived damaged twice: expected SHA-256 {sha256[:16]}….",
        hint=f"Fetch it again; it is still on {place}. If this persists, the disk there may be damaged.",
    )


class Digest:
    """SHA-256 of a growing file, computed while more data arrive."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        self._path = path
        self._pool = pool
        self._sha = hashlib.sha256()
        self._done = 0
        self._last: Future[None] | None = None

    def upto(self, size: int) -> None:
        """The file's first `size` bytes are final, and written."""
        self._last = self._pool.submit(self._digest, size)

    def hexdigest(self) -> str:
        """The digest of all that is final."""
        if self._last is not None:
            self._last.result()
        return self._sha.hexdigest()

    def _digest(self, size: int) -> None:
        with open(self._path, "rb") as file:
            file.seek(self._done)
            # Empty if the file was truncated; then the digest is wrong, as it should be.
            while piece := file.read(min(BLOCK, size - self._done)):
                self._sha.update(piece)
                self._done += len(piece)


def read_fetched(marker: Path) -> tuple[int, int] | None:
    """Files and bytes of an archive that was unpacked before; None if it was not."""
    try:
        document = json.loads(marker.read_bytes())
        return int(document["files"]), int(document["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def unpack(
    part: Path, folder: Path, split: Callable[[Path], Mapping[int, Path]], resources: Path, *, marker: Path, first: bool
) -> tuple[int, int]:
    """Replace `folder`/output/rank-N of each rank, and the file `resources`, by what an archive holds.

    `split` tells which folder of the archive's output is whose. `first`: it is the archive of rank 0, which tells of
    faults. What could escape the folder, or is no result, is left out. Then the archive is removed, and `marker` says
    so. On disk when this returns. Returns the number of files and of bytes of the output.
    """
    fresh = part.with_suffix(".unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "output").mkdir(parents=True)
    with tarfile.open(part, "r:") as archive:
        unpack_members(archive, fresh, _is_result)
    outputs = folder / "output"
    outputs.mkdir(exist_ok=True)
    own = split(fresh / "output")
    found = [_sync(path) for path in own.values()]
    files, size = sum(count for count, _ in found), sum(amount for _, amount in found)
    moves = {"resources.jsonl": resources, **({FAULTS: folder / FAULTS} if first else {})}
    for name, target in moves.items():
        if (fresh / name).is_file():
            _sync_file(fresh / name)
            os.replace(fresh / name, target)
    for rank, path in own.items():
        target = outputs / f"rank-{rank}"
        if target.exists():
            shutil.rmtree(target)
        os.replace(path, target)
    sync_folder(outputs)
    shutil.rmtree(fresh, ignore_errors=True)
    write_atomically(marker, json.dumps({"files": files, "bytes": size}).encode())
    part.unlink()
    return files, size


def digest_file(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_result(name: str) -> bool:
    return name in ("output", "resources.jsonl", FAULTS) or name.startswith("output/")


def _check_room(part: Path, size: int, place: str) -> None:
    needed = 2 * size - size_of(part)  # once as the archive, once unpacked
    free = shutil.disk_usage(part.parent).free
    if free < needed:
        raise FetchError(
            f"The results need {needed >> 20} MiB, and {part.parent} has {free >> 20} MiB free.",
            hint=f"Free up disk space, or set MLBENCH_HOME to another folder; the results stay on {place} for now.",
        )


def _sync(folder: Path) -> tuple[int, int]:
    """Write every file to disk; returns their number and bytes."""
    files = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_symlink():
                continue
            files, size = files + 1, size + _sync_file(path)
        sync_folder(Path(parent))
    return files, size


def _sync_file(path: Path) -> int:
    """Write a file to disk; returns its size."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


# --- foreign archives -------------------------------------------------------------------------------------------------


def unpack_members(archive: tarfile.TarFile, folder: Path, keep: Callable[[str], bool]) -> None:
    """Write the members whose names `keep` takes below `folder`, without what is no file, folder or link, and without
    what leads out of the folder.

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
