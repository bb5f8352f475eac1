"""`mlbench scale-cluster NAME N`: change the number of a cluster's worker machines, also to 0 between runs."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.clusters import changes as cluster_changes
from mlbench_cli.commands._clusters import StepPrinter, cluster_document
from mlbench_cli.commands._common import Format, Output, Yes, complete_clusters, print_answer
from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.storage.store import Store


def scale_cluster(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="cluster (list: mlbench list-clusters)", autocompletion=complete_clusters),
    ],
    nodes: Annotated[int, typer.Argument(metavar="NUM_WORKERS", help="new number of worker machines (0 or more)")],
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Change the number of worker machines of a cluster. With 0, only the control plane costs money."""
    if nodes < 0:
        raise UsageError(f"{nodes} machines: the number must be at least 0.")
    store = Store(notice=console.note)
    cluster = store.cluster(name)
    cluster_changes.plan_scaling(cluster, nodes)  # refuses what cannot be, before it asks
    before = ClusterDetails.of(cluster).nodes or 0
    if nodes > before:
        console.confirm(f"Scale {name} from {before} to {nodes} machines?", yes=yes)
    with StepPrinter() as report:
        ready = cluster_changes.scale_cluster(store, cluster, nodes, report)
    print_answer(output, {"cluster": cluster_document(ready)}, f"The cluster {name} has {nodes} worker machines.")
