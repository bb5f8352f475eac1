"""From a run's folder to its archive.

An archive is sealed if and only if its SHA256SUMS is there: that file is written last, when everything it lists is on
disk. A crash before leaves a folder that is sealed by sealing it again.
"""

import dataclasses
import hashlib
import os
import stat
import urllib.parse
from pathlib import Path

from mlbench_cli import run_folder
from mlbench_cli.errors import UsageError
from mlbench_cli.files import replace_file, sync_folder
from mlbench_cli.model import Finding, Observation, Run
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.documents import describes_run, findings_document, run_document
from mlbench_cli.results.archive.events import resource_lines
from mlbench_cli.results.archive.evidence import collect_evidence
from mlbench_cli.results.archive.judge import Judgement, judge
from mlbench_cli.results.archive.layout import format_document
from mlbench_cli.run_folder import RunFolder


def seal(run: Run, observation: Observation) -> Judgement:
    """Complete the run's folder to an archive and return what was judged. Hold the folder's lock.

    The observation is kept as evidence, with what sealing itself has found. Logs are read in bounded memory. Raises
    UsageError for a folder that is sealed already.
    """
    folder = RunFolder(run.folder)
    if folder.is_sealed:
        raise UsageError(f"The archive in {run.folder} is complete already.", hint=f"mlbench verify {run.folder}")
    with layout.naming_file_on_os_error(run.folder, "sealed"):
        run.folder.mkdir(parents=True, exist_ok=True)
        _remove_temporary_files(run.folder)
        return _seal(run, folder, observation)


def _seal(run: Run, folder: RunFolder, observation: Observation) -> Judgement:
    before = folder.read_observation()  # of a seal that was interrupted: what it renamed has its old name no more
    found = [*(before.findings if before else ()), *_make_portable(run.folder)]
    more = [finding for finding in found if finding not in observation.findings]
    observation = dataclasses.replace(observation, findings=(*observation.findings, *more))
    document = folder.read_json(run_folder.RUN)
    if document is None or not describes_run(document, run):
        document = {"schema_version": layout.SCHEMA_VERSION, **run_document(run)}
        folder.write(run_folder.RUN, format_document(document))
    folder.write_observation(observation)
    _normalize_resources(run.folder / run_folder.RESOURCES)
    with replace_file(run.folder / run_folder.METRICS) as metrics:
        judgement = judge(collect_evidence(run, document, observation), metrics.write)
    _write(run.folder / run_folder.ENVIRONMENT, format_document(judgement.environment))
    _write(run.folder / run_folder.FINDINGS, format_document(findings_document(judgement.findings)))
    if judgement.network is not None:
        _write(run.folder / run_folder.NETWORK, format_document(judgement.network))
    _write(run.folder / run_folder.RESULT, format_document(judgement.result))
    _write(run.folder / run_folder.OFFICIAL, judgement.official_text.encode())
    sync_folder(run.folder)
    _write(run.folder / run_folder.SUMS, layout.format_sums(_digests(run.folder)))
    sync_folder(run.folder)
    return judgement


def _write(path: Path, data: bytes) -> None:
    with replace_file(path) as file:
        file.write(data)


def _remove_temporary_files(folder: Path) -> None:
    """Remove what a killed writer has left."""
    for name in (*layout.REQUIRED, run_folder.OBSERVATION, run_folder.SUMS):
        for temporary in folder.glob(f".{name}.*.tmp"):
            temporary.unlink(missing_ok=True)


def _normalize_resources(path: Path) -> None:
    """Bring resources.jsonl to the archive's form: times as RFC 3339, no torn lines; empty if nothing was sampled."""
    with replace_file(path) as normalized:
        if path.is_file():
            with open(path, "rb") as samples:
                normalized.writelines(resource_lines(samples))


def _make_portable(folder: Path) -> list[Finding]:
    """Rename files that no archive can hold by that name, and put links and devices aside; idempotent."""
    findings = []
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            _let_read(Path(parent, name), stat.S_IRWXU)
    for name, mode in sorted(layout.walk(folder)):
        if not stat.S_ISREG(mode):
            aside = (
                folder / run_folder.STATE_FOLDER / "left_out" / urllib.parse.quote(os.fsencode(name), safe="")[-200:]
            )
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, aside)
            shown = ascii(name)[1:-1]
            findings.append(
                Finding("file_left_out", f"{shown} is a link or no regular file; an archive holds only files.")
            )
        elif trouble := layout.find_name_problem(name):
            portable = "/".join(map(layout.portable_part, name.split("/")))
            if layout.find_name_problem(portable) or (folder / portable).exists():
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
        if name == run_folder.SUMS:
            continue
        if name == run_folder.SIGNATURE:  # of what was not sealed yet
            (folder / name).unlink()
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
