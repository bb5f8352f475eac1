"""From a run's folder to its archive.

An archive is sealed if and only if its SHA256SUMS is there: that file is written last, when everything it lists is on
disk. A crash before leaves a folder that is sealed by sealing it again.
"""

import fcntl
import hashlib
import os
import stat
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model import Finding, Observation, Outcome, Run
from mlbench_cli.results.archive import documents as record
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.events import Reading, log_files, proves, resource_lines
from mlbench_cli.results.archive.layout import document, replace, replacing
from mlbench_cli.results.archive.official import official_text
from mlbench_cli.results.archive.reader import Archive


def seal(run: Run, *, outcome: str, exit_code: int | None, observation: Observation) -> str:
    """Complete the run's folder to an archive, once and for all, and return the outcome that it records.

    That is the given outcome (one of model.Outcome), or a lesser one where logs and exit codes contradict it; a
    finding then says why. Sealed already, nothing is done. Logs are read once, in bounded memory.
    """
    if outcome not in [*Outcome]:
        raise UsageError(f"{outcome!r} is no outcome of a run, only {', '.join(Outcome)}.")
    with layout.told(run.folder, "sealed"):
        run.folder.mkdir(parents=True, exist_ok=True)
        with _only_one(run.folder):
            if layout.is_sealed(run.folder):
                return str(Archive.open(run.folder).result["outcome"])
            return _seal(run, outcome, exit_code, observation)


def _seal(run: Run, outcome: str, exit_code: int | None, seen: Observation) -> str:
    folder = run.folder
    findings = list(seen.findings) + _make_portable(folder)
    if not _is_of(folder / layout.RUN, run):
        replace(folder / layout.RUN, document(record.run_document(run)))
    _mend_resources(folder / layout.RESOURCES)
    reading = _read_logs(run, record.started(run, seen))
    reported = reading.result
    goal, differing = record.goal_of(run.spec, reported["goal"] if reported else None)
    proven = record.is_proven(goal) and _is_metric(folder, goal, "value")
    shown = _is_metric(folder, goal, "last") if outcome == "budget_spent" else proven
    outcome, contradictions = record.settle(outcome, reported, goal, shown, seen)
    result = record.result_document(
        run, outcome=outcome, exit_code=exit_code, seen=seen, reported=reported, goal=goal, proven=proven
    )
    replace(folder / layout.ENVIRONMENT, document(record.environment_document(run.spec, reading.environments)))
    replace(folder / layout.FINDINGS, document(record.findings_document(findings + differing + contradictions)))
    replace(folder / layout.RESULT, document(result))
    replace(folder / layout.OFFICIAL, official_text(result).encode())
    layout.sync_folder(folder)
    replace(folder / layout.SUMS, layout.format_sums(_digests(folder)))
    layout.sync_folder(folder)
    return outcome


def _is_metric(folder: Path, goal: Mapping[str, Any] | None, key: str) -> bool:
    """Whether the goal's `value` or `last` was reported as its metric, too."""
    if goal is None or goal[key] is None:
        return False
    with open(folder / layout.METRICS, "rb") as metrics:
        return proves({**goal, "value": goal[key]}, metrics)


def _is_of(path: Path, run: Run) -> bool:
    """Whether the run.json that is there, if any, is whole and says what this run is."""
    try:
        written = layout.parse_document(path.read_bytes())
    except (OSError, ValueError):
        return False
    return all(written.get(key) == value for key, value in record.identity(run).items())


def _read_logs(run: Run, started: str | None) -> Reading:
    """Write metrics.jsonl, in the order of logs and of lines in them."""
    reading = Reading(run.spec.world_size, record.judge_of(run.spec, started))
    with replacing(run.folder / layout.METRICS) as metrics:
        for rank, path in log_files(run.folder).items():
            with open(path, "rb") as log:
                metrics.writelines(reading.metrics(rank, log))
    return reading


def _mend_resources(path: Path) -> None:
    """Bring resources.jsonl to the archive's form: times as RFC 3339, no torn lines; empty if nothing was sampled."""
    with replacing(path) as mended:
        if path.is_file():
            with open(path, "rb") as samples:
                mended.writelines(resource_lines(samples))


def _make_portable(folder: Path) -> list[Finding]:
    """Rename files that no archive can hold by that name, and put links and devices aside; idempotent."""
    findings = []
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            _let_read(Path(parent, name), stat.S_IRWXU)
    for name, mode in sorted(layout.walk(folder)):
        if not stat.S_ISREG(mode):
            aside = folder / layout.STATE_FOLDER / "left_out" / urllib.parse.quote(os.fsencode(name), safe="")[-200:]
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, aside)
            shown = ascii(name)[1:-1]
            findings.append(
                Finding("file_left_out", f"{shown} is a link or no regular file; an archive holds only files.")
            )
        elif trouble := layout.name_trouble(name):
            portable = "/".join(map(layout.portable_part, name.split("/")))
            if layout.name_trouble(portable) or (folder / portable).exists():
                portable = f"output/renamed-{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}"
            (folder / portable).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, folder / portable)
            findings.append(Finding("file_renamed", f"{ascii(name)[1:-1]} is now {portable}: {trouble}."))
            name = portable
        if stat.S_ISREG(mode):
            _let_read(folder / name, stat.S_IRUSR)
    return findings


def _let_read(path: Path, needed: int) -> None:
    """A task may have taken away its owner's right to read what it wrote."""
    mode = path.lstat().st_mode
    if not stat.S_ISLNK(mode) and mode & needed != needed:
        path.chmod(stat.S_IMODE(mode) | needed)


def _digests(folder: Path) -> dict[str, str]:
    """Name to digest of every file, each of them on disk when this returns."""
    digests = {}
    for name, _ in layout.walk(folder):
        if name == layout.SUMS:
            continue
        with open(folder / name, "rb") as file:
            digests[name] = layout.digest(file)
            os.fsync(file.fileno())
        if len(digests) >= layout.MAX_FILES:
            raise UsageError(
                f"{folder} holds more than {layout.MAX_FILES} files; an archive cannot.",
                hint=f"Remove some from {folder / 'output'}, then run the command again.",
            )
    return digests


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, and clear away what a killed writer has left."""
    state = folder / layout.STATE_FOLDER
    state.mkdir(exist_ok=True)
    with open(state / "seal.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in (*layout.REQUIRED, layout.SUMS):
            for leftover in folder.glob(f".{name}.*.tmp"):
                leftover.unlink(missing_ok=True)
        yield
