"""`mlbench images`: list the task images in a registry; `mlbench images push` builds and pushes them."""

from platform import machine
from typing import Annotated

import typer

from mlbench_cli import __version__, console
from mlbench_cli.clusters import registry_login as cluster_images
from mlbench_cli.commands._common import Format, Output, complete_clusters, complete_tasks
from mlbench_cli.commands._images import platform_of
from mlbench_cli.commands._values import PanelCommand
from mlbench_cli.config.file import find_default
from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.runs.defaults import default_cluster
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import Task, load_catalog, load_task, use_task_folder
from mlbench_cli.tasks.image_builds import Build, push_images
from mlbench_cli.tasks.images import LOCAL_REGISTRY, name_image, parse_image
from mlbench_cli.tasks.registries import find_image
from providers import registry as registry_of_providers

ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="use the registry of this cluster; default: the default cluster",
        autocompletion=complete_clusters,
    ),
]
Registry = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="PREFIX",
        help="registry prefix, e.g. ghcr.io/me; default: registry of the cluster, or MLBENCH_REGISTRY",
    ),
]

images = typer.Typer(rich_markup_mode=None, add_completion=False)


@images.callback(invoke_without_command=True)
def show(
    context: typer.Context, registry: Registry = None, cluster: ClusterName = None, output: Output = Format.text
) -> None:
    """Show for each task whether its image of this version is in the registry, with its digest."""
    if context.invoked_subcommand is not None:
        return
    place, known = _find_registry(Store(notice=console.note), registry, cluster)
    login = cluster_images.find_registry_login(known, place)
    own = [task for task in load_catalog().values() if task.origin is None or "/" not in task.image]
    names = {task.image: name_image(place, task.image, __version__) for task in own}
    asked = console.track("Asking the registry", list(names))
    found = {image: find_image(parse_image(names[image]), login) for image in asked}
    if output == Format.json:
        document = {
            image: {"image": names[image], "presence": finding.presence.value, "digest": finding.digest or None}
            for image, finding in found.items()
        }
        console.out_json({"registry": place, "images": document})
        return
    rows = [[names[image], finding.presence.value, finding.digest or finding.words] for image, finding in found.items()]
    console.out_table(["IMAGE", "PRESENCE", "DIGEST"], rows)


@images.command(cls=PanelCommand)
def push(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK]...", help="tasks (list: mlbench tasks); default: all", autocompletion=complete_tasks
        ),
    ] = None,
    registry: Registry = None,
    cluster: ClusterName = None,
    platform: Annotated[
        str | None,
        typer.Option(
            "--platform",
            help="platforms of the images, e.g. linux/amd64,linux/arm64; default: that of the cluster, or "
            "of this machine; others need Docker's buildx",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="base image with Python and pip; or efa (Amazon EFA), gib (Google RDMA)"),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option("--index", metavar="URL", help="package index for torch, e.g. for another CUDA version"),
    ] = None,
    task_path: Annotated[
        str | None,
        typer.Option("--task-path", metavar="DIR", help="folder with your own tasks, which have a Dockerfile"),
    ] = None,
    output: Output = Format.text,
) -> None:
    """Build the images of tasks with Docker, push them, and record their digests with the cluster.

    The images of your own tasks are built from the Dockerfile beside their catalog.json or pyproject.toml. Runs on the
    cluster then use exactly these images. mlbench logs in to a registry of create-cluster --registry auto; to others,
    log in with docker login.
    """
    use_task_folder(task_path)
    store = Store(notice=console.note)
    every = [task for task in load_catalog().values() if task.origin is None]
    chosen: list[Task] = [load_task(name) for name in tasks] if tasks else every
    # A third-party catalog may name a complete image reference, which needs no registry.
    references = {task.image for task in chosen if task.origin is not None and "/" in task.image}
    if registry is None and references.issuperset(task.image for task in chosen):
        place, known = next(iter(references)).rpartition("/")[0], None
    else:
        place, known = _find_registry(store, registry, cluster)
    build = Build(base, index, _choose_platforms(platform, known))
    login = cluster_images.find_registry_login(known, place)
    with console.Busy("Images") as busy:

        def report(line: str) -> None:
            console.note(line)
            busy.step(line, 0)

        digests = push_images(chosen, place, build, login, report)
    pinned = {name: digest for name, digest in digests.items() if name not in references}
    is_of_cluster = known and ClusterDetails.of(known).registry == place
    if known and is_of_cluster and not store.record_images(known.identity, pinned):
        console.warn(f"The cluster {known.name} has been deleted, so the digests were not recorded.")
    if output == Format.json:
        console.out_json({"registry": place, "digests": digests})
        return
    for name, digest in digests.items():
        image, _, version = name.partition(":")
        console.out(f"{name if name in references else name_image(place, image, version)} {digest}")


def _find_registry(store: Store, given: str | None, name: str | None) -> tuple[str, Cluster | None]:
    """The selected registry, and the cluster that it belongs to, if any."""
    cluster = store.cluster(name) if name else default_cluster(store)
    own = ClusterDetails.of(cluster).registry
    if given is not None:
        place: str | None = given.rstrip("/")
    else:
        default = find_default("registry")
        place = own or (default.value.rstrip("/") if default else None)
    if not place or f"{place}/".startswith(f"{LOCAL_REGISTRY}/"):
        raise UsageError(
            f'The cluster "{cluster.name}" has no registry.',
            hint="Pass your own: --registry ghcr.io/me, or MLBENCH_REGISTRY=ghcr.io/me; on gke, eks and aks "
            "create-cluster --registry auto makes one",
        )
    return place, cluster


def _choose_platforms(given: str | None, cluster: Cluster | None) -> tuple[str, ...]:
    """The platforms to build for; none: this machine's. Images of an Arm laptop do not run on x86 machines."""
    if given:
        return tuple(given.split(","))
    if cluster is None or cluster.provider not in registry_of_providers.PAID:
        return ()
    wanted = platform_of(cluster)
    here = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}.get(machine().lower())
    if f"linux/{here}" == wanted:
        return ()
    console.note(f"Building images for {wanted}, the platform of {cluster.name} (change it with --platform).")
    return (wanted,)
