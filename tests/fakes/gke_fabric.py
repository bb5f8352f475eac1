"""Which network NCCL finds in a pod on Google's machines: the fast one only under all of the real conditions.

Everything else is TCP, silently: sums are right, and the log says "Using network Socket". Written from Google's samples
(container-engine-accelerators, gpudirect-*) and reports; docs/development/clouds-assumptions.md.
"""

import json
from typing import TYPE_CHECKING

import yaml

from tests.fakes.gke_networks import URL
from tests.fakes.kube_pods import Object, status

if TYPE_CHECKING:
    from tests.fakes.gke import World

NETWORKING = "/apis/networking.gke.io/v1"
DAEMON_SETS = "/apis/apps/v1/namespaces/kube-system/daemonsets"
# Machine: network of NCCL, number of cards with a network of their own, container beside the ranks, Google's programs.
FABRICS = {
    "a3-highgpu-8g": ("GPUDirectTCPX_v7", 4, "tcpx-daemon", "gpudirect-tcpx/"),
    "a3-megagpu-8g": ("FasTrak", 8, "tcpxo-daemon", "gpudirect-tcpxo/"),
    "a3-ultragpu-8g": ("gIB", 0, "", "gpudirect-gib/"),
    "a4-highgpu-8g": ("gIB", 0, "", "gpudirect-gib/"),
}
# Of the plugin and of the program beside the ranks: one release, of one branch of the driver.
RELEASES = {"v3.1.12": "v2.0.12", "v1.0.16": "v1.0.22", "v1.0.17": "v1.0.23"}
BRANCHES = {"v3.1.12": "580", "v1.0.16": "580", "v1.0.17": "595"}


def answer_object(world: "World", path: str) -> tuple[int, Object]:
    """An object of Kubernetes with the status that its controller gives it."""
    found = world.objects.get(path)
    if found is None:
        return 404, status(404, "NotFound", f"{path} not found")
    if path.startswith(f"{NETWORKING}/gkenetworkparamsets/"):
        spec = found["spec"]
        names = (f"global/networks/{spec['vpc']}", f"regions/europe-west1/subnetworks/{spec['vpcSubnet']}")
        ready = all(name in world.networks.found for name in names)
        condition = {"type": "Ready", "status": str(ready), "message": "" if ready else "the VPC was not found"}
        return 200, {**found, "status": {"conditions": [condition]}}
    if path.startswith(DAEMON_SETS):
        wanted = found["spec"]["template"]["spec"].get("nodeSelector") or {}
        count = sum(1 for node in world.machines() if wanted.items() <= node.labels.items())
        return 200, {**found, "status": {"desiredNumberScheduled": count, "numberReady": count}}
    return 200, found


def may_apply(world: "World", path: str) -> bool:
    """Whether the cluster knows such objects: those of networks only with multi-networking."""
    enabled = any(item.network_config.enable_multi_networking for item in world.clusters.values())
    return enabled or not path.startswith(NETWORKING)


def find_nccl_network(world: "World", template: Object, claims: list[Object], image_has_ibverbs: bool = True) -> str:
    """The network that NCCL of a worker names, for the template of its pod and the claim templates of its run."""
    pool = next(pool for cluster in world.clusters.values() for pool in cluster.node_pools if pool.name == "workers")
    name, cards, sidecar, program = FABRICS.get(pool.config.machine_type, ("", 0, "", ""))
    spec = template["spec"]
    (main,) = spec["containers"]
    environment = {item["name"]: item.get("value") for item in main["env"]}
    images = [
        container["image"]
        for path, item in world.objects.items()
        if path.startswith(DAEMON_SETS)
        for container in item["spec"]["template"]["spec"].get("initContainers") or ()
        if program and program in container["image"]
    ]
    has_gpus = main["resources"]["limits"].get("nvidia.com/gpu") == "8"
    folders = {mount["mountPath"]: _host_path(spec, mount["name"]) for mount in main["volumeMounts"]}
    if not name or not images or not has_gpus:
        return "Socket"
    if not cards:
        managed = pool.network_config.accelerator_network_profile == "auto"
        driver = pool.config.labels.get("cloud.google.com/gke-networking-dra-driver") == "true"
        claimed = [item["claims"] for item in [main["resources"]] if item.get("claims")]
        template_of = {item["name"]: item["resourceClaimTemplateName"] for item in spec.get("resourceClaims") or ()}
        requests = [request["exactly"] for item in claims for request in item["spec"]["spec"]["devices"]["requests"]]
        granted = bool(claimed and template_of and requests == [
            {"deviceClassName": "mrdma.google.com", "allocationMode": "ExactCount", "count": 8}
        ]) and set(template_of.values()) == {item["metadata"]["name"] for item in claims}  # fmt: skip
        mounted = folders.get("/usr/local/gib") == "/home/kubernetes/bin/gib"
        settings = environment.get("MLBENCH_NCCL_PROFILE") == "/usr/local/gib/scripts/set_nccl_env.sh"
        libraries = environment.get("MLBENCH_FABRIC_LIBRARIES") == "/usr/local/gib/lib64"
        all_there = managed and driver and granted and mounted and settings and libraries and image_has_ibverbs
        return name if all_there else "Socket"
    return (
        name if _has_cards(world, template, cards) and _has_sidecar(world, template, sidecar, images[-1]) else "Socket"
    )


def _has_cards(world: "World", template: Object, cards: int) -> bool:
    """An interface in each additional network of the machines, by Kubernetes' names for them."""
    annotations = template["metadata"]["annotations"]
    listed = json.loads(annotations.get("networking.gke.io/interfaces", "[]"))
    interfaces = {item["interfaceName"]: item["network"] for item in listed}
    default = annotations.get("networking.gke.io/default-interface")
    if default != "eth0" or interfaces.get("eth0") != "default" or len(interfaces) != cards + 1:
        return False
    for number in range(1, cards + 1):
        network = world.objects.get(f"{NETWORKING}/networks/{interfaces.get(f'eth{number}')}")
        if network is None or network["spec"]["type"] != "Device":
            return False
        parameters = world.objects[f"{NETWORKING}/gkenetworkparamsets/{network['spec']['parametersRef']['name']}"]
        found = world.networks.found.get(f"global/networks/{parameters['spec']['vpc']}")
        subnets = [item for item in world.networks.found.values() if item.get("ipCidrRange")]
        rules = [item for item in world.networks.found.values() if item.get("allowed")]
        if found is None or found["mtu"] != 8244 or parameters["spec"]["deviceMode"] != "NetDevice":
            return False
        url = f"{URL}global/networks/{found['name']}"
        if not all(any(item["network"] == url for item in items) for items in (subnets, rules)):
            return False
    ranges = [item["ipCidrRange"] for item in world.networks.found.values() if "ipCidrRange" in item]
    return len(set(ranges)) == cards  # a machine's cards may not have overlapping ranges


def _has_sidecar(world: "World", template: Object, name: str, plugin: str) -> bool:
    """The program that receives into the GPUs' memory, with its devices, folders and rights, of the same release."""
    spec = template["spec"]
    (main,) = spec["containers"]
    found = next((item for item in spec.get("initContainers") or () if item["name"] == name), None)
    if found is None or found.get("restartPolicy") != "Always":
        return False  # as a plain container it would keep the pod, and so the Job, from ending
    listed = template["metadata"]["annotations"].get(f"devices.gke.io/container.{name}", "")
    devices = {item["path"] for item in yaml.safe_load(listed) or ()}
    wanted = {*(f"/dev/nvidia{number}" for number in range(8)), "/dev/nvidiactl", "/dev/nvidia-uvm"}
    folders = {mount["mountPath"]: _host_path(spec, mount["name"]) for mount in found["volumeMounts"]}
    of_ranks = {mount["mountPath"]: _host_path(spec, mount["name"]) for mount in main["volumeMounts"]}
    environment = {item["name"]: item.get("value") for item in main["env"]}
    injector = any(path.startswith(DAEMON_SETS) and path.endswith("device-injector") for path in world.objects)
    rights = set(found["securityContext"]["capabilities"]["add"])
    libraries = "/home/kubernetes/bin/nvidia/lib64"
    if name == "tcpxo-daemon":
        wanted |= {"/dev/dmabuf_import_helper"}
        fits = (
            of_ranks.get("/dev/aperture_devices") == "/dev/aperture_devices"
            and environment.get("NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY") == "/dev/aperture_devices"
            and environment.get("MLBENCH_NCCL_PROFILE") == "/usr/local/nvidia/lib64/nccl-env-profile.sh"
            and rights == {"NET_ADMIN", "NET_BIND_SERVICE"}
        )
    else:
        sockets = environment.get("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", "/tmp")
        fits = (
            folders.get("/run/tcpx") == "/run/tcpx" == of_ranks.get(str(sockets))
            and environment.get("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME") == "eth1,eth2,eth3,eth4"
            and environment.get("NCCL_GPUDIRECTTCPX_CTRL_DEV") == "eth0"
            and rights == {"NET_ADMIN"}
        )
    return bool(
        fits
        and injector
        and devices == wanted
        and folders.get("/usr/local/nvidia/lib64") == of_ranks.get("/usr/local/nvidia/lib64") == libraries
        and folders.get("/hostsysfs") == "/sys"
        and folders.get("/hostprocsysfs") == "/proc/sys"
        and RELEASES[plugin.rpartition(":")[2]] == found["image"].rpartition(":")[2]
        and all(
            node.driver.partition(".")[0] == BRANCHES[plugin.rpartition(":")[2]]
            for node in world.machines()
            if node.gpus
        )
        and found["securityContext"].get("runAsUser") == 0
        and spec["securityContext"]["runAsUser"] == 0  # every documented pod is root's
    )


def _host_path(spec: Object, name: str) -> str | None:
    volume = next(item for item in spec["volumes"] if item["name"] == name)
    path = (volume.get("hostPath") or {}).get("path")
    return str(path) if path else None
