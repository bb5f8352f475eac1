"""Turns a run's folder into an archive.

An archive is sealed if and only if it has SHA256SUMS, which is written last, when everything it lists is on disk. After
a crash before that, sealing can be repeated.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Observation, Run
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.evidence import collect_evidence, keep_observation, normalize_samples
from mlbench_cli.results.archive.judge import Judgement, judge
from mlbench_cli.results.archive.record import complete_run_document
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import replace_file
from mlbench_cli.util.json_text import format_document


def seal(run: Run, observation: Observation) -> Judgement:
    """Complete the run's folder to an archive, and return the judgement. The caller must hold the folder's lock.

    The observation is stored as evidence, with the findings of sealing. Logs are read in bounded memory. Raises
    UsageError for a sealed folder.
    """
    folder = RunFolder(run.folder)
    if folder.is_sealed:
        raise UsageError(f"The archive in {run.folder} is complete already.", hint=f"mlbench verify {run.folder}")
    with layout.naming_file_on_os_error(run.folder, "sealed"):
        run.folder.mkdir(parents=True, exist_ok=True)
        layout.remove_temporary_files(run.folder)
        renamed = layout.make_portable(run.folder)
        document = complete_run_document(run)
        observation = keep_observation(run, observation, renamed)
        normalize_samples(run.folder / run_folder.RESOURCES)
        with replace_file(run.folder / run_folder.METRICS) as metrics:
            judgement = judge(collect_evidence(run, document, observation), metrics.write)
        _write_documents(run.folder, judgement.documents)
        _write(run.folder / run_folder.OFFICIAL, judgement.official_text.encode())
        layout.write_sums(run.folder)
    return judgement


def _write_documents(folder: Path, documents: Mapping[str, Mapping[str, Any]]) -> None:
    for name, document in documents.items():
        _write(folder / name, format_document(document))


def _write(path: Path, data: bytes) -> None:
    with replace_file(path) as file:
        file.write(data)
