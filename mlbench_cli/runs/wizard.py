"""The questions of `mlbench run`: only on a terminal, only what no flag has answered, remembered by name.

Name, cluster, task (or command), preset, data folder, device, numbers of workers, backend, and for a backend
of one's own whether the command runs on all workers.
"""

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from mlbench_cli import console
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import CUSTOM
from mlbench_cli.runs import launch, questions
from mlbench_cli.runs.preflight import find_missing_package
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import TORCH_BACKENDS, Task, load_catalog, load_task
from mlbench_cli.util.text import Option
from providers import registry

T = TypeVar("T")

# What a cluster can be created with only if it is installed: a program for KIND, else the cloud's library.
_CREATOR_NEEDS = {"gke": "google.cloud.container_v1", "eks": "boto3", "aks": "azure.identity"}


def complete(
    request: Request,
    clusters: Sequence[Cluster],
    current: Cluster,
    taken: Collection[str],
    add_defaults: Callable[[Request, Cluster], Request],
) -> tuple[Request, Cluster]:
    """Ask on the terminal what `request` leaves open; the request, and the cluster that it is for.

    `clusters` are all that are known, `current` is the default, `taken` the names of other runs. `add_defaults` fills
    in what needs no question on the cluster that was chosen.
    """
    memory = questions.recall()
    memory = {name: value for name, value in memory.items() if name in questions.REMEMBERED}
    has_program = request.task is not None or request.command is not None
    # Whoever has no cluster is asked only by the whole dialog, which `mlbench run` alone begins.
    is_settled = has_program or request.cluster is not None or bool(request.create)
    has_cluster = is_settled or (len(clusters) < 2 and request.name is not None)
    has_backend = has_program or request.backend is not None or request.custom_backend is not None

    def ask_cluster(request: Request) -> Request:
        return request if has_cluster else _ask_cluster(request, memory, clusters, current)

    def cluster_of(request: Request) -> Cluster:
        if request.create:
            gpus = int(bool(request.create.get("gpu_type")))
            return Cluster("new", str(request.create["provider"]), details={"gpus_per_node": gpus})
        return next((cluster for cluster in clusters if cluster.name == request.cluster and not has_cluster), current)

    def is_local(request: Request) -> bool:
        return cluster_of(request).provider == "local"

    # Each step asks at most one question, and only if the request leaves it open.
    steps: tuple[Callable[[Request], Request], ...] = (
        lambda asked: asked if asked.name is not None else replace(asked, name=_ask_name(asked, memory, taken)),
        ask_cluster,
        lambda asked: _ask_gpu_type(asked, memory),
        lambda asked: add_defaults(asked, cluster_of(asked)),
        lambda asked: asked if has_program else _ask_task(asked, memory, is_local(asked)),
        lambda asked: asked if has_program else _ask_command(asked, memory),
        lambda asked: asked if has_program else _ask_preset(asked, memory, is_local(asked)),
        lambda asked: asked if has_program else _ask_folder(asked, memory, is_local(asked)),
        lambda asked: asked if has_program else _ask_device(asked, memory, cluster_of(asked)),
        lambda asked: asked if asked.workers else replace(asked, workers=_ask_sizes(asked, memory, taken)),
        lambda asked: asked if has_backend else _ask_backend(asked, memory),
        lambda asked: asked if has_backend else _ask_custom_backend(asked, memory),
        lambda asked: asked if has_backend else _ask_run_on_all(asked, memory),
    )
    request = _ask_all(request, steps, memory, add_defaults_at=3)
    if problem := questions.remember(request):
        console.warn(problem)
    return request, cluster_of(request)


def _ask_all(
    request: Request, steps: Sequence[Callable[[Request], Request]], memory: dict[str, Any], *, add_defaults_at: int
) -> Request:
    """The request after all steps; one that asks nothing returns the same object. Esc goes back to the last step that
    asked something; answers stay in `memory`, as the defaults of their questions."""
    answered: list[tuple[int, Request]] = []  # steps that asked, and the request before
    number = 0
    while number < len(steps):
        try:
            after = steps[number](request)
        except console.Back:
            if answered:
                number, request = answered.pop()
            continue
        if after is not request and number != add_defaults_at:
            answered.append((number, request))
            memory.update(questions.answers_in(after))
            memory.update(name=after.name, workers=after.workers, create=after.create, gpu=after.gpu)
            memory.update(asked_cluster=after.cluster)
        number, request = number + 1, after
    return request


# --- name, sizes, cluster, device -----------------------------------------------------------------------------------


def _ask_name(request: Request, memory: Mapping[str, Any], taken: Collection[str]) -> str:
    def read(answer: str) -> str:
        launch.check_names(replace(request, name=answer, workers=request.workers or (1,)), taken)
        return answer

    return _ask_until("Name of the run", memory.get("name") or questions.propose_name(taken), read)


def _ask_sizes(request: Request, memory: Mapping[str, Any], taken: Collection[str]) -> tuple[int, ...]:
    def read(answer: str) -> tuple[int, ...]:
        words = answer.replace(",", " ").split()
        if not words or not all(
            word.isascii() and word.isdecimal() and 1 <= int(word) <= questions.MAX_WORKERS for word in words
        ):
            raise UsageError(f"Enter numbers from 1 to {questions.MAX_WORKERS}, e.g. 1 2 4.")
        sizes = tuple(map(int, words))
        launch.check_names(replace(request, workers=sizes), taken)
        return sizes

    return _ask_until("Numbers of workers, one run each", " ".join(map(str, memory.get("workers") or (1,))), read)


def _ask_cluster(request: Request, memory: Mapping[str, Any], clusters: Sequence[Cluster], current: Cluster) -> Request:
    """Ask for a cluster: an existing one, or one that is created for these runs and deleted afterwards."""
    options = [
        Option(cluster.name, "this machine")
        if cluster.provider == "local"
        else Option(cluster.name, cluster.provider, "" if cluster.state == "ready" else cluster.state)
        for cluster in clusters
    ]
    creators = list(filter(_can_create, registry.creators()))
    price = {name: "costs money" if name in registry.PAID else "free" for name in creators}
    options += [Option(f"new {name}", f"{price[name]}; created for these runs, then deleted") for name in creators]
    if len(options) == 1:
        return request
    names = [cluster.name for cluster in clusters]
    chosen_before = memory.get("create") or {}
    if chosen_before.get("provider") in creators:
        default = len(clusters) + creators.index(chosen_before["provider"])
    else:
        default = _index(names, memory.get("asked_cluster"), current.name)
    chosen = console.choose("Cluster", options, default, back=True)
    if chosen >= len(clusters):
        return replace(request, create={"provider": creators[chosen - len(clusters)]})
    return replace(request, cluster=None if len(clusters) == 1 else clusters[chosen].name)


def _can_create(provider: str) -> bool:
    """Whether this machine has what creating a cluster with the provider needs."""
    package = _CREATOR_NEEDS.get(provider)
    if package is None:
        return shutil.which("kind") is not None
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _ask_gpu_type(request: Request, memory: Mapping[str, Any]) -> Request:
    """Ask for the GPU of a new cluster in a cloud, unless other options of the cluster are given."""
    if request.create.get("provider") not in registry.PAID or len(request.create) > 1:
        return request
    before = (memory.get("create") or {}).get("gpu_type", "")
    shown = f" [{before}]" if before else ""
    answer = console.ask(f"GPU of each worker, e.g. t4, l4, a100; empty: none{shown}: ", back=True) or before
    return replace(request, create={**request.create, "gpu_type": answer} if answer else request.create)


def _may_use_gpus(request: Request, cluster: Cluster) -> bool:
    if request.task is not None and "gpu" not in load_task(request.task).devices:
        return False
    return questions.has_gpus(cluster)


def _ask_device(request: Request, memory: Mapping[str, Any], cluster: Cluster) -> Request:
    if request.gpu is not None or not _may_use_gpus(request, cluster):
        return request
    default = int(memory.get("gpu") is False)
    return replace(request, gpu=console.choose("Device", [Option("gpu"), Option("cpu")], default, back=True) == 0)


# --- task, preset, data ---------------------------------------------------------------------------------------------


def _ask_task(request: Request, memory: Mapping[str, Any], is_local: bool) -> Request:
    if request.image:
        return request
    tasks = {name: task for name, task in load_catalog().items() if name != "certify"}  # mlbench certify runs it
    if is_local:  # leave out what needs a package that is not installed, unless that is all
        tasks = {name: task for name, task in tasks.items() if _installed_backends(task)} or tasks
    preset = request.preset or "spec"
    options = [_task_option(task, preset, request, is_local) for task in tasks.values()]
    names = [*tasks, CUSTOM]
    default = _index(names, memory.get("task"), questions.DEFAULT_TASK)
    choice = names[console.choose("Task", [*options, Option(CUSTOM, "a command of your own")], default, back=True)]
    return replace(request, task=choice)


def _ask_command(request: Request, memory: Mapping[str, Any]) -> Request:
    if request.task not in (None, CUSTOM):
        return request
    return replace(request, task=None, command=_ask_text("Command", memory.get("command")))


def _ask_preset(request: Request, memory: Mapping[str, Any], is_local: bool) -> Request:
    if request.task is None or request.preset is not None:
        return request
    task = load_task(request.task)
    presets = list(task.presets)
    if len(presets) < 2:
        return request
    options = [
        Option(preset, questions.describe_preset(task, preset), _lack(task, preset, request, is_local))
        for preset in presets
    ]
    remembered = memory.get("preset") if memory.get("task") == task.name else "spec"
    return replace(request, preset=presets[console.choose("Preset", options, _index(presets, remembered), back=True)])


def _ask_folder(request: Request, memory: Mapping[str, Any], is_local: bool) -> Request:
    if request.task is None:
        return request
    task = load_task(request.task)
    files = task.files
    if not is_local or files is None or not _lack(task, request.preset or "spec", request, is_local) or files.download:
        return request

    def read(answer: str) -> str:
        folder = str(Path(os.path.expanduser(answer)).absolute())
        missing = files.list_missing(folder)
        if not Path(folder).is_dir() or missing:
            raise UsageError(f"There is no {missing[0]} in {folder}." if missing else f"There is no folder {folder}.")
        return folder

    console.note(f"{task.name} needs: {task.data}")
    before = memory.get("data_dir") if memory.get("task") == task.name else None
    return replace(request, data_dir=_ask_until("Folder with the data", before or "", read))


def _task_option(task: Task, preset: str, request: Request, is_local: bool) -> Option:
    preset = preset if preset in task.presets else "spec"
    return Option(task.name, task.title, _lack(task, preset, request, is_local))


def _lack(task: Task, preset: str, request: Request, is_local: bool) -> str:
    return questions.find_lack(task, preset, is_local=is_local, changes=request.set, data_dir=request.data_dir)


# --- backend --------------------------------------------------------------------------------------------------------


def _ask_backend(request: Request, memory: Mapping[str, Any]) -> Request:
    known = TORCH_BACKENDS if request.task is None else load_task(request.task).backends
    if request.task is not None and request.cluster in (None, "local") and not request.create:
        known = tuple(_installed_backends(load_task(request.task))) or known
    names = [*(backend for backend in known if backend != "nccl" or request.gpu), CUSTOM]
    default = "nccl" if request.gpu and "nccl" in names else memory.get("backend")
    options = [*map(Option, names[:-1]), Option(CUSTOM, "another one, by name")]
    choice = names[console.choose("Backend", options, _index(names, default), back=True)]
    if choice != CUSTOM:
        return replace(request, backend=choice)
    return replace(request, custom_backend="")


def _installed_backends(task: Task) -> list[str]:
    """The backends of the task that this machine has."""
    return [backend for backend in task.backends if find_missing_package(backend) is None]


def _ask_custom_backend(request: Request, memory: Mapping[str, Any]) -> Request:
    if request.custom_backend != "":
        return request
    return replace(request, custom_backend=_ask_text("Name of the backend", memory.get("custom_backend")))


def _ask_run_on_all(request: Request, memory: Mapping[str, Any]) -> Request:
    if request.custom_backend is None or request.task is not None or request.run_on_all is not None:
        return request
    return replace(
        request, run_on_all=_ask_switch("Run the command on all workers (otherwise on the first only)", memory)
    )


# --- answers --------------------------------------------------------------------------------------------------------


def _index(names: Sequence[str], remembered: Any, otherwise: str = "") -> int:
    """The place of the first of these two names that is offered, else 0."""
    return next((list(names).index(name) for name in (remembered, otherwise) if name in names), 0)


def _ask_text(title: str, remembered: Any) -> str:
    def read(answer: str) -> str:
        if not answer:
            raise UsageError("Please enter a value.")
        return answer

    return _ask_until(title, remembered if isinstance(remembered, str) else "", read)


def _ask_switch(title: str, memory: Mapping[str, Any]) -> bool:
    default = memory.get("run_on_all") is True
    words = {"y": True, "yes": True, "n": False, "no": False}

    def read(answer: str) -> bool:
        if answer.lower() not in words:
            raise UsageError("Please answer y or n.")
        return words[answer.lower()]

    return _ask_until(title, "y" if default else "n", read, shown="Y/n" if default else "y/N")


def _ask_until(title: str, default: str, read: Callable[[str], T], shown: str = "") -> T:
    """Ask until `read` accepts the answer, and show its errors."""
    hint = f" [{shown or default}]" if default else ""
    while True:
        try:
            return read(console.ask(f"{title}{hint}: ", back=True) or default)
        except UsageError as error:
            console.note(error.message)
