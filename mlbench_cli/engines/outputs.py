"""Fetches the output of a run's machines into its folder, verified by digest."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mlbench_cli.agent.channel import Channel
from mlbench_cli.engines import fetch
from mlbench_cli.engines.base import LOG_GAP
from mlbench_cli.engines.observe import NodeReport
from mlbench_cli.model.run import Finding, Run
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import size_of, write_atomically

PIECE = 4 << 20


def fetch_archive(channel: Channel, place: str, report: NodeReport, node: int, run: Run) -> tuple[int, int] | None:
    """Files and bytes of one machine's output, unpacked into the run's folder; None if the machine packed nothing.

    Raises FetchError if what comes is not what was packed.
    """
    packed = (report.results or {}).get("archive")
    if packed is None:
        return None
    state = RunFolder(run.folder).state
    marker, part = state / f"fetched-{node}.json", state / f"output-{node}.tar"
    if (known := fetch.read_fetched(marker)) is not None:
        return known
    download(channel, f"{place}/.state/archive.tar", packed, part)
    resources = state / f"resources-{node}.jsonl"
    return fetch.unpack(part, run.folder, _split_output, resources, marker=marker, first=node == 0)


def download(channel: Channel, path: str, facts: Mapping[str, Any], part: Path) -> None:
    """Copy a file whose size and SHA-256 are known; resumes a partial copy. Raises FetchError."""

    def receive(file: BinaryIO, _: fetch.Digest) -> None:
        while (have := file.tell()) < facts["size"]:
            answer, data = channel.exchange("get", path=path, offset=have, size=PIECE)
            if answer["size"] is None or not data:
                break
            file.write(data)

    source = f"{path} from {channel.target.name}"
    fetch.download(part, facts["size"], facts["sha256"], receive, source=source, place="the machine of the run's head")


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
            elif size_of(path) != facts["size"] or (facts["size"] and fetch.digest_file(path) != facts["sha256"]):
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


def _split_output(output: Path) -> dict[int, Path]:
    found = {path.name.removeprefix("rank-"): path for path in output.glob("rank-*")}
    return {int(rank): path for rank, path in found.items() if rank.isdigit()}
