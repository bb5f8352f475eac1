"""`mlbench list-clusters`: what the store knows, and with --cloud what the clouds know."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, default_cluster
from mlbench_cli.model import Cluster
from mlbench_cli.store import Store
from mlbench_cli.times import timestamp

if TYPE_CHECKING:
    from mlbench_cli.errors import MlbenchError


def list_clusters(
    cloud: Annotated[
        bool, typer.Option("--cloud", help="ask the clouds, too, for clusters with mlbench's labels")
    ] = False,
    output: Output = Format.text,
) -> None:
    """Show the known clusters; the current one, which commands use by default, is marked with *.

    Clusters that only a cloud knows were made by another machine or data directory, or half made.
    """
    store = Store()
    known = {cluster.name: cluster for cluster in store.clusters()}
    found, unseen = _in_clouds() if cloud else ({}, {})
    clusters = [*known.values(), *(cluster for name, cluster in found.items() if name not in known)]
    current = default_cluster(store).name
    if output == Format.json:
        documents = [_document(cluster, cluster.name == current, cluster.name in known) for cluster in clusters]
        console.out_json({"clusters": documents})
    else:
        console.out_table(
            ["CLUSTER", "PROVIDER", "STATE", "NODES", "PRICE/H", "EXPIRES", "CREATED"],
            [_row(cluster, cluster.name == current, cluster.name in known) for cluster in clusters],
            droppable=["CREATED", "NODES", "EXPIRES"],
        )
    for name, error in unseen.items():
        console.warn(f"No answer from {name}: {error.message}")


def _in_clouds() -> tuple[dict[str, Cluster], dict[str, "MlbenchError"]]:
    from mlbench_cli.commands._clusters import discovered
    from mlbench_cli.errors import MlbenchError

    try:
        found, unseen = discovered(None, {})
    except MlbenchError as error:  # no cloud can be asked; what is known here is shown all the same
        return {}, {"the clouds": error}
    return {cluster.name: cluster for cluster in found}, unseen


def _document(cluster: Cluster, current: bool, known: bool) -> dict[str, Any]:
    expires = cluster.details.get("expires")
    return {
        "name": cluster.name,
        "provider": cluster.provider,
        "state": cluster.state,
        "created": cluster.created or None,
        "current": current,
        "known": known,
        "nodes": cluster.details.get("nodes"),
        "price_per_hour": _plan(cluster).get("price_per_hour"),
        "currency": _plan(cluster).get("currency"),
        "expires": None if expires is None else timestamp(expires),
    }


def _row(cluster: Cluster, current: bool, known: bool) -> list[object]:
    expires = cluster.details.get("expires")
    left = None if expires is None else expires - datetime.now(UTC).timestamp()
    return [
        cluster.name + (" *" if current else ""),
        cluster.provider,
        cluster.state if known else f"{cluster.state}, unknown here",
        cluster.details.get("nodes"),
        _price(cluster),
        None if left is None else f"in {console.duration(left)}" if left > 0 else "overdue",
        console.ago(cluster.created) if cluster.created else None,
    ]


def _price(cluster: Cluster) -> str | None:
    plan = _plan(cluster)
    if not plan:
        return None
    price = plan.get("price_per_hour")
    return "unknown" if price is None else f"{price:.2f} {plan.get('currency')}" if price else "free"


def _plan(cluster: Cluster) -> dict[str, Any]:
    plan = cluster.details.get("plan")
    return plan if isinstance(plan, dict) else {}
