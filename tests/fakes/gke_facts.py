"""What the GKE double knows of Google's machines, zones and failures. Sources: docs/development."""

import grpc
from google.cloud import container_v1 as g

# Google's list of GPU machine types: accelerator, number, vCPUs.
SHAPES = {
    **{f"g2-standard-{size}": ("nvidia-l4", 1, size) for size in (4, 8, 12, 16, 32)},
    **{f"g2-standard-{size}": ("nvidia-l4", gpus, size) for size, gpus in ((24, 2), (48, 4), (96, 8))},
    **{f"g4-standard-{48 * gpus}": ("nvidia-rtx-pro-6000", gpus, 48 * gpus) for gpus in (1, 2, 4, 8)},
    **{f"a2-highgpu-{gpus}g": ("nvidia-tesla-a100", gpus, 12 * gpus) for gpus in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("nvidia-tesla-a100", 16, 96),
    **{f"a2-ultragpu-{gpus}g": ("nvidia-a100-80gb", gpus, 12 * gpus) for gpus in (1, 2, 4, 8)},
    **{f"a3-highgpu-{gpus}g": ("nvidia-h100-80gb", gpus, 26 * gpus) for gpus in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("nvidia-h100-mega-80gb", 8, 208),
    "a3-ultragpu-8g": ("nvidia-h200-141gb", 8, 224),
    "a4-highgpu-8g": ("nvidia-b200", 8, 224),
}
# Shapes that GKE takes without accelerators, too: the nodes then show no GPUs (cluster-toolkit, pull request 1285).
# Sources: cluster-toolkit, Google's pages on machine types.
NEWER = {"a4x-highgpu-4g": ("nvidia-gb200", 4, 140), "a4x-maxgpu-4g-metal": ("nvidia-gb300", 4, 144)}
SHAPES |= NEWER
PLAIN = {
    **{
        f"{family}-standard-{size}": size
        for family in ("e2", "n1", "n2", "n4", "c2", "c4")
        for size in (2, 4, 8, 16, 32)
    }
}
# Source: dstack gcp/resources.py, SkyPilot volume_utils.py; the words are those of a report (NVIDIA/aicr 2338).
ONLY_HYPERDISK = ("n4-", "c4-", "g4-", "a3-ultragpu-", "a4-")
NO_HYPERDISK = ("e2-", "n1-", "n2-", "c2-", "g2-", "a2-")
# Source: Google's table of consumption options, as gpuhunt quotes it.
NEVER_ON_DEMAND = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g", "a3-ultragpu-8g", "a4-highgpu-8g", *NEWER)
VERSIONS = ("1.36.2-gke.100", "1.35.5-gke.200", "1.33.6-gke.200")  # the second is the default
PROJECT, ZONE, REGION = "demo-project", "europe-west1-b", "europe-west1"
PODS = "/api/v1/namespaces/default/pods"
ZONES = (ZONE, f"{REGION}-d")  # that have machines
Status, Code = g.Cluster.Status, grpc.StatusCode


class ApiError(Exception):
    """A refusal of Google's, by gRPC or HTTP."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


OPERATION_ERRORS = {
    "stockout": (14, "GCE_STOCKOUT", "ZONE_RESOURCE_POOL_EXHAUSTED: the zone does not have enough resources"),
    "partial": (
        14,
        "GCE_STOCKOUT",
        "Instance 'gke-1' creation failed: The zone 'projects/P/zones/Z' does not have enough resources available to "
        "fulfill the request. '(resource type:compute)'.",
    ),
    "addresses": (
        9,
        "UNKNOWN",
        "Not all instances running in IGM after 24.1s. Expected 1, running 0, transitioning 1. Current errors: "
        "[IP_SPACE_EXHAUSTED_WITH_DETAILS]: Instance 'gke-1' creation failed: IP space of 'projects/P/regions/R/"
        "subnetworks/default' is exhausted. If this is a secondary range, consider adding an additional one.",
    ),
    "external": (
        9,
        "UNKNOWN",
        "Instance 'gke-1' creation failed: Constraint constraints/compute.vmExternalIpAccess violated for project 1. "
        "Add instance projects/P/zones/Z/instances/gke-1 to the constraint to use external IP with it.",
    ),
    "account": (3, "UNKNOWN", 'Service account "1-compute@developer.gserviceaccount.com" does not exist.'),
    "unregistered": (
        2,
        "UNKNOWN",
        "All cluster resources were brought up, but: only 0 nodes out of 1 have registered; cluster may be unhealthy.",
    ),
    "quota": (8, "GCE_QUOTA_EXCEEDED", "Quota 'NVIDIA_L4_GPUS' exceeded. Limit: 0.0 in region europe-west1."),
}
