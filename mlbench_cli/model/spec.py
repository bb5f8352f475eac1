"""RunSpec: everything that decides what a run does, frozen and validated."""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec import Struct, to_builtins

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.network import is_modeled, parse_network
from mlbench_cli.util.text import shorten

SPEC_VERSION = 2
# Kubernetes appends a suffix to pod names and a Service wants a DNS label that begins with a letter.
NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAME_LENGTH = 40
TASK_PATTERN = re.compile(r"\w[\w.-]*")  # of any language, as the names of packages are
TASK_BYTES = 200
_REPEAT = re.compile(r"(.+-\d+)-r\d+")
MAX_WORKERS = 4096
DEFAULT_TIMEOUT = 86400.0
MAX_TIMEOUT = 30 * 86400
DEVICES = ("cpu", "gpu")
GOALS = ("full", "light")
CUSTOM = "custom"  # the task and the preset of a run of the user's own command
OPEN = "open"  # the preset of a user's own command that is measured against a task's goal
SEED = 42
START_TIMEOUT = 1800
KEEP_SECONDS = 86400
MIN_KEEP_SECONDS = 600  # minimum time for which a run's head keeps the results
HOLD_SECONDS = 900  # how long a worker's pod tries to hand its results over to a head that does not answer
OWN_PRICE = {"currency": "USD", "source": "named by the user (--worker-hour)", "table": None}


def check_name(name: str, what: str = "run name") -> str:
    """`name` itself if it is a DNS label of at most 40 characters that begins with a letter, else UsageError."""
    if len(name) > NAME_LENGTH:
        raise UsageError(
            f'The {what} "{name[:NAME_LENGTH]}…" has {len(name)} characters, {NAME_LENGTH} are allowed.',
            hint="Choose a shorter name; the number of workers is appended to it.",
        )
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f'The {what} "{name}" is not a DNS label: only a-z, 0-9 and "-", beginning with a letter, '
            "ending with a letter or digit.",
            hint='For example "my-run".',
        )
    return name


def repeat_of(name: str) -> int:
    """The number of a repeat: 3 of "demo-2-r3", and 1 of any other name."""
    found = _REPEAT.fullmatch(name)
    return 1 if found is None else int(name.rpartition("-r")[2])


def common_name(name: str) -> str | None:
    """The name that repeats of a run share: "demo-2" of "demo-2-r3"; None for any other name."""
    found = _REPEAT.fullmatch(name)
    return found[1] if found else None


_QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:[KMGTP]i|[kMGTP])?")
_KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")


class KubernetesOptions(Struct, frozen=True):
    """Options that only the kubernetes engine uses. Quantities are Kubernetes' own strings ("8Gi")."""

    namespace: str | None = None  # None: the cluster's own
    memory: str | None = None
    shm: str = "1Gi"
    node_selector: Mapping[str, str] = {}
    tolerations: tuple[str, ...] = ()  # KEY[=VALUE][:EFFECT]
    pull_secret: str | None = None
    queue: str | None = None  # a Kueue local queue
    start_timeout: int = START_TIMEOUT  # seconds after its release in which all workers of the run must start
    keep_seconds: int = KEEP_SECONDS  # how long the run's head keeps the results, at least 10 minutes
    collect: str = "rank0"  # rank0 | all
    data_claim: str | None = None  # a persistent volume claim, mounted at data_dir
    registry: str | None = None  # prefix of catalog images
    spread: bool = True  # one worker per node
    share_nodes: bool = False  # may use nodes on which another run measures
    runtime_class: str | None = None  # RuntimeClass of pods with GPUs; None: the nodes' default
    gpu_resource: str | None = None  # Kubernetes' name of the machines' GPUs; None: NVIDIA's
    devices: Mapping[str, str] = {}  # besides GPUs, of each worker: resource and count
    pod_patch: Mapping[str, Any] = {}  # merged into the pods: metadata and spec
    provisioning_class: str | None = None  # by which the cluster books the machines of all workers at once
    fabric: Mapping[str, Any] = {}  # fast network of each machine: name and gbits, if it has one
    network_policy: bool = True  # False: the run's pods are reachable as the cluster has it

    def __post_init__(self) -> None:
        for flag, amount in (("--memory", self.memory), ("--shm", self.shm)):
            if amount is not None and not (amount.isascii() and _QUANTITY.fullmatch(amount)):
                raise UsageError(
                    f'{flag} "{shorten(amount)}" is not a Kubernetes quantity.', hint="Write 512Mi, 8Gi or 8G."
                )
        for name in ("namespace", "runtime_class", "pull_secret", "queue", "data_claim"):
            text = getattr(self, name)
            if text is not None and not _KUBERNETES_NAME.fullmatch(text):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f'{flag} "{shorten(text)}" is not a Kubernetes name (a-z, 0-9 and "-").')
        if self.collect not in ("rank0", "all"):
            raise UsageError(
                f'run.collect "{shorten(self.collect)}" is neither rank0 nor all.', hint="--set run.collect=rank0"
            )
        if not 0 <= self.keep_seconds <= MAX_TIMEOUT:
            raise UsageError(f"run.keep: {self.keep_seconds} seconds; the maximum is 30 days.")

    @property
    def has_rdma_devices(self) -> bool:
        """Whether workers get network cards that read and write their memory, which has to be locked for that."""
        return any(map(is_rdma_device, self.pod_devices))

    @property
    def pod_devices(self) -> dict[str, Any]:
        """The devices of each worker: those of the cluster's machines, changed by the patch, whose nulls delete."""
        limits = (_main_container(self.pod_patch).get("resources") or {}).get("limits") or {}
        named = {name: amount for name, amount in limits.items() if name not in ("cpu", "memory")}
        return {name: amount for name, amount in {**self.devices, **named}.items() if amount is not None}

    @property
    def runs_as_root(self) -> bool:
        """Whether the ranks are root, because network cards need locked memory.

        Kubernetes has no ambient capabilities, so IPC_LOCK does nothing for other users, and their limit is 8 MiB in
        most clusters (NVIDIA/nvidia-container-toolkit#2037). All documented pods of EFA and of Google's fast networks
        are root.
        """
        return self.has_rdma_devices or "setup" in self.fabric

    @property
    def uses_host_network(self) -> bool:
        """Whether the pods are on their nodes' network, by the patch."""
        return bool((self.pod_patch.get("spec") or {}).get("hostNetwork"))


class RunSpec(Struct, frozen=True):
    """One run, resolved. Built by `launch.resolve`, stored with the run, and as an annotation on a cluster.

    `argv` may hold the placeholders {hosts} {rank} {run_id} {backend} {master_port} in any element of a custom command.
    `cpus` is per worker; None leaves it to the engine. `timeout` is in seconds, from a worker's start
    to its end.
    """

    name: str  # NAME-N
    cluster: str
    engine: str  # local | kubernetes | slurm | hosts
    task: str  # catalog name, or "custom"
    preset: str  # of the task's; or open, or custom
    argv: tuple[str, ...]
    backend: str
    workers: int
    parameters: Mapping[str, Any] = {}
    image: str | None = None
    run_on_all: bool = True  # False: only worker 0 runs the command, the others wait for it
    processes_per_worker: int = 1
    device: str = "cpu"
    gpus_per_worker: int = 0
    cpus: float | None = None
    goal: str = "full"
    seed: int = SEED
    data_dir: str | None = None
    env: Mapping[str, str] = {}  # further variables of the ranks, except on this machine
    anonymous: bool = False  # the archive has no host names, local paths or command line
    share_machine: bool = False  # local: do not wait until this machine is free, and say so in the result
    method: Mapping[str, str] = {}  # how ranks communicate; empty: the task's own way
    network: str | None = None  # shaped: "1gbit,5ms", or "model:1gbit,5ms" (network.py)
    pin: bool = False  # pin each process of the run to its own CPUs
    faults: str | None = None  # script of the faults that the run meets on purpose (faults.py)
    on_failure: str | None = None  # a faults.Policy; None: the run fails with its first rank
    checkpoint_every: str | None = None  # "30s" or a number of updates, for policies that start ranks again
    detect_seconds: float | None = None  # after which a rank that makes no progress counts as failed
    include_files: tuple[str, ...] = ()  # of a user's command: further files of its code
    template: tuple[str, ...] = ()  # `argv` with {KEY} in place of values of --set; empty: it has none
    task_path: str | None = None  # folder that the ranks import the task from; None: it is installed
    nodes: tuple[str, ...] = ()  # machines that the run must have, by name, one per worker; empty: any
    # How long the run waits for nodes that do not start before it starts without them; None: it needs all of them. The
    # end of a rank other than rank 0 then does not end the others, which therefore must not wait for it.
    absent_seconds: float | None = None
    timeout: float = DEFAULT_TIMEOUT
    # Of the cluster, as planned when it was made: per_hour (None: unknown), currency, source. Empty: nobody planned it.
    price: Mapping[str, Any] = {}
    functional_only: str | None = None  # why its figures are not a performance measurement, if they are not
    # Provider and machine type, such as "gke/n1-standard-4", when the run was made; None: not known.
    cluster_kind: str | None = None
    kubernetes: KubernetesOptions | None = None  # of a run on Kubernetes

    def __post_init__(self) -> None:
        # Files, pages and suggested commands have these names, also of an archive that a stranger has written.
        check_name(self.name)
        check_name(self.cluster, "cluster name")
        if not TASK_PATTERN.fullmatch(self.task) or len(self.task.encode()) > TASK_BYTES:
            raise UsageError(
                f'The name of the task "{shorten(self.task)}" is too long, or not of letters, digits, "_", "-" and ".".'
            )
        if self.engine != "kubernetes" and self.kubernetes is not None:
            raise UsageError(f"The run spec of {self.name} is for {self.engine}, and has options of Kubernetes.")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise UsageError(f"{self.workers} workers: the number must be from 1 to {MAX_WORKERS}.")
        if not 1 <= self.processes_per_worker <= 64:
            raise UsageError(f"{self.processes_per_worker} processes per worker: the number must be from 1 to 64.")
        if self.device not in DEVICES:
            raise UsageError(f'The device "{self.device}" is neither cpu nor gpu.')
        if self.goal not in GOALS:
            raise UsageError(f'The goal "{self.goal}" is neither full nor light.')
        if not self.argv or not self.argv[0]:
            raise UsageError("The command of the run is empty.", hint="Give one with --command.")
        if not 0 < self.timeout <= MAX_TIMEOUT:
            raise UsageError(f"A timeout of {self.timeout} s: it must be above 0 and at most 30 days.")
        if not 0 <= self.gpus_per_worker <= 64:
            raise UsageError(f"{self.gpus_per_worker} GPUs per worker: the number must be from 0 to 64.")
        if self.cpus is not None and not 0 < self.cpus <= 4096:
            raise UsageError(f"{self.cpus} CPUs per worker: the number must be above 0 and at most 4096.")
        if self.absent_seconds is not None and not 0 <= self.absent_seconds <= MAX_TIMEOUT:
            raise UsageError(f"{self.absent_seconds} s for absent nodes: it must be from 0 to 30 days.")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"The seed is {self.seed}: it must be from 0 to 4294967295.")
        if self.network is not None:
            parse_network(self.network)
        # These become arguments and environment variables of processes, which can hold neither.
        for text in (*self.argv, self.backend, self.image or "", self.data_dir or "", self.task_path or ""):
            if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
                raise UsageError(f"{text!r} holds a zero byte, or bytes that are not UTF-8.")

    @property
    def pods(self) -> KubernetesOptions:
        """The options of a run on Kubernetes, or their defaults."""
        return self.kubernetes or KubernetesOptions()

    @property
    def world_size(self) -> int:
        """How many ranks the run has."""
        return self.workers * self.processes_per_worker

    @property
    def has_shaped_network(self) -> bool:
        """Whether the run's workers are joined by a network that is made for it, and proved by probes."""
        return self.network is not None and not is_modeled(self.network) and self.workers > 1

    @property
    def has_faults(self) -> bool:
        """Whether ranks meet faults on purpose, are started again, or are watched for being stopped."""
        return any(value is not None for value in (self.faults, self.on_failure, self.detect_seconds))

    @property
    def servers(self) -> int:
        """Number of parameter servers: processes besides the ranks, numbered after them."""
        return int(self.method.get("servers", "0"))

    @property
    def process_count(self) -> int:
        """Ranks and parameter servers."""
        return self.world_size + self.servers

    @property
    def unit_count(self) -> int:
        """Workers and parameter servers: what an engine places. A server is a unit of one process after the workers."""
        return self.workers + self.servers

    def ranks_of(self, unit: int) -> range:
        """The ranks of a worker, or the number of a server, which follows those of the ranks."""
        if unit < self.workers:
            return range(unit * self.processes_per_worker, (unit + 1) * self.processes_per_worker)
        number = self.world_size + unit - self.workers
        return range(number, number + 1)

    def unit_of(self, rank: int) -> int:
        """The inverse of `ranks_of`."""
        beyond = rank - self.world_size
        return self.workers + beyond if beyond >= 0 else rank // self.processes_per_worker

    @property
    def runs_task_program(self) -> bool:
        """Whether the ranks run a catalog task's own program, and not a command of the user."""
        return CUSTOM not in (self.task, self.preset) and self.preset != OPEN

    @property
    def title(self) -> str:
        """What the run is for people: the task, or the user's command."""
        return self.task if self.runs_task_program else shorten(shlex.join(self.argv), 80)

    @property
    def hash(self) -> str:
        """Hex SHA-256 (first 16 digits) of the canonical JSON: the same spec has the same hash everywhere."""
        return hashlib.sha256(canonical_json(self.to_dict())).hexdigest()[:16]

    @property
    def content_hash(self) -> str:
        """As `hash`, of what the run computes: two runs with the same content hash repeat each other exactly."""
        return hashlib.sha256(self._content()).hexdigest()[:16]

    def content(self) -> dict[str, Any]:
        """The spec without its name and without what is only known about its cluster, as plain JSON values."""
        document: dict[str, Any] = json.loads(self._content())
        return document

    def _content(self) -> bytes:
        document = self.to_dict()
        for name in ("name", "price", "functional_only"):
            del document[name]
        return canonical_json(document)

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain values."""
        document = {"spec_version": SPEC_VERSION, **to_builtins(self)}
        if not self.template:
            del document["template"]
        return document

    @classmethod
    def from_dict(cls, document: Any) -> "RunSpec":
        """The spec in a dictionary as `to_dict` makes it. Raises UsageError that names the bad key."""
        data = _object(document, "run spec")
        version = data.pop("spec_version", SPEC_VERSION)
        if version != SPEC_VERSION:
            raise UsageError(f"The run spec has version {version!r}; this mlbench reads {SPEC_VERSION}.")
        options = data.pop("kubernetes", None)
        if options is not None:
            found = _check_fields(KubernetesOptions, _object(options, "kubernetes"), "kubernetes.")
            options = KubernetesOptions(**found)
        return cls(**_check_fields(cls, data, ""), kubernetes=options)


def is_rdma_device(resource: str) -> bool:
    """Whether a Kubernetes resource is a network card for RDMA, like rdma/ib, openshift.io/rdma_vf, or EFA's."""
    return resource == "vpc.amazonaws.com/efa" or "rdma" in resource.lower()


def _main_container(patch: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = (patch.get("spec") or {}).get("containers") or ()
    return next((item for item in containers if item.get("name") == "main"), {})


def canonical_json(value: Any) -> bytes:
    """Byte-stable JSON: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"The {what} is not an object with text keys.")
    return dict(value)


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "tuple[str, ...]": (list, tuple),
    "Mapping[str, str]": (Mapping,),
    "Mapping[str, Any]": (Mapping,),
}


def _check_fields(cls: type, data: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The entries of `data` as arguments of `cls`; unknown keys, wrong types and missing ones are refused."""
    known = _field_types(cls)
    for key in data:
        if key not in known:
            raise UsageError(f'The run spec has an unknown key "{prefix}{key}".{did_you_mean(key, list(known))}')
    checked: dict[str, object] = {}
    for key, kind in known.items():
        if key not in data:
            continue
        value: Any = data[key]
        fits = isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
        if not fits:
            raise UsageError(f'"{prefix}{key}" of the run spec is {value!r}, not of type {kind}.')
        if kind == "tuple[str, ...]":
            if not all(isinstance(element, str) for element in value):
                raise UsageError(f'"{prefix}{key}" of the run spec must be a list of strings.')
            value = tuple(value)
        if kind == "Mapping[str, str]" and not all(isinstance(text, str) for pair in value.items() for text in pair):
            raise UsageError(f'"{prefix}{key}" of the run spec must map strings to strings.')
        checked[key] = value
    required = {"name", "cluster", "engine", "task", "preset", "argv", "backend", "workers"} & set(known)
    missing = sorted(required - set(checked))
    if missing:
        raise UsageError(f'The run spec lacks "{prefix}{missing[0]}".')
    return checked


@cache
def _field_types(cls: type) -> dict[str, str]:
    """Name to type of the fields, worked out once: `status` reads many specs."""
    return {name: _type_name(kind) for name, kind in cls.__annotations__.items() if name != "kubernetes"}


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not hasattr(annotation, "__origin__") and "[" not in repr(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
