"""Record runs that the store does not know: started by another machine on a cluster, or sealed folders that outlived
the store.
"""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict, replace

from mlbench_cli.engines.base import CanDiscover, FoundRun, UnreadableRun
from mlbench_cli.errors import DamagedArchive, UsageError
from mlbench_cli.model.run import DAMAGED, Cluster, JsonObject, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.files import read_documents
from mlbench_cli.runs.connect import connect_engine
from mlbench_cli.runs.finalize import read_finished
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.store import Store

RECORDED, KNOWN, TAKEN, UNREADABLE = "recorded", "known", "name_taken", "unreadable"
FETCHED = "fetched"


class Discovered(Struct, frozen=True):
    """A run found on a cluster. `here` is its status on this machine: recorded, known, name_taken, unreadable.

    `created` is RFC 3339; `results` says whether they are fetched, damaged or on the cluster. `problem` says why it is
    skipped, or what is damaged.
    """

    name: str
    here: str
    id: str | None = None
    created: str | None = None
    results: str | None = None
    problem: str | None = None

    def to_dict(self) -> JsonObject:
        """The run as JSON values."""
        return asdict(self)


def discover_runs(
    cluster: Cluster, store: Store, namespace: str | None = None, notice: Callable[[str], None] | None = None
) -> list[Discovered]:
    """Record the runs of a cluster that this machine does not know, with their own ids.

    For the local cluster these are the runs in the store's folder, whichever cluster they ran on.
    """
    if cluster.provider == "local":
        return [_record_folder(folder, store) for folder in list_unknown_folders(store)]
    engine = connect_engine(cluster, notice)
    assert isinstance(engine, CanDiscover)
    return [_record(found, cluster, store) for found in engine.discover(namespace)]


def list_unknown_folders(store: Store) -> list[Path]:
    """The sealed folders of runs that the store does not know, by their time of creation."""
    sealed = [path.parent for path in (store.folder / "runs").glob(f"*/{run_folder.SUMS}")]
    return sorted(
        (folder for folder in sealed if store.find_run(folder.name) is None), key=lambda folder: folder.stat().st_mtime
    )


def _record_folder(folder: Path, store: Store) -> Discovered:
    """Record a run from its sealed folder. Its experiment is unknown."""
    try:
        (document,) = read_documents(folder, [run_folder.RUN])
        spec = RunSpec.from_dict(document["spec"])
        run_id, created = str(document["id"]), str(document["created"])
    except UsageError as error:
        return Discovered(folder.name, UNREADABLE, problem=error.message)
    if run_id != folder.name:
        problem = f"{folder} contains the run {run_id}, but its name differs from that of the run."
        return Discovered(spec.name, UNREADABLE, run_id, created, problem=problem)
    try:
        run = store.record_run(spec, run_id=run_id, created=created)
    except UsageError:
        return Discovered(spec.name, TAKEN, run_id, created, FETCHED, _explain_taken(spec.name))
    try:
        finished = read_finished(run)
    except DamagedArchive as damage:
        store.advance(run, RunState.FINISHED)
        return Discovered(spec.name, RECORDED, run_id, created, DAMAGED, damage.message)
    store.advance(run, RunState.FINISHED, finished.outcome if finished else None)
    return Discovered(spec.name, RECORDED, run_id, created, FETCHED)


def _explain_taken(name: str) -> str:
    return f"another run here has that name. To record this one: mlbench delete {name}, then mlbench status --refresh."


def _record(found: FoundRun | UnreadableRun, cluster: Cluster, store: Store) -> Discovered:
    if isinstance(found, UnreadableRun):
        return Discovered(found.name, UNREADABLE, problem=found.reason)
    name = found.spec.name
    results = FETCHED if found.is_fetched else "on the cluster"
    if store.find_run(found.id) is not None:
        return Discovered(name, KNOWN, found.id, found.created, results)
    try:
        # The machine that started the run may use another name for the cluster.
        spec = replace(found.spec, cluster=cluster.name)
        run = store.record_run(spec, run_id=found.id, created=found.created)
    except UsageError:
        return Discovered(name, TAKEN, found.id, found.created, results, _explain_taken(name))
    store.advance(run, RunState.RUNNING)
    return Discovered(name, RECORDED, found.id, found.created, results)
