"""`mlbench discover`: record runs of a cluster that another machine started, or whose folders outlived the store."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import CleanupError
from mlbench_cli.model.run import LOCAL


def discover(
    cluster: Annotated[
        str | None, typer.Argument(metavar="[CLUSTER]", help="cluster; default: the default cluster")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Kubernetes namespace; default: namespace of the cluster")
    ] = None,
    output: Output = Format.text,
) -> int:
    """Record runs of a cluster that another machine started, so that status, wait and download work here.

    mlbench discover local rebuilds an emptied store: it records the runs whose sealed folders are still in the data
    directory, without the experiments that they belonged to.

    A run has the same ID on every machine. Runs whose name is already taken here, and runs of a newer mlbench, are
    skipped; the exit code is then 8.
    """
    client = Client(notice=console.note)
    name = cluster or client.store.current_cluster.name
    found = client.discover(name, namespace)
    if output == Format.json:
        console.out_json({"cluster": name, "runs": [run.to_dict() for run in found]})
    elif found:
        console.out_table(
            ["RUN", "HERE", "RESULTS", "CREATED"], [[run.name, run.here, run.results, run.created] for run in found]
        )
        for run in found:
            if run.problem:
                console.warn(f"{run.name}: {run.problem}")
    else:
        where = "run folders that are not in the store" if name == LOCAL.name else f"runs on {name}"
        console.note(f"There are no {where}.")
    return CleanupError.exit_code if any(run.problem for run in found) else 0
