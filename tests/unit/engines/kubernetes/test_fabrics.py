"""What is added to a worker's pod for the fast network of its machine, as the clouds document it."""

import json
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.fabrics import PodFabric, choose_fabric
from mlbench_cli.kube.gpudirect import choose_release, explain_unknown_branch
from mlbench_cli.model.spec import KubernetesOptions, RunSpec


def fabric(workers: int = 2, gpus: int = 8, devices: dict[str, str] | None = None, **known: Any) -> PodFabric:
    names = (f"demo-{workers}", "c", "kubernetes", "custom", "custom", ("true",), "nccl", workers)
    options = KubernetesOptions(fabric=known, devices=devices or {})
    return choose_fabric(RunSpec(*names, gpus_per_worker=gpus, kubernetes=options))


@pytest.mark.parametrize(
    "found",
    [
        fabric(),
        fabric(setup="tcpxo", gpus=7),
        fabric(setup="tcpxo", workers=1),
        fabric(setup="of-next-year"),
        fabric(devices={"hugepages-2Mi": "5Gi"}),
    ],
)
def test_pods_without_a_fast_network_get_nothing(found: PodFabric) -> None:
    assert found == PodFabric()


def test_cards_for_rdma_need_locked_memory_and_efa_also_its_provider() -> None:
    assert fabric(devices={"rdma/hca": "1"}, workers=1, gpus=0) == PodFabric(pins_memory=True)
    found = fabric(devices={"vpc.amazonaws.com/efa": "4", "rdma/hca": "1"}, workers=1, gpus=0)
    assert found == PodFabric(
        {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1", "NCCL_SOCKET_IFNAME": "^docker,lo,veth"}, pins_memory=True
    )


def interfaces(count: int) -> dict[str, str]:
    """As Google's pages show them: eth0 in the network "default", eth1 in vpc1, and so on."""
    listed = [{"interfaceName": "eth0", "network": "default"}]
    listed += [{"interfaceName": f"eth{number}", "network": f"vpc{number}"} for number in range(1, count + 1)]
    return {
        "networking.gke.io/default-interface": "eth0",
        "networking.gke.io/interfaces": json.dumps(listed, separators=(",", ":")),
    }


GPUS = "".join(f"- path: /dev/nvidia{number}\n" for number in range(8))
CONTROL = "- path: /dev/nvidiactl\n- path: /dev/nvidia-uvm\n"
LIBRARIES = {"name": "nvidia", "mountPath": "/usr/local/nvidia/lib64"}
SYSTEM = [
    {"name": "machine-sys", "mountPath": "/hostsysfs"},
    {"name": "machine-proc-sys", "mountPath": "/hostprocsysfs"},
]
MACHINE = [
    {"name": "nvidia", "hostPath": {"path": "/home/kubernetes/bin/nvidia/lib64"}},
    {"name": "machine-sys", "hostPath": {"path": "/sys"}},
    {"name": "machine-proc-sys", "hostPath": {"path": "/proc/sys"}},
]
ROOT = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
REGISTRY = "us-docker.pkg.dev/gce-ai-infra"


def test_tcpx_has_four_networks_and_a_daemon_with_sockets() -> None:
    found = fabric(setup="tcpx")
    assert found.annotations == {
        **interfaces(4),
        "devices.gke.io/container.tcpx-daemon": GPUS + CONTROL,
    }
    sockets = {"name": "tcpx-sockets", "mountPath": "/run/tcpx"}
    assert found.sidecars == (
        {
            "name": "tcpx-daemon",
            "image": f"{REGISTRY}/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.12",
            "restartPolicy": "Always",
            "env": [{"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"}],
            "securityContext": {**ROOT, "capabilities": {"add": ["NET_ADMIN"]}},
            "volumeMounts": [LIBRARIES, *SYSTEM, sockets],
            "command": [
                *("/tcpgpudmarxd/build/app/tcpgpudmarxd", "--gpu_nic_preset", "a3vm"),
                *("--gpu_shmem_type", "fd", "--uds_path", "/run/tcpx"),
            ],
        },
    )
    assert [*found.volumes] == [*MACHINE, {"name": "tcpx-sockets", "hostPath": {"path": "/run/tcpx"}}]
    assert [*found.mounts] == [LIBRARIES, sockets]
    assert (found.pins_memory, found.claimed_cards) == (True, 0)


def test_tcpx_has_the_settings_of_nccl_that_google_documents_for_a3_high() -> None:
    """The cores are those of the CPU that each card is attached to, other ones for what is sent and for what comes."""
    environment = dict(fabric(setup="tcpx").environment)
    cards = {"eth1": 0, "eth2": 0, "eth3": 1, "eth4": 1}
    cores = {"TX": ("8-21,112-125", "60-73,164-177"), "RX": ("22-35,126-139", "74-87,178-191")}
    for direction, found in cores.items():
        bindings = ";".join(f"{card}:{found[socket]}" for card, socket in cards.items())
        assert environment.pop(f"NCCL_GPUDIRECTTCPX_{direction}_BINDINGS") == bindings
    chunk = str(512 << 10)
    assert environment == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": ",".join(cards),
        "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx",
        "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": str(500_000),
        "NCCL_CROSS_NIC": "0",
        "NCCL_ALGO": "Ring,Tree",
        "NCCL_PROTO": "Simple",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_P2P_PXN_LEVEL": "0",
        **dict.fromkeys(("NCCL_DYNAMIC_CHUNK_SIZE", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE"), chunk),
        "NCCL_P2P_NVL_CHUNKSIZE": str(1 << 20),
        "NCCL_BUFFSIZE": str(4 << 20),
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_NTHREADS": "1",
    }


@pytest.mark.parametrize(("branch", "program"), [(None, "v1.0.22"), (580, "v1.0.22"), (595, "v1.0.23")])
def test_tcpxo_has_eight_networks_and_a_daemon_that_says_when_it_is_ready(branch: int | None, program: str) -> None:
    found = fabric(setup="tcpxo", driver_branch=branch)
    assert found.annotations == {
        **interfaces(8),
        "devices.gke.io/container.tcpxo-daemon": f"{GPUS}{CONTROL}- path: /dev/dmabuf_import_helper\n",
    }
    start = "/fts/entrypoint_rxdm_container.sh"
    assert found.sidecars == (
        {
            "name": "tcpxo-daemon",
            "image": f"{REGISTRY}/gpudirect-tcpxo/tcpgpudmarxd-dev:{program}",
            "restartPolicy": "Always",
            "env": [
                {"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"},
                {"name": "HEALTH_CHECK_LOG_FILE", "value": "/run/health-check"},
            ],
            "securityContext": {**ROOT, "capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]}},
            "volumeMounts": [LIBRARIES, *SYSTEM],
            "command": ["sh", "-ec", f"chmod +x {start}; exec {start} --num_hops=2"],
            "startupProbe": {
                "exec": {"command": ["cat", "/run/health-check"]},
                "periodSeconds": 5,
                "failureThreshold": 24,
            },
        },
    )
    assert [*found.volumes] == [*MACHINE, {"name": "apertures", "hostPath": {"path": "/dev/aperture_devices"}}]
    assert [*found.mounts] == [LIBRARIES, {"name": "apertures", "mountPath": "/dev/aperture_devices"}]
    assert found.environment == {
        "NCCL_LIB_DIR": "/usr/local/nvidia/lib64",
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
        "MLBENCH_NCCL_PROFILE": "/usr/local/nvidia/lib64/nccl-env-profile.sh",
    }
    assert found.pins_memory


def test_gib_claims_the_cards_and_needs_no_daemon() -> None:
    assert fabric(setup="gib") == PodFabric(
        {
            "MLBENCH_NCCL_PROFILE": "/usr/local/gib/scripts/set_nccl_env.sh",
            "MLBENCH_FABRIC_LIBRARIES": "/usr/local/gib/lib64",
        },
        pins_memory=True,
        volumes=(
            {"name": "nvidia", "hostPath": {"path": "/home/kubernetes/bin/nvidia"}},
            {"name": "gib", "hostPath": {"path": "/home/kubernetes/bin/gib"}},
        ),
        mounts=(
            {"name": "nvidia", "mountPath": "/usr/local/nvidia", "readOnly": True},
            {"name": "gib", "mountPath": "/usr/local/gib", "readOnly": True},
        ),
        claimed_cards=8,
    )


@pytest.mark.parametrize(
    ("kind", "branch", "chosen"),
    [
        ("tcpxo", None, 580),
        ("tcpxo", 535, 580),
        ("tcpxo", 580, 580),
        ("tcpxo", 594, 580),
        ("tcpxo", 595, 595),
        ("tcpxo", 600, 595),
        ("tcpx", 600, 580),
        ("gib", 600, 580),
    ],
)
def test_a_plugin_is_the_newest_for_the_driver(kind: str, branch: int | None, chosen: int) -> None:
    assert choose_release(kind, branch).branch == chosen


def test_a_driver_without_a_known_plugin_is_said() -> None:
    assert explain_unknown_branch("tcpxo", 595) is None
    text = explain_unknown_branch("tcpxo", 590) or ""
    assert "branch 590; Google's plugin for NCCL is known for 580, 595. That of 580 is installed." in text
