"""`mlbench discover`: record the runs of a cluster that another machine started."""

from dataclasses import replace
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, engine_of
from mlbench_cli.engines.base import CanDiscover, FoundRun, UnreadableRun
from mlbench_cli.errors import CleanupError, UsageError
from mlbench_cli.model import Cluster, RunState
from mlbench_cli.store import Store

RECORDED, KNOWN, TAKEN, UNREADABLE = "recorded", "known", "name_taken", "unreadable"


def discover(
    cluster: Annotated[str | None, typer.Argument(metavar="[CLUSTER]", help="default: the current cluster")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Kubernetes namespace; default: the cluster's own")
    ] = None,
    output: Output = Format.text,
) -> int:
    """Record the runs of a cluster that this machine does not know, so that status, wait and download work here.

    A run has the same id on every machine. A run whose name stands for another one here is skipped, and so is one that
    a newer mlbench started; the exit code is then 8, else 0.
    """
    store = Store()
    chosen = store.cluster(cluster) if cluster else store.current_cluster
    if chosen.provider == "local":
        raise UsageError("The local cluster has no runs but this machine's own.", hint="mlbench discover CLUSTER")
    engine = engine_of(chosen)
    assert isinstance(engine, CanDiscover)
    rows = [_record(found, chosen, store) for found in engine.discover(namespace)]
    if output == Format.json:
        console.out_json({"cluster": chosen.name, "runs": rows})
    elif rows:
        console.out_table(
            ["RUN", "HERE", "RESULTS", "CREATED"],
            [[row["name"], row["here"], row["results"], row["created"]] for row in rows],
        )
        for row in rows:
            if row["problem"]:
                console.warn(f"{row['name']}: {row['problem']}")
    else:
        console.note(f"There are no runs on {chosen.name}.")
    return CleanupError.exit_code if any(row["problem"] for row in rows) else 0


def _record(found: FoundRun | UnreadableRun, cluster: Cluster, store: Store) -> dict[str, object]:
    if isinstance(found, UnreadableRun):
        return _row(found.name, UNREADABLE, problem=found.reason)
    name = found.spec.name
    facts = {"id": found.id, "created": found.created, "results": "fetched" if found.is_fetched else "on the cluster"}
    if store.find_run(found.id) is not None:
        return _row(name, KNOWN, **facts)
    try:
        # The cluster may have another name on the machine that started the run.
        spec = replace(found.spec, cluster=cluster.name)
        run = store.record_run(spec, run_id=found.id, created=found.created)
    except UsageError:
        problem = f"another run has that name here; to record this one: mlbench delete {name}, then discover again."
        return _row(name, TAKEN, problem=problem, **facts)
    store.update_run(run, RunState.RUNNING)
    return _row(name, RECORDED, **facts)


def _row(
    name: str,
    here: str,
    *,
    id: str | None = None,
    created: str | None = None,
    results: str | None = None,
    problem: str | None = None,
) -> dict[str, object]:
    return {"name": name, "id": id, "created": created, "here": here, "results": results, "problem": problem}
