"""KIND: Kubernetes in Docker containers on this machine. For trials; timings are not meaningful."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mlbench_cli.config import settings
from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.files import write_atomically
from providers.base import THIS_MACHINE, Plan, PlanLine, Provider, Resource, read_options
from providers.kind.api import call, check_tools, require_image_support
from providers.kind.discover import discover_clusters
from providers.kind.options import KindOptions
from providers.kind.quota import check_registry, image_of, list_warnings
from providers.kind.resources import (
    KindCluster,
    LoadedImage,
    MarkerVolume,
    Registry,
    RegistryEntry,
    control_plane_of,
    nodes_in,
    platform_of,
)


class KindProvider(Provider):
    """The provider "kind": nodes are containers of this machine's Docker."""

    name = "kind"
    summary = "Kubernetes in Docker on this machine, to try things out"
    # The first edition's `-h` was a port of the dashboard's container.
    notes = (
        "NUM_WORKERS nodes take runs; one more is the control plane. KIND_EXPERIMENTAL_PROVIDER=podman or nerdctl uses "
        "that instead of Docker. -h is this help: MLBench 3's -h (--host_port) was removed with its dashboard "
        "container; use mlbench serve --port PORT."
    )
    options = KindOptions
    minutes = (2, 1)
    min_nodes, max_nodes = 1, 50

    def new_cluster(self, name: str, nodes: int, options: KindOptions) -> Cluster:
        """Check all options and return the cluster to create.

        `nodes` counts the workers; the control plane is one container more. Raises UsageError for options that do not
        go together.
        """
        self.check_nodes(nodes)
        if options.num_gpus:
            raise UsageError(
                "KIND clusters have no GPUs: kind does not support them.",
                hint="Remove --num-gpus, or use a GKE, EKS or AKS cluster.",
            )
        if options.image and options.kubernetes_version:
            raise UsageError("--image and --kubernetes-version exclude each other.", hint="Remove one of them.")
        if options.registry_port is not None and not 1 <= options.registry_port <= 65535:
            raise UsageError(f"--registry-port {options.registry_port}: a port is from 1 to 65535.")
        cpus = os.cpu_count() or 1
        if options.num_cpus is not None and not 1 <= options.num_cpus <= cpus:
            raise UsageError(
                f"--num-cpus {options.num_cpus}: nodes are containers on this machine, which has {cpus} CPUs.",
                hint="Use at least 1 and at most that many.",
            )
        image_of(options)
        details = {"nodes": nodes, "gpus_per_node": 0, "functional_only": True, "options": asdict(options)}
        if options.registry_port is not None:
            details["registry"] = f"localhost:{options.registry_port}"  # if runs look for the catalog's images
        return Cluster(name, self.name, "creating", details=details)

    def plan(self, cluster: Cluster) -> Plan:
        """Check docker, kind and the images to load, and list the node containers, which cost nothing."""
        version = check_tools()
        options = read_options(cluster, KindOptions)
        if options.kubernetes_version:
            require_image_support(version, options.kubernetes_version.removeprefix("v"))
        for image in options.load:
            platform_of(image)
        if options.registry_port is not None:
            check_registry(options)
        nodes = nodes_in(cluster)
        line = PlanLine(f"node container ({image_of(options) or f'default image of kind {version}'})", nodes, 0.0)
        return Plan((line,), location=THIS_MACHINE, warnings=tuple(list_warnings(options, nodes)))

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """The resources in the order of their creation: marker volume, nodes, registry, loaded images."""
        options = read_options(cluster, KindOptions)
        port = options.registry_port
        kubeconfig = kubeconfig_of(cluster)
        mark = MarkerVolume(cluster, kubeconfig.parent, options.registry_name if port is not None else None)
        reserved = (os.cpu_count() or 1) - options.num_cpus if options.num_cpus else 0
        nodes = KindCluster(cluster, mark, kubeconfig, image_of(options), reserved)
        found: list[Resource] = [mark, nodes]
        if port is not None:
            registry = Registry(cluster, mark, options.registry_name, port, options.registry_image)
            found += [registry, RegistryEntry(nodes, registry)]
        for image in options.load:
            found.append(LoadedImage(nodes, image, needs=tuple(found[2:])))
        return found

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """Find the clusters whose marker volume is in this machine's Docker."""
        return discover_clusters()

    def connect(self, cluster: Cluster) -> Access:
        """Open the cluster's API by its own kubeconfig, which is asked for from kind if it is missing."""
        path = kubeconfig_of(cluster)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, _kubeconfig(cluster).encode(), mode=0o600)  # it gives access
        return Access.from_kubeconfig(path)


def kubeconfig_of(cluster: Cluster) -> Path:
    """The file of a cluster's kubeconfig in the data folder; never the user's own."""
    return settings.data_dir() / "clusters" / cluster.name / "kubeconfig"


def _kubeconfig(cluster: Cluster) -> str:
    try:
        return call(["kind", "get", "kubeconfig", "--name", cluster.name])
    except UsageError:
        raise
    except MlbenchError as error:
        raise NotFoundError(
            f'The KIND cluster "{cluster.name}" does not run (no {control_plane_of(cluster.name)}): {error.message}',
            hint=f"mlbench delete-cluster kind {cluster.name}",
        ) from None
