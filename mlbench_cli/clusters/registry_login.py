"""The login to the registry of a cluster whose own cloud runs it."""

from mlbench_cli.model.run import Cluster
from mlbench_cli.tasks.images import parse_image
from mlbench_cli.tasks.registries import Login
from providers import registry


def find_registry_login(cluster: Cluster | None, place: str) -> Login | None:
    """The login to a registry of the cluster's own cloud; None for others, whose logins Docker keeps."""
    host = parse_image(place.rstrip(":")).host
    if cluster is None or not host.endswith((".pkg.dev", ".amazonaws.com", ".azurecr.io")):
        return None
    if cluster.provider not in registry.PAID:
        return None
    return Login(*registry.load(cluster.provider).fetch_registry_login(cluster))
