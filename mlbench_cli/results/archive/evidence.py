"""The evidence of a run: completed in its folder, and read from the folder or its archive."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from mlbench_cli.errors import DamagedArchive, UsageError
from mlbench_cli.model.goals import Goal, is_finite_number
from mlbench_cli.model.run import Finding, Observation, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.tasks.catalog import TaskRules
from mlbench_cli.util.files import read_end, replace_file
from mlbench_cli.util.json_text import format_row, make_strict, parse_document
from mlbench_cli.util.times import MAX_SECONDS, parse_timestamp, timestamp

MAX_ROW_BYTES = 1 << 20  # of resources.jsonl; longer lines are not rows


@dataclass(frozen=True)
class Evidence:
    """The evidence that a run left behind. `logs` opens each rank's log for reading, repeatedly if needed."""

    id: str
    name: str
    created: str  # RFC 3339
    spec: RunSpec
    rules: TaskRules | None
    observation: Observation
    provenance: Mapping[str, Any]  # Provenance.to_dict
    samples: Callable[[], Iterable[Mapping[str, Any]]]  # the rows of resources.jsonl
    logs: Mapping[int, Callable[[], BinaryIO]]
    shaping: Mapping[str, Any] | None = None  # shaping.json, if the engine emulated the network
    faults: Mapping[str, Any] | None = None  # faults.json, if faults occurred, or ranks could be restarted

    @property
    def goal(self) -> Goal | None:
        """The run's goal; None for a task without one."""
        return None if self.rules is None else self.rules.find_goal(self.spec.parameters, self.spec.goal)

    @property
    def span(self) -> tuple[float | None, float]:
        """Start of the first worker and end of the last, in seconds since 1970; the start is None if none started."""
        workers = self.observation.workers
        started = min((worker.started for worker in workers if worker.started is not None), default=None)
        ends = [worker.finished for worker in workers if worker.finished is not None]
        finished = max(ends, default=self.observation.time)
        return started, max(finished, parse_timestamp(self.created) if started is None else started)

    @property
    def is_alone(self) -> bool:
        """Whether each worker has its own node, so that other processes there do not belong to the run."""
        nodes = [worker.node for worker in self.observation.workers]
        return not self.spec.functional_only and len(set(nodes)) == len(nodes)


def collect_evidence(run: Run, document: Mapping[str, Any], observation: Observation) -> Evidence:
    """The evidence in the folder of a run that is not yet sealed; `document` is its run.json."""
    folder = RunFolder(run.folder)
    logs: dict[int, Callable[[], BinaryIO]] = {rank: partial(_open, path) for rank, path in folder.logs().items()}
    rules, provenance = _rules(document), document.get("provenance") or {}
    samples = partial(_read_rows, run.folder / run_folder.RESOURCES)
    shaping = folder.read_json(run_folder.SHAPING)
    head = (run.id, run.name, run.created, run.spec, rules)
    return Evidence(*head, observation, provenance, samples, logs, shaping, folder.read_json(run_folder.FAULTS))


def load_evidence(archive: Archive) -> Evidence:
    """The evidence in an archive. Raises DamagedArchive, which names the file and the problem."""
    run = archive.run
    try:
        spec = RunSpec.from_dict(run["spec"])
        rules = _rules(run)
    except (UsageError, TypeError, ValueError, KeyError) as error:
        message = error.message if isinstance(error, UsageError) else str(error)
        raise DamagedArchive(
            archive.path, run_folder.RUN, f"it cannot be judged: {message}", problem="schema"
        ) from None
    logs: dict[int, Callable[[], BinaryIO]] = {
        rank: partial(archive.open_file, name) for rank, name in archive.logs.items()
    }
    observation, provenance = _load_observation(archive), run.get("provenance") or {}
    head = (run["id"], run["name"], run["created"], spec, rules)
    shaping = archive.document(run_folder.SHAPING) if run_folder.SHAPING in archive.names else None
    faults = archive.document(run_folder.FAULTS) if run_folder.FAULTS in archive.names else None
    return Evidence(*head, observation, provenance, archive.samples, logs, shaping, faults)


def _rules(document: Mapping[str, Any]) -> TaskRules | None:
    """The task's rules in run.json."""
    rules = document["task"]
    return None if rules is None else TaskRules.from_dict(rules)


def _load_observation(archive: Archive) -> Observation:
    document = archive.document(run_folder.OBSERVATION)
    document.pop("schema_version")
    try:
        return Observation.from_dict(document)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DamagedArchive(
            archive.path, run_folder.OBSERVATION, f"it is not an observation: {error}", problem="schema"
        ) from None


def keep_observation(run: Run, observation: Observation, renamed: list[Finding]) -> Observation:
    """Write the observation with the files renamed by sealing, now or before an interruption, and return it."""
    folder = RunFolder(run.folder)
    before = folder.read_observation()
    found = [*(before.findings if before else ()), *renamed]
    more = [finding for finding in found if finding not in observation.findings]
    observation = replace(observation, findings=(*observation.findings, *more))
    if run.spec.anonymous:
        observation = _without_host_names(observation)
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


def normalize_samples(path: Path) -> None:
    """Convert resources.jsonl to the archive's format: times as RFC 3339, no truncated lines.

    The file is empty if nothing was sampled.
    """
    with replace_file(path) as normalized:
        normalized.writelines(map(format_row, _read_rows(path)))


def read_samples(path: Path) -> Iterator[Mapping[str, object]]:
    """The rows of resources.jsonl with times as RFC 3339, also from a file that is not yet normalized."""
    return _read_rows(path)


def read_last_samples(path: Path, limit: int = 64 * 1024) -> Iterator[Mapping[str, object]]:
    """The complete rows in the last `limit` bytes of resources.jsonl; none if the file is missing."""
    data = read_end(path, limit)
    if len(data) == limit:
        data = data[data.find(b"\n") + 1 :]  # the first row may be truncated
    return _whole_rows(io.BytesIO(data))


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with open(path, "rb") as samples:
            yield from _whole_rows(samples)


def _whole_rows(samples: BinaryIO) -> Iterator[dict[str, Any]]:
    """The rows of resources.jsonl with times as RFC 3339, without truncated rows."""
    while line := samples.readline(MAX_ROW_BYTES):
        try:
            row = make_strict(parse_document(line))
        except ValueError:
            continue
        if is_finite_number(moment := row.get("time")) and 0 <= moment <= MAX_SECONDS:
            row["time"] = timestamp(moment)
        yield row


def _open(path: Path) -> BinaryIO:
    return open(path, "rb")
