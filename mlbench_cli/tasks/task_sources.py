"""External tasks: from installed packages and from folders.

A package names itself, or a subpackage, in the entry point `mlbench.tasks`:

    [project.entry-points."mlbench.tasks"]
    mine = "my_package.tasks"

Folders come from --task-path or MLBENCH_TASK_PATH (separated as in PATH). Both have a catalog.json beside the packages
of their tasks, which `python -m task_images.describe FOLDER` writes.
"""

import os
import shlex
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from mlbench_cli import isolation
from mlbench_cli.errors import UsageError

GROUP = "mlbench.tasks"
VARIABLE = "MLBENCH_TASK_PATH"
CATALOG = "catalog.json"


class TaskSource(NamedTuple):
    """A catalog.json and where it comes from: `origin` is a package with its version, or a folder; `search_path` is the
    folder from which ranks import it (None for installed packages)."""

    file: Path
    origin: str
    search_path: str | None = None


def use_task_path(path: str | None) -> bool:
    """Add the folder `path` to the task path of this process and its children. False if it is already there. Raises
    UsageError if the folder has no task."""
    if path is None:
        return False
    folder = _require_tasks(path).parent
    known = os.environ.get(VARIABLE, "")
    if str(folder) in known.split(os.pathsep):
        return False
    os.environ[VARIABLE] = os.pathsep.join(filter(None, (str(folder), known)))
    return True


def _require_tasks(path: str) -> Path:
    """The catalog in the folder, absolute."""
    try:
        file = Path(os.path.expanduser(path)).absolute() / CATALOG
        is_there = file.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, or the home of an unknown user
        raise UsageError(f"{path!r} is not a folder: {error}.") from None
    if not is_there:
        raise UsageError(
            f"{file.parent} holds no task: it has no {CATALOG}.",
            hint=f"python -m task_images.describe {shlex.quote(path)}",
        )
    return file


def list_sources() -> list[TaskSource]:
    """All external tasks. Raises UsageError if a folder in MLBENCH_TASK_PATH has none."""
    return [*_find_named(), *_find_installed()]


def _find_named() -> Iterator[TaskSource]:
    for entry in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        file = _require_tasks(entry)
        yield TaskSource(file, str(file.parent), str(file.parent))  # a task is a package in this folder


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
                if folder is not None and (folder / CATALOG).is_file():
                    yield TaskSource(folder / CATALOG, f"{name} {version}")


def _read_group(file: Path) -> list[str]:
    """The packages with tasks of an installed distribution, without importing them."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return []
    packages, is_ours = [], False
    for line in map(str.strip, lines):
        if line.startswith("["):
            is_ours = line == f"[{GROUP}]"
        elif is_ours and "=" in line and not line.startswith(("#", ";")):
            packages.append(line.partition("=")[2].strip())
    return packages


def _find_package(name: str, path: list[str]) -> Path | None:
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, path)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)), *rest)
