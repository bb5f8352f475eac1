"""Facts about a rank's machine and code. Standard library only, because the command line records the same facts."""

import ast
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from task_images.cores import count_usable, cpu_quota, pinned_cpus
from task_images.methods import FILES

ROOT = Path(__file__).parents[1]  # the folder that contains task_images
NVIDIA = Path("/proc/driver/nvidia")
AMD, AMD_MODULE = Path("/sys/bus/pci"), Path("/sys/module/amdgpu")
CAP_IPC_LOCK = 14  # linux/capability.h

_MODULE = re.compile(r"task_images(\.[A-Za-z_][A-Za-z0-9_]*)+")
_NOT_CODE = ("Dockerfile", "__pycache__")
_SEPARATORS = re.compile(r"[-_.]+")


def digest_code(task: str, method: str = "", root: Path = ROOT) -> tuple[str, str]:
    """Hex SHA-256 of the code of a catalog task, and of what the communication method with this name adds to it, empty
    for the task's own method; the same code has the same digests on every machine and in an image.

    Each is the digest of lines "DIGEST  NAME", as written by sha256sum, sorted by name: for the files of the task's
    folder and all modules in task_images that they import, directly or not; and for the further modules that the method
    needs. Raises OSError for an unknown task.
    """
    package = root / "task_images"
    own = _collect_code(package, task)
    added = _follow(package, _list_modules(method), own) if method else {}
    return _digest(own), _digest(added) if method else ""


def _digest(contents: Mapping[str, bytes]) -> str:
    lines = (f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in sorted(contents))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_task_code(task: str, root: Path = ROOT) -> dict[str, bytes]:
    """What runs of a catalog task may need on a machine without mlbench, by names in task_images: its own code, that of
    all methods, and the program that prepares data. Raises OSError if there is no such task."""
    package = root / "task_images"
    own = _collect_code(package, task)
    return {**own, **_follow(package, ["prepare.py", *_list_modules(*FILES)], own)}


def _list_modules(*methods: str) -> list[str]:
    """The modules that communication methods have beside the task's own."""
    return ["methods/check.py", *(f"methods/{FILES.get(method, 'check')}.py" for method in methods)]


def _collect_code(package: Path, task: str) -> dict[str, bytes]:
    """The files of the task's folder, and all modules of task_images that they import, directly or not. Hidden files,
    compiled files and Dockerfiles are left out."""
    folder = {path.relative_to(package).as_posix(): path.read_bytes() for path in _code_files(package / task)}
    names = ["__init__.py", "contract.py", "run.py", *(name for name in folder if name.endswith(".py"))]
    return {**folder, **_follow(package, names)}


def _follow(package: Path, names: Sequence[str], known: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """The modules `names` and all that they import, directly or not, without those of `known`, which has all that its
    own modules import."""
    found: dict[str, bytes] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found and name not in (known or ()):
            found[name] = (package / name).read_bytes()
            waiting += _list_imports(package, found[name])
    return found


def _list_imports(package: Path, code: bytes) -> set[str]:
    """The files of task_images that a module imports, also where it is imported late, by its name as text."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            named.update([node.module, *(f"{node.module}.{item.name}" for item in node.names)])
        elif isinstance(node, ast.Import):
            named.update(item.name for item in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            named.add(node.value)
    found: set[str] = set()
    for words in (name.split(".")[1:] for name in named if name.startswith("task_images.")):
        for count in range(1, len(words) + 1):
            place = "/".join(words[:count])
            found.update(name for name in (f"{place}.py", f"{place}/__init__.py") if (package / name).is_file())
    return found


def running_task() -> str | None:
    """The catalog task whose program this process runs; None for other programs."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    task = sys.argv[1] if spec and spec.name == "task_images.run" and len(sys.argv) > 1 else ""
    return task if task.isidentifier() and (ROOT / "task_images" / task).is_dir() else None


def list_packages(path: Sequence[str] | None = None) -> dict[str, str]:
    """Name (lower case, words joined by "-") to version of every installed package on `path` (sys.path).

    The same as importlib.metadata finds, but read from the names of folders: 1 ms instead of 100 ms.
    """
    packages: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        with suppress(OSError):
            for entry in sorted(os.listdir(folder or ".")):
                if entry.endswith((".dist-info", ".egg-info")):
                    name, version = _name_and_version(Path(folder, entry))
                    packages.setdefault(_SEPARATORS.sub("-", name).lower(), version)
    return dict(sorted(packages.items()))


def cpu_model() -> str | None:
    """The processor's name, if the system tells it."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def gpu_models(driver: Path = NVIDIA, amd: Path = AMD) -> list[str]:
    """The models of all GPUs, first NVIDIA's, then AMD's, each in the order of PCI addresses."""
    models = []
    for path in sorted(driver.glob("gpus/*/information")):
        with suppress(OSError):
            lines = path.read_text("utf-8", "replace").splitlines()
            models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    for path in sorted(amd.glob("drivers/amdgpu/*/product_name")):
        with suppress(OSError):
            models.append(path.read_text("utf-8", "replace").strip() or "AMD GPU")
    return models


def gpu_driver(driver: Path = NVIDIA, amd: Path = AMD_MODULE) -> str | None:
    """Version of the NVIDIA or AMD driver; None without a driver, and for the AMD driver built into the kernel."""
    with suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", (driver / "version").read_text("utf-8", "replace"))
        return found[1] if found else None
    with suppress(OSError):
        return f"amdgpu {(amd / 'version').read_text('utf-8', 'replace').strip()}"
    return None


def lockable_bytes(status: Path = Path("/proc/self/status")) -> int | str | None:
    """Bytes of memory that this process may lock (ulimit -l), or "unlimited"; None if unknown.

    The capability IPC_LOCK removes the limit, but only if it is effective: in pods it is effective only for root.
    """
    with suppress(OSError, ValueError):
        effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text("utf-8", "replace"), re.MULTILINE)
        if effective and int(effective[1], 16) >> CAP_IPC_LOCK & 1:
            return "unlimited"
    with suppress(ImportError, AttributeError, OSError):
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return "unlimited" if limit == resource.RLIM_INFINITY else limit
    return None


def machine_facts() -> dict[str, Any]:
    """Facts that every rank reports about its machine. `cores`: usable by the ranks; `cpu_quota`: see cores.cpu_quota;
    `pinned_cpus`: the CPUs to which this rank is pinned, if it is."""
    facts: Mapping[str, Any] = {
        "cpu": cpu_model(),
        "cores": count_usable(),
        "cpu_quota": cpu_quota(),
        "pinned_cpus": pinned_cpus(),
        "gpus": gpu_models(),
        "gpu_driver": gpu_driver(),
        "memlock_bytes": lockable_bytes(),
    }
    return {name: value for name, value in facts.items() if value not in (None, [])}


def code_facts(method: str = "") -> dict[str, Any]:
    """Facts that rank 0 reports for all ranks: the digests of the code of the task and of the communication method with
    this name, and the installed packages."""
    task = running_task()
    with suppress(OSError):
        digests = dict(zip(("code_digest", "method_digest"), digest_code(task, method), strict=True)) if task else {}
        return {"packages": list_packages(), **digests}
    return {}


def _code_files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _NOT_CODE or entry.name.endswith((".pyc", "~")):
                continue
            if entry.is_dir():
                yield from _code_files(Path(entry.path))
            else:
                yield Path(entry.path)


def _name_and_version(entry: Path) -> tuple[str, str]:
    """Name and version from NAME-VERSION.dist-info, NAME-VERSION-py3.X.egg-info, or NAME.egg-info with its PKG-INFO."""
    stem, egg = entry.stem, entry.suffix == ".egg-info"
    name, dash, version = stem.partition("-") if egg else stem.rpartition("-")
    if dash:
        return name, version.partition("-")[0]
    with suppress(OSError), open(entry / "PKG-INFO", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("Version:"):
                return stem, line.partition(":")[2].strip()
    return stem, "unknown"
