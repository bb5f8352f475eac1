"""The last step of creating a GPU cluster: a pod that uses the GPUs of one worker, to check that they work.

Nodes can report GPUs that no container can use: on GKE if an image does not search the driver's folder, and anywhere if
the driver is too old for the image's CUDA. `templates/kubernetes/gpu-probe.sh` runs nvidia-smi and, if the image has
torch, a kernel and an all-reduce over all GPUs of the machine. The completed pod stays as evidence for later
operations; it uses no resources and disappears with its node.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.errors import MlbenchError, NotFoundError
from mlbench_cli.kube.objects import FINAL_PULL, PULL_REASONS, condition
from mlbench_cli.model.cluster_details import NVIDIA_GPU
from mlbench_cli.util.text import counted
from providers.base import ROLE_LABEL, WORKER, Readiness, Resource, ResourceStatus
from providers.kubernetes_calls import Connect, open_young_cluster
from templates import FOLDER, documents

NAME = "mlbench-gpu-probe"
NAMESPACE = "default"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PROBE_SECONDS = 900.0
# A probe is created when the workers show their GPUs: one that no node takes for so long will not be taken at all.
UNSCHEDULABLE_SECONDS = 60.0
# The oldest driver branch by major version of CUDA. Source: NVIDIA's CUDA compatibility table, as of 2026-11.
MIN_DRIVERS = {12: 525, 13: 580}
IMAGE_CUDA = 13  # of the torch wheels in today's task images
NONE = "none"  # of --probe-image


class GpuProbe(Resource):
    """A pod on one of the workers that uses all GPUs of its machine."""

    kind = "GPU probe"
    name = NAME
    create_seconds = PROBE_SECONDS
    delete_seconds = 60.0

    def __init__(
        self,
        connect: Connect,
        image: str,
        gpus: int,
        needs: Sequence[Resource],
        goes_with: Resource,
        tolerations: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.connect = connect
        self.image = image
        self.gpus = gpus
        self.needs = tuple(needs)
        self.goes_with = goes_with
        self.report: Mapping[str, str] = {}  # what the probe has found, once it was successful
        self.tolerations = [{"key": NVIDIA_GPU, "operator": "Exists", "effect": "NoSchedule"}, *tolerations]
        self._unschedulable_since: float | None = None

    def find(self) -> ResourceStatus | None:
        try:
            with open_young_cluster(self.connect) as api:
                pod = api.get(f"{PODS}/{NAME}")
        except NotFoundError:  # neither pod nor cluster
            return None
        if pod["metadata"].get("deletionTimestamp"):
            return ResourceStatus("Terminating", deleting=True)
        phase = (pod.get("status") or {}).get("phase", "Pending")
        stale = pod["spec"]["containers"][0]["image"] != self.image
        broken = (
            "an earlier probe did not succeed" if phase == "Failed" else "it is of another image" if stale else None
        )
        return ResourceStatus(phase, broken=broken)

    def create(self) -> None:
        values = {
            "name": NAME,
            "namespace": NAMESPACE,
            "image": self.image,
            "gpus": self.gpus,
            "node_selector": {ROLE_LABEL: WORKER},
            "tolerations": self.tolerations,
            "seconds": int(PROBE_SECONDS),
            "script": (FOLDER / "kubernetes" / "gpu-probe.sh").read_text("utf-8"),
        }
        (manifest,) = documents("kubernetes/gpu-probe.yaml.j2", values)
        with open_young_cluster(self.connect) as api:
            api.create(PODS, manifest)

    def poll(self) -> Readiness:
        with open_young_cluster(self.connect) as api:
            try:
                pod = api.get(f"{PODS}/{NAME}")
            except NotFoundError:
                raise MlbenchError(f'The pod "{NAME}" is gone, perhaps with its node.', hint=AGAIN) from None
        status = pod.get("status") or {}
        phase = status.get("phase", "Pending")
        if phase == "Succeeded":
            self.report = parse_report(_termination_message(status))
            return Readiness(True, facts={"gpu_probe": self.report})
        if phase == "Failed":
            raise explain_failure(_termination_message(status) or str(status.get("message") or "no message"))
        if (why := _scheduling_problem(status)) is None:
            self._unschedulable_since = None
            return Readiness(False, _waiting_reason(status, self.image))
        now = time.monotonic()
        if self._unschedulable_since is None:
            self._unschedulable_since = now
        if now - self._unschedulable_since >= UNSCHEDULABLE_SECONDS:
            raise MlbenchError(
                f'No worker can run the GPU probe, which asks for {counted(self.gpus, "GPU")}: "{why}"',
                hint=f"kubectl describe nodes   shows what the workers offer and who uses it. {AGAIN}",
            )
        return Readiness(False, f"no worker takes its pod: {why}")

    def delete(self) -> None:
        with open_young_cluster(self.connect) as api:
            api.delete(f"{PODS}/{NAME}")


AGAIN = "Repeat the create-cluster command to repeat the probe; --probe-image none skips it."
# Words of a failed probe, and what to do about each. They are those of the driver, of torch and of the dynamic linker.
REMEDIES = (
    (
        ("driver on your system is too old", "CUDA driver version is insufficient"),
        "The driver is older than the CUDA of the image: on GKE --gpu-driver latest; or build images with an older "
        "CUDA: INDEX=URL task_images/build.sh, with the URL of PyTorch's package index for that CUDA",
    ),
    (
        ("no kernel image is available",),
        "torch has no code for this GPU: choose a newer --gpu-type.",
    ),
    (
        ("libcuda.so", "libnvidia-ml.so", "nvidia-smi: not found"),
        "The driver is not visible in the container: on GKE LD_LIBRARY_PATH has to hold /usr/local/nvidia/lib64, "
        "elsewhere the node needs NVIDIA's container runtime.",
    ),
)


def explain_failure(message: str) -> MlbenchError:
    """The error for a probe that failed with this termination message."""
    report = parse_report(message)
    reason = report.get("error") or message
    hint = next((remedy for phrases, remedy in REMEDIES if any(phrase in reason for phrase in phrases)), None)
    return MlbenchError(
        f'The workers show GPUs, but a container cannot use them: "{reason}"',
        hint=f"{hint}\n{AGAIN}" if hint else AGAIN,
        details={"gpu_probe": report},
    )


def parse_report(message: str) -> dict[str, str]:
    """The facts in a termination message: gpu, driver, memory, gpus, torch, cuda, error."""
    return {key: value for key, equals, value in (line.partition("=") for line in message.splitlines()) if equals}


def find_driver_branch(report: Mapping[str, str]) -> int | None:
    """The branch of the driver that a probe found, e.g. 580; None if it found none."""
    branch = report.get("driver", "").partition(".")[0]
    return int(branch) if branch.isdecimal() else None


def find_driver_problem(report: Mapping[str, str]) -> str | None:
    """Why the task images may not run on a probed driver; None if they can, or if torch has proved it."""
    branch = find_driver_branch(report)
    if report.get("torch") or branch is None or branch >= MIN_DRIVERS[IMAGE_CUDA]:
        return None
    return (
        f"The driver of the workers is {report['driver']}; images with CUDA {IMAGE_CUDA}, as today's torch brings it, "
        f"need {MIN_DRIVERS[IMAGE_CUDA]} or later."
    )


def _termination_message(status: Mapping[str, Any]) -> str:
    states = [(item.get("state") or {}).get("terminated") or {} for item in status.get("containerStatuses") or ()]
    return next((str(state["message"]) for state in states if state.get("message")), "")


def _waiting_reason(status: Mapping[str, Any], image: str) -> str:
    """Why the pod does not run yet. Raises MlbenchError for an image that cannot be pulled."""
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, said = str(waiting.get("reason", "")), str(waiting.get("message") or "")
        if reason in PULL_REASONS and FINAL_PULL.search(said):
            raise MlbenchError(
                f'The nodes cannot pull the image {image}: "{said}"',
                hint="Check that the nodes can read its registry, or build it: task_images/build.sh; or: "
                "--probe-image IMAGE",
            )
        if reason:
            return f"{reason}: {said}" if said else reason
    return f"its pod is {status.get('phase', 'Pending')}"


def _scheduling_problem(status: Mapping[str, Any]) -> str | None:
    """Why no node takes the pod, in the scheduler's words; None if one has taken it or none has been looked for."""
    scheduled = condition({"status": status}, "PodScheduled")
    return str(scheduled.get("message") or scheduled.get("reason")) if scheduled.get("status") == "False" else None
