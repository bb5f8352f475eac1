"""Write the catalog of tasks: `python -m task_images.describe [FOLDER]`; without FOLDER, mlbench's own.

Each package in FOLDER that has `TASK`, in its `__init__` or in its module `task`, becomes an entry of
FOLDER/catalog.json, the only file that mlbench reads of a task before it runs it. Run it after every change of `TASK`
or `Settings`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from task_images.parameters import Task, describe
from task_images.run import find_in

FILE = "catalog.json"


def describe_task(package: str) -> dict[str, Any] | None:
    """The entry of a package; None if it is no task."""
    task: Task | None = find_in(package, "TASK", "", "task")
    if task is None:
        return None
    name = package.rpartition(".")[2]
    given = {one.name: getattr(task, one.name) for one in fields(task) if one.name != "settings"}
    command = task.command or ("python", "-m", "task_images.run", package.removeprefix("task_images."))
    given |= {"image": task.image or name, "command": list(command)}
    parameters = {} if task.settings is None else describe(task.settings)
    return {"name": name, **{key: value for key, value in given.items() if value}, "parameters": parameters}


def describe_folder(folder: Path) -> str:
    """The text of the catalog of a folder, which may be a package itself."""
    root, prefix = folder.absolute(), ""
    while (root / "__init__.py").is_file():
        root, prefix = root.parent, f"{root.name}.{prefix}"
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    places = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    found = [entry for name in places if (entry := describe_task(f"{prefix}{name}")) is not None]
    return f'{{"tasks": [\n{",".join(map(_format, found))}]}}\n'


def _format(task: Mapping[str, Any]) -> str:
    """An entry as JSON with a line for each key, each preset and each parameter."""
    lines = []
    for key, value in task.items():
        text = json.dumps(value)
        if key in ("presets", "parameters"):
            text = "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items()) + "}"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "}\n"


def main(arguments: Sequence[str]) -> int:
    """Write the catalog of the folder in the arguments."""
    folder = Path(arguments[0]) if arguments else Path(__file__).parent
    text = describe_folder(folder)
    (folder / FILE).write_text(text, "utf-8")
    print(f"{folder / FILE}: {', '.join(task['name'] for task in json.loads(text)['tasks']) or 'no tasks'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
