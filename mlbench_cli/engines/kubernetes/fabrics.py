"""Additions to a worker's pod that let NCCL use the fast network of its machine. Pure; used by `manifests`.

EFA's cards are devices of the pod. Google's GPUDirect-TCPX and TCPXO want an interface in each of the machine's
networks and a program beside the ranks, which receives the data into the GPUs' memory; RDMA (gIB) wants a claim of the
cards. Which of Google's is set up is `fabric["setup"]` of the cluster's record (`providers/gke/options.py`).
Sources: awsome-distributed-ai (EFA); GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpx, gpudirect-tcpxo
(release notes, best-practice.md) and gpudirect-rdma, as of 2026-11. Assumptions: docs/development.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlbench_cli.kube.gpudirect import choose_release
from mlbench_cli.model.spec import RunSpec

Object = Mapping[str, Any]  # of Kubernetes

EFA = "vpc.amazonaws.com/efa"
LIBRARIES = "/usr/local/nvidia/lib64"  # in containers; the machine has them in the next folder
MACHINE_FOLDER = "/home/kubernetes/bin"
GPUS = 8  # of every machine with one of these networks
CLAIM, CARDS = "rdma", 8
SOCKETS = "/run/tcpx"
APERTURES = "/dev/aperture_devices"
TCPX_CPUS_OUT = "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177"
TCPX_CPUS_IN = "eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191"
# TCPXO and RDMA bring their settings as a script for bash; TCPX has none.
TCPX_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
    "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
    "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": SOCKETS,
    "NCCL_GPUDIRECTTCPX_TX_BINDINGS": TCPX_CPUS_OUT,
    "NCCL_GPUDIRECTTCPX_RX_BINDINGS": TCPX_CPUS_IN,
    "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "500000",
    "NCCL_CROSS_NIC": "0",
    "NCCL_ALGO": "Ring,Tree",
    "NCCL_PROTO": "Simple",
    "NCCL_NET_GDR_LEVEL": "PIX",
    "NCCL_P2P_PXN_LEVEL": "0",
    "NCCL_DYNAMIC_CHUNK_SIZE": "524288",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_P2P_PCI_CHUNKSIZE": "524288",
    "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
    "NCCL_BUFFSIZE": "4194304",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_SOCKET_NTHREADS": "1",
}
EFA_ENVIRONMENT = {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1", "NCCL_SOCKET_IFNAME": "^docker,lo,veth"}


@dataclass(frozen=True)
class PodFabric:
    """Additions to a worker's pod. `pins_memory`: network cards read and write the ranks' memory, which is locked."""

    environment: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    pins_memory: bool = False
    sidecars: tuple[Object, ...] = ()  # containers that run beside the ranks, and end after them
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()  # of the ranks' container
    claimed_cards: int = 0  # network cards, by a claim of dynamic resource allocation


def choose_fabric(spec: RunSpec) -> PodFabric:
    """What the pods of a run need for their machines' fast network.

    Google's is only for several workers with whole machines: one alone communicates within its machine.
    """
    if EFA in spec.pods.pod_devices:
        return PodFabric(EFA_ENVIRONMENT, pins_memory=True)
    if spec.pods.has_rdma_devices:
        return PodFabric(pins_memory=True)
    if spec.gpus_per_worker < GPUS or spec.workers < 2:
        return PodFabric()
    fabric = spec.pods.fabric
    kind = str(fabric.get("setup"))
    make = {"tcpx": _tcpx, "tcpxo": _tcpxo, "gib": _gib}.get(kind)
    # Of the same release as the plugin that the cluster has installed.
    return make(choose_release(kind, fabric.get("driver_branch")).program or "") if make is not None else PodFabric()


def _tcpx(program: str) -> PodFabric:
    name = "tcpx-daemon"
    daemon = {
        **_daemon(name, program, ("NET_ADMIN",), {"name": "tcpx-sockets", "mountPath": SOCKETS}),
        "command": [
            *("/tcpgpudmarxd/build/app/tcpgpudmarxd", "--gpu_nic_preset", "a3vm"),
            *("--gpu_shmem_type", "fd", "--uds_path", SOCKETS),
        ],
    }
    return PodFabric(
        TCPX_ENVIRONMENT,
        {**_interfaces(4), **_devices(name)},
        pins_memory=True,
        sidecars=(daemon,),
        volumes=(*_daemon_volumes(), _host_folder("tcpx-sockets", SOCKETS)),
        mounts=(_libraries(), {"name": "tcpx-sockets", "mountPath": SOCKETS}),
    )


def _tcpxo(program: str) -> PodFabric:
    name = "tcpxo-daemon"
    marker = "/run/health-check"  # written once it can receive; its name may not hold an underscore
    daemon = _daemon(name, program, ("NET_ADMIN", "NET_BIND_SERVICE"))
    start = "/fts/entrypoint_rxdm_container.sh"
    daemon = {
        **daemon,
        "command": ["sh", "-ec", f"chmod +x {start}; exec {start} --num_hops=2"],
        "env": [*daemon["env"], {"name": "HEALTH_CHECK_LOG_FILE", "value": marker}],
        # Without its devices this container exits or waits forever; the ranks start only after it.
        "startupProbe": {"exec": {"command": ["cat", marker]}, "periodSeconds": 5, "failureThreshold": 24},
    }
    environment = {
        "NCCL_LIB_DIR": LIBRARIES,
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": APERTURES,
        "MLBENCH_NCCL_PROFILE": f"{LIBRARIES}/nccl-env-profile.sh",
    }
    return PodFabric(
        environment,
        {**_interfaces(8), **_devices(name, "/dev/dmabuf_import_helper")},
        pins_memory=True,
        sidecars=(daemon,),
        volumes=(*_daemon_volumes(), _host_folder("apertures", APERTURES)),
        mounts=(_libraries(), {"name": "apertures", "mountPath": APERTURES}),
    )


def _gib(_: str) -> PodFabric:
    environment = {
        "MLBENCH_NCCL_PROFILE": "/usr/local/gib/scripts/set_nccl_env.sh",
        "MLBENCH_FABRIC_LIBRARIES": "/usr/local/gib/lib64",
    }
    return PodFabric(
        environment,
        pins_memory=True,
        volumes=(
            _host_folder("nvidia", f"{MACHINE_FOLDER}/nvidia"),
            _host_folder("gib", f"{MACHINE_FOLDER}/gib"),
        ),
        mounts=(
            {"name": "nvidia", "mountPath": "/usr/local/nvidia", "readOnly": True},
            {"name": "gib", "mountPath": "/usr/local/gib", "readOnly": True},
        ),
        claimed_cards=CARDS,
    )


def _daemon(name: str, image: str, capabilities: tuple[str, ...], *mounts: Object) -> Object:
    """A container that starts before the ranks and ends after them: with a plain one beside them no Job would end.

    It runs as root, as its image wants it, whatever user the ranks have.
    """
    return {
        "name": name,
        "image": image,
        "restartPolicy": "Always",
        "env": [{"name": "LD_LIBRARY_PATH", "value": LIBRARIES}],
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "capabilities": {"add": list(capabilities)},
        },
        "volumeMounts": [
            _libraries(),
            {"name": "machine-sys", "mountPath": "/hostsysfs"},
            {"name": "machine-proc-sys", "mountPath": "/hostprocsysfs"},
            *mounts,
        ],
    }


def _daemon_volumes() -> tuple[Object, ...]:
    return (
        _host_folder("nvidia", f"{MACHINE_FOLDER}/nvidia/lib64"),
        _host_folder("machine-sys", "/sys"),
        _host_folder("machine-proc-sys", "/proc/sys"),
    )


def _libraries() -> Object:
    return {"name": "nvidia", "mountPath": LIBRARIES}


def _host_folder(name: str, path: str) -> Object:
    return {"name": name, "hostPath": {"path": path}}


def _interfaces(count: int) -> dict[str, str]:
    """The pod's interfaces: the cluster's network, then one in each of the networks that the cluster calls vpcN."""
    names = ["default", *(f"vpc{number}" for number in range(1, count + 1))]
    listed = [{"interfaceName": f"eth{number}", "network": name} for number, name in enumerate(names)]
    return {
        "networking.gke.io/default-interface": "eth0",
        "networking.gke.io/interfaces": json.dumps(listed, separators=(",", ":")),
    }


def _devices(container: str, *more: str) -> dict[str, str]:
    """The devices of the machine that a container without GPUs gets; YAML in an annotation."""
    paths = [*(f"/dev/nvidia{number}" for number in range(GPUS)), "/dev/nvidiactl", "/dev/nvidia-uvm", *more]
    return {f"devices.gke.io/container.{container}": "".join(f"- path: {path}\n" for path in paths)}
