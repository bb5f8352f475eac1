"""`mlbench list-clusters`: clusters in the store, and with --cloud also those in the clouds."""

from datetime import UTC, datetime
from typing import Annotated

import typer
from msgspec.structs import replace

from mlbench_cli import console
from mlbench_cli.clusters.manage import describe_search_error, list_gone, search_everywhere
from mlbench_cli.commands._clusters import cluster_document
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.analysis.numbers import format_price
from mlbench_cli.runs.defaults import default_cluster
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import timestamp


def list_clusters(
    cloud: Annotated[
        bool, typer.Option("--cloud", help="also list clusters found in the clouds by their labels")
    ] = False,
    output: Output = Format.text,
) -> None:
    """List clusters; * marks the default cluster.

    With --cloud, the list includes clusters that another machine or data folder created, also partly created ones.
    """
    store = Store(notice=console.note)
    known = store.clusters()
    found, errors, gone = _search(store) if cloud else ([], {}, [])
    current = default_cluster(store).identity
    identities = [cluster.identity for cluster in known]
    listed = [(replace(cluster, state="gone") if cluster in gone else cluster, True) for cluster in known]
    listed += [(cluster, False) for cluster in found if not any(item.matches(cluster.identity) for item in identities)]
    if output == Format.json:
        documents = [_document(cluster, cluster.identity == current, is_known) for cluster, is_known in listed]
        console.out_json({"clusters": documents})
    else:
        console.out_table(
            ["CLUSTER", "PROVIDER", "LOCATION", "STATE", "NODES", "PRICE/H", "EXPIRES", "CREATED"],
            [_row(cluster, cluster.identity == current, is_known) for cluster, is_known in listed],
            droppable=["CREATED", "NODES", "EXPIRES", "LOCATION"],
        )
    if gone:
        named = ", ".join(cluster.name for cluster in gone)
        console.note(f"Deleted elsewhere: {named}. mlbench gc   removes the record")
    if errors:
        for name, error in errors.items():
            console.warn(describe_search_error(name, error))


def _search(store: Store) -> tuple[list[Cluster], dict[str, MlbenchError], list[Cluster]]:
    """Clusters that the clouds show, errors of clouds, and recorded clusters that their clouds no longer show."""
    try:
        search = search_everywhere(store, None, {})
    except MlbenchError as error:  # no cloud can be searched; the known clusters are listed all the same
        return [], {"the clouds": error}, []
    return search.found, search.errors, list_gone(store, search)


def _document(cluster: Cluster, current: bool, known: bool) -> dict[str, object]:
    details = ClusterDetails.of(cluster)
    return {
        **{name: value for name, value in cluster_document(cluster).items() if name != "details"},
        "current": current,
        "known": known,
        "nodes": details.nodes,
        "price_per_hour": details.price_per_hour,
        "currency": details.plan.get("currency"),
        "expires": None if details.expires is None else timestamp(details.expires),
    }


def _row(cluster: Cluster, current: bool, known: bool) -> list[object]:
    details = ClusterDetails.of(cluster)
    left = None if details.expires is None else details.expires - datetime.now(UTC).timestamp()
    return [
        cluster.name + (" *" if current else ""),
        cluster.provider,
        cluster.location or None,
        cluster.state if known else f"{cluster.state}, unknown here",
        details.nodes,
        format_price(details.price_per_hour, str(details.plan.get("currency"))) if details.plan else None,
        None if left is None else f"in {console.duration(left)}" if left > 0 else "overdue",
        console.ago(cluster.created) if cluster.created else None,
    ]
