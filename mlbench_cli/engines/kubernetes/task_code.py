"""The code of a catalog task, which a run brings along, so that its image needs only what the code imports.

A ConfigMap with one zip, unpacked by worker.sh. The Job names its digest; a worker that finds another one runs nothing.
"""

import io
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from mlbench_cli.errors import UsageError
from mlbench_cli.isolation import ROOT
from task_images.harness.environment import read_task_code

PREPARE = "task_images.harness.prepare"  # prepares the data of the task that its first argument names
MAX_BYTES = 1_000_000  # a ConfigMap holds 1 MiB


def find_task(argv: Sequence[str]) -> str | None:
    """The task whose program a command runs: `python -m task_images.TASK`; None for other commands."""
    words = [*argv, "", "", "", ""]
    if words[:2] != ["python", "-m"] or not words[2].startswith("task_images."):
        return None
    return words[3] if words[2] == PREPARE else words[2].split(".")[1]


@lru_cache(maxsize=8)
def pack_code(task: str) -> bytes | None:
    """A zip with the task's package, the same bytes for the same code; None for a task that is not mlbench's own."""
    try:
        contents = read_task_code(task, Path(ROOT))
    except OSError:
        return None
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(f"task_images/{name}")  # dated 1980
            archive.writestr(entry, contents[name], zipfile.ZIP_DEFLATED, 9)
    if len(file.getvalue()) > MAX_BYTES:
        raise UsageError(
            f"The code of the task {task} is {len(file.getvalue())} bytes, more than a ConfigMap holds.",
            hint="Put it into an image of your own, and run that by --command and --image.",
        )
    return file.getvalue()
