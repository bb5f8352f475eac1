"""Turns a run's folder into an archive.

An archive is sealed if and only if it has SHA256SUMS, which is written last, when everything it lists is on disk. After
a crash before that, sealing can be repeated.
"""

import hashlib
import json
import os
import shlex
import stat
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mlbench_cli.errors import CleanupError, UsageError, naming_file_on_os_error
from mlbench_cli.model.run import Finding, Observation, Run
from mlbench_cli.model.spec import canonical_json
from mlbench_cli.results.archive import files
from mlbench_cli.results.archive.evidence import collect_evidence, read_samples
from mlbench_cli.results.archive.judge import Judgement, judge
from mlbench_cli.results.archive.record import run_document
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import let_read, replace_file, sync_folder
from mlbench_cli.util.json_text import SCHEMA_VERSION, format_document, format_row


def seal(run: Run, observation: Observation) -> Judgement:
    """Complete the run's folder to an archive, and return the judgement. The caller must hold the folder's lock.

    The observation is stored as evidence, with the findings of sealing. Logs are read in bounded memory. Raises
    UsageError for a sealed folder, CleanupError for one with folders that may not be read.
    """
    folder = RunFolder(run.folder)
    if folder.is_sealed:
        raise UsageError(
            f"The archive in {run.folder} is complete already.", hint=f"mlbench verify {shlex.quote(str(run.folder))}"
        )
    with naming_file_on_os_error(run.folder, "sealed"):
        run.folder.mkdir(parents=True, exist_ok=True)
        for temporary in run.folder.glob(".*.tmp"):  # of a killed writer
            if temporary.name[1:].rsplit(".", 2)[0] in (*files.REQUIRED, run_folder.OBSERVATION, run_folder.SUMS):
                temporary.unlink(missing_ok=True)
        try:
            renamed = make_portable(run.folder)
        except PermissionError as error:  # a folder of another user, e.g. of a container that the task has started
            raise CleanupError(
                f"The archive cannot be completed: {error.filename}: {error.strerror}.",
                hint=f"sudo chown -R $USER {shlex.quote(str(error.filename))}, then: mlbench wait {run.name}",
            ) from None
        document = complete_run_document(run)
        observation = _keep_observation(run, observation, renamed)
        _normalize_samples(run.folder / run_folder.RESOURCES)
        # What is derived from the evidence can be derived again; `write_sums` syncs it with all other files.
        with replace_file(run.folder / run_folder.METRICS, is_durable=False) as metrics:
            judgement = judge(collect_evidence(run, document, observation), metrics.write)
        made = {name: format_document(document) for name, document in judgement.documents.items()}
        for name, data in (*made.items(), (run_folder.OFFICIAL, judgement.official_text.encode())):
            with replace_file(run.folder / name, is_durable=False) as file:
                file.write(data)
        write_sums(run.folder)
    return judgement


# --- evidence ---------------------------------------------------------------------------------------------------------


def complete_run_document(run: Run) -> Mapping[str, Any]:
    """The run.json in the run's folder; rewritten without provenance if it is missing or belongs to another run."""
    folder = RunFolder(run.folder)
    document = folder.read_json(run_folder.RUN)
    provenance = repeats = None
    if document is not None and [document.get(name) for name in ("id", "name", "created")] == [
        *(run.id, run.name, run.created)
    ]:
        if document.get("spec") == json.loads(canonical_json(run.spec.to_dict())):
            return document
        provenance, repeats = document.get("provenance"), document.get("repeats")  # the spec had another form then
    written = {"schema_version": SCHEMA_VERSION, **run_document(run, provenance, repeats)}
    folder.write(run_folder.RUN, format_document(written))
    return written


def _keep_observation(run: Run, observation: Observation, renamed: list[Finding]) -> Observation:
    """Write the observation with the files renamed by sealing, now or before an interruption, and return it."""
    folder = RunFolder(run.folder)
    before = folder.read_observation()
    found = [*(before.findings if before else ()), *renamed]
    more = [finding for finding in found if finding not in observation.findings]
    observation = replace(observation, findings=(*observation.findings, *more))
    if run.spec.anonymous:
        observation = _without_host_names(observation)
    if observation != before:
        folder.write_observation(observation)
    return observation


def _without_host_names(observation: Observation) -> Observation:
    """The observation with nodes named node-0, node-1, ... in the order of their ranks."""
    nodes = dict.fromkeys(worker.node for worker in observation.workers if worker.node is not None)
    names = {node: f"node-{number}" for number, node in enumerate(nodes)}
    return replace(
        observation,
        workers=tuple(
            worker if worker.node is None else replace(worker, node=names[worker.node])
            for worker in observation.workers
        ),
        clocks=tuple(
            replace(clock, node=None if clock.node is None else names.get(clock.node, "node"))
            for clock in observation.clocks
        ),
    )


def _normalize_samples(path: Path) -> None:
    """Convert resources.jsonl to the archive's format: times as RFC 3339, no truncated lines.

    The file is empty if nothing was sampled.
    """
    with replace_file(path) as normalized:
        normalized.writelines(map(format_row, read_samples(path)))


# --- names ------------------------------------------------------------------------------------------------------------


def make_portable(folder: Path) -> list[Finding]:
    """Rename files with invalid names, and move links and devices aside. Idempotent."""
    findings = []
    for name in list(_open_folders(folder)):
        _put_aside(folder, name)
        shown = f"{ascii(name)[1:61]}..."
        findings.append(Finding("file_left_out", f"The folder {shown} is nested too deeply; it was left out."))
    found = sorted(files.walk(folder))
    colliding = files.find_collisions(os.fsencode(name).decode("utf-8", "replace") for name, _ in found)
    for name, mode in found:
        if not stat.S_ISREG(mode):
            _put_aside(folder, name)
            shown = ascii(name)[1:-1]
            findings.append(
                Finding("file_left_out", f"{shown} is not a regular file; archives contain only regular files.")
            )
        elif not name.startswith(".") and not files.is_in_layout(name):
            _put_aside(folder, name)
            findings.append(Finding("file_left_out", f"{ascii(name)[1:-1]} does not belong in an archive."))
            continue
        elif (
            trouble := files.find_name_problem(name)
            or files.find_portability_problem(name)
            or _name_collision(colliding, name)
        ):
            portable = "/".join(map(files.portable_part, name.split("/")))
            if portable == name or files.find_name_problem(portable) or (folder / portable).exists():
                portable = f"output/renamed-{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}"
            (folder / portable).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, folder / portable)
            findings.append(Finding("file_renamed", f"{ascii(name)[1:-1]} is now {portable}: {trouble}."))
            name = portable
        if stat.S_ISREG(mode):
            let_read(folder / name)
            if not os.access(folder / name, os.R_OK):  # of another user, e.g. of a container that the task has started
                _put_aside(folder, name)
                findings.append(Finding("file_left_out", f"{ascii(name)[1:-1]} may not be read; it was left out."))
    return findings


def _open_folders(folder: Path) -> Iterator[str]:
    """Make all folders readable. Yields those that are too deep to be read by their paths, which it does not enter."""
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(folder / below) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in names:
            inner = f"{below}/{name}" if below else name
            if len(os.fsencode(inner)) > files.MAX_FOLDER_BYTES:
                yield inner
                continue
            let_read(folder / inner)
            pending.append(inner)


def _put_aside(folder: Path, name: str) -> None:
    aside = folder / run_folder.STATE_FOLDER / "left_out" / urllib.parse.quote(os.fsencode(name), safe="")[-200:]
    aside.parent.mkdir(parents=True, exist_ok=True)
    os.replace(folder / name, aside)


def _name_collision(colliding: Mapping[str, str], name: str) -> str | None:
    other = colliding.get(name)
    return None if other is None else f"on some systems it is the same as {ascii(other)[1:-1]}"


# --- checksums --------------------------------------------------------------------------------------------------------


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of a folder's files after all of them are on disk. This seals the folder."""
    sync_folder(folder)
    sums = files.format_sums(_digest_files(folder))
    with replace_file(folder / run_folder.SUMS) as file:
        file.write(sums)
    sync_folder(folder)


def _digest_files(folder: Path) -> dict[str, str]:
    """Name -> digest of every file. All files are on disk when this returns."""
    digests = {}
    for name, _ in files.walk(folder):
        if name == run_folder.SUMS:
            continue
        if name == run_folder.SIGNATURE:  # an old signature
            (folder / name).unlink()
            continue
        with open(folder / name, "rb") as file:
            digests[name] = files.digest(file)
            os.fsync(file.fileno())
        if len(digests) >= files.MAX_FILES:
            raise UsageError(
                f"{folder} has more than {files.MAX_FILES} files, the limit of an archive.",
                hint=f"Remove some from {folder / 'output'}, then run the command again.",
            )
    return digests
