"""Resolve a request to run specs: Request + Cluster -> RunSpec. Pure, except for examining this machine.

Invalid combinations are rejected here, before anything is touched, with the allowed and the nearest values.
"""

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli import __version__
from mlbench_cli.agent.machine import visible_gpus
from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.model.cluster_details import AMD_GPU, ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import CUSTOM, DEFAULT_TIMEOUT, MAX_TIMEOUT, OPEN, OWN_PRICE, SEED, RunSpec, check_name
from mlbench_cli.runs import fault_options
from mlbench_cli.runs.fault_options import check_faults, resolve_faults
from mlbench_cli.runs.kubernetes_options import (
    check_mount_point,
    gpus_of_machine,
    resolve_kubernetes,
)
from mlbench_cli.runs.methods import check_method, resolve_method, split_set
from mlbench_cli.runs.own_command import TIMEOUT, check_scripts, check_scripts_of_pods, split_command
from mlbench_cli.runs.preflight import (
    IN_PUBLIC_IMAGE,
    check_network,
    check_pinning,
    check_run,
    find_missing_package,
    resolve_network,
)
from mlbench_cli.runs.request import KUBERNETES, OPTIONS, Request, check_environment, flag, parse_duration
from mlbench_cli.tasks.catalog import BACKENDS, BUDGET, Task, load_catalog, load_task, short, use_task_folder
from mlbench_cli.tasks.command_code import collect_code, reads_parameters
from mlbench_cli.tasks.images import LOCAL_REGISTRY, name_image, name_released_image
from mlbench_cli.util.masking import refuse_secrets
from mlbench_cli.util.text import counted, one_line, shorten
from providers.pins import require_pin
from task_images.cores import effective_cores

MAX_LOCAL_RANKS = 64
_DOCKER_HUB, _GOOGLES_MIRROR = "docker.io/", "mirror.gcr.io/"
_OWN_IMAGE = (
    "Name one with --image, or a registry with --registry ghcr.io/me; "
    "mlbench images push --registry ghcr.io/me   builds and pushes the images"
)
BLACKWELL = ("b200", "b300", "rtx-pro-6000", "p6-", "g7", "a4-", "a4x-", "g4-")  # GPUs and machines that need CUDA 12.8
MAX_REPEATS = 1000
MACHINE_OPTIONS = ("image", "env")  # cluster options that also apply without Kubernetes
# A cluster's record says only that its timings are meaningless; this text, in the run's spec, says why.
FUNCTIONAL_ONLY = "all nodes of the cluster are containers on one machine"
_BACKEND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,39}")


class Machine(Struct, frozen=True):
    """Resources of the local engine: usable cores (respecting CPU quotas), GPUs, and threads per rank from the user's
    OMP_NUM_THREADS.
    """

    cores: int
    gpus: int
    threads: int | None = None


def local_machine() -> Machine:
    """This machine, examined without importing a framework: its GPUs are files."""
    gpus = sum(device.strip() not in ("", "-1") for device in visible_gpus(os.environ))
    threads = re.match(r"[1-9]\d{0,3}(?!\d)", os.environ.get("OMP_NUM_THREADS", "").strip())  # "4" or "4,2"
    return Machine(effective_cores(), gpus, int(threads[0]) if threads else None)


def resolve(
    request: Request, cluster: Cluster, machine: Machine | None = None, tasks: Mapping[str, Task] | None = None
) -> tuple[RunSpec, ...]:
    """One spec per number of workers, in the order given. Raises UsageError or NotFoundError for what cannot work.

    `machine` describes the local cluster, `tasks` is the catalog; None means this machine and the shipped tasks.
    """
    check_names(request)
    if request.task_path is not None:
        use_task_folder(request.task_path)
    engine = cluster.engine
    if engine == "local":
        request = _on_this_machine(request)
    elif engine == "kubernetes":
        request = _on_kubernetes(request)
    else:
        request = _on_machines(request, engine)
    common = {**_program(request, cluster, tasks), **_placement(request, cluster)}
    if engine == "kubernetes":
        common["kubernetes"] = resolve_kubernetes(request, cluster)
    elif engine == "local":
        _check_data(request, common, tasks)
        machine = machine or local_machine()
        if common["cpus"] is None:
            common["cpus"] = _equal_cpus(request.workers, common["processes_per_worker"], machine)
    price = _own_price(request)
    specs = tuple(_spec(size, cluster, common, price) for size in sizes(request))
    for spec in specs:
        _check(spec, cluster, machine)
        if spec.preset not in (CUSTOM, OPEN):
            check_run(load_task(spec.task, tasks), spec)
    return specs


def _on_this_machine(request: Request) -> Request:
    """The request with the absolute path of its data folder. Raises UsageError for options that only clusters use,
    NotFoundError for a missing folder."""
    _refuse_cluster_options(request, "on the local cluster")
    if request.data_dir is None:
        return request
    path = os.path.expanduser(request.data_dir)  # no shell reads a file of runs
    if "\0" in path or not Path(path).is_dir():
        is_file = "\0" not in path and Path(path).is_file()
        what = f"{shorten(path)} is a file" if is_file else f"the folder {shorten(path)} does not exist"
        raise NotFoundError(f"--data-dir: {what}.")
    return replace(request, data_dir=os.path.abspath(path))


def _on_machines(request: Request, engine: str) -> Request:
    """The request with its data folder checked. Raises UsageError for options that only Kubernetes uses."""
    _refuse_cluster_options(request, f"on {engine}", MACHINE_OPTIONS)
    if request.share_machine is not None and engine == "slurm":
        raise UsageError(
            "--share-machine does not apply to Slurm, which allocates or shares nodes itself.",
            hint="Remove it; to share nodes, attach the cluster with --share-nodes.",
        )
    return replace(request, data_dir=check_machine_folder(request.data_dir))


def _on_kubernetes(request: Request) -> Request:
    """The request with the folder at which its data are mounted, if it has any."""
    if request.share_machine is not None:
        raise UsageError("--share-machine applies only to this machine and hosts.")
    if request.data_claim or request.data_dir:
        return replace(request, data_dir=check_mount_point(request.data_dir or "/data"))
    return request


def check_names(request: Request, taken: Collection[str] = ()) -> None:
    """Reject a request whose runs cannot be named; `taken` are the names of other runs."""
    if request.name is None:
        raise UsageError("The run has no name.", hint="mlbench run NAME 1 2 4 --task TASK")
    if not request.workers:
        raise UsageError("No number of workers given.", hint=f"mlbench run {request.name} 1 2 4 ...")
    if request.repeat is not None and not 1 <= request.repeat <= MAX_REPEATS:
        raise UsageError(f"--repeat {request.repeat}: the number must be from 1 to {MAX_REPEATS}.")
    for size in sizes(request):
        check_name(size.name)
        if request.workers.count(size.workers) > 1:
            hint = "To repeat a size, use --repeat 3"
            raise UsageError(
                f"{size.workers} workers are given twice; both runs would be named {size.name}.", hint=hint
            )
        if size.name in taken:
            raise UsageError(
                f'There is already a run "{size.name}".', hint=f"Choose another name, or: mlbench delete {size.name}"
            )


class Size(Struct, frozen=True):
    """The settings of one run of a request that differ from its other runs."""

    name: str
    workers: int
    seed: int


def sizes(request: Request) -> list[Size]:
    """The runs of a request in order: all sizes once, then all again, so that a drift of the machine affects all sizes
    alike.
    """
    seed = SEED if request.seed is None else request.seed
    if request.repeat in (None, 1):
        return [Size(f"{request.name}-{workers}", workers, seed) for workers in request.workers]
    return [
        Size(f"{request.name}-{workers}-r{number + 1}", workers, seed + number)
        for number in range(request.repeat or 1)
        for workers in request.workers
    ]


def _own_price(request: Request) -> float | None:
    """The user's price of a worker per hour. Raises UsageError."""
    if request.worker_hour is None:
        return None
    try:
        price = float(request.worker_hour)
    except ValueError:
        price = math.nan
    if not 0 <= price < 1e6:
        raise UsageError(
            f"run.worker_hour={one_line(request.worker_hour, 60)} is not a price in US dollars, e.g. 0.05."
        )
    return price


def _spec(size: Size, cluster: Cluster, common: Mapping[str, Any], price: float | None) -> RunSpec:
    """`price` is the user's price of a worker per hour, if given."""
    own_price = {} if price is None else {"price": {**OWN_PRICE, "per_hour": price * size.workers}}
    facts: dict[str, Any] = {**_cluster_facts(cluster), **own_price, **common}
    return RunSpec(name=size.name, workers=size.workers, seed=size.seed, **facts)


def _cluster_facts(cluster: Cluster) -> dict[str, Any]:
    """The fields of RunSpec about the cluster itself."""
    details = ClusterDetails.of(cluster)
    return {
        "cluster": cluster.name,
        "engine": cluster.engine,
        "price": _price(cluster),
        # Such as "gke/n1-standard-4"; the provider alone if the machine type is not known.
        "cluster_kind": "/".join(str(part) for part in (cluster.provider, details.machine_type) if part),
        "functional_only": FUNCTIONAL_ONLY if details.functional_only else None,
    }


def move(spec: RunSpec, cluster: Cluster, data_dir: str | None) -> RunSpec:
    """The same run on another cluster: with that cluster's engine, image, options and price.

    `data_dir` is where its data are there. Raises UsageError if the cluster cannot run it.
    """
    engine = cluster.engine
    options = resolve_kubernetes(Request(), cluster) if engine == "kubernetes" else None
    moved = replace(
        spec,
        image=task_image(load_task(spec.task), cluster) if engine == "kubernetes" else None,
        data_dir=data_dir,
        env={},
        nodes=(),
        task_path=load_task(spec.task).search_path if engine == "local" else None,
        kubernetes=options,
        **_cluster_facts(cluster),
    )
    _check(moved, cluster, None)
    return moved


def _check(spec: RunSpec, cluster: Cluster, machine: Machine | None) -> None:
    """Raise UsageError for a run that cannot work on the cluster. `machine` is this machine, if it is to be checked."""
    is_local = cluster.provider == "local"
    if spec.pin:
        check_pinning(spec, cluster, machine.cores if machine else None)
    if machine and is_local:
        check_local(spec, machine)
    elif not is_local:
        _check_gpus(spec, cluster)
    if spec.network is not None:
        check_network(spec, spec.network)
    if spec.method:
        check_method(spec)
    if spec.has_faults:
        check_faults(spec)


def _check_gpus(spec: RunSpec, cluster: Cluster) -> None:
    """Raise UsageError for a run whose workers would never start on the machines of the cluster, which may cost money
    by then."""
    details = ClusterDetails.of(cluster)
    if spec.device == "gpu" and details.gpus_per_node == 0:
        hint = "Leave out --gpu, or create a cluster with GPUs: --gpu-type TYPE"
        raise UsageError(f'The cluster "{cluster.name}" has no GPUs.', hint=hint)
    if not details.node_selector or not details.gpus_per_node:
        return  # only of machines that mlbench has made it is known what else there may be
    if spec.device == "cpu" and "tolerations" not in spec.pods.pod_patch.get("spec", {}):
        raise UsageError(
            f'The workers of the cluster "{cluster.name}" have GPUs, and are kept for runs that use them.',
            hint="Add --gpu, or use machines without GPUs.",
        )
    if spec.gpus_per_worker > details.gpus_per_node:
        raise UsageError(
            f'Each machine of the cluster "{cluster.name}" has {counted(details.gpus_per_node, "GPU")}; a worker on '
            f"one machine cannot have {spec.gpus_per_worker}.",
            hint=f"--gpus-per-worker {details.gpus_per_node}, or larger machines",
        )


# --- what runs: task or command, its parameters, its backend --------------------------------------------------------


def _program(request: Request, cluster: Cluster, tasks: Mapping[str, Task] | None) -> dict[str, object]:
    """The fields of RunSpec about the program."""
    if request.image is not None and cluster.provider in ("local", "hosts"):
        place = "the local cluster" if cluster.provider == "local" else "hosts"
        raise UsageError(
            f"--image does not apply to {place}, which runs processes.",
            hint="Remove it, or choose a cluster with --cluster.",
        )
    if request.task is not None and request.command is None:
        task = load_task(request.task, tasks)
        return {**_task_program(request, task, cluster, tasks), "image": _image(request, task, cluster)}
    if request.command is None:
        missing = "--task, or --command" if request.image is None else "--command for the image"
        raise UsageError(
            f"Nothing to run: {missing} is missing.",
            hint="--task NAME (see: mlbench tasks), or --command 'python train.py'",
        )
    if request.task is not None:
        task = load_task(request.task, tasks)
        program = _open_program(request, task, _custom_program(request, request.command, cluster))
        return {**program, "image": _image(request, task, cluster)}
    program = _custom_program(request, request.command, cluster)
    return {**program, "image": _image(request, None, cluster)}


def _task_program(
    request: Request, task: Task, cluster: Cluster, tasks: Mapping[str, Task] | None
) -> dict[str, object]:
    device = "gpu" if request.gpu else "cpu"
    if device not in task.devices:
        raise UsageError(f'The task "{task.name}" runs on {" and ".join(task.devices)} only, not on {device}.')
    if request.light and task.goal is None:
        raise UsageError(f'The task "{task.name}" has no goal, so --light does not apply.', hint="Leave out --light.")
    if request.run_on_all is False:
        raise UsageError("run.run_on_all=no works only with your own command; tasks always run on all workers.")
    parameters = task.resolve(request.preset or "spec", {**split_set(request.set)[0], **_budget(request, task, tasks)})
    return {
        "task": task.name,
        "preset": request.preset or "spec",
        "argv": task.command,
        "task_path": None if cluster.engine == "kubernetes" else task.search_path,
        "parameters": parameters,
        "method": resolve_method(request, task, parameters, tasks),
        "backend": _task_backend(request, task, device),
        "absent_seconds": None if task.absent is None else parse_duration(task.absent, f"absent of {task.name}"),
    }


def _budget(request: Request, task: Task, tasks: Mapping[str, Task] | None) -> dict[str, float]:
    """The task's parameter that run.budget sets."""
    if request.budget is None:
        return {}
    if BUDGET not in task.parameters:
        known = load_catalog() if tasks is None else tasks
        able = [other.name for other in known.values() if BUDGET in other.parameters]
        raise UsageError(
            f'The task "{task.name}" cannot train for a fixed time.',
            hint=f"Tasks that can: {', '.join(able)}. --timeout limits runs of any task.",
        )
    if BUDGET in request.set:
        raise UsageError(f"run.budget and --set {BUDGET} exclude each other.")
    seconds = parse_duration(request.budget, "run.budget")
    timeout = DEFAULT_TIMEOUT if request.timeout is None else parse_duration(request.timeout, "--timeout")
    if not 0 < seconds < MAX_TIMEOUT:
        raise UsageError(f"run.budget={shorten(request.budget)}: it must be above 0 and below 30 days.")
    if timeout <= seconds:
        raise UsageError(
            f"The timeout of {timeout:g} s would end the run before its budget of {seconds:g} s is used up.",
            hint="Use a longer --timeout, which must also cover start-up and loading data.",
        )
    return {BUDGET: seconds}


def _image(request: Request, task: Task | None, cluster: Cluster) -> str | None:
    """The image of the ranks; None if they are processes of the machines' own Python. `task`: None for a command."""
    if cluster.engine != "kubernetes":
        return request.image
    if task is None:
        image = request.image or _public_image("Your command", cluster, ClusterDetails.of(cluster))
    else:
        image = request.image or task_image(task, cluster, request.registry)
    backend = _asked_backend(request) or (task.backends[0] if task else "gloo")
    lacks = find_missing_package(backend, IN_PUBLIC_IMAGE)
    installs = lacks and task and any(package.startswith(lacks) for package in task.packages)
    if lacks and not installs and (task is None or task.origin is None) and is_public(image):
        raise UsageError(
            f"The backend {backend} needs {lacks}, which PyTorch's public image does not have.", hint=_OWN_IMAGE
        )
    return image


def task_image(task: Task, cluster: Cluster, registry: str | None = None) -> str:
    """The image of a task on a cluster of Kubernetes; `registry` is a prefix that goes before the cluster's own. Raises
    UsageError if no registry is known."""
    if task.origin is not None and "/" in task.image:  # a whole reference, since mlbench does not build it
        return task.image
    details = ClusterDetails.of(cluster)
    if registry:
        return name_image(registry, task.image, __version__)
    if details.registry:
        return name_image(details.registry, task.image, __version__, details.images)
    if (loaded := name_image(LOCAL_REGISTRY, task.image, __version__)) in details.options.get("load", ()):
        return loaded
    if released := name_released_image(task.image, __version__):
        return released
    return _public_image(task.name, cluster, details)


def _public_image(program: str, cluster: Cluster, details: ClusterDetails) -> str:
    """The public PyTorch image for the GPUs; workers install what the code of a task needs besides. Raises UsageError
    for processors without an image."""
    if details.arm:
        raise UsageError(
            f"{program} needs an image of its own on {cluster.name}, because PyTorch's public image is for x86 "
            "processors.",
            hint=_OWN_IMAGE,
        )
    if details.gpu_resource == AMD_GPU:
        part = "torch-rocm"
    else:
        is_blackwell = any(word in str(details.gpu or details.machine_type).lower() for word in BLACKWELL)
        part = "torch-blackwell" if is_blackwell else "torch"
    image = require_pin("images", part)
    # Docker Hub limits anonymous pulls of an address, and Google's machines have a mirror.
    return image.replace(_DOCKER_HUB, _GOOGLES_MIRROR, 1) if cluster.provider == "gke" else image


def public_images() -> list[str]:
    """The images of Docker Hub that tasks run in by default."""
    return [require_pin("images", part) for part in ("torch", "torch-blackwell", "torch-rocm")]


def is_public(image: str) -> bool:
    """Whether this is one of them, from Docker Hub or its mirror."""
    return image.replace(_GOOGLES_MIRROR, _DOCKER_HUB, 1) in public_images()


def brings_files(spec: RunSpec) -> bool:
    """Whether the run's pods get the files that its command names: with an image of the user's own, if asked to."""
    is_own = spec.engine == "kubernetes" and not spec.runs_task_program
    return is_own and (bool(spec.include_files) or is_public(spec.image or ""))


def _task_backend(request: Request, task: Task, device: str) -> str:
    backend = _asked_backend(request)
    if backend is None:
        return "nccl" if device == "gpu" and "nccl" in task.backends else task.backends[0]
    # Whether torch has a custom backend can only be known on the machine that runs the task.
    if backend in BACKENDS and backend not in task.backends:
        raise UsageError(f'The task "{task.name}" has no backend {backend}, only {", ".join(task.backends)}.')
    return _check_device(backend, request)


def _custom_program(request: Request, command: str, cluster: Cluster) -> dict[str, object]:
    if request.preset is not None:
        raise UsageError("--preset works only with tasks, not with your own command.")
    if any(given is not None for given in (request.method, request.method_path, request.servers)):
        raise UsageError("--method, --method-path and run.servers work only with tasks, not with your own command.")
    if request.budget is not None:
        raise UsageError(
            "run.budget works only with tasks; your own command decides when to end.",
            hint="--timeout limits any run.",
        )
    argv = split_command(command)
    refuse_secrets(argv, "--command")
    if cluster.provider == "local":
        check_scripts(argv)
    template, argv = argv, _use_settings(request, cluster, argv)
    if cluster.engine == "kubernetes" and request.image is None and request.task is None:
        check_scripts_of_pods(argv)
    _refuse_task_options(request)
    refuse_secrets([f"{key}={value}" for key, value in request.set.items()], "--set")
    backend = _check_device(_asked_backend(request) or "gloo", request)
    on_all = backend in ("gloo", "nccl", "grpc") if request.run_on_all is None else request.run_on_all
    return {
        "task": CUSTOM,
        "preset": CUSTOM,
        "argv": argv,
        "template": template if template != argv else (),
        "image": request.image,
        "parameters": {key: _plain_value(key, value) for key, value in request.set.items()},
        "include_files": request.include_files,
        "backend": backend,
        "run_on_all": on_all,
    }


def _use_settings(request: Request, cluster: Cluster, argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command with the values of --set in place of {KEY}. Raises UsageError for a setting that has no effect."""
    unused = []
    for key, value in request.set.items():
        mark = f"{{{key}}}"
        if key in ("goal_full", "goal_light") and request.task is not None:
            continue  # refused below, as fixed by the task
        if any(mark in word for word in argv):
            argv = tuple(word.replace(mark, str(value)) for word in argv)
        else:
            unused.append(key)
    reads = any("MLBENCH_PARAMETERS" in word for word in argv) or cluster.provider != "local"
    if unused and not reads and not reads_parameters(collect_code(argv, request.include_files)):
        key = unused[0]
        raise UsageError(
            f"--set {key} has no effect: the command has no {{{key}}}, and its files do not read MLBENCH_PARAMETERS.",
            hint=f"--command 'python train.py --{key} {{{key}}}' --set {key}={request.set[key]}",
        )
    return argv


def _refuse_task_options(request: Request) -> None:
    """Raise UsageError for options that only apply to tasks of mlbench."""
    for name in ("light", "detect"):
        if name == "light" and request.task is not None:
            continue  # the goal of that task
        if getattr(request, name):
            raise UsageError(
                f"{flag(name)} has no effect on your own command.",
                hint="Leave it out." if name == "light" else "Leave it out; --timeout ends a run that hangs.",
            )
    if request.checkpoint_every is not None and request.on_failure is None:
        raise UsageError("run.checkpoint_every needs --on-failure restart.", hint="Add --on-failure restart.")


def _open_program(request: Request, task: Task, program: dict[str, Any]) -> dict[str, Any]:
    """The user's own command, measured against the goal of a task."""
    if task.goal is None:
        raise UsageError(
            f'The task "{task.name}" has no goal to measure your own command against.',
            hint="Leave out --task.",
        )
    goals = {name: task.presets["spec"][name] for name in ("goal_full", "goal_light")}
    for name in goals:
        if name in request.set:
            raise UsageError(f"{name} is fixed by the task, because a result with another goal could not be compared.")
    return {**program, "task": task.name, "preset": OPEN, "parameters": {**program["parameters"], **goals}}


def _asked_backend(request: Request) -> str | None:
    """The backend's name without "custom:", in lower case if it is a known one."""
    asked = request.backend
    if request.custom_backend is not None:
        if asked not in (None, CUSTOM, f"{CUSTOM}:{request.custom_backend}"):
            raise UsageError(f"--backend {asked} and custom:{request.custom_backend} exclude each other.")
        return _custom_backend(request.custom_backend)
    if asked is None:
        return None
    if asked.lower() in BACKENDS:
        return asked.lower()
    if asked == CUSTOM:
        raise UsageError("--backend custom: the name is missing.", hint="--backend custom:NAME")
    if not asked.startswith(f"{CUSTOM}:"):
        known = [*BACKENDS, f"{CUSTOM}:NAME"]
        raise UsageError(
            f'There is no backend "{shorten(asked)}", only {", ".join(known)}.{did_you_mean(asked.lower(), known)}'
        )
    return _custom_backend(asked.removeprefix(f"{CUSTOM}:"))


def _check_device(backend: str, request: Request) -> str:
    if backend == "nccl" and not request.gpu:
        raise UsageError("The backend nccl works only on GPUs.", hint="Add --gpu, or choose --backend gloo.")
    return backend


def _custom_backend(name: str) -> str:
    if not _BACKEND.fullmatch(name):
        raise UsageError(f'The custom backend "{shorten(name)}" is not a word of letters, digits, "-", "_", ".", ":".')
    return name


def _plain_value(key: str, value: Any) -> Any:
    """A custom command's parameter: a text that is JSON stands for its value, any other text for itself."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
            json.dumps(parsed, allow_nan=False)
        except (ValueError, RecursionError):
            return value
        return parsed
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise UsageError(f'The parameter "{shorten(key)}" is {short(value)}, which JSON cannot hold.') from None


# --- cluster and engine -----------------------------------------------------------------------------------------------


def _placement(request: Request, cluster: Cluster) -> dict[str, Any]:
    """The fields of RunSpec about resources and time."""
    gpus = request.gpus_per_worker
    if gpus is not None and gpus < 1:
        raise UsageError(f"--gpus-per-worker {gpus}: the minimum is 1.", hint="Remove it to train on CPUs.")
    if gpus is not None and not request.gpu:
        raise UsageError("--gpus-per-worker needs --gpu.")
    if request.num_cpus is not None and request.num_cpus < 1:
        raise UsageError(f"--num-cpus {request.num_cpus}: the minimum is 1.")
    gpus = (gpus or gpus_of_machine(request, cluster)) if request.gpu else 0
    wants_faults = any(getattr(request, name) is not None for name in fault_options.OPTIONS)
    placement: dict[str, object] = {
        "device": "gpu" if request.gpu else "cpu",
        "goal": "light" if request.light else "full",
        "gpus_per_worker": gpus,
        "processes_per_worker": max(1, gpus) if request.processes_per_worker is None else request.processes_per_worker,
        "cpus": None if request.num_cpus is None else float(request.num_cpus),
        "data_dir": request.data_dir,
        "env": check_environment(request.env),
        "share_machine": bool(request.share_machine),
        "anonymous": bool(request.anonymous),
        "pin": bool(request.pin),
        "network": None if request.network is None else resolve_network(request, request.network),
        **(resolve_faults(request) if wants_faults else {}),
        "nodes": _nodes(request, cluster),
    }
    if request.absent is not None:
        placement["absent_seconds"] = parse_duration(request.absent, "run.absent")
    if request.timeout is not None:
        placement["timeout"] = parse_duration(request.timeout, "--timeout")
    elif request.command is not None:
        placement["timeout"] = TIMEOUT
    return placement


def _nodes(request: Request, cluster: Cluster) -> tuple[str, ...]:
    """The machines that the run must have. Raises UsageError, NotFoundError for unknown hosts."""
    if request.nodes is None:
        return ()
    if cluster.provider == "local":
        raise UsageError("run.nodes does not apply to this machine, which is one node.")
    if request.anonymous:
        raise UsageError(
            "run.nodes names machines, which an anonymous archive does not.", hint="Leave out --anonymous."
        )
    names = tuple(name.strip() for name in request.nodes.split(",") if name.strip())
    if any(workers != len(names) for workers in request.workers):
        raise UsageError(f"run.nodes names {counted(len(names), 'node')}: each worker needs one.")
    hosts = [str(host["name"]) for host in cluster.details.get("hosts") or ()]
    if unknown := [name for name in names if hosts and name not in hosts]:
        raise NotFoundError(
            f"The cluster {cluster.name} has no host {shorten(unknown[0])}.", hint=f"It has {shorten(', '.join(hosts))}"
        )
    return names


def _equal_cpus(sizes: Sequence[int], processes_per_worker: int, machine: Machine) -> float | None:
    """CPUs of each worker: the user's OMP_NUM_THREADS per rank, else an equal share of the cores in the largest run.

    The same for all sizes of a request; otherwise a single worker would get all cores, and each further worker would
    take some away. Also recorded for a single size, because runs are comparable only if it is equal.
    """
    if processes_per_worker < 1 or max(sizes) < 1:  # the spec rejects both, by name
        return None
    share = machine.threads or max(1, machine.cores // (max(sizes) * processes_per_worker))
    return float(share * processes_per_worker)


def check_local(spec: RunSpec, machine: Machine) -> None:
    """Raise UsageError for what this machine cannot run: too many ranks, or missing GPUs."""
    if spec.world_size > MAX_LOCAL_RANKS:
        raise UsageError(
            f"{spec.world_size} ranks on this machine of {machine.cores} cores: the local cluster "
            f"allows at most {MAX_LOCAL_RANKS}.",
            hint="Use fewer workers, or choose a cluster with --cluster.",
        )
    if spec.device == "gpu" and not machine.gpus:
        raise UsageError(
            "--gpu: this machine has no GPU (there is neither /dev/nvidia0 nor an AMD GPU at /dev/kfd).",
            hint="Remove --gpu, or choose a cluster with --cluster.",
        )
    if spec.backend == "nccl" and spec.world_size > machine.gpus:
        raise UsageError(
            f"The backend nccl needs one GPU per rank: {spec.world_size} ranks, but this machine has {machine.gpus}.",
            hint="Use fewer workers, or --backend gloo, whose ranks can share GPUs.",
        )


def _check_data(request: Request, common: Mapping[str, Any], tasks: Mapping[str, Task] | None) -> None:
    """Reject a task whose files are missing from the data folder, unless it downloads them itself."""
    if common["task"] == CUSTOM or common["preset"] == OPEN:
        return
    task = load_task(common["task"], tasks)
    if task.files is None or task.files.download or not task.files.are_read(common["parameters"]):
        return
    missing = task.files.list_missing(request.data_dir)
    if not missing:
        return
    place = f"in {request.data_dir}" if request.data_dir else "because no data folder was given"
    prepare = "" if task.origin else f"mlbench data prepare {task.name} --data-dir FOLDER, then "
    raise NotFoundError(
        f'The data of the task "{task.name}" are missing {place}: {", ".join(missing)}.',
        hint=f"{prepare}--data-dir FOLDER, or run without them: {task.files.instead}",
        details={"missing": missing},
    )


def check_machine_folder(path: str | None) -> str | None:
    """The normalized path of a data folder on the machines; None for None. Raises UsageError unless it is absolute."""
    if path is None:
        return None
    if not path.startswith("/") or "\0" in path or "\n" in path:
        raise UsageError(
            f'--data-dir "{shorten(path)}": on other machines the path must be absolute.',
            hint="Use a folder that exists on all machines.",
        )
    return os.path.normpath(path)


def _refuse_cluster_options(request: Request, place: str, allowed: Collection[str] = ()) -> None:
    for item in OPTIONS:
        if item.name in allowed or item.panel != KUBERNETES:
            continue
        if getattr(request, item.name) not in (None, (), {}):
            problem = f"{flag(item.name)} does not apply {place}."
            raise UsageError(problem, hint="Remove it, or choose a cluster with --cluster.")


def _price(cluster: Cluster) -> dict[str, Any]:
    """The price of the cluster, as planned from the price table when it was created. It is stored with the run."""
    plan = ClusterDetails.of(cluster).plan
    if not plan:
        return {}
    return {
        "per_hour": plan.get("price_per_hour"),
        "currency": plan.get("currency"),
        "source": plan.get("price_source"),
        "table": plan.get("price_table"),
    }
