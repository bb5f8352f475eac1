"""The questions of `mlbench run`: only on a terminal, only what no flag has answered, remembered by name.

The order is the original's: benchmark, image and command, backend, whether to run on all workers.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mlbench_cli import console, settings
from mlbench_cli.catalog import TORCH_BACKENDS, load_catalog, load_task
from mlbench_cli.errors import UsageError
from mlbench_cli.files import write_atomically
from mlbench_cli.runs.request import Request
from mlbench_cli.spec import CUSTOM

T = TypeVar("T")
REMEMBERED = ("task", "image", "command", "backend", "custom_backend", "run_on_all")


def needed(request: Request) -> bool:
    """Whether the request leaves open what to run."""
    return request.task is None and request.command is None


def complete(request: Request, *, local: bool) -> Request:
    """Ask what `request` leaves open. Raises UsageError that names the flags where there is no terminal to ask on."""
    if not console.interactive():
        raise UsageError(
            "What to run is not said, and there is no terminal to ask on.",
            hint="--task NAME [--backend NAME], or --command 'python train.py' [--image NAME:TAG]",
        )
    memory = _recall()
    request = _ask_benchmark(request, memory, local)
    if request.backend is None and request.custom_backend is None:
        request = _ask_backend(request, memory)
    _remember(request)
    return request


def _ask_benchmark(request: Request, memory: Mapping[str, Any], local: bool) -> Request:
    tasks = load_catalog()
    names = [*tasks, CUSTOM]
    longest = max(map(len, names))
    lines = [f"{task.name:<{longest}}  {task.title}" for task in tasks.values()]
    lines.append(f"{CUSTOM:<{longest}}  {'a command of your own' if local else 'an image and a command of your own'}")
    choice = CUSTOM if request.image else names[_choose("Benchmark", lines, names, memory.get("task"))]
    if choice != CUSTOM:
        return replace(request, task=choice)
    image = None if local else request.image or _ask_text("Image", memory.get("image"))
    return replace(request, image=image, command=_ask_text("Command", memory.get("command")))


def _ask_backend(request: Request, memory: Mapping[str, Any]) -> Request:
    known = TORCH_BACKENDS if request.task is None else load_task(request.task).backends
    names = [*(backend for backend in known if backend != "nccl" or request.gpu), CUSTOM]
    choice = names[_choose("Backend", [*names[:-1], "another one"], names, memory.get("backend"))]
    if choice != CUSTOM:
        return replace(request, backend=choice)
    request = replace(request, custom_backend=_ask_text("Name of the backend", memory.get("custom_backend")))
    if request.task is not None or request.run_on_all is not None:
        return request
    return replace(
        request, run_on_all=_ask_switch("Run the command on all workers (otherwise on the first only)", memory)
    )


def _choose(title: str, lines: Sequence[str], names: Sequence[str], remembered: Any) -> int:
    """The index of the line that is chosen, by number or by name; Enter takes the remembered one, or the first."""
    default = names.index(remembered) if remembered in names else 0
    console.note(f"{title}:\n")
    for index, line in enumerate(lines):
        console.note(console.cut(f"[{index}]  {line}", console.terminal_width(sys.stderr)))
    console.note("")

    def read(answer: str) -> int | None:
        if answer in names:
            return names.index(answer)
        return int(answer) if answer.isascii() and answer.isdecimal() and int(answer) < len(lines) else None

    return _ask_until(
        f"Selection [{default}]: ", str(default), read, f"Answer with a number from 0 to {len(lines) - 1}."
    )


def _ask_text(title: str, remembered: Any) -> str:
    default = remembered if isinstance(remembered, str) else ""
    question = f"{title} [{default}]: " if default else f"{title}: "
    return _ask_until(question, default, lambda answer: answer or None, "An answer is needed.")


def _ask_switch(title: str, memory: Mapping[str, Any]) -> bool:
    default = memory.get("run_on_all") is True
    words = {"y": True, "yes": True, "n": False, "no": False}
    question = f"{title} [{'Y/n' if default else 'y/N'}]: "
    return _ask_until(question, "y" if default else "n", lambda answer: words.get(answer.lower()), "Answer y or n.")


def _ask_until(question: str, default: str, read: Callable[[str], T | None], complaint: str) -> T:
    while True:
        value = read(console.ask(question) or default)
        if value is not None:
            return value
        console.note(complaint)


# --- memory ---------------------------------------------------------------------------------------------------------


def _memory_file() -> Path:
    return settings.config_dir() / "answers.json"


def _recall() -> dict[str, Any]:
    """The last answers, by name. A file that was damaged is as good as none."""
    try:
        data = json.loads(_memory_file().read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _remember(request: Request) -> None:
    """Keep the answers for next time, on top of older ones. Failing to do so is no reason not to run."""
    said = {name: getattr(request, name) for name in REMEMBERED if getattr(request, name) is not None}
    if request.task is None:
        said["task"] = CUSTOM
    if request.custom_backend is not None:
        said["backend"] = CUSTOM
    path = _memory_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, json.dumps({**_recall(), **said}, indent=2).encode() + b"\n")
    except OSError as error:
        console.warn(f"The answers could not be remembered in {path}: {error.strerror}.")
