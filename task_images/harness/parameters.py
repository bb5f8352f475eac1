"""MLBENCH_PARAMETERS -> the task's frozen dataclass, whose defaults are the preset `spec`."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from task_images.harness.errors import TaskUsageError
from task_images.harness.settings import describe

Settings = TypeVar("Settings")


def read_parameters(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """An instance of the dataclass `kind` with the values `given`, else its defaults.

    Fields are int, float, str, bool or list. Raises TaskUsageError for an unknown key, a wrong type or a value that is
    not among the choices. mlbench checks ranges earlier; this check is for tasks started by hand.
    """
    hints, known = typing.get_type_hints(kind), describe(kind)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            names = ", ".join(item.name for item in dataclasses.fields(kind))  # type: ignore[arg-type]
            raise TaskUsageError(f'there is no parameter "{name}", only {names}')
        wanted = typing.get_origin(hints[name]) or hints[name]
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise TaskUsageError(f'the parameter "{name}" is {value!r}, which is not of type {wanted.__name__}')
        choices = known[name].get("choices")
        if choices and not set(value if isinstance(value, list) else [value]) <= set(choices):
            raise TaskUsageError(f'the parameter "{name}" is {value!r}, not {" or ".join(choices)}')
        values[name] = value
    return kind(**values)
