"""RunSpec -> the Kubernetes objects of a run. Pure: no network, no clock, no random; same spec, same bytes."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.isolation import CODE_VARIABLES
from mlbench_cli.spec import KubernetesOptions, RunSpec, canonical_json

RUN_LABEL = "mlbench/run"
HASH_LABEL = "mlbench/spec-hash"
MANAGED_LABEL = "app.kubernetes.io/managed-by"
SPEC_ANNOTATION = "mlbench/spec"
STOPPED_ANNOTATION = "mlbench/stopped"  # "WORD TIME": how the run ended, a word of Observation.ended
FETCHED_ANNOTATION = "mlbench/fetched"

CONTAINER = "main"
WORK_DIR = "/results"
PORT = 29500
GRACE_SECONDS = 60  # the command has 10 of them to end; in the rest a client can still bring the results home
TTL_SECONDS = 7 * 86400
DEADLINE_MARGIN = 120
NODE_LOSS_SECONDS = 30
HOSTS_BYTES = 120_000  # one environment variable holds at most 128 KiB
ANNOTATION_BYTES = 200_000

# The ranks of a catalogue task run the image's code, whatever its working directory and the home folder hold.
INSTALLED_CODE_ONLY = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}

# In the order in which they are created. The Job comes first because the others are owned by it.
TEMPLATES = ("job", "configmap", "service", "networkpolicy")

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi|e[0-9]+)?")
_TOLERATION = re.compile(
    r"(?P<key>[^=:\s]+)(=(?P<value>[^=:\s]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)


def manifests(spec: RunSpec, namespace: str) -> tuple[dict[str, Any], ...]:
    """Job, ConfigMap, Service and NetworkPolicy of the run. Raises UsageError for what a cluster would refuse."""
    import templates

    values = _values(spec, spec.kubernetes.namespace or namespace)
    folder = Path(spec.kubernetes.template_dir) if spec.kubernetes.template_dir else None
    try:
        return tuple(
            document
            for kind in TEMPLATES
            for document in templates.documents(f"kubernetes/{kind}.yaml.j2", values, folder)
        )
    except templates.TemplateError as error:
        raise UsageError(f"A template of the run's objects is wrong: {error}") from None


def spec_of(job: Mapping[str, Any]) -> RunSpec:
    """The spec that a Job of ours was made from. Raises UsageError where it holds none."""
    metadata = job.get("metadata", {})
    try:
        document = json.loads(metadata["annotations"][SPEC_ANNOTATION])
    except (KeyError, ValueError, TypeError):
        raise UsageError(f'The Job "{metadata.get("name")}" does not say which run it is.') from None
    return RunSpec.from_dict(document)


def holders(spec: RunSpec) -> tuple[int, ...]:
    """The workers that hold their results: of those that run the command."""
    return tuple(range(spec.workers)) if spec.kubernetes.collect == "all" and spec.run_on_all else (0,)


def _values(spec: RunSpec, namespace: str) -> dict[str, Any]:
    import templates

    options = spec.kubernetes
    _check(spec)
    selector = {RUN_LABEL: spec.name}
    labels = {**selector, MANAGED_LABEL: "mlbench"}
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    hold = max(0, options.hold_seconds)
    return {
        "name": spec.name,
        "namespace": namespace,
        "labels": labels,
        "job_labels": {**labels, HASH_LABEL: spec.hash, **queue},
        "selector": selector,
        "annotations": {SPEC_ANNOTATION: canonical_json(spec.to_dict()).decode()},
        "workers": spec.workers,
        "run_on_all": spec.run_on_all,
        # Only a last resort: so long the workers may wait to be started, so long they may run, and so long one holds
        # its results. Each of them keeps its own deadline.
        "active_deadline_seconds": 2 * math.ceil(spec.timeout) + hold + DEADLINE_MARGIN,
        "ttl_seconds": TTL_SECONDS,
        "grace_seconds": GRACE_SECONDS,
        "host_network": options.host_network,
        "pull_secret": options.pull_secret,
        "env_secret": options.env_secret,
        "data_claim": options.data_claim,
        "data_dir": spec.data_dir,
        "node_selector": dict(options.node_selector),
        "tolerations": _tolerations(spec),
        "spread": options.spread,
        "image": spec.image,
        "arguments": [_literal(argument) for argument in spec.argv],
        "environment": {key: _literal(value) for key, value in _environment(spec).items()},
        "requests": _requests(spec),
        "limits": _limits(spec),
        "shm": options.shm,
        "worker_script": (templates.FOLDER / "kubernetes" / "worker.sh").read_text("utf-8"),
    }


def _check(spec: RunSpec) -> None:
    options = spec.kubernetes
    if not spec.image:
        raise UsageError("The run names no container image.", hint="Give one with --image.")
    if options.collect not in ("rank0", "all"):
        raise UsageError(f'"{options.collect}" is neither rank0 nor all.', hint="--collect rank0")
    for flag, quantity in (("--memory", options.memory), ("--shm", options.shm)):
        if quantity is not None and not _QUANTITY.fullmatch(quantity):
            raise UsageError(f'{flag} "{quantity}" is not a quantity of Kubernetes.', hint=f"For example {flag} 8Gi.")
    foreign = [name for name in options.env if name in CODE_VARIABLES]
    if foreign and spec.runs_task_program:
        raise UsageError(
            f"--env {foreign[0]}: a task of the catalogue runs the code of its image and no other.",
            hint="Leave it out, or run a command of your own with --command.",
        )
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
        **options.env,
        **(INSTALLED_CODE_ONLY if spec.runs_task_program else {}),
        "MASTER_ADDR": f"{spec.name}-0.{spec.name}",
        "MASTER_PORT": str(_port(spec)),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.processes_per_worker),
        "MLBENCH_RUN_ID": spec.name,
        "MLBENCH_BACKEND": spec.backend,
        "MLBENCH_HOSTS": _hosts(spec),
        "MLBENCH_DEVICE": spec.device,
        "MLBENCH_GOAL": spec.goal,
        "MLBENCH_DATA_DIR": spec.data_dir or "",
        "MLBENCH_SEED": str(spec.seed),
        "MLBENCH_PARAMETERS": canonical_json(spec.parameters).decode(),
        # Read by worker.sh only.
        "MLBENCH_WORK_DIR": WORK_DIR,
        "MLBENCH_WORKERS": str(spec.workers),
        "MLBENCH_RUN_ON_ALL": "1" if spec.run_on_all else "0",
        "MLBENCH_COLLECT": "all" if len(holders(spec)) > 1 else "rank0",
        "MLBENCH_HOLD": str(max(0, options.hold_seconds)),
        "MLBENCH_TIMEOUT": str(math.ceil(spec.timeout)),
    }


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
    cpu = {"cpu": f"{spec.cpus:g}"} if spec.cpus is not None else {}
    return {**cpu, **({"memory": spec.kubernetes.memory} if spec.kubernetes.memory else {})}


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
