"""The communication method of a run as a short phrase."""

from collections.abc import Mapping
from typing import Any

OWN = "task's own"


def method_of(spec: Mapping[str, Any]) -> str:
    """The method of a run by its spec's document; empty for a user's command, which does as it likes."""
    return "" if is_command(spec) else method_phrase(spec.get("method") or {})


def is_command(spec: Mapping[str, Any]) -> bool:
    """Whether the ranks of a spec's document run a command of the user."""
    return spec.get("task") == "custom" or spec.get("preset") == "open"


def method_phrase(method: Mapping[str, str]) -> str:
    """ "eftopk", "bsp (delay=0.002,1e-9)": the preset and all axes that differ from it; "task's own" if empty.

    Methods that differ on any axis have different phrases, even if a later version redefines a preset.
    """
    if not method:
        return OWN
    # Imported here because it takes 7 ms, and lists of runs without methods do not need it.
    from task_images.comm.presets import PRESETS, resolve

    name = method.get("name", "")
    axes = {axis: value for axis, value in method.items() if axis != "name"}
    usual = resolve(name).axes() if name in PRESETS else {}
    changes = [f"{axis}={value}" for axis, value in sorted(axes.items()) if usual.get(axis) != value]
    return f"{name or 'unnamed'} ({', '.join(changes)})" if changes else name
