"""The communication method of a run as a short phrase."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from task_images.methods import FILES
from task_images.methods.catalog import find_class

OWN = "default"  # of the task


def method_of(spec: Mapping[str, Any]) -> str:
    """The method of a run by its spec's document; empty for a user's command, whose method is not known."""
    return "" if is_command(spec) else method_phrase(spec.get("method") or {})


def is_command(spec: Mapping[str, Any]) -> bool:
    """Whether the ranks of a spec's document run a command of the user."""
    return spec.get("task") == "custom" or spec.get("preset") == "open"


def method_phrase(method: Mapping[str, str]) -> str:
    """ "eftopk", "bsp (delay=0.002,1e-9)": the method and the options that are not the usual ones; "default" if
    empty.

    Different methods have different phrases, also if another version, whose options are unknown here, made the run.
    """
    if not method:
        return OWN
    name = method.get("name", "")
    options = {option: value for option, value in method.items() if option != "name"}
    usual = {each: str(one.default) for each, one in find_class(name).list_options().items()} if name in FILES else {}
    if name in FILES and not options.keys() <= usual.keys():
        changes = [f"other version {crc32(repr(sorted(options.items())).encode()):08x}"]
    else:
        changes = [f"{option}={value}" for option, value in sorted(options.items()) if usual.get(option) != value]
    return f"{name or 'unnamed'} ({', '.join(changes)})" if changes else name
