"""`Request`: the options of `mlbench run`, given as flags, as keys of a spec file, or as answers to the wizard.

`Request` is the one place where an option of `mlbench run` is declared: the command builds its flags from the fields,
the file reader its keys, and `equivalent_command` the line that does the same again. `launch` resolves what the options
mean together.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict, replace

from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.runs.matrix import Matrix, format_axis, format_point, parse_axes, parse_point, value_text
from mlbench_cli.tasks.catalog import short
from mlbench_cli.util import gone
from mlbench_cli.util.durations import parse_duration as parse_duration
from mlbench_cli.util.masking import is_secret_variable
from mlbench_cli.util.text import shorten
from mlbench_cli.util.yaml_text import load_yaml, read_yaml

COMMON = "What to run"
ADVANCED = "Advanced"
KUBERNETES = "On clusters (not on local)"
RARE = "run."  # prefix of --set for fields without a flag


class Option(NamedTuple):
    """An option of `mlbench run`: a field of Request. A `rare` one has no flag, but is --set run.NAME=VALUE.

    `kind` is text, integer, switch, cluster, or one that is repeatable: texts, pairs (KEY=VALUE), axes
    (KEY=VALUE,VALUE) or points (KEY=VALUE,KEY=VALUE).
    """

    name: str
    help: str
    kind: str
    letter: str
    metavar: str
    panel: str
    rare: bool


_declared: list[Option] = []  # without their names, in the order of Request's fields


def _option(
    help: str, *, kind: str = "text", letter: str = "", metavar: str = "", panel: str = ADVANCED, rare: bool = False
) -> Any:
    """Declares an option, and returns what a field of Request is when it is not given."""
    _declared.append(Option("", help, kind, letter, metavar, panel, rare))
    if kind in ("pairs", "axes", "cluster"):
        return {}
    return () if kind in ("texts", "points") else None


def _common_option(help: str, **more: Any) -> Any:
    """An option that `mlbench run --help` lists; `--help-all` lists all."""
    return _option(help, panel=COMMON, **more)


def _cluster_option(help: str, **more: Any) -> Any:
    return _option(help, panel=KUBERNETES, **more)


class Request(Struct, frozen=True):
    """Options as they were given. None, an empty mapping or an empty tuple mean "not given"."""

    name: str | None = None
    workers: tuple[int, ...] = ()

    task: str | None = _common_option("benchmark task, e.g. digits_resnet (list: mlbench tasks)")
    task_path: str | None = _option("folder of your own task or tasks; default: MLBENCH_TASK_PATH", metavar="DIR")
    preset: str | None = _common_option("parameter preset of the task, e.g. spec (default) or tiny")
    set: Mapping[str, Any] = _common_option(
        "set a parameter, e.g. batch_size=64; run.KEY=VALUE: a setting of the run that is rarely needed (mlbench help "
        "run-settings)",
        kind="pairs",
        metavar="KEY=VALUE",
    )
    command: str | None = _common_option(
        "your own command; {hosts} {rank} {run_id} {backend} {master_port}, and {KEY} of --set, are replaced. With "
        "--task, it is measured against the goal of that task (open division)"
    )
    method: str | None = _common_option(
        "communication method (list: mlbench methods); --set comm.OPTION=VALUE changes an option of it; default: the "
        "method of the task",
        metavar="NAME",
    )
    method_path: str | None = _option(
        "Python file with your own method, on engines that share this machine's files", metavar="FILE.py"
    )
    servers: int | None = _option(
        "number of parameter servers, for methods that use them; default: 1", kind="integer", metavar="N", rare=True
    )
    image: str | None = _option(
        "container image of your command or task (clusters only); default on Kubernetes: PyTorch's public image, where "
        "workers get the files that your command names"
    )
    backend: str | None = _option(
        "gloo, nccl, mpi, grpc (TensorFlow) or custom:NAME; default: depends on task and device"
    )
    custom_backend: str | None = _option("same as --backend custom:NAME", metavar="NAME", rare=True)
    run_on_all: bool | None = _option(
        "run your command on all workers, or only on the first; default: all, except with mpi or a custom backend",
        kind="switch",
        rare=True,
    )
    gpu: bool | None = _common_option("train on GPUs", kind="switch", letter="g")
    light: bool | None = _common_option("stop at the task's light goal", kind="switch", letter="l")
    budget: str | None = _option(
        "train for this long, e.g. 2h, and report the accuracy reached instead of the time to the goal; only for tasks "
        "with the parameter budget_seconds",
        metavar="DURATION",
        rare=True,
    )
    num_cpus: int | None = _option(
        "CPUs of each worker, shared by its ranks; sets OMP_NUM_THREADS. Default on local: OMP_NUM_THREADS per rank if "
        "set, else the CPUs of this machine divided by the ranks of the largest run",
        kind="integer",
        letter="c",
    )
    processes_per_worker: int | None = _option("ranks per worker; default: 1, or one per GPU", kind="integer")
    gpus_per_worker: int | None = _option(
        "GPUs per worker; default with --gpu: all GPUs of the node, on local 1", kind="integer"
    )
    seed: int | None = _option("random seed; default: 42", kind="integer")
    repeat: int | None = _common_option(
        "number of repeats per size, with the seeds SEED, SEED+1, ...; reported with mean and 95 % interval",
        kind="integer",
        metavar="TIMES",
    )
    matrix: Mapping[str, tuple[Any, ...]] = _option(
        "run once per value, e.g. backend=gloo,mpi or set.batch_size=32,64; several matrices give all combinations",
        kind="axes",
        metavar="KEY=V1,V2",
    )
    include: tuple[Mapping[str, Any], ...] = _option(
        "FILE: a file or folder that belongs to the code of your command, besides the files that it names; they go "
        "into the archive, and to workers on Kubernetes. KEY=V,KEY=V: add a point to the matrix, or options to the "
        "points with these values",
        kind="points",
        metavar="FILE|KEY=V,KEY=V",
    )
    include_files: tuple[str, ...] = _option("as --include FILE", kind="texts", metavar="FILE", rare=True)
    exclude: tuple[Mapping[str, Any], ...] = _option(
        "skip the points of the matrix with all these values", kind="points", metavar="KEY=V,KEY=V"
    )
    parallel: int | None = _option(
        "number of concurrent runs on clusters; default: 1", kind="integer", metavar="N", rare=True
    )
    data_dir: str | None = _option("folder of the data sets", metavar="DIR")
    timeout: str | None = _option(
        "time limit of a run, e.g. 90s, 15m, 2h; default: 24h, for your own command 4h",
        metavar="DURATION",
    )
    cluster: str | None = _common_option("cluster to run on; default: see mlbench set-cluster")
    create: Mapping[str, Any] = _common_option(
        "create a cluster for these runs and delete it afterwards: kind, gke, eks or aks. Options of create-cluster "
        "follow, e.g. --gpu-type l4 --spot (list: mlbench run --create gke --help)",
        kind="cluster",
        metavar="PROVIDER",
    )
    network: str | None = _option(
        "emulate a network with this rate (per worker and direction) and one-way delay, e.g. 1gbit,5ms, verified by "
        "probes; on this machine only. model:1gbit,5ms only delays messages",
        metavar="[model:]RATE[,DELAY]",
    )
    pin: bool | None = _option(
        "on local and hosts: pin each rank to its own CPUs; needs at least one CPU per rank", kind="switch", rare=True
    )
    faults: str | None = _option(
        "inject faults: a script or the name of its file, e.g. 'at 60s kill rank 1; every ~10m kill any rank'",
        metavar="SCRIPT|FILE",
    )
    on_failure: str | None = _option(
        "what happens when a rank fails: fail (default), or restart (all ranks, from the last checkpoint)",
        metavar="POLICY",
    )
    checkpoint_every: str | None = _option(
        "time or number of updates between the checkpoints from which restarts resume, e.g. 30s or 200; default: the "
        "best interval for the faults",
        metavar="DURATION|N",
        rare=True,
    )
    detect: str | None = _option(
        "treat a rank as failed if it is stopped or keeps the others waiting for this long; default: 10m",
        metavar="DURATION",
        rare=True,
    )
    nodes: str | None = _option(
        "machines of the cluster that the run must have, by name, one per worker; not on this machine",
        metavar="NODE,NODE",
        rare=True,
    )
    absent: str | None = _option(
        "start without machines that have not started after this time, e.g. 3m, and continue if one is lost; for "
        "programs whose ranks do not wait for each other. Default: 3m for the task certify, else all are needed",
        metavar="DURATION",
        rare=True,
    )
    worker_hour: str | None = _option(
        "price of a worker per hour in US dollars, for your own machines; the cost is then part of the result",
        metavar="USD",
        rare=True,
    )
    anonymous: bool | None = _option(
        "record neither host names nor the command line",
        kind="switch",
    )
    share_machine: bool | None = _option(
        "on local and hosts: run even if the machines are in use by other runs; the result is labeled as shared",
        kind="switch",
    )

    namespace: str | None = _cluster_option("Kubernetes namespace")
    start_timeout: str | None = _cluster_option(
        "time limit for nodes to be added, pods to be scheduled and images to be pulled; default: 30m, with --queue or "
        "booked machines 7d",
        metavar="DURATION",
    )
    memory: str | None = _cluster_option("memory of each worker, e.g. 8Gi")
    shm: str | None = _cluster_option("size of /dev/shm; default: 1Gi")
    node_selector: Mapping[str, str] = _cluster_option(
        "label that nodes must have, e.g. pool=gpu", kind="pairs", metavar="KEY=VALUE"
    )
    runtime_class: str | None = _cluster_option(
        "RuntimeClass of the workers, e.g. nvidia on k3s; default with --gpu: nvidia, if the cluster has it"
    )
    pull_secret: str | None = _cluster_option("name of the image pull secret")
    queue: str | None = _cluster_option("name of the Kueue queue")
    keep: str | None = _cluster_option(
        "how long the cluster keeps the results after the run; default: 24h, at least 10m",
        metavar="DURATION",
        rare=True,
    )
    collect: str | None = _cluster_option("workers whose output folder is kept: rank0 (default) or all", rare=True)
    env: Mapping[str, str] = _cluster_option("environment variable of the ranks", kind="pairs", metavar="KEY=VALUE")
    data_claim: str | None = _cluster_option("PersistentVolumeClaim with the data, mounted at --data-dir or /data")
    spread: bool | None = _cluster_option("one worker per node (default)", kind="switch", rare=True)
    share_nodes: bool | None = _cluster_option(
        "also use nodes on which another run is measuring", kind="switch", rare=True
    )
    pod_patch: str | None = _cluster_option(
        "YAML file with metadata and spec to merge into the pods: labels, annotations, priorityClassName, ...",
        metavar="FILE",
    )
    registry: str | None = _cluster_option("registry prefix of the task images, e.g. ghcr.io/me", metavar="PREFIX")


# Its first fields, the name and the numbers of workers, are arguments.
OPTIONS = tuple(item._replace(name=name) for name, item in zip(Request.__struct_fields__[2:], _declared, strict=True))
_RARE = frozenset(item.name for item in OPTIONS if item.rare)
_KINDS: dict[str, str] = {item.name: item.kind for item in OPTIONS}
REPEATABLE = ("texts", "pairs", "axes", "points")
# Options that say which runs there are or how they are started, but nothing about any single run.
OF_EXPERIMENT = ("repeat", "matrix", "include", "exclude", "parallel", "create")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
GIVEN_BY_ENGINE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def flag(name: str) -> str:
    """The flag of an option: "num_cpus" -> "--num-cpus", "pin" -> "--set run.pin"."""
    if name in _RARE:
        return f"--set {RARE}{name}"
    return "--" + name.replace("_", "-")


def pairs(entries: Sequence[str], name: str) -> dict[str, str]:
    """KEY=VALUE texts as a mapping. Raises UsageError that names the flag."""
    found: dict[str, str] = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise UsageError(f'{flag(name)} "{entry}" is not of the form KEY=VALUE.')
        if found.get(key, value) != value:
            raise UsageError(f'{flag(name)} gives "{key}" twice: "{found[key]}" and "{value}".')
        found[key] = value
    return found


def check_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of --env. Raises UsageError for what is no variable, mlbench's own, or a secret."""
    for name in env:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f'--env: "{shorten(name)}" is not the name of a variable.')
        if name in GIVEN_BY_ENGINE or name.startswith("MLBENCH_"):
            raise UsageError(f"--env: {name} is set by mlbench itself.")
        if is_secret_variable(name):
            raise UsageError(
                f"--env: {name} looks like a secret, but values of --env are stored in the results.",
                hint="Put it into a Kubernetes Secret, and pass --pod-patch FILE with   spec: {containers: "
                "[{name: main, envFrom: [{secretRef: {name: SECRET}}]}]}",
            )
    return dict(env)


def given_value(name: str, value: Any) -> Any:
    """The value of an option as its flags give it: the texts of a repeatable one become its mapping or tuple."""
    kind = _KINDS[name]
    if kind == "pairs":
        return pairs(value, name)
    if kind == "axes":
        return _checked_axes(parse_axes(value))
    if kind == "points":
        return tuple(_checked_point(parse_point(entry, flag(name))) for entry in value)
    if kind == "cluster":
        return {"provider": value} if isinstance(value, str) else value
    return tuple(value) if kind == "texts" else value


def parse_flags(given: Mapping[str, str]) -> Request:
    """The request in texts as flags take them, by the names of options; a line for each entry of a repeatable option.
    Raises UsageError that names the option."""
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in _KINDS:
            raise UsageError(f'Unknown option "{shorten(name)}".{did_you_mean(name, list(_KINDS))}')
        kind, lines = _KINDS[name], [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            continue
        if kind == "cluster":
            raise UsageError(
                f"{flag(name)} works only on the command line, which stays to delete the cluster.",
                hint="mlbench run --create PROVIDER, or mlbench create-cluster",
            )
        if kind in REPEATABLE:
            values[name] = given_value(name, lines)
        elif kind == "text":
            values[name] = lines[0]
        elif kind == "switch" and lines[0] in ("yes", "no"):
            values[name] = lines[0] == "yes"
        elif kind == "integer" and lines[0].isascii() and lines[0].isdecimal():
            values[name] = int(lines[0][:18])
        else:
            wanted = "yes or no" if kind == "switch" else "a whole number"
            raise UsageError(f'{flag(name)} "{shorten(lines[0])}" is not {wanted}.')
    return Request(**values)


def take_rare(request: Request) -> Request:
    """The request with the settings of the run, which --set takes as `run.KEY=VALUE`, in their own fields. A field that
    is given both ways keeps its own value. Raises UsageError for an unknown setting."""
    own = {key: value for key, value in request.set.items() if not key.startswith(RARE)}
    rare = {key.removeprefix(RARE): str(value) for key, value in request.set.items() if key not in own}
    given = {key.replace("-", "_"): text for key, text in rare.items()}
    given = {name: text.lower() if text in ("True", "False") else text for name, text in given.items()}
    for name, text in given.items():
        if name not in _RARE:
            hint = f"{flag(name)} {text}" if name in _KINDS else "mlbench help run-settings"
            near = did_you_mean(name, list(_RARE))
            raise UsageError(f'There is no setting "{shorten(RARE + name)}".{near}', hint=hint)
        given[name] = {"true": "yes", "false": "no"}.get(text, text) if _KINDS[name] == "switch" else text
    return merge(parse_flags(given), replace(request, set=own))


def parse_line(text: str) -> Request:
    """The request in the options of a command line, e.g. "--repeat 3 --set batch_size=16". Raises UsageError."""
    known = {flag(item.name): item.name for item in OPTIONS if not item.rare}
    known |= {f"-{item.letter}": item.name for item in OPTIONS if item.letter}
    known |= {flag(f"no_{name}"): name for name, kind in _KINDS.items() if kind == "switch"}
    try:
        words = iter(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"The options cannot be read: {error}.") from None
    given: dict[str, list[str]] = {}
    for whole in words:
        word, equals, value = whole.partition("=")
        if word not in known:
            raise UsageError(f'Unknown option "{shorten(word)}".{did_you_mean(word, list(known))}')
        if _KINDS[known[word]] == "switch":
            if equals:
                raise UsageError(f"{word} takes no value.", hint=f"{word}, or {flag('no_' + known[word])}")
            value = "no" if word.startswith("--no-") else "yes"
        elif (value := value if equals else next(words, "")) == "":
            raise UsageError(f"{word} needs a value.")
        given.setdefault(known[word], []).append(value)
    settings = pairs(given.pop("set", []), "set")
    texts = {name: "\n".join(values) if _KINDS[name] in REPEATABLE else values[-1] for name, values in given.items()}
    return take_rare(replace(parse_flags(texts), set=settings))


def describe_rare() -> list[tuple[str, str]]:
    """Each setting of --set run.KEY=VALUE that has no other form, with its help."""
    alike = ("custom_backend", "include_files")  # of --backend and --include
    rare = [item for item in OPTIONS if item.rare and item.name not in alike]
    words = {"integer": "N", "switch": "yes|no"}
    return [
        (
            f"{RARE}{item.name}={item.metavar or words.get(item.kind, 'VALUE')}",
            item.help,
        )
        for item in rare
    ]


def merge(base: Request, top: Request) -> Request:
    """`base` overridden by everything that `top` gives; mappings are merged key by key."""
    changes: dict[str, Any] = {}
    for name in Request.__struct_fields__:
        below, above = getattr(base, name), getattr(top, name)
        if _KINDS.get(name) in ("pairs", "axes"):
            changes[name] = {**below, **above}
        elif above not in (None, (), {}):
            changes[name] = above
    return replace(base, **changes)


def read_file(path: Path) -> Request:
    """The request in a spec file: YAML with the names of the flags as keys, plus `name` and `workers`."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"There is no file {path}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"The spec file {path} cannot be read: it is not UTF-8 text.") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"The spec file {path} cannot be read: {reason}.") from None
    try:
        return parse_file(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint or "mlbench run --help") from None


def parse_file(text: str) -> Request:
    """The request in the text of a spec file. Raises UsageError that names the key."""
    data = read_yaml(text)
    if not isinstance(data, dict):
        raise UsageError("The spec file is not a mapping of options to values.")
    return parse_mapping(data)


def parse_mapping(data: Mapping[Any, Any]) -> Request:
    """The request in a mapping of options to values. Raises UsageError that names the key."""
    known = {name: _KINDS.get(name, "") for name in Request.__struct_fields__}
    values: dict[str, Any] = {}
    data = _with_flat_matrix(dict(data))
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            if flag(name) in gone.OPTIONS:
                raise UsageError(f'"{shorten(key)}" was removed.', hint=gone.OPTIONS[flag(name)])
            near = did_you_mean(name, list(known)).replace("_", "-")
            raise UsageError(f'Unknown key "{shorten(key)}".{near}')
        if name in values:
            raise UsageError(f'The key "{key}" is given twice.')
        if value is not None:
            values[name] = _file_value(str(key), name, known[name], value)
    return take_rare(Request(**values))


def _file_value(key: str, name: str, kind: str, value: Any) -> Any:
    if name == "workers":
        numbers = value if isinstance(value, list) else [value]
        if not all(_is_integer(number) for number in numbers):
            raise UsageError(f'"{key}" is {short(value)}, not a number or a list of numbers.')
        return tuple(numbers)
    if name == "command" and isinstance(value, list) and all(isinstance(word, str) for word in value):
        return shlex.join(value)
    if kind == "integer" and _is_integer(value):
        return value
    if kind == "switch" and isinstance(value, bool):
        return value
    if kind == "texts":
        texts = value if isinstance(value, list) else [value]
        if all(isinstance(word, str) for word in texts):
            return tuple(texts)
    if kind == "axes" and isinstance(value, dict):
        return _checked_axes(value)
    if kind == "points" and isinstance(value, list):
        return tuple(_checked_point(entry) for entry in value)
    if kind == "pairs" and isinstance(value, dict) and all(isinstance(word, str) for word in value):
        return dict(value) if name == "set" else {word: _text(f"{key}.{word}", item) for word, item in value.items()}
    if kind == "cluster":
        return _creation(key, value)
    if kind in ("text", ""):
        return _text(key, value)
    wanted = {"integer": "a whole number", "switch": "true or false", "texts": "a list of strings"}
    wanted["points"] = "a list of mappings of options to values"
    raise UsageError(f'"{key}" is {short(value)}, not {wanted.get(kind, "a mapping of names to values")}.')


def _creation(key: str, value: Any) -> dict[str, Any]:
    """ "kind", or {provider: gke, gpu-type: l4, spot: true}; the values are checked when the provider is known."""
    if isinstance(value, str):
        return {"provider": value}
    if not isinstance(value, dict) or not isinstance(value.get("provider"), str):
        raise UsageError(
            f'"{key}" is {short(value)}, not a provider, or a mapping with the key "provider".',
            hint="create: {provider: gke, gpu-type: l4, spot: true}",
        )
    return {str(word).replace("-", "_"): entry for word, entry in value.items()}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _text(key: str, value: Any) -> str:
    # "timeout: 90" is meant as it looks; "on" and dates, which YAML turns into something else, are not guessed at.
    if isinstance(value, str) or _is_integer(value):
        return str(value)
    raise UsageError(f'"{key}" is {short(value)}, not a text.', hint="Put the value in quotes.")


def equivalent_command(request: Request) -> str:
    """The command line that asks for the same without questions."""
    words = ["mlbench", "run", request.name or "NAME", *map(str, request.workers)]
    if request.custom_backend is not None:
        request = replace(request, custom_backend=None, backend=f"custom:{request.custom_backend}")
    for item in OPTIONS:
        value = getattr(request, item.name)
        if item.name == "include_files":
            words += [word for entry in value for word in ("--include", entry)]
        elif item.name in _RARE:
            text = ("yes" if value else "no") if item.kind == "switch" else value
            words += [] if value is None else ["--set", f"{RARE}{item.name}={text}"]
        elif item.kind == "switch":
            if value is not None:
                words.append(flag(item.name) if value else flag("no_" + item.name))
        elif item.kind == "cluster":
            words += _creation_words(value)
        elif item.kind == "pairs":
            for key, entry in value.items():
                words += [flag(item.name), f"{key}={value_text(entry)}"]
        elif item.kind in ("texts", "points", "axes"):
            for entry in _entries(item.kind, value):
                words += [flag(item.name), entry]
        elif value is not None:
            words += [flag(item.name), str(value)]
    return shlex.join(words)


def _creation_words(create: Mapping[str, Any]) -> list[str]:
    words = ["--create", str(create["provider"])] if create else []
    for name, value in create.items():
        for entry in value if isinstance(value, list | tuple) else [value]:
            if name != "provider" and entry not in (None, False):
                word = flag(f"cluster_{name}" if name in _KINDS else name)  # where a run has such an option, too
                words += [word] if entry is True else [word, str(entry)]
    return words


def _entries(kind: str, value: Any) -> list[str]:
    if kind == "axes":
        return [format_axis(key, values) for key, values in value.items()]
    return [format_point(entry) for entry in value] if kind == "points" else list(value)


# --- spec files, written --------------------------------------------------------------------------------------------


def request_document(request: Request) -> dict[str, object]:
    """The request as the mapping that a spec file holds: only what was given, in plain JSON values."""
    document: dict[str, Any] = {}
    for name, value in asdict(request).items():
        if value is None or value == () or value == {}:
            continue
        kind = _KINDS.get(name)
        if kind in ("axes", "points"):
            continue
        if kind == "cluster":
            value = {word.replace("_", "-"): entry for word, entry in value.items()}
        document[name.replace("_", "-")] = _plain(value)
    matrix = _plain(request.matrix)
    for name in ("include", "exclude"):
        if getattr(request, name):
            matrix[name] = _plain(getattr(request, name))
    return {**document, "matrix": matrix} if matrix else document


def format_file(request: Request) -> str:
    """The text of a spec file that says the same: `parse_file` gives the request again."""
    return str(load_yaml().safe_dump(request_document(request), sort_keys=False, allow_unicode=True, width=100))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(entry) for entry in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# --- the matrix -----------------------------------------------------------------------------------------------------


def _with_flat_matrix(data: dict[Any, Any]) -> dict[Any, Any]:
    """`matrix` holds its lists `include` and `exclude` in a file; here they are separate options."""
    matrix = data.get("matrix")
    if not isinstance(matrix, dict):
        return data
    flat = {key: value for key, value in data.items() if key not in ("matrix", "include", "exclude")}
    flat["matrix"] = {key: value for key, value in matrix.items() if key not in ("include", "exclude")}
    for name in ("include", "exclude"):
        if name in data:
            raise UsageError(f'"{name}" must be under "matrix".')
        flat[name] = matrix.get(name)
    return flat


def matrix_of(request: Request) -> Matrix:
    """The request's matrix. Raises UsageError if an axis is also given as a separate option."""
    for key in request.matrix:
        name, _, entry = key.partition(".")
        given = getattr(request, name)
        if given not in (None, {}, ()) and (not entry or entry in given):
            raise UsageError(
                f"{flag(name)}{' ' + entry if entry else ''} is set both directly and in the matrix.",
                hint="Give it once.",
            )
    return Matrix(request.matrix, request.include, request.exclude)


def apply_point(request: Request, point: Mapping[str, Any]) -> Request:
    """The request at one point of its matrix, without the matrix. Raises UsageError for a value of the wrong type."""
    changes: dict[str, Any] = {"matrix": {}, "include": (), "exclude": (), "parallel": None}
    for key, value in point.items():
        name, _, entry = key.partition(".")
        if _KINDS[name] == "pairs":
            before = changes.get(name, getattr(request, name))
            changes[name] = {**before, entry: value if name == "set" else _text(key, value)}
        else:
            changes[name] = _axis_value(key, name, value)
    return replace(request, **changes)


def _axis_value(key: str, name: str, value: Any) -> Any:
    kind = _KINDS[name]
    if kind == "integer" and isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if kind == "switch" and value in ("true", "false"):
        return value == "true"
    return _file_value(key, name, kind, value)


def _axis_key(key: Any) -> str:
    """The key of an axis with the option's name as in Request. Raises UsageError for what can be none."""
    option, dot, entry = str(key).partition(".")
    name = option.replace("-", "_")
    kind = _KINDS.get(name)
    if kind not in ("text", "integer", "switch", "pairs") or name in OF_EXPERIMENT:
        known = [axis for axis, kind in _KINDS.items() if kind != "texts" and axis not in OF_EXPERIMENT]
        near = did_you_mean(name, known).replace("_", "-")
        raise UsageError(
            f'"{shorten(key)}" cannot be a key of a matrix.{near}',
            hint="Use an option of mlbench run, e.g. method, or set.NAME",
        )
    if (kind == "pairs") != bool(dot and entry):
        form = f"{name}.KEY" if kind == "pairs" else name
        raise UsageError(f'"{shorten(key)}" cannot be a key of a matrix; write {form}.')
    return f"{name}.{entry}" if entry else name


def _checked_axes(axes: Mapping[Any, Any]) -> dict[str, tuple[Any, ...]]:
    checked: dict[str, tuple[Any, ...]] = {}
    for key, values in axes.items():
        name = _axis_key(key)
        listed = list(values) if isinstance(values, list | tuple) else [values]
        if not listed or name in checked:
            raise UsageError(
                f'The matrix has no values for "{shorten(key)}".' if not listed else f'"{shorten(key)}" is twice.'
            )
        checked[name] = tuple(_checked_scalar(name, value) for value in listed)
        texts = [value_text(value) for value in checked[name]]
        if len(set(texts)) < len(texts):
            twice = next(text for text in texts if texts.count(text) > 1)
            raise UsageError(f'The matrix has the value "{shorten(twice)}" of "{shorten(key)}" twice.')
    return checked


def _checked_point(entry: Any) -> dict[str, object]:
    if not isinstance(entry, Mapping) or not entry:
        raise UsageError(
            f"{short(entry)} is not a point of a matrix: it must be a mapping of options to values.",
            hint="Files of your program belong to include-files.",
        )
    checked = {_axis_key(key): value for key, value in entry.items()}
    return {key: _checked_scalar(key, value) for key, value in checked.items()}


def _checked_scalar(key: str, value: Any) -> Any:
    """A value that a name can be made of: a text, a number, a switch; for set.KEY also a list of those."""
    listed = value if key.startswith("set.") and isinstance(value, list | tuple) else [value]
    for item in listed:
        if not isinstance(item, str | int | float) or (isinstance(item, int) and abs(item) >= 2**63) or item == "":
            raise UsageError(f'The matrix has {short(value)} for "{shorten(key)}", not a text or a number.')
        if isinstance(item, float) and item * 0 != 0:
            raise UsageError(f'The matrix has {short(value)} for "{shorten(key)}", which is not a number.')
    return tuple(value) if isinstance(value, list | tuple) else value
