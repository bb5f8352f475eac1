"""Fetches a held worker's results in chunks through exec; each chunk is checked for length and status, the whole by
SHA-256.

An interrupted fetch resumes where it stopped. Nothing is acknowledged here; the caller does that when everything is on
disk.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlbench_cli.engines import fetch
from mlbench_cli.engines.fetch import BLOCK, FetchError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ApiError, NodeUnreachable
from mlbench_cli.kube.execute import ExecBroken, execute

WORK_DIR = "/results"
ARCHIVE = f"{WORK_DIR}/archive.tar"  # in a worker's pod
CHUNK_BLOCKS = 64  # of BLOCK bytes, the unit of dd; an interrupted chunk resumes after the last whole block
PATIENCE_SECONDS = 90.0  # without a single block
PAUSE_SECONDS = 0.5
ACK_TRIES = 5


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

    def receive(file: BinaryIO, digest: fetch.Digest) -> None:
        _receive(access, namespace, pod, path, what.size, file, digest)

    source = f"{path} of the pod {pod}"
    fetch.download(part, what.size, what.sha256, receive, source=source, keeper="the cluster")


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


def split_output(output: Path, ranks: Sequence[int]) -> dict[int, Path]:
    """The folder of each rank in a worker's output folder; of a worker with one rank that is the folder itself."""
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


def _receive(
    access: Access, namespace: str, pod: str, path: str, size: int, file: BinaryIO, digest: fetch.Digest
) -> None:
    last_progress = time.monotonic()
    trouble = ""
    while True:
        begun = file.seek(0, os.SEEK_END)
        if begun >= size:
            return
        begun -= begun % BLOCK
        file.truncate(begun)
        file.seek(begun)
        expected = min(CHUNK_BLOCKS * BLOCK, size - begun)
        command = ["dd", f"if={path}", f"bs={BLOCK}", f"skip={begun // BLOCK}", f"count={CHUNK_BLOCKS}"]
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
