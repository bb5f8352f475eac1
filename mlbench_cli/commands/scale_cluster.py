"""`mlbench scale-cluster NAME N`: change the number of a cluster's working machines, also to 0 between runs."""

from dataclasses import replace
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._clusters import StepTeller, document_of
from mlbench_cli.commands._common import Format, Output, Yes, complete_clusters
from mlbench_cli.errors import UsageError
from mlbench_cli.store import Store
from providers import registry


def scale_cluster(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="a cluster of mlbench list-clusters", autocompletion=complete_clusters),
    ],
    nodes: Annotated[int, typer.Argument(metavar="NUM_WORKERS", help="new number of worker machines, 0 or more")],
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Change the number of a cluster's working machines. With 0 nothing but its control plane costs money."""
    if nodes < 0:
        raise UsageError(f"{nodes} machines: the least is 0.")
    store = Store()
    cluster = store.cluster(name)
    provider = registry.load(cluster.provider)
    resources = provider.scale(cluster, nodes)
    if nodes > int(cluster.details.get("nodes", 0)):
        console.confirm(f"Let {name} have {nodes} machines instead of {cluster.details.get('nodes')}?", yes=yes)
    from providers.lifecycle import up

    scaled = replace(cluster, details={**cluster.details, "nodes": nodes})
    with StepTeller() as tell:
        up(scaled, resources, store, report=tell, times="scaling")
    if output == Format.json:
        console.out_json({"cluster": document_of(store.cluster(name))})
    else:
        console.out(f"The cluster {name} has {nodes} working machines.")
