"""The questions of `mlbench run`: only on a terminal, only what no flag has answered, remembered by name.

Name, cluster, task (or image and command), preset, data folder, device, numbers of workers, backend, and for a backend
of one's own whether the command runs on all workers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mlbench_cli import console
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import CUSTOM
from mlbench_cli.runs import launch, questions
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import TORCH_BACKENDS, Task, load_catalog, load_task
from mlbench_cli.util.text import Option

T = TypeVar("T")


def complete(
    request: Request,
    clusters: Sequence[Cluster],
    current: Cluster,
    taken: Collection[str],
    add_defaults: Callable[[Request, Cluster], Request],
) -> tuple[Request, Cluster]:
    """Ask on the terminal what `request` leaves open; the request, and the cluster that it is for.

    `clusters` are all that are known, `current` is the one that counts unless another is chosen, `taken` the names of
    other runs. `add_defaults` fills in what needs no question on the cluster that was chosen.
    """
    memory = questions.recall()
    has_program = request.task is not None or request.command is not None
    if request.name is None:
        request = replace(request, name=_ask_name(request, taken))
    if not has_program and request.cluster is None and len(clusters) > 1:
        current = _ask_cluster(clusters, current)
        request = replace(request, cluster=current.name)
    request = add_defaults(request, current)
    if not has_program:
        is_local = current.provider == "local"
        request = _ask_program(request, memory, is_local)
        if request.task is not None and request.command is None:
            request = _ask_preset(request, memory, is_local)
        if request.gpu is None and _may_use_gpus(request, current):
            request = replace(request, gpu=_ask_device())
    if not request.workers:
        request = replace(request, workers=_ask_sizes(request, taken))
    if not has_program and request.backend is None and request.custom_backend is None:
        request = _ask_backend(request, memory)
    if problem := questions.remember(request):
        console.warn(problem)
    return request, current


# --- name, sizes, cluster, device -----------------------------------------------------------------------------------


def _ask_name(request: Request, taken: Collection[str]) -> str:
    def read(answer: str) -> str:
        launch.check_names(replace(request, name=answer, workers=request.workers or (1,)), taken)
        return answer

    return _ask_until("Name of the run", questions.propose_name(taken), read)


def _ask_sizes(request: Request, taken: Collection[str]) -> tuple[int, ...]:
    def read(answer: str) -> tuple[int, ...]:
        words = answer.replace(",", " ").split()
        if not words or not all(
            word.isascii() and word.isdecimal() and 1 <= int(word) <= questions.MAX_WORKERS for word in words
        ):
            raise UsageError(f"Enter numbers from 1 to {questions.MAX_WORKERS}, e.g. 1 2 4.")
        sizes = tuple(map(int, words))
        launch.check_names(replace(request, workers=sizes), taken)
        return sizes

    return _ask_until("Numbers of workers, one run each", "1", read)


def _ask_cluster(clusters: Sequence[Cluster], current: Cluster) -> Cluster:
    options = [
        Option(cluster.name, f"{cluster.provider}, {cluster.state}", "" if cluster.state == "ready" else "not ready")
        for cluster in clusters
    ]
    names = [cluster.name for cluster in clusters]
    return clusters[console.choose("Cluster", options, names.index(current.name) if current.name in names else 0)]


def _may_use_gpus(request: Request, cluster: Cluster) -> bool:
    if request.task is not None and "gpu" not in load_task(request.task).devices:
        return False
    return questions.has_gpus(cluster)


def _ask_device() -> bool:
    return console.choose("Device", [Option("gpu"), Option("cpu")], 0) == 0


# --- task, preset, data ---------------------------------------------------------------------------------------------


def _ask_program(request: Request, memory: Mapping[str, Any], is_local: bool) -> Request:
    if request.image:
        return replace(request, command=_ask_text("Command", memory.get("command")))
    tasks = load_catalog()
    own = "a command of your own" if is_local else "an image and a command of your own"
    preset = request.preset or "spec"
    options = [_task_option(task, preset, request, is_local) for task in tasks.values()]
    names = [*tasks, CUSTOM]
    choice = names[console.choose("Task", [*options, Option(CUSTOM, own)], _index(names, memory.get("task")))]
    if choice != CUSTOM:
        return replace(request, task=choice)
    image = None if is_local else _ask_text("Image", memory.get("image"))
    return replace(request, image=image, command=_ask_text("Command", memory.get("command")))


def _ask_preset(request: Request, memory: Mapping[str, Any], is_local: bool) -> Request:
    task = load_task(request.task or "")
    if request.preset is None and len(task.presets) > 1:
        presets = list(task.presets)
        options = [
            Option(preset, questions.describe_preset(task, preset), _lack(task, preset, request, is_local))
            for preset in presets
        ]
        remembered = memory.get("preset") if memory.get("task") == task.name else "spec"
        request = replace(request, preset=presets[console.choose("Preset", options, _index(presets, remembered))])
    files = task.files
    if not is_local or files is None or not _lack(task, request.preset or "spec", request, is_local) or files.download:
        return request

    def read(answer: str) -> str:
        folder = str(Path(answer).expanduser().absolute())
        missing = files.list_missing(folder)
        if not Path(folder).is_dir() or missing:
            raise UsageError(f"There is no {missing[0]} in {folder}." if missing else f"There is no folder {folder}.")
        return folder

    console.note(f"{task.name} needs: {task.data}")
    return replace(request, data_dir=_ask_until("Folder with the data", "", read))


def _task_option(task: Task, preset: str, request: Request, is_local: bool) -> Option:
    preset = preset if preset in task.presets else "spec"
    return Option(task.name, task.title, _lack(task, preset, request, is_local))


def _lack(task: Task, preset: str, request: Request, is_local: bool) -> str:
    return questions.find_lack(task, preset, is_local=is_local, changes=request.set, data_dir=request.data_dir)


# --- backend --------------------------------------------------------------------------------------------------------


def _ask_backend(request: Request, memory: Mapping[str, Any]) -> Request:
    known = TORCH_BACKENDS if request.task is None else load_task(request.task).backends
    names = [*(backend for backend in known if backend != "nccl" or request.gpu), CUSTOM]
    default = "nccl" if request.gpu and "nccl" in names else memory.get("backend")
    options = [*map(Option, names[:-1]), Option(CUSTOM, "another one, by name")]
    choice = names[console.choose("Backend", options, _index(names, default))]
    if choice != CUSTOM:
        return replace(request, backend=choice)
    request = replace(request, custom_backend=_ask_text("Name of the backend", memory.get("custom_backend")))
    if request.task is not None or request.run_on_all is not None:
        return request
    return replace(
        request, run_on_all=_ask_switch("Run the command on all workers (otherwise on the first only)", memory)
    )


# --- answers --------------------------------------------------------------------------------------------------------


def _index(names: Sequence[str], remembered: Any) -> int:
    return list(names).index(remembered) if remembered in names else 0


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
    """The first answer that `read` accepts; its complaints are shown."""
    hint = f" [{shown or default}]" if default else ""
    while True:
        try:
            return read(console.ask(f"{title}{hint}: ") or default)
        except UsageError as error:
            console.note(error.message)
