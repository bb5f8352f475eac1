"""RunSpec -> the Kubernetes objects of a run. Pure: no network, no clock, no random; same spec, same bytes."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.engines.environment import contract_environment
from mlbench_cli.engines.kubernetes.diagnosis.scheduling import quantity
from mlbench_cli.errors import UsageError
from mlbench_cli.isolation import CODE_VARIABLES
from mlbench_cli.spec import MAX_TIMEOUT, KubernetesOptions, RunSpec, canonical_json

RUN_LABEL = "mlbench/run"
HASH_LABEL = "mlbench/spec-hash"
MANAGED_LABEL = "app.kubernetes.io/managed-by"
SPEC_ANNOTATION = "mlbench/spec"
STOPPED_ANNOTATION = "mlbench/stopped"  # "WORD TIME": how the run ended, a word of Observation.ended
FETCHED_ANNOTATION = "mlbench/fetched"
ID_ANNOTATION = "mlbench/run-id"  # the run's id and time of recording, the same on every machine that knows it
CREATED_ANNOTATION = "mlbench/run-created"
ROLE_LABEL = "mlbench/role"
WORKER, KEEPER = "worker", "keeper"
TOKEN_ANNOTATION = "mlbench/run-uid"  # on the keeper's pod: the Job's uid, which workers know from a label of theirs

EFA = "vpc.amazonaws.com/efa"
HOST = "kubernetes.io/hostname"
CONTAINER = "main"
WORK_DIR = "/results"
PORT = 29500
GRACE_SECONDS = 60  # the command has 10 of them to end; in the rest a client can still bring the results home
TTL_SECONDS = 7 * 86400
DEADLINE_MARGIN = 120
NODE_LOSS_SECONDS = 30
MAX_BOOKED_SECONDS = 7 * 86400  # for which DWS flex-start gives machines
HOSTS_BYTES = 120_000  # one environment variable holds at most 128 KiB
ANNOTATION_BYTES = 200_000
KEEPER_PORT = 29600
KEEPER_QUEUE_SECONDS = 7 * 86400  # that a keeper outlives a run whose queue may let it wait
KEEPER_SPARE_BYTES = 64 << 20  # of its disk that the keeper leaves free, since the kubelet evicts whoever fills it
# Only so that a worker is not the first to be evicted: it has its node for itself by anti-affinity.
CPU_REQUEST, MEMORY_REQUEST = "500m", "512Mi"

# The ranks of a catalogue task run the image's code, whatever its working directory and the home folder hold.
INSTALLED_CODE_ONLY = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}

# In the order in which they are created. The Job comes first because the others are owned by it.
TEMPLATES = ("job", "configmap", "service", "networkpolicy", "provisioning", "keeper")

# Nodes that a run measures on are not taken away to save money.
SAFE_TO_EVICT = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi|e[0-9]+)?")
_TOLERATION = re.compile(
    r"(?P<key>[^=:\s]+)(=(?P<value>[^=:\s]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)


def manifests(spec: RunSpec, namespace: str) -> tuple[dict[str, Any], ...]:
    """Job, ConfigMap, Service, NetworkPolicy, keeper's Job. Raises UsageError for what a cluster would refuse."""
    import templates

    values = _values(spec, spec.kubernetes.namespace or namespace)
    folder = Path(spec.kubernetes.template_dir) if spec.kubernetes.template_dir else None
    try:
        return tuple(
            document
            for kind in TEMPLATES
            if _is_wanted(kind, spec)
            for document in templates.documents(f"kubernetes/{kind}.yaml.j2", values, folder)
        )
    except templates.TemplateError as error:
        raise UsageError(f"A template of the run's objects is wrong: {error}") from None


def _is_wanted(kind: str, spec: RunSpec) -> bool:
    options = spec.kubernetes
    # Kueue books machines itself, for the runs of its queues.
    optional = {
        "keeper": has_keeper(spec),
        "networkpolicy": options.network_policy,
        "provisioning": options.provisioning_class is not None and options.queue is None,
    }
    return optional.get(kind, True)


def spec_of(job: Mapping[str, Any]) -> RunSpec:
    """The spec that a Job of ours was made from. Raises UsageError if it holds none."""
    metadata = job.get("metadata", {})
    try:
        document = json.loads(metadata["annotations"][SPEC_ANNOTATION])
    except (KeyError, ValueError, TypeError):
        raise UsageError(f'The Job "{metadata.get("name")}" does not say which run it is.') from None
    return RunSpec.from_dict(document)


def has_keeper(spec: RunSpec) -> bool:
    """Whether the run has a keeper, a pod that has its results after its workers have ended."""
    return spec.kubernetes.keep_seconds > 0


def keeper_name(run_name: str) -> str:
    """The name of the pod that keeps a run's results after its workers have ended."""
    return f"{run_name}-{KEEPER}"


def is_keeper(item: Mapping[str, Any]) -> bool:
    """Whether a Job or pod is a run's keeper."""
    return (item.get("metadata", {}).get("labels") or {}).get(ROLE_LABEL) == KEEPER


def file_name(document: Mapping[str, Any]) -> str:
    """Under which a document is kept in the archive's manifests/."""
    return f"{KEEPER if is_keeper(document) else document['kind'].lower()}.yaml"


def holders(spec: RunSpec) -> tuple[int, ...]:
    """The workers that hold their results: of those that run the command."""
    return tuple(range(spec.workers)) if spec.kubernetes.collect == "all" and spec.run_on_all else (0,)


def _values(spec: RunSpec, namespace: str) -> dict[str, object]:
    import templates

    options = spec.kubernetes
    _check(spec)
    selector = {RUN_LABEL: spec.name}
    labels = {**selector, MANAGED_LABEL: "mlbench"}
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    hold = max(0, options.hold_seconds)
    # Only a last resort: so long the workers may wait to be started, so long they may run, and so long one holds its
    # results. Each of them keeps its own deadline.
    deadline = 2 * math.ceil(spec.timeout) + hold + DEADLINE_MARGIN
    keep = max(0, options.keep_seconds)
    return {
        "name": spec.name,
        "namespace": namespace,
        "labels": labels,
        "job_labels": {**labels, HASH_LABEL: spec.hash, **queue},
        "selector": selector,
        "worker_labels": {**options.pod_labels, **labels, ROLE_LABEL: WORKER},
        "worker_annotations": {**SAFE_TO_EVICT, **_booking(spec), **options.pod_annotations},
        "priority_class": options.priority_class,
        "scheduler": options.scheduler,
        "worker_selector": {**selector, ROLE_LABEL: WORKER},
        "annotations": {SPEC_ANNOTATION: canonical_json(spec.to_dict()).decode(), **_booking_of_queue(spec, deadline)},
        "provisioning_class": options.provisioning_class,
        "pods": spec.unit_count,
        "run_on_all": spec.run_on_all,
        "active_deadline_seconds": deadline,
        "booked_seconds": min(deadline, MAX_BOOKED_SECONDS),
        "ttl_seconds": max(TTL_SECONDS, keep + 86400),
        "grace_seconds": GRACE_SECONDS,
        "host_network": options.host_network,
        "pull_secret": options.pull_secret,
        "env_secret": options.env_secret,
        "data_claim": options.data_claim,
        "data_dir": spec.data_dir,
        "node_selector": dict(options.node_selector),
        "tolerations": _tolerations(spec),
        "anti_affinity": _anti_affinity(spec, selector),
        "pod_security": _pod_security(spec),
        "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if _pins_memory(spec) else {})},
        "read_only_root": not options.writable_root,
        "egress": options.egress,
        "image": spec.image,
        "arguments": [_literal(argument) for argument in spec.argv],
        "environment": {key: _literal(value) for key, value in _environment(spec).items()},
        "requests": _requests(spec),
        "limits": _limits(spec),
        "shm": options.shm,
        "worker_script": (templates.FOLDER / "kubernetes" / "worker.sh").read_text("utf-8"),
        "keeper_script": (templates.FOLDER / "kubernetes" / "keeper.py").read_text("utf-8"),
        "keeper_name": keeper_name(spec.name),
        "keeper_labels": {**labels, ROLE_LABEL: KEEPER},
        "keeper_port": KEEPER_PORT,
        "keeper_deadline_seconds": deadline + keep + (KEEPER_QUEUE_SECONDS if options.queue else 0),
        "keeper_tolerations": [_toleration(text, options) for text in options.tolerations],
        "keeper_bytes": max(0, int(quantity(options.keep_storage)) - KEEPER_SPARE_BYTES),
        "keep_seconds": keep,
        "keep_storage": options.keep_storage,
    }


def _booking(spec: RunSpec) -> dict[str, str]:
    """The annotations by which pods take the machines that were booked for their run."""
    options = spec.kubernetes
    if options.provisioning_class is None or options.queue:
        return {}
    return {
        "autoscaling.x-k8s.io/consume-provisioning-request": spec.name,
        "autoscaling.x-k8s.io/provisioning-class-name": options.provisioning_class,
    }


def _booking_of_queue(spec: RunSpec, seconds: int) -> dict[str, str]:
    """What Kueue puts into the request by which it books machines: how long they are needed."""
    if spec.kubernetes.provisioning_class is None or not spec.kubernetes.queue:
        return {}
    return {"provreq.kueue.x-k8s.io/maxRunDurationSeconds": str(min(seconds, MAX_BOOKED_SECONDS))}


def _check(spec: RunSpec) -> None:
    options = spec.kubernetes
    if not spec.image:
        raise UsageError("The run names no container image.", hint="Give one with --image.")
    if options.collect not in ("rank0", "all"):
        raise UsageError(f'"{options.collect}" is neither rank0 nor all.', hint="--collect rank0")
    foreign = [name for name in options.env if name in CODE_VARIABLES]
    if foreign and spec.runs_task_program:
        raise UsageError(
            f"--env {foreign[0]}: a task of the catalogue runs the code of its image and no other.",
            hint="Leave it out, or run a command of your own with --command.",
        )
    quantities = (("--memory", options.memory), ("--shm", options.shm), ("--keep-storage", options.keep_storage))
    for flag, amount in quantities:
        if amount is not None and not _QUANTITY.fullmatch(amount):
            raise UsageError(f'{flag} "{amount}" is not a quantity of Kubernetes.', hint=f"For example {flag} 8Gi.")
    if has_keeper(spec) and quantity(options.keep_storage) <= KEEPER_SPARE_BYTES:
        raise UsageError(
            f"--keep-storage {options.keep_storage}: it must be above {KEEPER_SPARE_BYTES >> 20} MiB.",
            hint="For example --keep-storage 10Gi; --keep 0 does without a keeper.",
        )
    if not 0 <= options.keep_seconds <= MAX_TIMEOUT:
        raise UsageError(f"--keep: {options.keep_seconds} seconds; the most is 30 days.")
    if not 0 <= options.run_as_user < 2**31:
        raise UsageError(f"--run-as-user {options.run_as_user}: the number must be from 0 to {2**31 - 1}.")
    if len(canonical_json(spec.to_dict())) > ANNOTATION_BYTES:
        raise UsageError("The run's command, parameters and environment are too long to be kept in the cluster.")
    if len(_hosts(spec)) > HOSTS_BYTES:
        raise UsageError(
            f"The host names of {spec.workers} workers do not fit into one variable.", hint="Choose a shorter run name."
        )


def _environment(spec: RunSpec) -> dict[str, str]:
    """Defaults, then what the user gave, then the contract, which nothing overrides. Ranks are added by worker.sh."""
    options = spec.kubernetes
    return {
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "XDG_CACHE_HOME": "/tmp/.cache",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/.cache/inductor",
        "TRITON_CACHE_DIR": "/tmp/.cache/triton",
        "PYTHONUNBUFFERED": "1",
        **_threads(spec),
        **_fabric_environment(spec),
        **options.env,
        **(INSTALLED_CODE_ONLY if spec.runs_task_program else {}),
        **contract_environment(spec, _hosts(spec), f"{spec.name}-0.{spec.name}", str(_port(spec))),
        # Read by worker.sh only.
        "MLBENCH_WORK_DIR": WORK_DIR,
        "MLBENCH_WORKERS": str(spec.workers),
        "MLBENCH_RUN_ON_ALL": "1" if spec.run_on_all else "0",
        "MLBENCH_COLLECT": "all" if len(holders(spec)) > 1 else "rank0",
        "MLBENCH_HOLD": str(max(0, options.hold_seconds)),
        "MLBENCH_TIMEOUT": str(math.ceil(spec.timeout)),
        **({"MLBENCH_KEEPER": f"{keeper_name(spec.name)}.{spec.name}:{KEEPER_PORT}"} if has_keeper(spec) else {}),
    }


def _fabric_environment(spec: RunSpec) -> dict[str, str]:
    """What libfabric and NCCL need to know if the workers have EFA cards. Source: awsome-distributed-ai."""
    if EFA not in spec.kubernetes.devices:
        return {}
    return {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1", "NCCL_SOCKET_IFNAME": "^docker,lo,veth"}


def _threads(spec: RunSpec) -> dict[str, str]:
    """CPU limits are left off because they throttle; so each process is told how many threads its share allows."""
    if spec.cpus is None:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, int(spec.cpus / spec.processes_per_worker)))}


def _hosts(spec: RunSpec) -> str:
    return ",".join(f"{spec.name}-{index}.{spec.name}" for index in range(spec.workers))


def _port(spec: RunSpec) -> int:
    """On the host's network two runs may meet on one node: there the port depends on the spec."""
    return 20000 + int(spec.hash, 16) % 10000 if spec.kubernetes.host_network else PORT


def _requests(spec: RunSpec) -> dict[str, str]:
    return {
        "cpu": CPU_REQUEST if spec.cpus is None else f"{spec.cpus:g}",
        "memory": spec.kubernetes.memory or MEMORY_REQUEST,
    }


def _anti_affinity(spec: RunSpec, selector: Mapping[str, str]) -> list[dict[str, object]]:
    """The term that keeps workers off nodes of this run's other workers, of other runs' workers, or of both.

    One term at most: when a pod ends, the scheduler of Kubernetes 1.34 looks again at once only at waiting pods all of
    whose terms match it, at others after five minutes.
    """
    options, workers = spec.kubernetes, {MANAGED_LABEL: "mlbench", ROLE_LABEL: WORKER}
    if options.share_nodes:
        term: dict[str, Any] = {"labelSelector": {"matchLabels": {**workers, **selector}}}
        return [{"topologyKey": HOST, **term}] if options.spread else []
    others = [{"key": RUN_LABEL, "operator": "NotIn", "values": [spec.name]}]
    expressions = {} if options.spread else {"matchExpressions": others}
    return [{"topologyKey": HOST, "namespaceSelector": {}, "labelSelector": {"matchLabels": workers, **expressions}}]


def _pod_security(spec: RunSpec) -> dict[str, object]:
    user = spec.kubernetes.run_as_user
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _pins_memory(spec: RunSpec) -> bool:
    """Whether a worker has network cards that read and write its memory, which it has to lock for them."""
    return EFA in spec.kubernetes.devices


def _limits(spec: RunSpec) -> dict[str, str]:
    gpus = {"nvidia.com/gpu": str(spec.gpus_per_worker)} if spec.gpus_per_worker else {}
    return {**({"memory": spec.kubernetes.memory} if spec.kubernetes.memory else {}), **gpus, **spec.kubernetes.devices}


def _tolerations(spec: RunSpec) -> list[dict[str, Any]]:
    # A lost node ends the run after 30 s instead of five minutes.
    lost = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
        for key, seconds in (("not-ready", NODE_LOSS_SECONDS), ("unreachable", NODE_LOSS_SECONDS))
    ]
    gpu = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if spec.gpus_per_worker else []
    return [*lost, *gpu, *(_toleration(text, spec.kubernetes) for text in spec.kubernetes.tolerations)]


def _toleration(text: str, options: KubernetesOptions) -> dict[str, Any]:
    match = _TOLERATION.fullmatch(text)
    if match is None:
        raise UsageError(
            f'The toleration "{text}" is not of the form KEY[=VALUE][:EFFECT].', hint="For example gpu=yes:NoSchedule."
        )
    given = {"effect": match["effect"]} if match["effect"] else {}
    if match["value"] is None:
        return {"key": match["key"], "operator": "Exists", **given}
    return {"key": match["key"], "operator": "Equal", "value": match["value"], **given}


def _literal(text: str) -> str:
    """Kubernetes replaces $(NAME) in arguments and variables; what a user wrote stays as it is."""
    return text.replace("$", "$$")
