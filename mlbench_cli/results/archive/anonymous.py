"""Removes the author's traces from evidence: host names, command line, most packages, home folders.

Evidence is changed before it is judged and sealed, so all figures still follow from it. Facts that affect figures stay:
hardware, versions of computing libraries, settings, times.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive import sample_blocks
from mlbench_cli.results.archive.evidence import read_samples
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import replace_file
from mlbench_cli.util.json_text import format_parsed, format_row
from task_images.contract import PREFIX, format_event, parse_event

# Packages that compute or communicate; all others only describe the author.
KEPT_PACKAGES = re.compile(
    r"(torch|torchvision|triton|numpy|scipy|scikit-learn|pillow|mpi4py|mpich|openmpi|tensorflow.*|keras|jax.*|sacrebleu"
    r"|sacremoses|mlbench-cli|nvidia-.*|cuda-.*|intel-.*|mkl|oneccl.*)"
)
_HOME = re.compile(r"(/home/|/Users/)[^/\s\"']+|/root(?=/)")
# Folders in a hosts plan or Slurm job: of the interpreter, the runs, the --setup. System folders stay.
_FOLDER = re.compile(rb"(?<![\w./$-])/(?!(?:bin|dev|etc|proc|sbin|sys|usr)/)(?:[^\s\"'/:=,]+/)+(?=[^\s\"'/:=,])")


def anonymize(folder: Path) -> None:
    """Anonymize the evidence in a folder that is not sealed."""
    scrub = _make_scrubber(folder)
    document = _clean_run(_read(folder / run_folder.RUN), scrub)
    _write(folder / run_folder.RUN, document)
    for name in (run_folder.OBSERVATION, run_folder.SHAPING):
        if (folder / name).is_file():
            _write(folder / name, _walk(_read(folder / name), scrub))
    logs = RunFolder(folder).logs()
    moved = {rank: _rewrite(path, lambda line: _clean_log_line(line, scrub)) for rank, path in logs.items()}
    _rewrite_samples(folder / run_folder.RESOURCES, scrub, moved)
    for part in ("output", "manifests"):
        for path in sorted((folder / part).rglob("*")):
            if path.is_file():
                _rewrite(path, lambda line: _clean_text(line, scrub))
    for name in ("plan.json", "job.sh"):
        _rewrite(folder / "manifests" / name, lambda line: _FOLDER.sub(b"", line))


def _make_scrubber(folder: Path) -> Callable[[str], str]:
    """A function that replaces host names by node-0, node-1, ..., and the owner of a home folder by "user"."""
    observation = _read(folder / run_folder.OBSERVATION) if (folder / run_folder.OBSERVATION).is_file() else {}
    names = [str(worker["node"]) for worker in observation.get("workers", ()) if worker.get("node")]
    for path in RunFolder(folder).logs().values():
        with open(path, "rb") as file:
            for line in file:
                event = parse_event(line)
                if event is not None and event.get("event") == "environment" and isinstance(event.get("host"), str):
                    names.append(event["host"])
    hosts = {name: f"node-{number}" for number, name in enumerate(dict.fromkeys(names))}
    longest = sorted(hosts, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in longest)) if hosts else None

    def scrub(text: str) -> str:
        plain = _HOME.sub("/home/user", text)
        return pattern.sub(lambda found: hosts[found[0]], plain) if pattern else plain

    return scrub


def _clean_run(document: dict[str, Any], scrub: Callable[[str], str]) -> dict[str, Any]:
    spec = document["spec"]
    if spec.get("data_dir"):
        spec["data_dir"] = "data"
    document["spec_hash"] = RunSpec.from_dict(spec).hash
    provenance = document.get("provenance")
    if provenance:
        provenance["command_line"] = []
        if provenance.get("packages"):
            provenance["packages"] = _keep_packages(provenance["packages"])
        document["provenance"] = _walk(provenance, scrub)
    return document


def _keep_packages(packages: Mapping[str, Any]) -> dict[str, Any]:
    return {name: version for name, version in packages.items() if KEPT_PACKAGES.fullmatch(name)}


def _clean_log_line(line: bytes, scrub: Callable[[str], str]) -> bytes:
    event = parse_event(line) if line.startswith(PREFIX.encode()) else None
    if event is None or not line.endswith(b"\n"):
        return _clean_text(line, scrub)
    changed = _walk(event, scrub)
    if changed.get("event") == "environment" and isinstance(changed.get("packages"), dict):
        changed["packages"] = _keep_packages(changed["packages"])
    return line if changed == event else format_event(changed).encode() + b"\n"


def _rewrite_samples(path: Path, scrub: Callable[[str], str], logs: Mapping[int, "_Moved"]) -> None:
    """Clean the samples, and adjust their log sizes to the changed logs."""

    def change(row: Mapping[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = _walk(dict(row), scrub)
        size, moved = row.get("log_bytes"), logs.get(row["rank"]) if type(row.get("rank")) is int else None
        if type(size) is int and moved is not None:
            changed["log_bytes"] = moved.find(size)
        return changed

    if path.is_file():
        with replace_file(path) as file:
            file.writelines(map(format_row, sample_blocks.pack(map(change, read_samples(path)))))


@dataclass
class _Moved:
    """Maps offsets of a file to those after lines were changed: for each changed line, old start and end, and new start
    and end."""

    lines: list[tuple[int, int, int, int]] = field(default_factory=list)  # ascending

    def find(self, offset: int) -> int:
        """The size of the changed file when the original had `offset` bytes."""
        index = bisect_right(self.lines, offset, key=lambda line: line[0])
        if index == 0:
            return offset
        _, old_end, new_begin, new_end = self.lines[index - 1]
        if offset >= old_end:
            return new_end + offset - old_end
        return min(new_begin + offset - self.lines[index - 1][0], new_end)


def _clean_text(line: bytes, scrub: Callable[[str], str]) -> bytes:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return line
    return scrub(text).encode()


def _walk(value: Any, scrub: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {key: _walk(item, scrub) for key, item in value.items()}
    if isinstance(value, list):
        return [_walk(item, scrub) for item in value]
    return value


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> _Moved:
    """Apply `change` to each line of a file. Lines of any length are read completely, because a name may be anywhere in
    them."""
    moved, old, new = _Moved(), 0, 0
    if not path.is_file():
        return moved
    with replace_file(path) as target, open(path, "rb") as file:
        for line in file:
            changed = change(line)
            target.write(changed)
            if len(changed) != len(line):
                moved.lines.append((old, old + len(line), new, new + len(changed)))
            old, new = old + len(line), new + len(changed)
    return moved


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.write_bytes(format_parsed(document))
