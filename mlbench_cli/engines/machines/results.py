"""Fetches the output of a run's machines into its folder, verified by digest."""

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.agent.channel import Channel
from mlbench_cli.engines.base import LOG_GAP
from mlbench_cli.engines.machines.observe import NodeReport
from mlbench_cli.engines.members import unpack_members
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Finding, Run
from mlbench_cli.storage.run_folder import FAULTS, STDERR_INDEX, RunFolder
from mlbench_cli.util.files import write_atomically

PIECE = 4 << 20
ATTEMPTS = 3


class FetchError(MlbenchError):
    """Existing results could not be fetched; a retry may help."""


def fetch_archive(channel: Channel, place: str, report: NodeReport, node: int, run: Run) -> tuple[int, int] | None:
    """Files and bytes of one machine's output, unpacked into the run's folder; None if the machine packed nothing.

    Raises FetchError if what comes is not what was packed.
    """
    packed = (report.results or {}).get("archive")
    if packed is None:
        return None
    marker = RunFolder(run.folder).state / f"fetched-{node}.json"
    if marker.exists():
        files, size = json.loads(marker.read_bytes())
        return int(files), int(size)
    part = RunFolder(run.folder).state / f"output-{node}.tar"
    download(channel, f"{place}/.state/archive.tar", packed, part)
    files, size = unpack(part, run, node)
    write_atomically(marker, json.dumps([files, size]).encode())
    part.unlink()
    return files, size


def download(channel: Channel, path: str, facts: Mapping[str, Any], part: Path) -> None:
    """Copy a file whose size and SHA-256 are known; resumes a partial copy."""
    free = shutil.disk_usage(part.parent).free
    if free < facts["size"] * 2:
        raise FetchError(
            f"The results need {facts['size'] * 2 >> 20} MiB, and {part.parent} has {free >> 20} MiB free.",
            hint="Free up disk space, or set MLBENCH_HOME to another folder; the results stay on the machines for now.",
        )
    for _ in range(ATTEMPTS):
        with open(part, "ab") as file:
            while (have := file.tell()) < facts["size"]:
                answer, data = channel.exchange("get", path=path, offset=have, size=PIECE)
                if answer["size"] is None or not data:
                    break
                file.write(data)
        if digest_file(part) == facts["sha256"]:
            return
        part.unlink()
    raise FetchError(
        f"{path} from {channel.target.name} differs from what was packed there.",
        hint="Try again. If this persists, the disk there may be damaged.",
    )


def unpack(part: Path, run: Run, node: int) -> tuple[int, int]:
    """output/rank-N and the samples of one machine, in place of what was there; what could escape is left out."""
    fresh = part.with_suffix(".unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    with tarfile.open(part, "r:") as archive:
        unpack_members(archive, fresh, _is_result)
    files = size = 0
    outputs = run.folder / "output"
    outputs.mkdir(exist_ok=True)
    for folder in sorted((fresh / "output").glob("rank-*")):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                files, size = files + 1, size + path.stat().st_size
        target = outputs / folder.name
        if target.exists():
            shutil.rmtree(target)
        os.replace(folder, target)
    if (fresh / "resources.jsonl").exists():
        os.replace(fresh / "resources.jsonl", RunFolder(run.folder).state / f"resources-{node}.jsonl")
    for path in fresh.glob(f"{STDERR_INDEX}*"):
        os.replace(path, RunFolder(run.folder).state / path.name)
    if node == 0 and (fresh / FAULTS).exists():
        os.replace(fresh / FAULTS, run.folder / FAULTS)
    shutil.rmtree(fresh, ignore_errors=True)
    return files, size


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
                unknown.append(rank)
            elif (path.stat().st_size if path.exists() else 0) != facts["size"] or (
                facts["size"] and digest_file(path) != facts["sha256"]
            ):
                wrong.append(rank)
    findings = []
    if unknown:
        findings.append(
            Finding(
                LOG_GAP,
                f"The ends of the logs of ranks {', '.join(map(str, unknown[:20]))} are not verified: their agent "
                "was killed before it could write digests.",
                evidence={"ranks": unknown},
            )
        )
    return wrong, findings


def digest_file(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_result(name: str) -> bool:
    return name in ("output", "resources.jsonl", FAULTS) or name.startswith(("output/rank-", STDERR_INDEX))
