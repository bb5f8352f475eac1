"""`--custom-value a.b[0].c=v`: typed values for a Helm chart at any depth. Conflicts are errors.

A path is keys with dots between them and list indices in brackets; a backslash before a dot, a bracket or an equals
sign makes it part of a key. As in helm, `null` removes a value of the chart.
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
INTEGER = re.compile(r"[+-]?(0|[1-9]\d*)")
FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?")
INDEX = re.compile(r"\[(\d{1,6})\]")
# From this value on, helm's templates print numbers from files with an exponent.
EXPONENT_FROM = 10**6


@dataclass(frozen=True)
class CustomValue:
    """One given value: `text` is its path, `path` the keys (str) and indices (int)."""

    text: str
    path: tuple[str | int, ...]
    value: Any


Tree = dict[str | int, Any]  # by key or index: another tree, or a CustomValue


def parse_custom_values(entries: Sequence[str]) -> tuple[CustomValue, ...]:
    """Parse PATH=VALUE. Raises UsageError for malformed and conflicting values."""
    customs = tuple(_parse_custom_value(entry) for entry in entries)
    _build_tree(customs)
    return customs


def resolve_overrides(customs: Sequence[CustomValue], defaults: Mapping[str, Any]) -> dict[str, object]:
    """The overrides for helm on top of the chart's values.

    Helm replaces lists as a whole, so a list with a changed element includes the chart's other elements. Raises
    UsageError for an index beyond the end, and for a scalar in place of a mapping.
    """
    resolved: dict[str, object] = _resolve(_build_tree(customs), defaults, "")
    return resolved


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


# --- one entry ------------------------------------------------------------------------------------------------------


def _parse_custom_value(entry: str) -> CustomValue:
    match = re.match(r"((?:\\.|[^\\=])*)=", entry, re.DOTALL)
    if match is None:
        raise UsageError(
            f'{FLAG} "{shorten(entry)}" is not of the form PATH=VALUE.', hint=f"For example: {FLAG} image.tag=v1"
        )
    text = match[1]
    return CustomValue(text, _parse_path(text), _parse_value(text, entry[match.end() :]))


def _parse_path(text: str) -> tuple[str | int, ...]:
    path: list[str | int] = []
    rest = text
    while rest or not path:
        key = re.match(r"(?:\\.|[^\\.\[\]])+", rest, re.DOTALL)
        if key is None:
            raise UsageError(
                f'{FLAG}: the path "{shorten(text)}" has an empty or unfinished key.',
                hint="Write a.b[0].c, and a backslash before a dot or a bracket that belongs to a key.",
            )
        path.append(re.sub(r"\\(.)", r"\1", key[0], flags=re.DOTALL))
        rest = rest[key.end() :]
        while index := INDEX.match(rest):
            path.append(int(index[1]))
            rest = rest[index.end() :]
        if rest and (rest[0] != "." or rest == "."):
            raise UsageError(
                f'{FLAG}: the path "{shorten(text)}" cannot be read from "{shorten(rest)}" on.',
                hint="Write a.b[0].c: an index is a number in brackets, a dot stands between keys.",
            )
        rest = rest[1:]
    return tuple(path)


def _parse_value(path: str, text: str) -> Any:
    """null, true, false, whole numbers, decimal fractions, JSON in brackets or braces; anything else is text."""
    if text in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[text]
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        # No digits may be lost: a tag such as 1.10 would become 1.1.
        value = float(text)
        if f"{value:.17g}" == text or (repr(value) == text and not text.endswith(".0")):
            return value
        raise UsageError(
            f"{FLAG} {path}={text}: as a number that is {value:.15g}.",
            hint=f"""For text: {FLAG} '{path}="{text}"'; for the number: {FLAG} {path}={value:.15g}""",
        )
    if text[:1] in ("'", '"'):
        return _parse_quoted(path, text)
    if text[:1] in ("[", "{"):
        return _parse_json(path, text)
    return text


def _parse_quoted(path: str, text: str) -> str:
    if len(text) < 2 or text[-1] != text[0]:
        raise UsageError(f"{FLAG} {path}={shorten(text)}: the quote is not closed.")
    if text[0] == "'":
        return text[1:-1]
    try:
        return str(json.loads(text, strict=False))
    except ValueError as error:
        raise UsageError(
            f"{FLAG} {path}={shorten(text)}: {error}.",
            hint="Double quotes follow JSON; or use single quotes.",
        ) from None


def _parse_json(path: str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{FLAG} {path}={shorten(text)}: what begins with a bracket or a brace is JSON, and {error}.",
            hint=f"""For text put it in quotes: {FLAG} '{path}="..."'""",
        ) from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# --- all together ---------------------------------------------------------------------------------------------------


def _build_tree(customs: Sequence[CustomValue]) -> Tree:
    tree: Tree = {}
    for custom in customs:
        place = tree
        for number, step in enumerate(custom.path):
            other = next((known for known in place if type(known) is not type(step)), None)
            if other is not None:
                raise _conflict_error(custom, _first_leaf(place[other]), "one makes it a list, the other a mapping")
            if number == len(custom.path) - 1:
                known = place.setdefault(step, custom)
                if isinstance(known, dict):
                    raise _conflict_error(custom, _first_leaf(known), "the second goes further than the first")
                if (type(known.value), known.value) != (type(custom.value), custom.value):
                    raise _conflict_error(known, custom, "the values differ")
                continue
            place = place.setdefault(step, {})
            if isinstance(place, CustomValue):
                raise _conflict_error(place, custom, "the second goes further than the first")
    return tree


def _first_leaf(node: Any) -> CustomValue:
    while isinstance(node, dict):
        node = next(iter(node.values()))
    assert isinstance(node, CustomValue)
    return node


def _conflict_error(first: CustomValue, second: CustomValue, why: str) -> UsageError:
    return UsageError(f"{FLAG} {_format(first)} and {FLAG} {_format(second)} contradict each other: {why}.")


def _resolve(node: Any, default: Any, where: str) -> Any:
    if isinstance(node, CustomValue):
        if isinstance(default, Mapping) and default and not isinstance(node.value, Mapping | None):
            raise UsageError(
                f"{FLAG} {_format(node)}: in the chart this is a mapping, of {shorten(', '.join(map(str, default)))}.",
                hint=f"Set one of them: {FLAG} {node.text}.{next(iter(default))}=...",
            )
        return node.value
    if node and all(isinstance(step, int) for step in node):
        result = deepcopy(default) if isinstance(default, list) else []
        for index in sorted(int(step) for step in node):
            if index > len(result):
                custom = _first_leaf(node[index])
                raise UsageError(
                    f"{FLAG} {_format(custom)}: the list {where.lstrip('.')} has {len(result)} elements, so the next "
                    f"is [{len(result)}]."
                )
            below = result[index] if index < len(result) else None
            value = _resolve(node[index], below, f"{where}[{index}]")
            if isinstance(value, Mapping) and isinstance(below, Mapping):
                value = merge_values(below, value)  # helm does not look into lists
            result[index : index + 1] = [value]
        return result
    known = default if isinstance(default, Mapping) else {}
    return {key: _resolve(child, known.get(key), f"{where}.{key}") for key, child in node.items()}


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


def _format(custom: CustomValue) -> str:
    return f"{custom.text}={shorten(json.dumps(custom.value, ensure_ascii=False))}"
