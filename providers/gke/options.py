"""What may be asked of a cluster on GKE, and what its record adds to that of other clusters."""

from dataclasses import dataclass

from mlbench_cli.cluster_details import ClusterDetails, fact
from providers.base import option

DEFAULT_ZONE = "europe-west1-b"


@dataclass(frozen=True)
class GkeOptions:
    """The options of `mlbench create-cluster gke`; fields are declared once, for flags, plans and the record."""

    machine_type: str | None = option(
        None, "--machine-type", "-t", help="of each worker; default: n1-standard-4, or what has the GPUs asked for"
    )
    num_gpus: int | None = option(None, "--num-gpus", "-g", help="GPUs of each worker; default: all its machine has")
    gpu_type: str | None = option(None, "--gpu-type", help="t4, l4, a100, a100-80gb, h100, …; picks the machine")
    num_cpus: int | None = option(None, "--num-cpus", "-c", help="vCPUs that each worker must at least have")
    disk_size: int = option(100, "--disk-size", "-d", help="GB of each worker's disk")
    disk_type: str | None = option(
        None, "--disk-type", help="boot disk of the workers; default: as their machine wants"
    )
    kubernetes_version: str | None = option(
        None, "--kubernetes-version", "-k", help="X.Y or X.Y.Z-gke.N; the release channel's unless told"
    )
    zone: str | None = option(None, "--zone", "-z", help=f"where the cluster is; default: {DEFAULT_ZONE}")
    region: str | None = option(None, "--region", help="instead of a zone: the control plane in all zones of a region")
    worker_zone: tuple[str, ...] = option(
        (), "--worker-zone", help="of the workers; repeatable; default: the cluster's, or the first that has them"
    )
    project: str | None = option(None, "--project", "-p", help="Google project; default: the credentials' own")
    spot: bool = option(False, "--spot", "--preemptible", "-e", help="cheaper machines that may be taken away")
    flex_start: bool = option(False, "--flex-start", help="machines that come when there are some; runs wait for them")
    reservation: str | None = option(
        None, "--reservation", help="take the workers from this reservation of Compute Engine"
    )
    compact_placement: bool = option(False, "--compact-placement", help="put the workers close together")
    gpu_driver: str = option("latest", "--gpu-driver", help="latest or default, as GKE calls them")
    probe_image: str | None = option(
        None, "--probe-image", help="image of the GPU probe that ends the creation, best one with torch; none: no probe"
    )
    release_channel: str = option("regular", "--release-channel", help="rapid, regular, stable or extended")
    system_machine_type: str = option(
        "e2-standard-2", "--system-machine-type", help="of the two that run DNS and charts"
    )
    service_account: str | None = option(None, "--service-account", help="of the machines; default: the project's")
    private_nodes: bool = option(False, "--private-nodes", help="machines without public addresses")
    allow_from: tuple[str, ...] = option(
        (),
        "--allow-from",
        help="CIDR that may reach the Kubernetes API; repeatable; default: all, by DNS name",
    )
    network: str | None = option(None, "--network", help="VPC network; default: the project's default")
    subnetwork: str | None = option(None, "--subnetwork", help="its subnetwork")


@dataclass(frozen=True)
class GkeDetails(ClusterDetails):
    """A cluster on GKE is also identified by its Google project."""

    project: str | None = fact(str)
