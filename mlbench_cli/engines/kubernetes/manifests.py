"""RunSpec -> the Kubernetes objects of a run. Pure: no network, no clock, no random; same spec, same bytes."""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import templates
from mlbench_cli.agent.lock import NO_PROMISE, WHOLE_NODES
from mlbench_cli.agent.messages import AT_START, MachinesPlan
from mlbench_cli.engines.code import pack_task_code
from mlbench_cli.engines.kubernetes.fabrics import claims_cards, fabric_patch
from mlbench_cli.engines.kubernetes.pods import (
    HEAD,
    LOST_NODE,
    MANAGED_LABEL,
    NO_MESH,
    NO_MESH_ANNOTATIONS,
    ROLE_LABEL,
    RUN_LABEL,
    WORKER,
    anti_affinity,
    list_tolerations,
    pod_security,
    resource_limits,
    resource_requests,
    toleration,
)
from mlbench_cli.engines.plan import contract_environment, find_task, make_pods_plan, pod_host, thread_variables
from mlbench_cli.errors import UsageError
from mlbench_cli.isolation import CODE_VARIABLES
from mlbench_cli.model.spec import HOLD_SECONDS, MIN_KEEP_SECONDS, START_TIMEOUT, RunSpec, canonical_json
from mlbench_cli.storage.run_folder import PODS_FILES

HASH_LABEL = "mlbench/spec-hash"
SPEC_ANNOTATION = "mlbench/spec"
STOPPED_ANNOTATION = "mlbench/stopped"  # "ENDING TIME": how the run ended, a value of Observation.ended
FETCHED_ANNOTATION = "mlbench/fetched"
ID_ANNOTATION = "mlbench/run-id"  # the run's id and time of recording, the same on every machine that knows it
CREATED_ANNOTATION = "mlbench/run-created"
TOKEN_ANNOTATION = "mlbench/run-uid"  # on the head's pods: the Job's uid, which workers know from a label of theirs

WORK_DIR = "/results"
PORT = 29500
GRACE_SECONDS = 60  # 10 of them for the command to end, the rest to bring the results home
TTL_SECONDS = 7 * 86400
DEADLINE_MARGIN = 120
MAX_BOOKED_SECONDS = 7 * 86400  # maximum duration of DWS flex-start machines
HOSTS_BYTES = 120_000  # one environment variable holds at most 128 KiB
ANNOTATION_BYTES = 200_000
CODE_FILE = "code.tar.gz"  # in the ConfigMap
CONFIG_BYTES = 1_000_000  # a ConfigMap has at most 1 MiB
HEAD_PORT = 29600
HEAD_QUEUE_SECONDS = 7 * 86400  # that a head outlives a run that may wait in a queue
HEAD_DISK = "10Gi"
HEAD_CPUS = "2"  # required where a quota limits CPUs

# In the order in which they are created. The Job comes first because the others are owned by it.
TEMPLATES = ("job", "configmap", "service", "networkpolicy", "claim", "provisioning", "head")
KUEUE_LABEL = "kueue.x-k8s.io/queue-name"

# Nodes in use by a run are neither scaled down nor consolidated, by cluster-autoscaler and by Karpenter.
SAFE_TO_EVICT = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def manifests(spec: RunSpec, namespace: str) -> tuple[dict[str, Any], ...]:
    """Job, ConfigMap, Service, NetworkPolicy and the Job of the head.

    Raises UsageError for what a cluster would reject.
    """
    values = _values(spec, spec.pods.namespace or namespace)
    documents = (
        document
        for kind in TEMPLATES
        if _is_wanted(kind, spec)
        for document in templates.documents(f"kubernetes/{kind}.yaml.j2", values)
    )
    fabric = fabric_patch(spec)
    return tuple(_patch_pods(_add_fabric(document, fabric), spec.pods.pod_patch) for document in documents)


# Fields of a pod patch that also apply to the head, which has another container and runs on another kind of machine.
OF_ALL_PODS = ("securityContext", "priorityClassName", "imagePullSecrets", "serviceAccountName")


def _add_fabric(document: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """The document with what the pods of workers need for their fast network; the head needs none of it."""
    if not patch or document["kind"] != "Job" or role_of(document) is not None:
        return document
    return {**document, "spec": {**document["spec"], "template": _merge(document["spec"]["template"], patch)}}


def _patch_pods(document: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """The document with `patch` merged into its pods: those of workers, and in part those of the head."""
    if not patch or document["kind"] not in ("Job", "PodTemplate"):
        return document
    if role_of(document) == HEAD:
        spec = {key: value for key, value in patch.get("spec", {}).items() if key in OF_ALL_PODS}
        patch = {"metadata": patch.get("metadata", {}), "spec": spec}
    if document["kind"] == "PodTemplate":
        return {**document, "template": _merge(document["template"], patch)}
    return {**document, "spec": {**document["spec"], "template": _merge(document["spec"]["template"], patch)}}


def _merge(old: Any, new: Any) -> Any:
    """As a strategic merge patch: mappings by key, lists by name (other items are appended), and null deletes."""
    if isinstance(new, Mapping):
        merged = dict(old) if isinstance(old, Mapping) else {}
        for key, value in new.items():
            merged[key] = _merge(merged.get(key), value)
        return {key: value for key, value in merged.items() if value is not None}
    if not isinstance(new, list):
        return new
    merged_list = list(old) if isinstance(old, list) else []
    for item in new:
        identity = next((key for key in ("mountPath", "name") if isinstance(item, Mapping) and key in item), None)
        place = next(
            (
                number
                for number, known in enumerate(merged_list)
                if identity and isinstance(known, Mapping) and known.get(identity) == item[identity]
            ),
            None,
        )
        if place is not None:
            merged_list[place] = _merge(merged_list[place], item)
        elif item not in merged_list:
            merged_list.append(_merge(None, item))
    return merged_list


def _is_wanted(kind: str, spec: RunSpec) -> bool:
    options = spec.pods
    # Kueue books machines itself, for the runs of its queues.
    optional = {
        "networkpolicy": options.network_policy,
        "claim": claims_cards(spec),
        "provisioning": options.provisioning_class is not None and options.queue is None,
    }
    return optional.get(kind, True)


def spec_of(job: Mapping[str, Any]) -> RunSpec:
    """The spec of an mlbench Job. Raises UsageError if it has none."""
    metadata = job.get("metadata", {})
    try:
        document = json.loads(metadata["annotations"][SPEC_ANNOTATION])
    except (KeyError, ValueError, TypeError):
        raise UsageError(f'The Job "{metadata.get("name")}" does not name its run.') from None
    return RunSpec.from_dict(document)


def head_name(run_name: str) -> str:
    """The name of the Job of a run's head, which takes in what its pods write and keeps it after their end."""
    return f"{run_name}-{HEAD}"


def queue_of(job: Mapping[str, Any]) -> str | None:
    """The Kueue queue that releases a Job; None for one that mlbench releases."""
    labels: Mapping[str, str] = job.get("metadata", {}).get("labels") or {}
    return labels.get(KUEUE_LABEL)


def role_of(item: Mapping[str, Any]) -> str | None:
    """What a Job is within its run: HEAD; None for the run's own Job, which owns the other."""
    role: str | None = (item.get("metadata", {}).get("labels") or {}).get(ROLE_LABEL)
    return role


def with_files(documents: Sequence[Mapping[str, Any]], data: bytes) -> Sequence[Mapping[str, Any]]:
    """The documents of a run with the packed files of its command, which its pods get. Raises UsageError if they are
    too large."""
    text = base64.b64encode(data).decode()
    found = []
    for document in documents:
        if document["kind"] == "ConfigMap":
            room = CONFIG_BYTES - sum(map(len, document["binaryData"].values()))
            if len(text) > room:
                raise UsageError(
                    f"The files of the command have {len(data) / 1e6:.1f} MB, compressed; pods get up to "
                    f"{0.75 * room / 1e6:.1f} MB.",
                    hint="Put them into an image (--image NAME:TAG), or onto a volume (--data-claim CLAIM).",
                )
            document = {**document, "binaryData": {**document["binaryData"], PODS_FILES: text}}
        found.append(document)
    return found


def without_code(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The document for people and archives: with the digest of the code that it brings, in place of the code."""
    if CODE_FILE not in document.get("binaryData", {}):
        return document
    digest = hashlib.sha256(base64.b64decode(document["binaryData"][CODE_FILE])).hexdigest()
    return {**document, "binaryData": {**document["binaryData"], CODE_FILE: f"sha256:{digest}"}}


def file_name(document: Mapping[str, Any]) -> str:
    """File name of a document in the archive's manifests/."""
    return f"{role_of(document) or document['kind'].lower()}.yaml"


def holders(spec: RunSpec) -> tuple[int, ...]:
    """The workers whose output is fetched: of those that run the command."""
    return tuple(range(spec.workers)) if spec.pods.collect == "all" and spec.run_on_all else (0,)


def _values(spec: RunSpec, namespace: str) -> dict[str, object]:
    options = spec.pods
    _check(spec)
    selector = {RUN_LABEL: spec.name}
    labels = {**selector, MANAGED_LABEL: "mlbench"}
    # Only a last resort: the sum of how long workers may wait to start, may run, and may try to hand over results. Each
    # of these has its own, earlier deadline.
    length = math.ceil(spec.timeout) + HOLD_SECONDS + DEADLINE_MARGIN
    deadline = options.start_timeout + length
    keep = max(MIN_KEEP_SECONDS, options.keep_seconds)
    return {
        "spec": spec,
        "namespace": namespace,
        "labels": labels,
        "job_labels": {**labels, HASH_LABEL: spec.hash, **_queue_labels(spec)},
        "selector": selector,
        "worker_labels": {**NO_MESH, **labels, ROLE_LABEL: WORKER},
        "worker_annotations": {
            **SAFE_TO_EVICT,
            **NO_MESH_ANNOTATIONS,
            **_booking(spec),
        },
        "worker_selector": {**selector, ROLE_LABEL: WORKER},
        "annotations": {
            SPEC_ANNOTATION: canonical_json(spec.to_dict()).decode(),
            **_booking_of_queue(spec, length + START_TIMEOUT),
        },
        "active_deadline_seconds": deadline,
        "booked_seconds": min(length + START_TIMEOUT, MAX_BOOKED_SECONDS),
        "ttl_seconds": max(TTL_SECONDS, keep + 86400),
        "grace_seconds": GRACE_SECONDS,
        "tolerations": list_tolerations(spec),
        "anti_affinity": anti_affinity(spec),
        "chosen_nodes": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]} for name in spec.nodes
        ],
        "pod_security": pod_security(spec),
        "arguments": [_literal(argument) for argument in spec.argv],
        "environment": _literals(_environment(spec, thread_variables(spec))),
        "requests": resource_requests(spec),
        "limits": resource_limits(spec),
        "start_script": (templates.FOLDER / "kubernetes" / "start.sh").read_text("utf-8"),
        "code": _pack(pack_task_code(find_task(spec.argv))),
        "code_digest": hashlib.sha256(base64.b64decode(_pack(pack_task_code(find_task(spec.argv))))).hexdigest(),
        "plan": _pack(json.dumps(_plan(spec), sort_keys=True).encode()),
        "work_dir": WORK_DIR,
        "head_name": head_name(spec.name),
        "head_labels": {**labels, ROLE_LABEL: HEAD},
        "head_pod_labels": {**NO_MESH, **labels, ROLE_LABEL: HEAD},
        "head_annotations": {**SAFE_TO_EVICT, **NO_MESH_ANNOTATIONS},
        "head_limits": {"cpu": HEAD_CPUS, "memory": "512Mi", "ephemeral-storage": HEAD_DISK},
        "head_port": HEAD_PORT,
        "head_deadline_seconds": deadline + keep + (HEAD_QUEUE_SECONDS if options.queue else 0),
        "head_tolerations": [*LOST_NODE, *(toleration(text) for text in options.tolerations)],
        "keep_seconds": keep,
        "head_disk": HEAD_DISK,
        "head_idle_seconds": deadline,
    }


def _queue_labels(spec: RunSpec) -> dict[str, str]:
    """The labels by which Kueue recognizes the Jobs that it releases."""
    return {KUEUE_LABEL: spec.pods.queue} if spec.pods.queue else {}


def _booking(spec: RunSpec) -> dict[str, str]:
    """The annotations by which pods take the machines that were booked for their run."""
    options = spec.pods
    if options.provisioning_class is None or options.queue:
        return {}
    return {
        "autoscaling.x-k8s.io/consume-provisioning-request": spec.name,
        "autoscaling.x-k8s.io/provisioning-class-name": options.provisioning_class,
    }


def _booking_of_queue(spec: RunSpec, seconds: int) -> dict[str, str]:
    """What Kueue puts into the request by which it books machines: how long they are needed."""
    if spec.pods.provisioning_class is None or not spec.pods.queue:
        return {}
    return {"provreq.kueue.x-k8s.io/maxRunDurationSeconds": str(min(seconds, MAX_BOOKED_SECONDS))}


def _check(spec: RunSpec) -> None:
    if not spec.image:
        raise UsageError("The run names no container image.", hint="Give one with --image.")
    if len(_pack(pack_task_code(find_task(spec.argv)))) + len(_pack(json.dumps(_plan(spec)).encode())) > CONFIG_BYTES:
        raise UsageError("The run's command and environment are too long for the ConfigMap of its pods.")
    foreign = [name for name in spec.env if name in CODE_VARIABLES]
    if foreign and spec.runs_task_program:
        raise UsageError(
            f"--env {foreign[0]}: a built-in task runs only mlbench's own code.",
            hint="Remove it, or run your own command with --command.",
        )
    if len(canonical_json(spec.to_dict())) > ANNOTATION_BYTES:
        raise UsageError("The run's command, parameters and environment are too long to store in the cluster.")
    if len(f"{spec.name}-{spec.workers}.{spec.name},") * spec.workers > HOSTS_BYTES:
        raise UsageError(
            f"The host names of {spec.workers} workers do not fit into one environment variable.",
            hint="Choose a shorter run name.",
        )


def _environment(spec: RunSpec, threads: Mapping[str, str]) -> dict[str, str]:
    """Defaults, then the user's variables, then the contract, which cannot be overridden.

    The agent adds what is each rank's own, and MLBENCH_HOSTS: here it would be in each pod of the run.
    """
    return {
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "XDG_CACHE_HOME": "/tmp/.cache",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/.cache/inductor",
        "TRITON_CACHE_DIR": "/tmp/.cache/triton",
        "PYTHONUNBUFFERED": "1",
        **threads,
        **_nominal_fabric(spec),
        **spec.env,
        **contract_environment(spec, None, pod_host(spec, 0), str(PORT)),
        # Read by start.sh and the agent only.
        "MLBENCH_WORK_DIR": WORK_DIR,
        "MLBENCH_HEAD": f"{head_name(spec.name)}.{spec.name}:{HEAD_PORT}",
    }


def _plan(spec: RunSpec) -> MachinesPlan:
    """The plan of the pods' agents."""
    # The user's variables are named here, too: of a container's own, agents leave out what looks like a launcher's.
    contract = {**spec.env, **contract_environment(spec, AT_START, AT_START, AT_START)}
    lock = NO_PROMISE if spec.pods.share_nodes else WHOLE_NODES
    return make_pods_plan(spec, contract, lock=lock, collects=list(holders(spec)))


@cache
def _pack(data: bytes) -> str:
    """Data as compressed text: the same text for the same data."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def _nominal_fabric(spec: RunSpec) -> dict[str, str]:
    """The fast network that each machine has, for the ranks' own report beside the one that NCCL chose."""
    name, gbits = spec.pods.fabric.get("name"), spec.pods.fabric.get("gbits")
    return {"MLBENCH_FABRIC": f"{gbits} {name}"} if name and gbits else {}


def _literals(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: _literal(value) for name, value in variables.items()}


def _literal(text: str) -> str:
    """Escape $(NAME), which Kubernetes would replace in arguments and variables."""
    return text.replace("$", "$$")
