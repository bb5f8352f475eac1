"""How a run's ranks communicate, in a few words."""

from collections.abc import Mapping

OWN = "task's own"


def method_phrase(method: Mapping[str, str]) -> str:
    """ "eftopk", "bsp (delay=0.002,1e-9)": the preset and every axis that differs from it; "task's own" if empty.

    Methods that differ on any axis have different phrases, also if a later version defines a preset differently.
    """
    if not method:
        return OWN
    # Importing the presets takes 7 ms, which a list of runs without methods need not wait for.
    from task_images.comm.presets import PRESETS, resolve

    name = method.get("name", "")
    axes = {axis: value for axis, value in method.items() if axis != "name"}
    usual = resolve(name).axes() if name in PRESETS else {}
    changes = [f"{axis}={value}" for axis, value in sorted(axes.items()) if usual.get(axis) != value]
    return f"{name or 'unnamed'} ({', '.join(changes)})" if changes else name
