"""Fetches a held worker's results in chunks through exec; each chunk is checked for length and status, the whole by
SHA-256.

An interrupted fetch resumes where it stopped. Nothing is acknowledged here; the caller does that when everything is on
disk.
"""

import hashlib
import json
import os
import shutil
import tarfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbench_cli.engines.members import unpack_members
from mlbench_cli.errors import MlbenchError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ApiError, NodeUnreachable
from mlbench_cli.kube.execute import ExecBroken, execute
from mlbench_cli.storage.run_folder import FAULTS
from mlbench_cli.util.files import sync_folder

WORK_DIR = "/results"
ARCHIVE = f"{WORK_DIR}/archive.tar"  # in a worker's pod
BLOCK = 1 << 20  # unit of dd; an interrupted chunk resumes after the last whole block
CHUNK_BLOCKS = 64
PATIENCE_SECONDS = 90.0  # without a single block
PAUSE_SECONDS = 0.5
ACK_TRIES = 5


class FetchError(MlbenchError):
    """The results exist but could not be fetched completely. The worker is still held."""

    code = "fetch_failed"


@dataclass(frozen=True)
class HeldArchive:
    """What worker.sh holds: size in bytes and hex SHA-256 of its archive."""

    size: int
    sha256: str


def parse_held_archive(summary: Mapping[str, Any] | None) -> HeldArchive | None:
    """The results that a worker holds according to its final message, if any."""
    archive = (summary or {}).get("archive")
    if not isinstance(archive, dict) or not (summary or {}).get("held"):
        return None
    return HeldArchive(int(archive["size"]), str(archive["sha256"]))


def read_summary(access: Access, namespace: str, pod: str) -> dict[str, object] | None:
    """A worker's final message from its file; None if not written yet. Raises ApiError if exec fails."""
    done = execute(access, namespace, pod, ["cat", f"{WORK_DIR}/summary.json"])
    if done.code:
        return None
    try:
        summary = json.loads(done.stdout)
    except ValueError:
        return None
    return summary if isinstance(summary, dict) else None


def download(access: Access, namespace: str, pod: str, what: HeldArchive, part: Path, path: str = ARCHIVE) -> None:
    """Fetch the pod's file `path` into `part`, which may hold its beginning. On return, it is on disk and verified.

    Raises FetchError, NodeUnreachable if its node stays silent, or ApiError if the container has ended.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    _check_room(part, what.size)
    for attempt in (1, 2):
        with ThreadPoolExecutor(1) as pool:
            digest = _Digest(part, pool)
            _receive(access, namespace, pod, path, what.size, part, digest)
            right = digest.hexdigest() == what.sha256
        if right:
            with open(part, "rb") as file:
                os.fsync(file.fileno())
            return
        part.unlink()
        if attempt == 2:
            break
    raise FetchError(
        f"The results of the pod {pod} arrived damaged twice: expected SHA-256 {what.sha256[:16]}….",
        hint="Fetch them again; they are still on the cluster.",
    )


def acknowledge(access: Access, namespace: str, pod: str) -> None:
    """Let the worker go. A worker that is gone already is fine, and one whose node does not answer.

    Raises FetchError if it cannot be reached."""
    for attempt in range(1, ACK_TRIES + 1):
        try:
            done = execute(access, namespace, pod, ["touch", f"{WORK_DIR}/ack"])
            if done.code == 0:
                return
            trouble = done.stderr
        except ApiError as error:
            if error.status in (400, 404) or "not running" in error.message or "not found" in error.message:
                return
            trouble = error.message
            if isinstance(error, NodeUnreachable):
                return  # it goes with its node
        time.sleep(PAUSE_SECONDS * attempt)
    raise FetchError(f"The worker in the pod {pod} could not be told that its results were fetched: {trouble}")


def unpack(part: Path, outputs: Path, ranks: Sequence[int], resources: Path) -> tuple[int, int]:
    """Replace `outputs`/rank-N of each of the worker's `ranks`, and the file `resources`, by what the archive holds.

    On disk when this returns. What is in no rank's own folder belongs to the first rank. What could escape the folder,
    or is no file, is left out. Returns the number of files and of bytes.
    """
    fresh = part.with_suffix(".unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    with tarfile.open(part, "r:") as archive:
        unpack_members(archive, fresh, _is_result)
    files, size = _sync(fresh)
    outputs.mkdir(exist_ok=True)
    if (fresh / "resources.jsonl").exists():
        os.replace(fresh / "resources.jsonl", resources)
        files -= 1
    if (fresh / FAULTS).exists():
        files -= 1
        if ranks[0] == 0:
            os.replace(fresh / FAULTS, outputs.parent / FAULTS)
    for rank, folder in _split_output(fresh / "output", ranks).items():
        target = outputs / f"rank-{rank}"
        if target.exists():
            shutil.rmtree(target)
        os.replace(folder, target)
    sync_folder(outputs)
    shutil.rmtree(fresh, ignore_errors=True)
    return files, size


def _split_output(output: Path, ranks: Sequence[int]) -> dict[int, Path]:
    """The folder of each rank in a worker's output folder; of a worker with one rank that is the folder itself."""
    output.mkdir(exist_ok=True)
    if len(ranks) == 1:
        return {ranks[0]: output}
    own = {rank: output / f"rank-{rank}" for rank in ranks}
    for folder in own.values():
        folder.mkdir(exist_ok=True)
    first = own[ranks[0]]
    for path in output.iterdir():
        if path not in own.values() and not (first / path.name).exists():
            os.replace(path, first / path.name)
    return own


class _Digest:
    """SHA-256 of a growing file, computed while more data arrive."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        self._path = path
        self._pool = pool
        self._sha = hashlib.sha256()
        self._done = 0
        self._last: Future[None] | None = None

    def upto(self, size: int) -> None:
        """The file's first `size` bytes are final."""
        self._last = self._pool.submit(self._digest, size)

    def hexdigest(self) -> str:
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


def _receive(access: Access, namespace: str, pod: str, path: str, size: int, part: Path, digest: _Digest) -> None:
    last_progress = time.monotonic()
    trouble = ""
    with open(part, "ab") as file:
        while True:
            begun = file.seek(0, os.SEEK_END)
            if begun >= size:
                file.truncate(size)
                digest.upto(size)
                break
            begun -= begun % BLOCK
            file.truncate(begun)
            file.seek(begun)
            expected = min(CHUNK_BLOCKS * BLOCK, size - begun)
            command = [
                "dd",
                f"if={path}",
                f"bs={BLOCK}",
                f"skip={begun // BLOCK}",
                f"count={CHUNK_BLOCKS}",
            ]
            try:
                done = execute(access, namespace, pod, command, sink=file.write)
                if done.code == 0 and file.tell() - begun == expected:
                    last_progress = time.monotonic()
                    file.flush()
                    digest.upto(begun + expected)
                    continue
                # The command has ended but the length is wrong, so none of it can be trusted.
                trouble = done.stderr or f"{file.tell() - begun} of {expected} bytes arrived"
                file.truncate(begun)
            except ExecBroken as error:
                trouble = error.message
                if file.tell() - begun >= BLOCK:
                    last_progress = time.monotonic()
            except ApiError as error:
                if error.status in (400, 401, 403, 404):
                    raise
                trouble = error.message
                if isinstance(error, NodeUnreachable) and time.monotonic() - last_progress > PATIENCE_SECONDS:
                    raise
            if time.monotonic() - last_progress > PATIENCE_SECONDS:
                raise FetchError(
                    f"Cannot fetch the results of the pod {pod}: {trouble}", hint="Fetch again to resume the download."
                )
            time.sleep(PAUSE_SECONDS)
        file.flush()


def _check_room(part: Path, size: int) -> None:
    have = part.stat().st_size if part.exists() else 0
    # Once as the archive, once unpacked.
    needed = 2 * size - have
    free = shutil.disk_usage(part.parent).free
    if free < needed:
        raise FetchError(
            f"The results need {needed >> 20} MiB, and {part.parent} has {free >> 20} MiB free.",
            hint="Free up disk space, or set MLBENCH_HOME to another folder; the results stay on the cluster for now.",
        )


def _is_result(name: str) -> bool:
    return name in ("output", "resources.jsonl", FAULTS) or name.startswith("output/")


def _sync(folder: Path) -> tuple[int, int]:
    """Write every file to disk; returns their number and bytes."""
    files = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_symlink():
                continue
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                files, size = files + 1, size + os.fstat(file.fileno()).st_size
        sync_folder(Path(parent))
    return files, size
