"""A run's folder: the future archive, and mlbench's own state in `.state`.

run.json observation.json resources.jsonl logs/ output/ manifests/ shaping.json faults.json    evidence
result.json official_result.txt metrics.jsonl findings.json environment.json network.json certificate.json   documents
SHA256SUMS                                                              written last: seals the folder
SHA256SUMS.sig                                                          signature (mlbench verify --sign)
.state/                                                                 not part of the archive
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlbench_cli.agent.processes import try_lock
from mlbench_cli.errors import DeadlineError
from mlbench_cli.model.run import Observation, Run
from mlbench_cli.util.files import read_object, write_atomically
from mlbench_cli.util.json_text import format_document

RUN = "run.json"
OBSERVATION = "observation.json"
RESULT = "result.json"
OFFICIAL = "official_result.txt"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
RESOURCES = "resources.jsonl"
FINDINGS = "findings.json"
CERTIFICATE = "certificate.json"  # only of the task certify
NETWORK = "network.json"  # only if the network was measured or requested
SHAPING = "shaping.json"  # evidence: what the engine did for --network, with its probes
FAULTS = "faults.json"  # evidence: injected faults, and attempts
SUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"  # optional; like SUMS itself, not listed in SUMS
STATE_FOLDER = ".state"
PODS_FILES = "files.tar.gz"  # in .state: the files of a command that its pods get
LOG_PATTERN = re.compile(r"logs/rank-(0|[1-9][0-9]{0,6})\.log")

LOCK_SECONDS = 600.0  # seconds in which another command can complete even a large archive
_NOTICE_SECONDS = 1.0


class RunFolder(Struct, frozen=True):
    """The paths in a run's folder, its lock, and atomic writes."""

    path: Path

    @property
    def is_sealed(self) -> bool:
        """Whether it is a complete archive. Only `verify` checks its files."""
        return (self.path / SUMS).is_file()

    @property
    def state(self) -> Path:
        """The folder of mlbench's own state; created if missing."""
        folder = self.path / STATE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self, rank: int) -> Path:
        """The log of a rank."""
        return self.path / "logs" / f"rank-{rank}.log"

    def output(self, rank: int) -> Path:
        """The folder of files written by a rank."""
        return self.path / "output" / f"rank-{rank}"

    def logs(self) -> dict[int, Path]:
        """Rank -> log, sorted by rank. Symbolic links are skipped."""
        paths = {f"logs/{path.name}": path for path in (self.path / "logs").glob("rank-*.log")}
        found = {int(match[1]): paths[name] for name in paths if (match := LOG_PATTERN.fullmatch(name))}
        return {rank: found[rank] for rank in sorted(found) if found[rank].is_file() and not found[rank].is_symlink()}

    def write(self, name: str, data: bytes) -> None:
        """Replace the file `name` atomically and durably."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)

    def write_observation(self, observation: Observation) -> None:
        """Store how the run ended: its objects may soon be deleted from the cluster."""
        self.write(OBSERVATION, format_document(observation.to_dict()))

    def read_observation(self) -> Observation | None:
        """The stored observation; None if it is missing or unreadable."""
        document = self.read_json(OBSERVATION)
        if document is None:
            return None
        document.pop("schema_version", None)
        try:
            return Observation.from_dict(document)
        except ValueError:
            return None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in the file `name`; None if it is missing or unreadable."""
        return read_object(self.path / name)

    @contextmanager
    def lock(self, *, notice: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the folder's lock, so that completing, deleting and cancelling a run exclude each other.

        The folder itself is locked, which works on a full disk. If another process holds the lock, `notice` is called
        with one sentence with the deadline. Raises DeadlineError after LOCK_SECONDS.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            _wait_for_lock(descriptor, self.path, notice)
            yield
        finally:
            os.close(descriptor)


def is_sealed(run: Run) -> bool:
    """Whether the run's folder is a complete archive."""
    return RunFolder(run.folder).is_sealed


def _wait_for_lock(descriptor: int, path: Path, notice: Callable[[str], None] | None) -> None:
    if try_lock(descriptor, patience=min(_NOTICE_SECONDS, LOCK_SECONDS)):
        return
    if notice is not None:
        notice(f"Another mlbench command is completing this run; waiting for it at most {LOCK_SECONDS:g} s.")
    if not try_lock(descriptor, patience=LOCK_SECONDS - _NOTICE_SECONDS):
        raise DeadlineError(
            f"Another mlbench command has been working on {path} for {LOCK_SECONDS:g} s.",
            hint="Wait for it to end, then run the command again.",
        )
