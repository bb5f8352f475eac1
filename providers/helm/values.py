"""`--custom-value a.b[0].c=v`: typed values for a Helm chart at any depth.

A path is keys with dots between them and list indices in brackets; a backslash before a dot, a bracket or an equals
sign makes it part of a key. As in helm, a later value replaces an earlier one, and `null` removes a value of the chart.
"""

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.util.text import shorten

FLAG = "--custom-value"
ENTRY = re.compile(r"((?:\\.|[^\\=])*)=(.*)", re.DOTALL)
STEP = re.compile(r"(?:^|(?!^)\.)((?:\\.|[^\\.\[\]])+)|(?!^)\[(\d{1,6})\]", re.DOTALL)
# From this value on, helm's templates print numbers from files with an exponent.
EXPONENT_FROM = 10**6


@dataclass(frozen=True)
class CustomValue:
    """One given value: `text` is its path, `path` the keys (str) and indices (int)."""

    text: str
    path: tuple[str | int, ...]
    value: Any

    def __str__(self) -> str:
        return f"{FLAG} {self.text}={shorten(json.dumps(self.value, ensure_ascii=False))}"


def parse_custom_values(entries: Sequence[str]) -> tuple[CustomValue, ...]:
    """Parse PATH=VALUE. Raises UsageError for malformed ones."""
    customs = []
    for entry in entries:
        match = ENTRY.fullmatch(entry)
        if match is None:
            raise UsageError(
                f'{FLAG} "{shorten(entry)}" is not of the form PATH=VALUE.', hint=f"For example: {FLAG} image.tag=v1"
            )
        customs.append(CustomValue(match[1], _parse_path(match[1]), _parse_value(*match.groups())))
    return tuple(customs)


def resolve_overrides(customs: Sequence[CustomValue], defaults: Mapping[str, Any]) -> dict[str, object]:
    """The overrides for helm on top of the chart's values.

    Helm replaces lists as a whole, so a list with a changed element includes the chart's other elements. Raises
    UsageError for an index beyond the end, and for a scalar in place of a mapping, which helm would ignore.
    """
    overrides: dict[str, object] = {}
    for custom in customs:
        overrides = _override(overrides, defaults, custom, 0)
    return overrides


def merge_values(defaults: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, object]:
    """The values that the chart sees: mappings are merged, everything else is replaced, null removes."""
    result = dict(deepcopy(defaults))
    for key, value in top.items():
        below = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = merge_values(below if isinstance(below, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def warn_about(customs: Sequence[CustomValue], defaults: Mapping[str, Any], subcharts: Sequence[str]) -> list[str]:
    """Warnings about values that helm accepts silently: paths unknown to the chart, long numbers."""
    warnings = [warning for custom in customs if (warning := _warn_if_unknown(custom, defaults, subcharts)) is not None]
    for custom in customs:
        value = custom.value
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= EXPONENT_FROM:
            warnings.append(
                f"helm prints {custom.text}={value} as {float(value):g}, unless the chart converts it; "
                f"""for text put it in quotes: {FLAG} '{custom.text}="{value}"'"""
            )
    return warnings


def _parse_path(text: str) -> tuple[str | int, ...]:
    path: list[str | int] = []
    position = 0
    while position < len(text) or not path:
        step = STEP.match(text, position)
        if step is None:
            raise UsageError(
                f'{FLAG}: the path "{shorten(text)}" cannot be read from "{shorten(text[position:])}" on.',
                hint="Write a.b[0].c, and a backslash before a dot or a bracket that belongs to a key.",
            )
        path.append(re.sub(r"\\(.)", r"\1", step[1], flags=re.DOTALL) if step[2] is None else int(step[2]))
        position = step.end()
    return tuple(path)


def _parse_value(path: str, text: str) -> Any:
    """JSON in quotes, brackets or braces; null, true, false and numbers that lose no digit; anything else is text."""
    is_json = text[:1] in ('"', "[", "{")
    try:
        value = json.loads(text, parse_constant=_refuse_constant, strict=False)
    except (ValueError, RecursionError) as error:
        if not is_json:
            return text
        raise UsageError(
            f"{FLAG} {path}={shorten(text)}: what begins with a quote, a bracket or a brace is JSON, and {error}.",
            hint=f"""For text put it in quotes: {FLAG} '{path}="..."'""",
        ) from None
    return value if is_json or json.dumps(value) == text else text  # a tag such as 1.10 stays what it is


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _override(place: Any, known: Any, custom: CustomValue, depth: int) -> Any:
    """`place`, the overrides so far, with the value of `custom` from step `depth` on; `known` is the chart's own."""
    if depth == len(custom.path):
        if isinstance(known, Mapping) and known and not isinstance(custom.value, Mapping | None):
            raise UsageError(
                f"{custom}: in the chart this is a mapping, of {shorten(', '.join(map(str, known)))}.",
                hint=f"Set one of them: {FLAG} {custom.text}.{next(iter(known))}=...",
            )
        return custom.value
    step = custom.path[depth]
    if isinstance(step, str):
        mapping = place if isinstance(place, Mapping) else {}
        below = known.get(step) if isinstance(known, Mapping) else None
        return {**mapping, step: _override(mapping.get(step), below, custom, depth + 1)}
    elements = place if isinstance(place, list) else known if isinstance(known, list) else []
    if step > len(elements):
        raise UsageError(f"{custom}: the list has {len(elements)} elements, so the next is [{len(elements)}].")
    element = deepcopy(elements[step]) if step < len(elements) else None
    value = _override(element, None, custom, depth + 1)
    return [*elements[:step], value, *elements[step + 1 :]]


def _warn_if_unknown(custom: CustomValue, defaults: Mapping[str, Any], subcharts: Sequence[str]) -> str | None:
    if custom.path[0] in (*subcharts, "global"):
        return None
    place: Any = defaults
    for step in custom.path:
        if not isinstance(place, Mapping) or not place:
            return None
        if step not in place:
            near = did_you_mean(str(step), [str(key) for key in place])
            return f'The chart\'s own values have no "{step}" of {custom.text}; helm may ignore it.{near}'
        place = place[step]
    return None
