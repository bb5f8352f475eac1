"""The catalog of tasks: task_images/catalog.json, and those of external tasks (task_sources.py), parsed and checked.

`python -m task_images.describe` writes a catalog from what the packages of tasks declare (task_images/parameters.py
says what each entry means), so no code of a task runs here. A task with a goal has the parameters `goal_full` and
`goal_light`, the thresholds.
"""

import json
import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError, did_you_mean
from mlbench_cli.model.goals import COMPARISONS, Goal, GoalRule
from mlbench_cli.model.spec import CUSTOM
from mlbench_cli.tasks.datafiles import DataFiles, parse_data_files
from mlbench_cli.tasks.task_sources import TaskSource, list_sources, use_task_path
from mlbench_cli.util.sizes import parse_sizes
from task_images import contract

TYPES = ("int", "float", "str", "bool", "list", "sizes")
TORCH_BACKENDS = ("gloo", "nccl", "mpi")
BACKENDS = (*TORCH_BACKENDS, "grpc")  # of TensorFlow; listed by the tasks that support it
REQUIRED = ("backends", "command", "data", "devices", "image", "name", "number", "title", "parameters")
OWN = Path(contract.__file__).with_name("catalog.json")
WRITE = "python -m task_images.describe {}"  # what writes a catalog
BUDGET = "budget_seconds"  # parameter of tasks that can train for a given time


Entries = dict[str, Any]  # of a JSON object, not checked yet


class Parameter(NamedTuple):
    """One parameter of a task. `type` is one of TYPES; a list holds numbers or texts, sizes are whole bytes."""

    name: str
    type: str
    help: str
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """`value` converted to this parameter's type; strings are parsed. Raises UsageError with the allowed values."""
        try:
            read = _READERS[self.type](value)
        except ValueError as error:
            raise UsageError(f'The parameter "{self.name}": {error}.') from None
        if read is None:
            raise UsageError(f'The parameter "{self.name}" is {short(value)}, which is not of type {self.type}.')
        if self.min is not None and read < self.min:
            raise self._out_of_range(value, "least", self.min)
        if self.max is not None and read > self.max:
            raise self._out_of_range(value, "most", self.max)
        if self.choices and self.type == "list":
            return self._chosen(read)
        if self.choices and read not in self.choices:
            raise self._no_choice(read)
        return read

    def _chosen(self, items: list[Any]) -> list[Any]:
        """Some of the choices, in the given order; "all" selects every one."""
        if items == ["all"]:
            return list(self.choices)
        for item in items or [""]:
            if item not in self.choices:
                raise self._no_choice(item)
        return list(dict.fromkeys(items))

    def _out_of_range(self, value: Any, which: str, limit: float) -> UsageError:
        exact = int(limit) if float(limit).is_integer() else limit
        return UsageError(
            f'The parameter "{self.name}" is {short(value)}, the {which} is {limit:g}.',
            hint=f"--set {self.name}={exact}",
        )

    def _no_choice(self, value: Any) -> UsageError:
        what = "has" if self.type == "list" else "is"
        return UsageError(
            f'The parameter "{self.name}" {what} {short(value)}, not one of {", ".join(self.choices)}.'
            + did_you_mean(str(value), self.choices)
        )


class MethodRule(NamedTuple):
    """The communication methods of a task: its default, and which others it refuses, with the reason.

    `refuses` has names of methods, or `wraps` and `gates` for all with that attribute (methods.base.Method).
    """

    own: str
    refuses: Mapping[str, str]


class WorkersRule(NamedTuple):
    """The largest number of ranks at which training to the goal is meaningful, and the reason."""

    sensible: int
    reason: str


class Task(Struct, frozen=True):
    """A task of the catalog."""

    name: str
    number: str
    title: str
    image: str
    command: tuple[str, ...]
    backends: tuple[str, ...]
    devices: tuple[str, ...]
    data: str
    parameters: Mapping[str, Parameter]
    presets: Mapping[str, Mapping[str, Any]]
    goal: GoalRule | None = None
    method: MethodRule | None = None
    files: DataFiles | None = None
    free: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    measured_on: tuple[str, ...] = ()
    absent: str | None = None  # a duration
    preflight: str | None = None
    legacy_name: str | None = None
    packages: tuple[str, ...] = ()
    workers: WorkersRule | None = None
    folder: Path = Path()
    origin: str | None = None  # package or folder that provides it; None: mlbench itself
    search_path: str | None = None  # folder from which its ranks import it; None: it is installed

    def resolve(self, preset: str = "spec", changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The values of all parameters for `preset` with `changes` applied. Raises UsageError with the bad
        parameter."""
        if preset not in self.presets:
            known = list(self.presets)
            raise UsageError(
                f'The task "{self.name}" has no preset "{preset}", only {", ".join(known)}.'
                + did_you_mean(preset, known),
                hint=f"mlbench tasks {self.name}",
            )
        values = {**self.presets["spec"], **self.presets[preset]}
        for key, value in (changes or {}).items():
            if key not in self.parameters:
                raise UsageError(
                    f'The task "{self.name}" has no parameter "{key}".{did_you_mean(key, list(self.parameters))}',
                    hint=f"mlbench tasks {self.name}",
                )
            try:
                values[key] = self.parameters[key].check(value)
            except UsageError as error:
                raise UsageError(error.message, hint=error.hint or f"mlbench tasks {self.name}") from None
        return values


class TaskRules(Struct, frozen=True):
    """What the judge needs to know about a task. Stored in run.json, because later catalogs may differ.

    `spec` and `preset` are the parameters of the preset `spec` and of the run's preset (`spec` if it has none).
    """

    name: str
    image: str
    command: tuple[str, ...]
    goal: GoalRule | None
    free: tuple[str, ...]
    spec: Mapping[str, Any]
    preset: Mapping[str, Any]
    origin: str | None = None  # as Task.origin

    def find_goal(self, parameters: Mapping[str, Any], kind: str) -> Goal | None:
        """The goal of a run with these parameters; None if the task or the run has none."""
        return None if self.goal is None else self.goal.find_goal(parameters, kind)

    @classmethod
    def of(cls, task: Task, preset: str) -> "TaskRules":
        """The rules of a task for a run of that preset."""
        known = preset if preset in task.presets else "spec"
        own = task.resolve(known)
        spec = task.presets["spec"]
        return cls(task.name, task.image, task.command, task.goal, task.free, spec, own, task.origin)

    def to_dict(self) -> dict[str, Any]:
        """The rules as plain JSON values, for run.json."""
        document: Entries = json.loads(json.dumps(to_builtins(self)))
        if self.origin is None:
            del document["origin"]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "TaskRules":
        """The rules in a dictionary from `to_dict`. Raises TypeError or ValueError for anything else."""
        facts = dict(document)
        if not isinstance(facts.get("spec"), dict) or not isinstance(facts.get("preset"), dict):
            raise ValueError("a preset is not an object")
        goal = facts.pop("goal", None)
        command, free = tuple(facts.pop("command", ())), tuple(facts.pop("free", ()))
        return cls(goal=None if goal is None else GoalRule(**goal), command=command, free=free, **facts)


def find_rules(task: str, preset: str) -> TaskRules | None:
    """The rules of a task in this catalog; None if it is unknown. Reads only that task's file."""
    found = _load_one(task)
    return None if found is None else TaskRules.of(found, preset)


def packages_of(task: str) -> tuple[str, ...]:
    """What pip installs for a task besides torch; nothing for an unknown one."""
    found = _load_one(task)
    return () if found is None else found.packages


def load_task(name: str, tasks: Mapping[str, Task] | None = None) -> Task:
    """The task with this name in the catalog or in `tasks`. Raises NotFoundError with the nearest name."""
    tasks = load_catalog() if tasks is None else tasks
    if name not in tasks:
        raise NotFoundError(
            f'There is no task "{name}".{did_you_mean(name, list(tasks))}',
            hint="mlbench tasks",
            details={"known": list(tasks)},
        )
    return tasks[name]


@cache
def load_catalog() -> dict[str, Task]:
    """All tasks by name, ordered by number and name. Raises UsageError for invalid files and duplicate names."""
    tasks = [parse_task(entry, OWN) for entry in read_entries(OWN)]
    tasks += [task for source in list_sources() for task in _parse_source(source)]
    found: dict[str, Task] = {}
    for task in sorted(tasks, key=lambda task: (task.number, task.name)):
        if task.name in found:
            places = " and ".join(str(one.origin or "mlbench") for one in (found[task.name], task))
            raise UsageError(f'Two tasks are called "{task.name}": of {places}.', hint="Rename one of them.")
        found[task.name] = task
    return found


@cache
def read_entries(file: Path) -> list[Entries]:
    """The tasks in a catalog.json, not checked yet. Raises UsageError if it is not a catalog."""
    try:
        tasks = json.loads(file.read_bytes())["tasks"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{file} is not a catalog of tasks: {why[:200]}.", hint=WRITE.format(file.parent)) from None
    if not isinstance(tasks, list) or not all(isinstance(entry, dict) for entry in tasks):
        raise UsageError(f'{file}: "tasks" is not a list of objects.', hint=WRITE.format(file.parent))
    return tasks


def use_task_folder(path: str | None) -> None:
    """Add the tasks in the folder `path` to the catalog of this process and its children."""
    if use_task_path(path):
        read_entries.cache_clear()
        load_catalog.cache_clear()
        _load_one.cache_clear()


def _parse_source(source: TaskSource) -> list[Task]:
    if source.search_path and source.search_path not in sys.path:
        sys.path.append(source.search_path)  # for its preflight
    tasks = [parse_task(entry, source.file) for entry in read_entries(source.file)]
    return [replace(task, origin=source.origin, search_path=source.search_path) for task in tasks]


@cache
def _load_one(name: str) -> Task | None:
    """One task of this catalog; None if it is missing or damaged."""
    if name == CUSTOM:  # a command of the user: looking for it would read the metadata of all installed packages
        return None
    try:
        entry = next((entry for entry in read_entries(OWN) if entry.get("name") == name), None)
        if entry is not None:
            return parse_task(entry, OWN)
        return next((task for source in list_sources() for task in _parse_source(source) if task.name == name), None)
    except (MlbenchError, OSError, ValueError):
        return None


def parse_task(data: Mapping[str, Any], place: Path) -> Task:
    """The task of an entry in the catalog `place`. Raises UsageError with file and key."""
    file = f"{place}: {short(data.get('name'))}"
    known = {*Task.__struct_fields__} - {"folder", "origin", "search_path"}
    for key in data:
        if key not in known:
            raise UsageError(f"{file}: unknown key {key!r}.{did_you_mean(str(key), sorted(known))}")
    for key in REQUIRED:
        if key not in data:
            raise UsageError(f'{file}: the key "{key}" is missing.')
    for key in ("name", "number", "title", "image", "data", "absent", "preflight", "legacy_name"):
        if key in data and (not isinstance(data[key], str) or not data[key]):
            raise UsageError(f'{file}: "{key}" is not a text.')
    parameters, defaults = _read_parameters(file, _mapping(file, data, "parameters"))
    presets = {"spec": {}, **_mapping(file, data, "presets")}
    checked = {name: _preset(file, name, entry, parameters) for name, entry in presets.items()}
    checked["spec"] = {**defaults, **checked["spec"]}
    return Task(
        name=data["name"],
        number=data["number"],
        title=data["title"],
        image=data["image"],
        command=_texts(file, data, "command"),
        backends=_texts(file, data, "backends", BACKENDS),
        devices=_texts(file, data, "devices", ("cpu", "gpu")),
        data=data["data"],
        parameters=parameters,
        presets=checked,
        goal=_goal(file, data.get("goal"), parameters),
        files=parse_data_files(file, data["files"]) if "files" in data else None,
        free=_texts(file, data, "free", tuple(parameters)) if "free" in data else (),
        notes=_texts(file, data, "notes") if "notes" in data else (),
        measured_on=_texts(file, data, "measured_on") if "measured_on" in data else (),
        absent=data.get("absent"),
        preflight=data.get("preflight"),
        method=_method(file, data["method"]) if "method" in data else None,
        legacy_name=data.get("legacy_name"),
        packages=_texts(file, data, "packages") if "packages" in data else (),
        workers=_workers(file, data["workers"]) if "workers" in data else None,
        folder=place.parent / data["name"],
    )


def _read_parameters(file: str, declared: Entries) -> tuple[dict[str, Parameter], Entries]:
    """The parameters and their defaults. Raises UsageError."""
    found = {name: _parameter(file, name, entry) for name, entry in declared.items()}
    try:
        return found, {name: found[name].check(entry.get("default")) for name, entry in declared.items()}
    except UsageError as error:
        raise UsageError(f"{file}: a default: {error.message}") from None


def _parameter(file: str, name: str, entry: Any) -> Parameter:
    if not isinstance(entry, dict) or entry.get("type") not in TYPES or not isinstance(entry.get("help"), str):
        raise UsageError(
            f'{file}: the parameter "{name}" needs a type ({", ".join(TYPES)}) and a help text.',
            hint=f"{name}: int = parameter(1, 'what it means')",
        )
    least, most = entry.get("min"), entry.get("max")
    choices = entry.get("choices", [])
    if not all(limit is None or _read_float(limit) == limit for limit in (least, most)):
        raise UsageError(f'{file}: a limit of the parameter "{name}" is not a number.')
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise UsageError(f'{file}: the choices of the parameter "{name}" are not a list of texts.')
    low, high = (None if limit is None else float(limit) for limit in (least, most))
    return Parameter(name, entry["type"], entry["help"], low, high, tuple(choices))


def _preset(file: str, name: str, entry: Any, parameters: Mapping[str, Parameter]) -> Entries:
    if not isinstance(entry, dict):
        raise UsageError(f'{file}: the preset "{name}" is not a mapping.')
    for key in entry:
        if key not in parameters:
            near = did_you_mean(str(key), list(parameters))
            raise UsageError(
                f'{file}: the preset "{name}" sets {key!r}, which is not a parameter.{near}',
                hint="The fields of the class Settings are the parameters.",
            )
    try:
        return {key: parameters[key].check(value) for key, value in entry.items()}
    except UsageError as error:
        raise UsageError(f'{file}: preset "{name}": {error.message}') from None


def _goal(file: str, entry: Any, parameters: Mapping[str, Parameter]) -> GoalRule | None:
    if entry is None:
        return None
    if not isinstance(entry, dict) or set(entry) != {"metric", "comparison", "wording"}:
        raise UsageError(f"{file}: a goal has exactly metric, comparison and wording.")
    if entry["comparison"] not in COMPARISONS:
        raise UsageError(f"{file}: the comparison of the goal is neither >= nor <=.")
    if not {"goal_full", "goal_light"} <= set(parameters):
        raise UsageError(f"{file}: a task with a goal has the parameters goal_full and goal_light.")
    return GoalRule(str(entry["metric"]), entry["comparison"], str(entry["wording"]))


def _method(file: str, entry: Any) -> MethodRule:
    if not isinstance(entry, dict) or not isinstance(entry.get("own"), str):
        raise UsageError(f'{file}: "method" is not a mapping with the name of a method as "own".')
    if unknown := entry.keys() - {"own", "refuses"}:
        raise UsageError(f'{file}: unknown key {min(unknown)!r} in "method", which has own and refuses.')
    refuses = _mapping(file, entry, "refuses")
    if not all(isinstance(reason, str) for reason in refuses.values()):
        raise UsageError(f'{file}: a reason in "refuses" is not a text.')
    return MethodRule(entry["own"], refuses)


def _workers(file: str, entry: Any) -> WorkersRule:
    known = isinstance(entry, dict) and entry.keys() == {"sensible", "reason"}
    if not known or not isinstance(entry["sensible"], int) or not isinstance(entry["reason"], str):
        raise UsageError(f'{file}: "workers" is not a mapping with a number as "sensible" and a text as "reason".')
    return WorkersRule(entry["sensible"], entry["reason"])


def _mapping(file: str, data: Mapping[str, Any], key: str) -> Entries:
    value = data.get(key, {})
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UsageError(f'{file}: "{key}" is not a mapping with texts as keys.')
    return value


def _texts(file: str, data: Mapping[str, Any], key: str, allowed: tuple[str, ...] = ()) -> tuple[str, ...]:
    value = data[key]
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise UsageError(f'{file}: "{key}" is not a list of strings.')
    for item in value:
        if allowed and item not in allowed:
            raise UsageError(f'{file}: {item!r} in "{key}" is not one of {", ".join(allowed)}.')
    return tuple(value)


def short(value: Any) -> str:
    """An untrusted value for a message, truncated: ten lines of YAML aliases can expand to gigabytes."""
    shortener = reprlib.Repr()
    shortener.maxlevel = 2
    try:
        return shortener.repr(value)
    except ValueError:  # Python does not format integers of more than 4300 digits
        return "a giant number"


# Convert a value or its text to a parameter's type; None if that is impossible. Text is not parsed as YAML, where 1e-3
# is a string, 1:30 is ninety and "no" is a boolean.


def _read_int(value: Any) -> int | None:
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _read_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read_str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "yes": True, "false": False, "no": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def _read_list(value: Any) -> list[int | float | str] | None:
    """A list of numbers and strings; as text "1,2,4" or "[1, 2, 4]"."""
    if isinstance(value, str):
        words = [word.strip() for word in value.strip().removeprefix("[").removesuffix("]").split(",")]
        return [_read_item(word) for word in words if word]
    if not isinstance(value, list | tuple):
        return None
    usable = [item for item in value if isinstance(item, str) or _read_float(item) is not None]
    return usable if len(usable) == len(value) else None


def _read_sizes(value: Any) -> list[int] | None:
    """Ascending sizes in bytes; as text "8B:64MiB:x2" or "4KiB,1MiB"."""
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return parse_sizes(value) if isinstance(value, str) else None


def _read_item(word: str) -> int | float | str:
    number = _read_int(word)
    if number is not None:
        return number
    real = _read_float(word)
    return word if real is None else real


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int": _read_int,
    "float": _read_float,
    "str": _read_str,
    "bool": _read_bool,
    "list": _read_list,
    "sizes": _read_sizes,
}
