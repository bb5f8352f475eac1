"""Pods with RDMA network cards can lock memory, tried with the kernel's own rules for capabilities and limits.

The process gets what a container runtime gives: the user and the capabilities of the manifest, no new privileges, and
8 MiB of RLIMIT_MEMLOCK, containerd's default. Kubernetes has no ambient capabilities: for users other than root an
added capability is in the bounding set only (NVIDIA/nvidia-container-toolkit#2037 measured it on Kubernetes 1.36).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.model.run import Cluster
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request

MEMLOCK = 8 << 20
LOCK_64_MIB = """
import ctypes, mmap, sys
sys.path[:0] = sys.argv[1:]
from task_images.facts import lockable_bytes
area = mmap.mmap(-1, 64 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
print(ctypes.CDLL(None).mlock(ctypes.c_void_p(address), 64 << 20), lockable_bytes())
"""


def pod_of(folder: Path, device: dict[str, str], user: int | None = None) -> dict[str, Any]:
    cluster = Cluster("c", "attached", details={"gpus_per_node": 8, "registry": "ghcr.io/me"})
    security = {} if user is None else {"securityContext": {"runAsUser": user, "runAsGroup": user}}
    patch = {"spec": {**security, "containers": [{"name": "main", "resources": {"limits": device}}]}}
    (folder / "patch.yaml").write_text(json.dumps(patch))
    path = str(folder / "patch.yaml")
    (spec,) = resolve(Request(name="r", workers=(2,), task="allreduce", gpu=True, pod_patch=path), cluster)
    pod: dict[str, Any] = manifests(spec, "default")[0]["spec"]["template"]["spec"]
    return pod


def lock_memory(pod: dict[str, Any]) -> list[str]:
    """What mlock of 64 MiB returns in a process with the pod's rights, and what the environment event says."""
    user, container = pod["securityContext"]["runAsUser"], pod["containers"][0]["securityContext"]
    assert container["allowPrivilegeEscalation"] is False
    added = "".join(f",+{name.lower()}" for name in container["capabilities"].get("add", ()))
    words = [
        *("prlimit", f"--memlock={MEMLOCK}:{MEMLOCK}", "setpriv", f"--reuid={user}", f"--regid={user}"),
        *("--clear-groups", f"--bounding-set=-all{added}", "--inh-caps=-all", "--no-new-privs"),
        *(sys.executable, "-c", LOCK_64_MIB, os.getcwd()),
    ]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "device", [{"vpc.amazonaws.com/efa": "4"}, {"rdma/ib": "1"}, {"rdma/hca_shared_devices_a": "1"}]
)
def test_pods_with_rdma_cards_lock_64_mib_and_those_of_another_user_do_not(
    device: dict[str, str], tmp_path: Path
) -> None:
    assert lock_memory(pod_of(tmp_path, device)) == ["0", "unlimited"]
    other = pod_of(tmp_path, device, user=10001)
    assert other["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert lock_memory(other) == ["-1", str(MEMLOCK)]


def test_pods_without_such_cards_stay_ordinary_users(tmp_path: Path) -> None:
    pod = pod_of(tmp_path, {"hugepages-2Mi": "1Gi"})
    assert pod["securityContext"]["runAsUser"] == 10001
    assert "add" not in pod["containers"][0]["securityContext"]["capabilities"]
