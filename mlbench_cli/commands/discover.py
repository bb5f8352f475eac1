"""`mlbench discover`: record the runs of a cluster that another machine started."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import CleanupError


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
        console.note(f"There are no runs on {name}.")
    return CleanupError.exit_code if any(run.problem for run in found) else 0
