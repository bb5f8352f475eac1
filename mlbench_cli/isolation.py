"""Which code a process of this tool runs: its own packages from where `mlbench_cli` was loaded, all else as installed.

Folders of machine-learning projects are often called `providers` or `templates`, their files `signal.py` or
`random.py`, and PYTHONPATH often names them. None of that may take the place of this tool's modules, of the standard
library or of an installed package, in the tool or in the ranks of a catalog task.

`python isolation.py PACKAGES MODULE [ARGUMENT...]` is how a rank of a catalog task is started: as `python -m MODULE`,
with `task_images` from beside this file. PACKAGES are further folders of installed packages, joined as in PYTHONPATH.

Standard library only, and of that only what every interpreter has loaded: this module is imported by every command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OWN_PACKAGES = ("providers", "task_images", "templates")  # of the project's, those besides mlbench_cli itself

# Variables that make an interpreter run code, or read code from places, that belong to no installed package.
CODE_VARIABLES = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PYTHONSTARTUP", "PYTHONINSPECT"),
    *("PYTHONBREAKPOINT", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONSAFEPATH"),
)


class OwnPackageFinder:
    """Finds the packages of OWN_PACKAGES in folder `root`, and nothing else. It goes to the front of sys.meta_path."""

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find one of our own top-level packages below `root`; None for every other module."""
        if name not in OWN_PACKAGES:
            return None
        return PathFinder.find_spec(name, [self.root])


def find_own_packages_first() -> None:
    """Let this process import the project's packages from where this module was loaded. Idempotent."""
    if not any(type(finder).__name__ == OwnPackageFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackageFinder(ROOT))


def protect_path() -> None:
    """Take the user's folders off this process's sys.path, for a process that is this tool and nothing else."""
    sys.path[:] = protected_path()


def protected_path() -> list[str]:
    """sys.path without the current folder, the script's folder and PYTHONPATH.

    A folder of PYTHONPATH that holds installed packages (environment modules on HPC machines) stays, at the end.
    """
    path = list(sys.path)
    if path and not sys.flags.safe_path and _absolute(path[0]) in _folders_of_start():
        del path[0]
    named = [] if sys.flags.ignore_environment else _entries(os.environ.get("PYTHONPATH"))
    own = [entry for entry in path if entry and _absolute(entry) not in named]
    return [*own, *(entry for entry in package_folders(os.environ) if entry in map(_absolute, path))]


def package_folders(environ: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH that hold installed packages, absolute, in their order. Never the current folder, which
    an empty part of PYTHONPATH stands for: any repository may hold a file that looks like a package."""
    return [entry for entry in _entries(environ.get("PYTHONPATH")) if entry != _absolute("") and _has_packages(entry)]


def isolated_command(module: str, python: str = sys.executable, root: str = ROOT) -> list[str]:
    """The command that calls `main(ARGUMENTS)` of one of our modules, in a process that sees no file of the user's and
    no installed package. The caller appends the arguments.

    `root` is the folder of our packages. The module is imported, not run as a script, so that it is compiled once.
    """
    code = f"import sys; sys.path.append(sys.argv.pop(1)); from {module} import main; sys.exit(main(sys.argv[1:]))"
    return [python, "-I", "-S", "-c", code, root]


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a rank that is to run installed code only."""
    kept = {name: value for name, value in environ.items() if name not in CODE_VARIABLES}
    return {**kept, "PYTHONSAFEPATH": "1"}


def rank_command(argv: Sequence[str], environ: Mapping[str, str], task_path: str | None = None) -> list[str]:
    """How `python -m MODULE ...` is started, if MODULE is to come from where this tool was loaded, from an installed
    package, or from the folder `task_path`."""
    if list(argv[:2]) != ["python", "-m"] or len(argv) < 3:
        return list(argv)
    folders = [*package_folders(environ), *([task_path] if task_path else [])]
    return ["python", os.path.abspath(__file__), os.pathsep.join(folders), *argv[2:]]


def run_module(packages: str, module: str, arguments: Sequence[str]) -> None:
    """Become `python -m MODULE ARGUMENT...`, with the project's packages from where this file is."""
    import runpy  # which no interpreter has loaded

    # At the end, for processes that a rank may start: they have its sys.path, but not its finder.
    sys.path += [*_entries(packages), ROOT]
    find_own_packages_first()
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _folders_of_start() -> tuple[str, ...]:
    """What Python puts at the front of sys.path: the current folder, or that of the script."""
    script = sys.argv[0] if sys.argv else ""
    return (_absolute(""), *(os.path.dirname(place) for place in (_absolute(script), os.path.realpath(script))))


def _entries(path: str | None) -> list[str]:
    """The folders of a text as in PYTHONPATH, absolute; an empty part is the current folder, as in Python."""
    return [_absolute(entry) for entry in path.split(os.pathsep)] if path else []


def _absolute(entry: str) -> str:
    try:
        return os.path.abspath(entry)
    except OSError:  # the current folder has been deleted
        return entry


def _has_packages(folder: str) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name.endswith((".dist-info", ".egg-info")) for name in names)


if __name__ == "__main__":
    run_module(sys.argv[1], sys.argv[2], sys.argv[3:])
