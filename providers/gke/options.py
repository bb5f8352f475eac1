"""The options of GKE clusters, and the additional details in their records."""

from dataclasses import dataclass

from mlbench_cli.model.cluster_details import ClusterDetails, fact
from providers.base import CloudOptions, option

DEFAULT_ZONE = "europe-west1-b"


@dataclass(frozen=True)
class GkeOptions(CloudOptions):
    """The options of `mlbench create-cluster gke`; fields are declared once, for flags, plans and the record."""

    machine_type: str | None = option(
        None,
        "--machine-type",
        "-t",
        help="machine type of each worker; default: n1-standard-4, or one with the requested GPUs",
    )
    gpu_type: str | None = option(None, "--gpu-type", help="t4, l4, a100, a100-80gb, h100, …; selects the machine type")
    disk_size: int = option(100, "--disk-size", "-d", help="boot disk size per worker in GB")
    disk_type: str | None = option(
        None, "--disk-type", help="boot disk type of the workers; default: the machine type's"
    )
    kubernetes_version: str | None = option(
        None, "--kubernetes-version", "-k", help="X.Y or X.Y.Z-gke.N; default: the release channel's version"
    )
    zone: str | None = option(None, "--zone", "-z", help=f"zone of the cluster; default: {DEFAULT_ZONE}")
    region: str | None = option(
        None, "--region", help="region of a regional cluster, with a control plane in all of its zones"
    )
    worker_zone: tuple[str, ...] = option(
        (),
        "--worker-zone",
        help="zone of the workers; repeatable; default: the cluster's, or the first with such machines",
    )
    project: str | None = option(None, "--project", "-p", help="Google project; default: the credentials' own")
    flex_start: bool = option(False, "--flex-start", help="queue for machines (DWS flex-start); runs wait for them")
    reservation: str | None = option(
        None,
        "--reservation",
        help="Compute Engine reservation for the workers; for one of its blocks: NAME/reservationBlocks/BLOCK",
    )
    compact_placement: bool = option(False, "--compact-placement", help="put the workers close together")
    fast_network: bool = option(
        False,
        "--fast-network",
        help="GPUDirect-TCPX, TCPXO or RDMA between the workers (A3 with 8 GPUs, A4); runs use it",
    )
    gpu_driver: str = option("latest", "--gpu-driver", help="GPU driver version: latest or default, as GKE calls them")
    release_channel: str = option(
        "regular", "--release-channel", help="release channel: rapid, regular, stable or extended"
    )
    system_machine_type: str = option(
        "e2-standard-2", "--system-machine-type", help="machine type of the two system nodes (DNS, Helm charts)"
    )
    service_account: str | None = option(
        None, "--service-account", help="service account of the machines; default: the project's"
    )
    private_nodes: bool = option(False, "--private-nodes", help="machines without public addresses")
    allow_from: tuple[str, ...] = option(
        (),
        "--allow-from",
        help="CIDR with access to the Kubernetes API; repeatable; default: all, by DNS name",
    )
    network: str | None = option(
        None,
        "--network",
        help="VPC network; default: the project's default; a shared one: projects/HOST/global/networks/NAME",
    )
    subnetwork: str | None = option(
        None,
        "--subnetwork",
        help="subnetwork of that network; a shared one: projects/HOST/regions/REGION/subnetworks/NAME",
    )
    pods_range: str | None = option(
        None, "--pods-range", help="secondary range of the subnetwork for pods; default: GKE adds one"
    )
    services_range: str | None = option(
        None, "--services-range", help="secondary range of the subnetwork for Services; default: GKE adds one"
    )
    secure_boot: bool = option(
        False, "--secure-boot", help="machines that start only signed code, for organizations that require it"
    )


@dataclass(frozen=True)
class GkeDetails(ClusterDetails):
    """A cluster on GKE is also identified by its Google project."""

    project: str | None = fact(str)
