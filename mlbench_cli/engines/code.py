"""The code that a run brings to its machines."""

import hashlib
import io
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import mlbench_cli
from task_images.facts import read_task_code

# Files of mlbench that the machines need besides the tasks.
_MODULES = (
    *("mlbench_cli/__init__.py", "mlbench_cli/isolation.py", "mlbench_cli/errors.py"),
    *("mlbench_cli/model/__init__.py", "mlbench_cli/model/faults.py", "mlbench_cli/model/network.py"),
    *("mlbench_cli/util/__init__.py", "mlbench_cli/util/files.py"),
)
_FOLDERS = ("task_images", "mlbench_cli/agent")
# What the agent alone needs.
_AGENT = (
    "mlbench_cli/agent",
    *("task_images/__init__.py", "task_images/contract.py", "task_images/cores.py"),
)


@cache
def pack_code() -> tuple[bytes, str]:
    """The code for the machines as a tar that depends only on the files, and its SHA-256."""
    root, names = _find_files((*_MODULES, *_FOLDERS))
    data = _pack({name: (root / name).read_bytes() for name in names})
    return data, hashlib.sha256(data).hexdigest()


@cache
def pack_task_code(task: str | None) -> bytes:
    """The code for the pods of one run, as `pack_code`: the agent, and that of the task if it is mlbench's own."""
    root, names = _find_files((*_MODULES, *_AGENT))
    files = {name: (root / name).read_bytes() for name in names}
    if task is not None:
        with suppress(OSError):  # the code of a third-party task is in the image
            files |= {f"task_images/{name}": data for name, data in read_task_code(task, root).items()}
    return _pack(files)


def _pack(files: Mapping[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(files[name]), 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    return sink.getvalue()


def _find_files(places: Sequence[str]) -> tuple[Path, list[str]]:
    """The project's folder, and in order the names of these files and of those in these folders."""
    root = Path(mlbench_cli.__file__).parents[1]
    found = (
        path for place in places for path in ((root / place).rglob("*") if (root / place).is_dir() else [root / place])
    )
    files = (path for path in found if path.is_file() and "__pycache__" not in path.parts)
    return root, sorted(path.relative_to(root).as_posix() for path in files)
