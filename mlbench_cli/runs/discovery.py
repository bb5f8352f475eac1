"""Recording the runs of a cluster that another machine has started."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from mlbench_cli.engines.base import CanDiscover, FoundRun, UnreadableRun
from mlbench_cli.errors import UsageError
from mlbench_cli.model import Cluster, JsonObject, RunState
from mlbench_cli.runs.connect import connect_engine
from mlbench_cli.store import Store

RECORDED, KNOWN, TAKEN, UNREADABLE = "recorded", "known", "name_taken", "unreadable"


@dataclass(frozen=True)
class Discovered:
    """A run that a cluster has. `here` is what became of it on this machine: recorded, known, name_taken, unreadable.

    `created` is RFC 3339; `results` says whether they are fetched or on the cluster. `problem` says why it is skipped.
    """

    name: str
    here: str
    id: str | None = None
    created: str | None = None
    results: str | None = None
    problem: str | None = None

    def to_dict(self) -> JsonObject:
        """The run as `mlbench discover -o json` prints it."""
        return asdict(self)


def discover_runs(
    cluster: Cluster, store: Store, namespace: str | None = None, notice: Callable[[str], None] | None = None
) -> list[Discovered]:
    """Record the runs of a cluster that this machine does not know, with their own ids. Raises UsageError for local."""
    if cluster.provider == "local":
        raise UsageError("The local cluster has no runs but this machine's own.", hint="mlbench discover CLUSTER")
    engine = connect_engine(cluster, notice)
    assert isinstance(engine, CanDiscover)
    return [_record(found, cluster, store) for found in engine.discover(namespace)]


def _record(found: FoundRun | UnreadableRun, cluster: Cluster, store: Store) -> Discovered:
    if isinstance(found, UnreadableRun):
        return Discovered(found.name, UNREADABLE, problem=found.reason)
    name = found.spec.name
    results = "fetched" if found.is_fetched else "on the cluster"
    if store.find_run(found.id) is not None:
        return Discovered(name, KNOWN, found.id, found.created, results)
    try:
        # The cluster may have another name on the machine that started the run.
        spec = replace(found.spec, cluster=cluster.name)
        run = store.record_run(spec, run_id=found.id, created=found.created)
    except UsageError:
        problem = f"another run has that name here; to record this one: mlbench delete {name}, then discover again."
        return Discovered(name, TAKEN, found.id, found.created, results, problem)
    store.update_run(run, RunState.RUNNING)
    return Discovered(name, RECORDED, found.id, found.created, results)
