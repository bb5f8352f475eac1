"""`mlbench list-clusters`: what the store knows."""

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.store import Store


def list_clusters(output: Output = Format.text) -> None:
    """Show the known clusters; the current one, which commands use by default, is marked with *."""
    store = Store()
    current = store.current_cluster.name
    clusters = store.clusters()
    if output == Format.json:
        documents = [
            {
                "name": cluster.name,
                "provider": cluster.provider,
                "state": cluster.state,
                "created": cluster.created or None,
                "current": cluster.name == current,
            }
            for cluster in clusters
        ]
        console.out_json({"clusters": documents})
        return
    console.out_table(
        ["CLUSTER", "PROVIDER", "STATE", "CREATED"],
        [
            [
                cluster.name + (" *" if cluster.name == current else ""),
                cluster.provider,
                cluster.state,
                console.ago(cluster.created) if cluster.created else None,
            ]
            for cluster in clusters
        ],
    )
