"""The documents of an archive: their types, and the parts that are derived from a single fact.

run.json is evidence, written when a run is recorded. `judge` derives the others from the evidence.
"""

import json
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from mlbench_cli import __version__
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Observation, Run, WorkerState
from mlbench_cli.model.spec import canonical_json
from mlbench_cli.results.archive.events import DataIdentityDocument
from mlbench_cli.results.archive.faults import FaultsDocument
from mlbench_cli.results.archive.network import SummaryDocument
from mlbench_cli.storage.run_folder import RUN, RunFolder
from mlbench_cli.tasks.catalog import find_rules
from mlbench_cli.util.json_text import SCHEMA_VERSION, format_document, make_strict
from mlbench_cli.util.times import timestamp

# The version of the rules in `judge`. From the first release on, a change that gives a different result for the same
# evidence needs a new version.
JUDGE_VERSION = 1

# Tasks may report environment variables; only these are kept, because others may contain secrets.
KEPT_VARIABLES = {
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_NUM_THREADS",
}
_KEPT_PREFIXES = ("NCCL_", "GLOO_", "OMPI_MCA_", "UCX_", "TORCH_NCCL_")
_MAX_ENVIRONMENT = 8 << 20


class RunDocument(TypedDict):
    """run.json: the request, its provenance, and the task's rules at that time."""

    id: str
    name: str
    created: str  # RFC 3339
    spec_hash: str
    spec: dict[str, Any]  # RunSpec.to_dict
    task: dict[str, Any] | None  # TaskRules.to_dict; None for a custom command or an unknown task
    mlbench: str
    provenance: dict[str, Any] | None
    repeats: NotRequired[int]  # how many runs of this setting and size the command asked for


class SecondsDocument(TypedDict):
    """Wall-clock seconds of rank 0's training, and the sum over its training steps, which the original reported."""

    wall: float | None
    training: float | None


class GoalDocument(TypedDict):
    """`value` is the one that reached the goal, else the best; `last` the one at the end of a budget."""

    metric: str
    comparison: str
    threshold: float
    kind: str
    value: float | None
    last: float | None
    wording: str
    reached: bool
    seconds: SecondsDocument | None


class WorkerDocument(TypedDict):
    """Like WorkerState, with times as RFC 3339."""

    rank: int
    phase: str
    reason: str | None
    node: str | None
    exit_code: int | None
    started: str | None
    finished: str | None
    restarts: int
    image_digest: str | None
    seconds: NotRequired[float]


class ResultDocument(TypedDict):
    """result.json. All times in seconds; `timings` has min, mean, max and rank0 over ranks, by category."""

    judge: int
    run: str
    id: str
    task: str
    preset: str
    engine: str
    cluster: str
    backend: str
    workers: int
    world_size: int
    device: str
    outcome: str
    exit_code: int | None  # of the rank that failed first
    summary: str
    started: str | None
    finished: str
    wall_seconds: float | None
    task_seconds: SecondsDocument
    goal: GoalDocument | None
    budget_seconds: float | None
    timings: dict[str, dict[str, float]]
    updates: float | None
    samples: float | None
    epochs: float | None
    synthetic: bool
    data: str | None
    data_identity: DataIdentityDocument | None  # None: not reported by the task
    label: dict[str, str | None]
    division: dict[str, str | None]
    conditions: dict[str, Any]  # Conditions.to_dict
    method: NotRequired[str]  # name of the communication method, unless it was the task's own
    network: NotRequired[SummaryDocument]  # if it was measured or requested
    faults: NotRequired[FaultsDocument]  # if faults occurred, or ranks could be restarted
    first_failed: int | None
    ended: str | None
    worker_states: list[WorkerDocument]
    metrics: dict[str, float | str]  # rank 0's last values by name
    progress: dict[str, Any]  # rank 0's last phase: phase, epoch, epochs, step, steps
    details: dict[str, Any]
    price: dict[str, Any] | None
    doubts: NotRequired[list[str]]  # codes of the findings that remove the official line
    official_line: str | None


class EnvironmentDocument(TypedDict):
    """environment.json: the facts that ranks reported, by rank."""

    ranks: dict[str, dict[str, Any]]
    ranks_left_out: int


# --- run.json -------------------------------------------------------------------------------------------------------


def run_document(run: Run, provenance: Mapping[str, Any] | None = None, repeats: int | None = None) -> RunDocument:
    """run.json without its schema version, as plain JSON values."""
    spec = run.spec
    rules = find_rules(spec.task, spec.preset)
    return {
        "id": run.id,
        "name": run.name,
        "created": run.created,
        "spec_hash": spec.hash,
        "spec": json.loads(canonical_json(spec.to_dict())),
        "task": None if rules is None else rules.to_dict(),
        "mlbench": __version__,
        "provenance": None if provenance is None else dict(provenance),
        **({} if repeats is None else {"repeats": repeats}),  # type: ignore[typeddict-item]
    }


def write_run_document(run: Run, provenance: Mapping[str, Any] | None = None, repeats: int | None = None) -> None:
    """Write run.json into the run's folder, before anything is started."""
    document = format_document(run_document(run, provenance, repeats))
    try:
        RunFolder(run.folder).write(RUN, document)
    except OSError as error:
        raise UsageError(
            f"The folder {run.folder} of the run cannot be created: {error.strerror or error}.",
            hint="Free up disk space or fix its permissions, or set MLBENCH_HOME to another folder.",
        ) from None


def complete_run_document(run: Run) -> Mapping[str, Any]:
    """The run.json in the run's folder; rewritten without provenance if it is missing or belongs to another run."""
    folder = RunFolder(run.folder)
    document = folder.read_json(RUN)
    if document is not None and _describes_run(document, run):
        return document
    written = {"schema_version": SCHEMA_VERSION, **run_document(run)}
    folder.write(RUN, format_document(written))
    return written


def _describes_run(document: Mapping[str, Any], run: Run) -> bool:
    spec = json.loads(canonical_json(run.spec.to_dict()))
    return (document.get("id"), document.get("name"), document.get("created"), document.get("spec")) == (
        *(run.id, run.name, run.created),
        spec,
    )


# --- parts of result.json -------------------------------------------------------------------------------------------


def find_exit_code(observation: Observation) -> int | None:
    """The exit code of the rank that failed first, else the first non-zero one; None if no rank ended."""
    first = [worker.exit_code for worker in observation.workers if worker.rank == observation.first_failed]
    codes = [worker.exit_code for worker in observation.workers]
    nothing_ended = all(code is None for code in codes)
    return next((code for code in (*first, *codes) if code), None if nothing_ended else 0)


def price_of(price: Mapping[str, Any], wall_seconds: float | None) -> dict[str, object] | None:
    """The cost of the whole cluster from the start of the first worker to the end of the last; None if unknown."""
    if not price:
        return None
    hours = None if wall_seconds is None else wall_seconds / 3600
    each = price.get("per_hour")
    return {**price, "amount": None if each is None or hours is None else round(each * hours, 4)}


def label_of(functional_only: str | None) -> dict[str, str | None]:
    """The label of a run's figures: "performance", or "functional" with the reason."""
    return {"word": "functional" if functional_only else "performance", "reason": functional_only}


def worker_document(worker: WorkerState) -> WorkerDocument:
    """A worker's state for observation.json, with times as RFC 3339 UTC."""
    times = {"started": worker.started, "finished": worker.finished}
    moments = {key: None if value is None else timestamp(value) for key, value in times.items()}
    return {**worker.to_dict(), **moments}  # type: ignore[typeddict-item]


# --- environment.json -----------------------------------------------------------------------------------------------


def environment_document(ranks: Mapping[int, Mapping[str, Any]]) -> EnvironmentDocument:
    """environment.json without its schema version, and without variables that may contain secrets."""
    reported: dict[str, Any] = {}
    size = 0
    for rank in sorted(ranks):
        facts = _without_secrets(ranks[rank])
        size += len(repr(facts))
        if size > _MAX_ENVIRONMENT:
            break
        reported[str(rank)] = facts
    return {"ranks": reported, "ranks_left_out": len(ranks) - len(reported)}


def _without_secrets(facts: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = make_strict(
        {key: value for key, value in facts.items() if key not in ("v", "event", "rank", "time")}
    )
    for key in ("env", "environ", "environment", "variables"):
        if isinstance(kept.get(key), dict):
            kept[key] = {name: value for name, value in kept[key].items() if _is_kept(name)}
    return kept


def _is_kept(name: str) -> bool:
    return name in KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)
