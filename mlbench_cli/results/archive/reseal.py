"""Changes the evidence of archives, judges it again and reseals it. The original's signature becomes invalid."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mlbench_cli.errors import CannotTellError
from mlbench_cli.model.run import Ending, Finding, Observation, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.files import DOCUMENTS, Archive, pack
from mlbench_cli.results.archive.judge import STILL_RUNNING
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.run_folder import RunFolder

_UNFINISHED = Finding(
    STILL_RUNNING,
    "This archive was written during the run and is incomplete.",
    hint="Download it again after the run has ended.",
)


def seal_partial(run: Run, observation: Observation, target: Path) -> None:
    """Write a partial archive of a running run, marked as such. The run continues.

    Raises CannotTellError if no archive can be made yet.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        folder = Path(name, "run")
        shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns(run_folder.STATE_FOLDER))
        found = (_UNFINISHED, *observation.findings)
        seal(replace(run, folder=folder), replace(observation, ended=Ending.CANCELED, findings=found))
        _pack(folder, target, f"{run.name} cannot be archived while it runs")


def seal_anew(archive: Archive, target: Path, change: Callable[[Path], None]) -> None:
    """Change the evidence of an archive, judge it by the current rules, and write it to `target`, which may be the same
    file.

    `change` is called with the folder of the evidence. Raises CannotTellError if the documents still cannot be derived.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        folder = Path(name, "run")
        _copy(archive, folder)
        change(folder)
        _seal(folder)
        _pack(folder, target, f"The evidence of {archive.path} cannot be sealed again")


def _pack(folder: Path, target: Path, refusal: str) -> None:
    """Write the sealed folder as a zip. Raises CannotTellError with `refusal` and the reason if it does not verify."""
    packed = folder.with_suffix(".zip")
    pack(folder, packed)
    if not (found := verify(packed)).ok:
        raise CannotTellError(f"{refusal}: {[*found.problems, *found.not_derived][0]}")
    packed.replace(target)


def _copy(archive: Archive, folder: Path) -> None:
    """Copy the evidence of an archive, without documents and checksums."""
    made = {*DOCUMENTS, run_folder.NETWORK, run_folder.CERTIFICATE, run_folder.SUMS, run_folder.SIGNATURE}
    for name in archive.names:
        if name not in made:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open_file(name) as file, open(target, "wb") as copy:
                shutil.copyfileobj(file, copy)


def _seal(folder: Path) -> None:
    document: dict[str, Any] = json.loads((folder / run_folder.RUN).read_bytes())
    run = Run(document["id"], RunSpec.from_dict(document["spec"]), folder, document["created"])
    observation = RunFolder(folder).read_observation()
    if observation is None:
        raise CannotTellError(f"{run.name} has no observation of its workers, so it cannot be judged again.")
    seal(run, observation)
