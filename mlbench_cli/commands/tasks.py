"""`mlbench tasks`: the catalog."""

import shlex
from typing import Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, complete_tasks
from mlbench_cli.runs.matrix import value_text
from mlbench_cli.tasks.catalog import Parameter, Task, load_catalog, load_task, use_task_folder


def tasks(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="show this task with its parameters", autocompletion=complete_tasks),
    ] = None,
    task_path: Annotated[
        str | None,
        typer.Option("--task-path", metavar="DIR", help="folder with your own tasks, listed as well"),
    ] = None,
    output: Output = Format.text,
) -> None:
    """List benchmark tasks, or show the parameters and presets of one task."""
    use_task_folder(task_path)
    found_by = f" --task-path {shlex.quote(task_path)}" if task_path else ""
    if name is not None:
        task = load_task(name)
        console.out_json(_document(task)) if output == Format.json else _describe(task, found_by)
        return
    found = list(load_catalog().values())
    if output == Format.json:
        console.out_json({"tasks": [_document(task) for task in found]})
        return
    console.out_table(
        ["TASK", "NUMBER", "TITLE", "BACKENDS", "DEVICES", "GOAL"],
        [
            [task.name, task.number, task.title, ",".join(task.backends), ",".join(task.devices), _goal(task, "spec")]
            for task in found
        ],
        droppable=["NUMBER", "DEVICES", "BACKENDS", "GOAL"],
    )
    console.note(f"\nDetails: mlbench tasks TASK{found_by}")


def _document(task: Task) -> dict[str, object]:
    goal = task.goal
    return {
        "name": task.name,
        "number": task.number,
        "title": task.title,
        "legacy_name": task.legacy_name,
        "image": task.image,
        "command": list(task.command),
        "backends": list(task.backends),
        "devices": list(task.devices),
        "measured_on": list(task.measured_on),
        "data": task.data,
        "free": list(task.free),
        "goal": None if goal is None else {"metric": goal.metric, "comparison": goal.comparison},
        "parameters": {
            parameter.name: {
                "type": parameter.type,
                "help": parameter.help,
                "min": parameter.min,
                "max": parameter.max,
                "choices": list(parameter.choices) or None,
            }
            for parameter in task.parameters.values()
        },
        "presets": {preset: task.resolve(preset) for preset in task.presets},
        "workers": None if task.workers is None else task.workers._asdict(),
        "notes": list(task.notes),
        "origin": task.origin,
    }


def _describe(task: Task, found_by: str) -> None:
    facts = [
        ("Title", task.title),
        ("Backends", ", ".join(task.backends)),
        ("Devices", ", ".join(task.devices)),
        ("Measured", f"on {', '.join(task.measured_on)}" if task.measured_on else None),
        ("Goal", _goal(task, "spec")),
        ("Light goal", _goal(task, "spec", "goal_light")),
        ("Data", task.data),
        ("Presets", ", ".join(task.presets)),
        ("Workers", task.workers and f"up to {task.workers.sensible}: {task.workers.reason}"),
        ("Free", ", ".join(task.free) or None),
        ("Origin", task.origin),
    ]
    console.out("\n".join(f"{title + ':':<12}{text}" for title, text in facts if text is not None) + "\n")
    changed = [preset for preset in task.presets if preset != "spec"]
    console.out_table(
        ["PARAMETER", "SPEC", *(preset.upper() for preset in changed), "MEANING"],
        [
            [
                parameter.name,
                _format_value(parameter, task.presets["spec"][parameter.name]),
                *(_change(task, preset, parameter.name) for preset in changed),
                _meaning(parameter),
            ]
            for parameter in task.parameters.values()
        ],
        wrap=True,
    )
    if task.notes:
        console.out("\n" + "\n".join(task.notes))
    console.note("")
    console.next_step(f"mlbench run my-run 1 2 --task {task.name}{found_by}{_example(task)}")


def _goal(task: Task, preset: str, parameter: str = "goal_full") -> str | None:
    if task.goal is None:
        return None
    return f"{task.goal.metric} {task.goal.comparison} {task.resolve(preset)[parameter]:g}"


def _change(task: Task, preset: str, parameter: str) -> str:
    changes = task.presets[preset]
    return _format_value(task.parameters[parameter], changes[parameter]) if parameter in changes else ""


def _format_value(parameter: Parameter, value: Any) -> str:
    """A value as --set takes it; what would be a long list is named."""
    if parameter.type == "list" and len(parameter.choices) > 1 and tuple(value) == parameter.choices:
        return "all"
    if parameter.type == "sizes" and len(value) > 4:
        return f"{len(value)} from {value[0]} to {value[-1]}"
    return value_text(value)


def _meaning(parameter: Parameter) -> str:
    if parameter.choices:
        some = "some of: " if parameter.type == "list" else ""
        return f"{parameter.help} ({some}{', '.join(parameter.choices)})"
    low, high = parameter.min, parameter.max
    if low is None and high is None:
        return f"{parameter.help} ({parameter.type})"
    bounds = (
        f"{low:.10g}..{high:.10g}"
        if low is not None and high is not None
        else (f">= {low:.10g}" if low is not None else f"<= {high:.10g}")
    )
    return f"{parameter.help} ({parameter.type}, {bounds})"


def _example(task: Task) -> str:
    name = next(iter(task.parameters), None)
    return "" if name is None else f" --set {name}={value_text(task.presets['spec'][name])}"
