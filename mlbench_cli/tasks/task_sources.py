"""External tasks: from installed packages and from folders.

A package names itself, or a subpackage, in the entry point `mlbench.tasks`:

    [project.entry-points."mlbench.tasks"]
    mine = "my_package.tasks"

Folders come from --task-path or MLBENCH_TASK_PATH (separated as in PATH). Each is a task (with a task.yaml) or
contains folders of tasks.
"""

import os
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from mlbench_cli import isolation
from mlbench_cli.errors import UsageError

GROUP = "mlbench.tasks"
VARIABLE = "MLBENCH_TASK_PATH"


class TaskSource(NamedTuple):
    """A task.yaml and where it comes from: `origin` is a package with its version, or a folder; `search_path` is the
    folder from which ranks import it (None for installed packages)."""

    file: Path
    origin: str
    search_path: str | None = None


def use_task_path(path: str | None) -> bool:
    """Add the folder `path` to the task path of this process and its children. False if it is already there. Raises
    UsageError if the folder has no task."""
    if path is None:
        return False
    folder = _require_tasks(path)[0]
    known = os.environ.get(VARIABLE, "")
    if str(folder) in known.split(os.pathsep):
        return False
    os.environ[VARIABLE] = os.pathsep.join(filter(None, (str(folder), known)))
    return True


def _require_tasks(path: str) -> tuple[Path, list[Path]]:
    """The folder, absolute, and the task.yaml files of its tasks."""
    try:
        folder = Path(path).expanduser().absolute()
        files = _task_files(folder)
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, or the home of an unknown user
        raise UsageError(f"{path!r} is not a folder: {error}.") from None
    if not files:
        raise UsageError(
            f"{folder} holds no task: neither task.yaml nor a folder with one.",
            hint=f"--task-path and {VARIABLE} name a folder of tasks; see the guide to your own tasks.",
        )
    return folder, files


def list_sources() -> list[TaskSource]:
    """All external tasks. Raises UsageError if a folder in MLBENCH_TASK_PATH has none."""
    return [*_find_named(), *_find_installed()]


def _find_named() -> Iterator[TaskSource]:
    for entry in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        folder, files = _require_tasks(entry)
        # A task is a package, imported from its parent folder.
        root = folder.parent if files == [folder / "task.yaml"] else folder
        yield from (TaskSource(file, str(folder), str(root)) for file in files)


def _find_installed() -> Iterator[TaskSource]:
    """Tasks of installed distributions. As with imports, the first of several installations counts; a virtual
    environment may list the same folder as lib and lib64."""
    path = isolation.protected_path()
    known: set[str] = set()
    for place in path:
        for file in sorted(Path(place or ".").glob("*.dist-info/entry_points.txt")):
            name, _, version = file.parent.name.removesuffix(".dist-info").partition("-")
            if name.lower() in known:
                continue
            known.add(name.lower())
            for package in _read_group(file):
                folder = _find_package(package, path)
                if folder is not None:
                    yield from (TaskSource(task, f"{name} {version}") for task in _task_files(folder))


def _read_group(file: Path) -> list[str]:
    """The packages with tasks of an installed distribution, without importing them."""
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError):
        return []
    if GROUP not in text:
        return []
    from configparser import ConfigParser, Error

    parser = ConfigParser(delimiters=("=",), interpolation=None)
    try:
        parser.read_string(text)
        return [value.strip() for _, value in parser.items(GROUP)] if parser.has_section(GROUP) else []
    except Error:
        return []


def _find_package(name: str, path: list[str]) -> Path | None:
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, path)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)), *rest)


def _task_files(folder: Path) -> list[Path]:
    own = folder / "task.yaml"
    return [own] if own.is_file() else sorted(folder.glob("*/task.yaml"))
