"""MLBENCH_PARAMETERS -> the task's own frozen dataclass, whose defaults are the preset `spec`."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from task_images.harness.errors import TaskUsageError

Settings = TypeVar("Settings")


def read_parameters(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """An instance of the dataclass `kind` with `given` on top of its defaults.

    Fields are int, float, str, bool or list. Raises TaskUsageError for an unknown key or a wrong type; the tool has
    checked ranges before, this is for whoever starts a task by hand.
    """
    hints = typing.get_type_hints(kind)
    known = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise TaskUsageError(f'there is no parameter "{name}", only {", ".join(known)}')
        wanted = typing.get_origin(hints[name]) or hints[name]
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise TaskUsageError(f'the parameter "{name}" is {value!r}, which is not of type {wanted.__name__}')
        values[name] = value
    return kind(**values)


def check_choices(settings: Any, allowed: Mapping[str, Sequence[str]]) -> None:
    """Raises TaskUsageError if a parameter in `allowed` has none of its words."""
    for name, choices in allowed.items():
        if getattr(settings, name) not in choices:
            raise TaskUsageError(f'the parameter "{name}" is {getattr(settings, name)!r}, not {" or ".join(choices)}')
