"""Resolve `extends` in task.yaml.

`extends: NAME` inherits the keys of a task in the same folder, or of a shipped task, unless this task sets them. The
values of the preset `spec` are merged; any other preset replaces the inherited one. `null` removes a key or a preset.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.util.yaml_text import read_yaml

MAX_ANCESTORS = 5

Entries = dict[str, Any]  # of a YAML mapping, not checked yet


def compose_task(text: str, path: Path, shipped: Path) -> Entries:
    """The task.yaml `text` (from `path`) merged with the tasks that it extends. `shipped` is the folder of mlbench's
    tasks. Raises UsageError with file and key."""
    file = f"{path.parent.name}/{path.name}"
    own = _read_mapping(text, file)
    parent = own.get("extends")
    entries = _extend(own, path, shipped, MAX_ANCESTORS)
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
        reason = "no such task next to it or in mlbench" if depth else "the tasks extend each other in a circle"
        raise UsageError(f'{file}: "extends: {parent}": {reason}.')
    inherited = _extend(_read_mapping(place.read_text("utf-8"), str(place)), place, shipped, depth - 1)
    presets, base = own.setdefault("presets", {}), inherited.get("presets", {})
    if not isinstance(presets, dict):
        raise UsageError(f'{file}: "presets" is not a mapping with texts as keys.')
    spec = {**(base.get("spec") or {}), **(presets.get("spec") or {})}
    return _drop_removed({**inherited, **own, "presets": _drop_removed({**base, **presets, "spec": spec})})


def _drop_removed(entries: Mapping[str, Any]) -> Entries:
    return {name: entry for name, entry in entries.items() if entry is not None}
