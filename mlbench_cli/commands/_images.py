"""Checks of task images before a cluster costs money and before a run is submitted."""

from collections.abc import Callable, Iterable

from mlbench_cli import __version__, console
from mlbench_cli.clusters import registry_login as cluster_images
from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.launch import is_public
from mlbench_cli.tasks.catalog import load_catalog
from mlbench_cli.tasks.images import LOCAL_REGISTRY, name_image, parse_image
from mlbench_cli.tasks.registries import FoundImage, Presence, find_image
from providers import registry as registry_of_providers


def require_images(specs: Iterable[RunSpec], find_cluster: Callable[[str], Cluster]) -> None:
    """Reject runs whose task images are missing from their registry. Failed checks are warnings.

    Images that were loaded onto the nodes are in no registry, and the public one is known to exist: both are not looked
    for. The login is that of each run's own cluster.
    """
    wanted = {
        (spec.image, spec.cluster): spec.task
        for spec in specs
        if spec.image and spec.engine == "kubernetes" and spec.runs_task_program
    }
    for (name, where), task in wanted.items():
        image, cluster = parse_image(name), find_cluster(where)
        loaded = ClusterDetails.of(cluster).options.get("load") or ()
        if name in loaded or image.host == "localhost" or image.host.startswith(("localhost:", "127.0.0.1:")):
            continue
        if is_public(name):
            continue
        place = name.partition("@")[0]
        login = cluster_images.find_registry_login(cluster, place)
        finding = find_image(image, login)
        if finding.presence is Presence.ABSENT:
            raise UsageError(
                f"The image {name} does not exist. The registry says: {finding.words or 'not found'}.",
                hint=f"mlbench images push {task}{_registry_words(name, cluster)}",
                details={"image": name},
            )
        if finding.presence is not Presence.PRESENT:
            console.warn(_describe_unchecked(name, finding))
        needed = platform_of(cluster)
        is_known = cluster.provider in registry_of_providers.PAID and "arm" in cluster.details
        if is_known and finding.platforms and needed not in finding.platforms:
            raise UsageError(
                f"The image {name} is for {' and '.join(finding.platforms)}, and the workers of {where} are {needed}.",
                hint=f"mlbench images push {task}{_registry_words(name, cluster)} --platform {needed}",
                details={"image": name, "platforms": list(finding.platforms)},
            )


def platform_of(cluster: Cluster) -> str:
    """The platform of the workers of a cloud cluster in the notation of registries, e.g. "linux/amd64"."""
    return "linux/arm64" if ClusterDetails.of(cluster).arm else "linux/amd64"


def require_registry(registry: str) -> None:
    """Reject a registry for a new cluster that has no task images of this version."""
    names = dict.fromkeys(name_image(registry, task.image, __version__) for task in load_catalog().values())
    for name in names:
        finding = find_image(parse_image(name))
        if finding.presence is Presence.PRESENT:
            return
        if finding.presence is not Presence.ABSENT:
            console.warn(_describe_unchecked(name, finding))
            return
    raise UsageError(
        f"{registry} has no task images for version {__version__} (e.g. {next(iter(names))}).",
        hint=f"mlbench images push --registry {registry}   builds them; --registry auto creates a registry with "
        "the cluster",
    )


def _describe_unchecked(name: str, finding: FoundImage) -> str:
    reason = "the registry requires a login" if finding.presence is Presence.HIDDEN else "the registry does not respond"
    words = f": {finding.words}" if finding.words else ""
    return f"Cannot check whether the image {name} exists: {reason}{words}."


def _registry_words(name: str, cluster: Cluster) -> str:
    """The options of `mlbench images push` that name the registry of the run's image."""
    own = ClusterDetails.of(cluster).registry
    if own and name.startswith(own):
        return f" --cluster {cluster.name}"
    return "" if name.startswith(LOCAL_REGISTRY) else f" --registry {name.partition('@')[0].rpartition('/')[0]}"
