"""Pods on the nodes of a cloud's double: each runs its command as a real process, in a folder that stands for its root.

A node shows a GPU to a container only under the real conditions: on GKE the driver lies in /usr/local/nvidia and the
container's own LD_LIBRARY_PATH has to hold it (ASSUMED from container-engine-accelerators, nvidia_gpu.go); on EKS
NVIDIA's container runtime puts it into the container's system folders. The image's torch needs a driver that is new
enough. Sources: docs/development/clouds-assumptions.md.
"""

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Object = dict[str, Any]  # of Kubernetes

NVIDIA_SMI = """#!/bin/sh
for folder in $(echo "${LD_LIBRARY_PATH:-}" | tr : ' ') @SYSTEM@; do
  if [ -e "$folder/libnvidia-ml.so.1" ]; then
    number=0
    while [ "$number" -lt @GPUS@ ]; do echo "NVIDIA L4, @DRIVER@, 23034 MiB"; number=$((number + 1)); done
    exit 0
  fi
done
echo "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system."
exit 12
"""
# An image's Python: with torch for CUDA 13, or without torch.
PYTHON = """#!/bin/sh
[ "$2" = "import torch" ] && exit @WITHOUT_TORCH@
for folder in $(echo "${LD_LIBRARY_PATH:-}" | tr : ' ') @SYSTEM@; do
  [ -e "$folder/libcuda.so.1" ] && found=1
done
if [ -z "${found:-}" ]; then
  echo "OSError: libcuda.so.1: cannot open shared object file: No such file or directory"; exit 1
fi
if [ @BRANCH@ -lt 580 ]; then
  echo "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."; exit 1
fi
echo "PROBED 2.15.0+cu132 13.2"
"""


@dataclass
class Node:
    """What a node has: its labels, taints and GPUs. `mounted`: the driver is in a folder of its own, as on GKE."""

    labels: dict[str, str]
    taints: tuple[str, ...] = ()
    gpus: int = 0
    mounted: bool = True
    driver: str = "580.159.03"


@dataclass
class Pods:
    """The pods of one cluster, by name. `images`: pulls that fail, by image, with the kubelet's words."""

    torch: bool = False  # whether images hold it
    images: dict[str, str] = field(default_factory=dict)
    refuse_pull: Callable[[str], str | None] = lambda image: None  # a registry's rule
    found: dict[str, Object] = field(default_factory=dict)

    def answer(self, method: str, name: str, body: Object | None, nodes: Sequence[Node]) -> tuple[int, Any]:
        """HTTP status and document for a request about the pod `name`, or about all of them if it is empty."""
        if method == "POST":
            assert body is not None
            name = str(body["metadata"]["name"])
            if name in self.found:
                return 409, status(409, "AlreadyExists", f'pods "{name}" already exists')
            self.found[name] = {**body, "status": {"phase": "Pending"}}
            return 201, self.found[name]
        if name not in self.found:
            return 404, status(404, "NotFound", f'pods "{name}" not found')
        if method == "DELETE":
            return 200, self.found.pop(name)
        self._advance(self.found[name], nodes)
        return 200, self.found[name]

    def _advance(self, pod: Object, nodes: Sequence[Node]) -> None:
        """One step: pending until a node fits, then run to the end."""
        if pod["status"]["phase"] != "Pending":
            return
        spec = pod["spec"]
        container = spec["containers"][0]
        gpus = int((container["resources"].get("limits") or {}).get("nvidia.com/gpu", 0))
        tolerated = {item["key"] for item in spec.get("tolerations") or ()}
        fitting = [
            node
            for node in nodes
            if (spec.get("nodeSelector") or {}).items() <= node.labels.items()
            and set(node.taints) <= tolerated
            and node.gpus >= gpus
        ]
        if not fitting:
            message = f"0/{len(nodes)} nodes are available: Insufficient nvidia.com/gpu."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            pod["status"]["conditions"] = [condition]
            return
        if said := self.images.get(container["image"]) or self.refuse_pull(container["image"]):
            waiting = {"waiting": {"reason": "ErrImagePull", "message": said}}
            pod["status"]["containerStatuses"] = [{"name": container["name"], "state": waiting}]
            return
        code, message = run_container(container, fitting[0], torch=self.torch)
        ended = {"terminated": {"exitCode": code, "message": message}}
        pod["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": container["name"], "state": ended}],
        }


def run_container(container: Object, node: Node, *, torch: bool) -> tuple[int, str]:
    """Exit code and termination message of the container's own command."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        mount = root / "nvidia"
        binaries, libraries = (mount / "bin", mount / "lib64") if node.mounted else (root / "bin", root / "lib")
        (root / "bin").mkdir()
        for folder in {binaries, libraries} - {root / "bin"}:
            folder.mkdir(parents=True)
        values = {
            "@SYSTEM@": "" if node.mounted else str(libraries),
            "@GPUS@": str(node.gpus),
            "@DRIVER@": node.driver,
            "@BRANCH@": node.driver.partition(".")[0],
            "@WITHOUT_TORCH@": "0" if torch else "1",
        }
        if node.gpus:
            write_program(binaries / "nvidia-smi", NVIDIA_SMI, values)
            for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
                (libraries / library).touch()
        write_program(root / "bin" / "python", PYTHON, values)
        report = root / "termination-log"
        environment = {item["name"]: item["value"] for item in container.get("env") or ()}
        ended = subprocess.run(
            container["command"],
            env={
                "PATH": f"{root / 'bin'}:/usr/bin:/bin",
                **environment,
                "MLBENCH_DRIVER_DIR": str(mount),
                "MLBENCH_TERMINATION_LOG": str(report),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        message = report.read_text() if report.exists() else (ended.stdout + ended.stderr)[-2000:]
        return ended.returncode, message


def write_program(path: Path, text: str, values: dict[str, str]) -> None:
    for key, value in values.items():
        text = text.replace(key, value)
    path.write_text(text)
    path.chmod(0o755)


def status(code: int, reason: str, message: str) -> Object:
    return {"kind": "Status", "code": code, "reason": reason, "message": message}


def start_job(known: Object | None, document: Object) -> Object:
    """The Job as applied, with the status that its controller gives it: its start does not move with a change."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {**document, "status": (known or {}).get("status") or {"startTime": now}}


def held_nodes(jobs: Iterable[Object], labels: Mapping[str, str], now: float) -> int:
    """How many machines with these labels are kept from an autoscaler by pods of Jobs that it may not evict.

    ASSUMED: as the autoscaler's FAQ has it, and a Job's deadline counts from its start.
    """
    held = 0
    for job in jobs:
        spec, template = job["spec"], job["spec"]["template"]
        notes = template["metadata"].get("annotations") or {}
        is_kept = notes.get("cluster-autoscaler.kubernetes.io/safe-to-evict") == "false"
        selected = (template["spec"].get("nodeSelector") or {}).items() <= dict(labels).items()
        tolerates = {"operator": "Exists"} in (template["spec"].get("tolerations") or [])
        began = datetime.fromisoformat(job["status"]["startTime"]).timestamp()
        if is_kept and selected and tolerates and now < began + spec.get("activeDeadlineSeconds", float("inf")):
            held += int(spec["parallelism"])
    return held
