"""The questions before a run, as data, for the wizard on a terminal and for the dashboard's form.

The possible answers, what each means, what is missing for it on this machine, and the last answers by name.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from mlbench_cli.config import settings
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Cluster, JsonObject
from mlbench_cli.model.spec import CUSTOM
from mlbench_cli.runs import launch
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import TORCH_BACKENDS, Task, load_catalog
from mlbench_cli.util.files import read_object, write_atomically

REMEMBERED = ("task", "preset", "image", "command", "backend", "custom_backend", "run_on_all", "cluster", "data_dir")
DEFAULT_NAME = "my-run"
DEFAULT_TASK = "digits_resnet"  # a training of a minute that needs no data
MAX_WORKERS = 4096


class PresetChoice(Struct, frozen=True):
    """A preset: what it changes, and what of its data is missing here ("" if nothing is)."""

    name: str
    note: str
    lack: str


class TaskChoice(Struct, frozen=True):
    """A task of the catalog. `data` says which files it needs, if they must be put somewhere by hand."""

    name: str
    title: str
    presets: tuple[PresetChoice, ...]
    backends: tuple[str, ...]
    has_gpu: bool
    data: str | None


class ClusterChoice(Struct, frozen=True):
    """A cluster, and whether a run on it may be asked for GPUs."""

    name: str
    provider: str
    state: str
    is_local: bool
    has_gpus: bool


class Questions(Struct, frozen=True):
    """Everything that a form needs. `name` is free; `answers` are the last ones, null if there were none, but a
    training for the first task."""

    name: str
    tasks: tuple[TaskChoice, ...]
    clusters: tuple[ClusterChoice, ...]
    cluster: str
    own_backends: tuple[str, ...]
    answers: JsonObject

    def to_dict(self) -> JsonObject:
        """The questions as the REST API gives them."""
        document: JsonObject = to_builtins(self)
        return document


def ask_questions(clusters: Sequence[Cluster], current: str, taken: Collection[str]) -> Questions:
    """The questions for what this machine knows. `current` is the default cluster, `taken` are the names of existing
    runs."""
    names = {cluster.name for cluster in clusters}
    answers = recall()
    return Questions(
        propose_name(taken),
        tuple(map(_choose_task, load_catalog().values())),
        tuple(
            ClusterChoice(item.name, item.provider, item.state, item.provider == "local", has_gpus(item))
            for item in clusters
        ),
        current if current in names else next(iter(sorted(names)), current),
        tuple(TORCH_BACKENDS),
        {"task": DEFAULT_TASK, **{key: answers.get(key) for key in REMEMBERED if key != "task" or answers}},
    )


def _choose_task(task: Task) -> TaskChoice:
    presets = tuple(
        PresetChoice(name, describe_preset(task, name), find_lack(task, name, is_local=True)) for name in task.presets
    )
    data = task.data if task.files is not None and not task.files.download else None
    return TaskChoice(task.name, task.title, presets, tuple(task.backends), "gpu" in task.devices, data)


# --- what an answer means -------------------------------------------------------------------------------------------


def propose_name(taken: Collection[str]) -> str:
    """A name for a run that no other run has, or begins with."""

    def is_free(name: str) -> bool:
        return not any(run == name or run.startswith(f"{name}-") for run in taken)

    numbers = (f"{DEFAULT_NAME}{number}" for number in range(2, len(taken) + 3))
    return DEFAULT_NAME if is_free(DEFAULT_NAME) else next(filter(is_free, numbers))


def has_gpus(cluster: Cluster) -> bool:
    """Whether a machine of the cluster has GPUs, as far as that is known here."""
    if cluster.provider == "local":
        return launch.local_machine().gpus > 0
    return bool(cluster.details.get("gpus_per_node"))


def describe_preset(task: Task, preset: str) -> str:
    """The first values that a preset sets."""
    changes = task.presets[preset]
    if preset == "spec":
        return "as in the benchmark's specification"
    shown = [f"{name}={value}" for name, value in changes.items() if not isinstance(value, list)]
    return ", ".join(shown[:4]) + (", …" if len(changes) > 4 else "")


def find_lack(
    task: Task,
    preset: str,
    *,
    is_local: bool,
    changes: Mapping[str, Any] | None = None,
    data_dir: str | None = None,
) -> str:
    """The data that the task reads and that are missing, or ""; only folders on this machine can be checked."""
    files = task.files
    try:
        parameters = task.resolve(preset, changes)
    except MlbenchError:  # --set names a parameter of another task
        parameters = task.resolve(preset)
    if files is None or not is_local or not files.are_read(parameters) or not files.list_missing(data_dir):
        return ""
    return f"downloads {files.download}" if files.download else "data missing"


# --- memory ---------------------------------------------------------------------------------------------------------


def _memory_file() -> Path:
    return settings.config_dir() / "answers.json"


def recall() -> JsonObject:
    """The last answers, by name. A damaged file counts as none."""
    return read_object(_memory_file()) or {}


def answers_in(request: Request) -> JsonObject:
    """The answers that a request has, by name."""
    answers = {name: getattr(request, name) for name in REMEMBERED if getattr(request, name) is not None}
    if request.command is not None:
        answers["task"] = CUSTOM
    if request.custom_backend is not None:
        answers["backend"] = CUSTOM
    return answers


def remember(request: Request) -> str | None:
    """Save the answers for next time, on top of older ones. Returns what went wrong, which must not prevent the run."""
    answers = answers_in(request)
    path = _memory_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, json.dumps({**recall(), **answers}, indent=2).encode() + b"\n")
    except OSError as error:
        return f"The answers could not be saved to {path}: {error.strerror}."
    return None
