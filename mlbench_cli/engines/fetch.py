"""Download the output of a run's machines into its folder: in pieces, verified by digest, replacing what was there."""

import hashlib
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbench_cli.agent.channel import Channel, Document
from mlbench_cli.engines.base import LOG_GAP
from mlbench_cli.engines.observe import NodeReport
from mlbench_cli.errors import MlbenchError, UnreachableError
from mlbench_cli.model.run import Finding, Phase, Run
from mlbench_cli.storage.run_folder import FAULTS, RunFolder
from mlbench_cli.util.files import read_object, size_of, sync_folder, write_atomically

ATTEMPTS = 2
CUTS, CUT_SECONDS = 8, 60.0  # that a download outlasts before it has another piece


class FetchError(MlbenchError):
    """The results exist but could not be fetched completely; a retry may help."""

    code = "fetch_failed"


def fetch_archive(channel: Channel, place: str, report: NodeReport, node: int, run: Run) -> tuple[int, int] | None:
    """Files and bytes of one machine's output, unpacked into the run's folder; None if the machine packed nothing.

    Raises FetchError if what comes is not what was packed.
    """
    packed = (report.results or {}).get("archive")
    if packed is None:
        return None
    state = RunFolder(run.folder).state
    marker, part = state / f"fetched-{node}.json", state / f"output-{node}.tar"
    if (known := read_object(marker)) is not None:  # it was unpacked before
        return known["files"], known["bytes"]
    download(channel, f"{place}/.state/archive.tar", packed, part)
    files, size = _unpack(part, run.folder, state / f"resources-{node}.jsonl", is_first=node == 0)
    write_atomically(marker, json.dumps({"files": files, "bytes": size}).encode())
    part.unlink()
    return files, size


def download(channel: Channel, path: str, facts: Mapping[str, Any], part: Path) -> None:
    """Complete `part`, which may hold the beginning of a file of known size and SHA-256. On return, it is on disk.

    Raises FetchError, and what the channel raises, UnreachableError only if nothing at all comes any more.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    _check_room(part, facts["size"])
    for _ in range(ATTEMPTS):
        with open(part, "ab") as file:
            while (have := file.tell()) < facts["size"]:
                answer, data = _get_piece(channel, path, have)
                if answer["size"] is None or not data:
                    break
                file.write(data)
            file.truncate(min(facts["size"], file.tell()))
            file.flush()
            if _digest(part) == facts["sha256"]:
                os.fsync(file.fileno())
                return
        part.unlink()
    raise FetchError(
        f"{path} from {channel.target.name} arrived damaged twice: expected SHA-256 {facts['sha256'][:16]}….",
        hint="Fetch it again; it is still on the machine of the run's head. If this persists, the disk there may be "
        "damaged.",
    )


def _get_piece(channel: Channel, path: str, offset: int) -> tuple[Document, bytes]:
    """The next piece of a file, by another connection if one is cut."""
    left, end = CUTS, time.monotonic() + CUT_SECONDS
    while True:
        try:
            return channel.exchange("get", path=path, offset=offset, size=channel.piece)
        except UnreachableError:
            if not left or time.monotonic() > end:
                raise
        left -= 1


def merge_resources(run: Run, nodes: int) -> None:
    """resources.jsonl of the archive: the samples of all machines, in the order of their times."""
    rows: list[tuple[float, int, bytes]] = []
    for node in range(nodes):
        path = RunFolder(run.folder).state / f"resources-{node}.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                rows.append((float(json.loads(line)["time"]), node, line))
            except (ValueError, KeyError, TypeError):
                continue
    if rows:
        rows.sort(key=lambda row: row[:2])
        write_atomically(run.folder / "resources.jsonl", b"".join(line + b"\n" for _, _, line in rows))


def check_logs(run: Run, reports: Iterable[NodeReport]) -> tuple[list[int], list[Finding]]:
    """Ranks whose log here is not the one that was packed, and a finding for those without a digest."""
    wrong, unknown = [], []
    for report in reports:
        known = (report.results or {}).get("logs", {})
        for entry in (report.state or {}).get("ranks", ()):
            rank = entry["rank"]
            path = RunFolder(run.folder).log(rank)
            facts = known.get(str(rank))
            if facts is None:
                unknown += [rank] if entry.get("phase") != Phase.PENDING else []
            elif size_of(path) != facts["size"] or (facts["size"] and _digest(path) != facts["sha256"]):
                wrong.append(rank)
    why = "not verified: their agent was killed before it could write digests"
    return wrong, [explain_gap(unknown, why)] if unknown else []


def explain_gap(ranks: Sequence[int], why: str) -> Finding:
    """The finding that the ends of the ranks' logs are `why`."""
    summary = f"The ends of the logs of ranks {', '.join(map(str, ranks[:20]))} are {why}."
    return Finding(LOG_GAP, summary, evidence={"ranks": list(ranks)})


def _unpack(part: Path, folder: Path, resources: Path, *, is_first: bool) -> tuple[int, int]:
    """Replace `folder`/output/rank-N of each rank, and the file `resources`, by what an archive holds.

    `is_first`: it is the archive of rank 0, which tells of faults. What could escape the folder, or is no result, is
    left out. On disk when this returns. Returns the number of files and of bytes of the output.
    """
    fresh = part.with_suffix(".unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "output").mkdir(parents=True)
    with tarfile.open(part, "r:") as archive:
        unpack_members(archive, fresh, _is_result)
    outputs = folder / "output"
    outputs.mkdir(exist_ok=True)
    own = [path for path in (fresh / "output").glob("rank-*") if path.name.removeprefix("rank-").isdigit()]
    found = [_sync(path) for path in own]
    moves = {"resources.jsonl": resources, **({FAULTS: folder / FAULTS} if is_first else {})}
    for name, target in moves.items():
        if (fresh / name).is_file():
            _sync_file(fresh / name)
            os.replace(fresh / name, target)
    for path in own:
        target = outputs / path.name
        if target.exists():
            shutil.rmtree(target)
        os.replace(path, target)
    sync_folder(outputs)
    shutil.rmtree(fresh, ignore_errors=True)
    return sum(count for count, _ in found), sum(amount for _, amount in found)


def _digest(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_result(name: str) -> bool:
    return name in ("output", "resources.jsonl", FAULTS) or name.startswith("output/")


def _check_room(part: Path, size: int) -> None:
    needed = 2 * size - size_of(part)  # once as the archive, once unpacked
    free = shutil.disk_usage(part.parent).free
    if free < needed:
        raise FetchError(
            f"The results need {needed >> 20} MiB, and {part.parent} has {free >> 20} MiB free.",
            hint="Free up disk space, or set MLBENCH_HOME to another folder; the results stay on the machine of the "
            "run's head for now.",
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
    """Like `_filter`, for versions of Python without tarfile's filters. Accepts only files and folders."""
    parts = member.name.split("/")
    if not (member.isfile() or member.isdir()) or member.name.startswith("/") or ".." in parts:
        return None
    member.mode = 0o755 if member.isdir() else member.mode & 0o755 | 0o600
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
