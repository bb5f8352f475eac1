"""task.yaml as written -> one mapping with everything in it: `extends` and `groups` are resolved here.

`extends: NAME` takes over all keys of a task beside this one, or of a shipped task, except those that this one gives
itself. Parameters and the values of the preset `spec` are merged one by one; any other preset replaces the one of its
name. `null` removes a key, a parameter or a preset.

`groups: [NAME]` adds the parameters of that group of task_images/harness/settings.py which the task does not declare.
Their default is the value in the preset `spec` unless that names another.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.util.yaml_text import read_yaml
from task_images.harness.settings import GROUPS, describe

MAX_ANCESTORS = 5

Entries = dict[str, Any]  # of a YAML mapping, not checked yet


def compose_task(text: str, path: Path, shipped: Path) -> Entries:
    """The task.yaml `text` (in `path`) with what it extends and its groups. `shipped` is the folder of mlbench's own
    tasks. Raises UsageError that names file and key."""
    file = f"{path.parent.name}/{path.name}"
    own = _read_mapping(text, file)
    parent = own.get("extends")
    entries = _add_groups(_extend(own, path, shipped, MAX_ANCESTORS), file)
    return entries if parent is None else {**entries, "extends": str(parent)}


def _read_mapping(text: str, file: str) -> Entries:
    found = read_yaml(text)
    if not isinstance(found, dict):
        raise UsageError(f"{file} is not a mapping.")
    return found


def _extend(own: Entries, path: Path, shipped: Path, depth: int) -> Entries:
    parent = own.pop("extends", None)
    if parent is None:
        return own
    file = f"{path.parent.name}/{path.name}"
    places = [folder / str(parent) / "task.yaml" for folder in (path.parent.parent, shipped)]
    place = next((place for place in places if place.is_file() and place != path), None)
    if place is None or not depth:
        reason = "no such task beside it or in mlbench" if depth else "the tasks extend each other in a circle"
        raise UsageError(f'{file}: "extends: {parent}": {reason}.')
    inherited = _extend(_read_mapping(place.read_text("utf-8"), str(place)), place, shipped, depth - 1)
    return _merge(inherited, own, file)


def _merge(inherited: Entries, own: Entries, file: str) -> Entries:
    for key in ("parameters", "presets"):
        if not isinstance(own.setdefault(key, {}), dict):
            raise UsageError(f'{file}: "{key}" is not a mapping with texts as keys.')
    parameters = _drop_removed({**inherited["parameters"], **own["parameters"]})
    spec = {**inherited["presets"]["spec"], **(own["presets"].get("spec") or {})}
    removed = {name for name, entry in own["parameters"].items() if entry is None}
    spec = {name: value for name, value in spec.items() if name not in removed and value is not None}
    presets = _drop_removed({**inherited["presets"], **own["presets"], "spec": spec})
    merged = {**inherited, **own, "parameters": parameters, "presets": presets}
    return _drop_removed(merged)


def _drop_removed(entries: Mapping[str, Any]) -> Entries:
    return {name: entry for name, entry in entries.items() if entry is not None}


def _add_groups(entries: Entries, file: str) -> Entries:
    """`entries` with the parameters of its groups and their defaults; a group's parameter that it declares itself stays
    as declared."""
    names = entries.pop("groups", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f'{file}: "groups" is not a list of texts.')
    if not names:
        return entries
    parameters, presets = entries.get("parameters"), entries.get("presets")
    if not isinstance(parameters, dict) or not isinstance(presets, dict) or not isinstance(presets.get("spec"), dict):
        raise UsageError(f'{file}: a task with groups has "parameters", "presets" and the preset "spec".')
    parameters, defaults = dict(parameters), {}
    for name in names:
        if name not in GROUPS:
            raise UsageError(f'{file}: there is no group "{name}" of parameters.{did_you_mean(name, sorted(GROUPS))}')
        for parameter, entry in describe(GROUPS[name]).items():
            default = entry.pop("default")
            if parameter not in parameters:
                parameters[parameter], defaults[parameter] = entry, default
    return {**entries, "parameters": parameters, "presets": {**presets, "spec": {**defaults, **presets["spec"]}}}
