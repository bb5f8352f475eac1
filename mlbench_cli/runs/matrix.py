"""The matrix of an experiment: options that take several values, and the points that they span."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import canonical_json
from mlbench_cli.tasks.catalog import short
from mlbench_cli.util.text import shorten

MAX_MEMBERS = 10_000
MAX_CONFIRMED = 1_000_000  # maximum number of members of a confirmed experiment
_SLUG = re.compile(r"[^a-z0-9]+")

Point = Mapping[str, Any]  # option name or "set.KEY" -> its value


def hint_for(count: int) -> str:
    """The hint for too many runs: reduce them, or confirm if that is possible for this number."""
    fewer = "Remove values with exclude"
    return fewer if count > MAX_CONFIRMED else f"{fewer}, or confirm it: --yes"


class Matrix(Struct, frozen=True):
    """`axes`: values by key, in order. `exclude` drops every point that has all of an entry's values.

    `include` is as in CI systems: an entry whose values for axes are those of a point adds its other values to it; an
    entry that matches no point is an additional point.
    """

    axes: Mapping[str, tuple[Any, ...]] = {}
    include: tuple[Point, ...] = ()
    exclude: tuple[Point, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.axes or self.include)

    def keys(self) -> set[str]:
        """All options that a point may set."""
        return {*self.axes, *(key for entry in self.include for key in entry)}

    def points(self, most: int = MAX_MEMBERS) -> list[dict[str, Any]]:
        """The points in their order, each once; one empty point without a matrix.

        Raises UsageError, also for more than `most`.
        """
        count = 1
        for values in self.axes.values():
            count *= len(values)
        if count > most:
            raise UsageError(f"The matrix has {count} points, more than {most}.", hint=hint_for(count))
        spanned = itertools.product(*self.axes.values()) if self.axes else []
        combinations = [dict(zip(self.axes, values, strict=True)) for values in spanned]
        kept = [point for point in combinations if not any(_fits(point, entry) for entry in self.exclude)]
        points = [dict(point) for point in kept]
        for entry in self.include:
            fitting = [number for number, point in enumerate(kept) if _fits_axes(point, entry, self.axes)]
            for number in fitting:
                points[number].update({key: value for key, value in entry.items() if key not in self.axes})
            if not fitting:
                points.append(dict(entry))
        if self and not points:
            raise UsageError("The matrix is empty: all points are excluded.")
        if not self:
            if self.exclude:
                raise UsageError("exclude needs a matrix.", hint="--matrix KEY=V1,V2")
            return [{}]
        return points


def point_text(point: Point) -> dict[str, str]:
    """The values of a point as texts: the same for 64 and "64", so that a file and a command line mean the same."""
    return {key: value_text(value) for key, value in sorted(point.items())}


def value_text(value: Any) -> str:
    """A value as a flag takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(value_text, value))
    return str(value)


def point_suffix(point: Point, limit: int) -> str:
    """A readable part of a name for a point, of at most `limit` characters: "gloo-batchsize64".

    It follows from the point alone, so that further points of a matrix rename nothing. If characters had to be dropped,
    it ends with 4 hexadecimal digits of the point's hash. Raises UsageError if there is no room.
    """
    texts = point_text(point)
    pieces = [_piece(key, texts[key]) for key in point]
    readable = "-".join(piece for piece, _ in pieces)
    if len(readable) <= limit and all(is_exact for _, is_exact in pieces):
        return readable
    digest = hashlib.sha256(canonical_json(texts)).hexdigest()[:4]
    room = limit - len(digest) - 1
    if room < 1:
        raise UsageError(
            "The experiment name is too long to append the matrix values to run names.",
            hint="Choose a shorter name.",
        )
    return f"{readable[:room].strip('-')}-{digest}".lstrip("-")


def _piece(key: str, text: str) -> tuple[str, bool]:
    """A value as part of a name, and whether it is unambiguous."""
    name = key.rpartition(".")[2].replace("_", "")
    if text in ("true", "false"):
        return f"{'' if text == 'true' else 'no'}{_slug(name)}", _slug(name) == name
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return f"{_slug(name)}{text.replace('.', 'p')}", _slug(name) == name
    return _slug(text), _slug(text) == text


def _slug(text: str) -> str:
    return _SLUG.sub("-", text.lower()).strip("-")


def _fits(point: Point, entry: Point) -> bool:
    return all(key in point and value_text(point[key]) == value_text(value) for key, value in entry.items())


def _fits_axes(point: Point, entry: Point, axes: Mapping[str, Any]) -> bool:
    shared = {key: value for key, value in entry.items() if key in axes}
    return _fits(point, shared) and len(shared) < len(entry)


# --- from and to texts ----------------------------------------------------------------------------------------------


def parse_axes(entries: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Axes in texts of the form KEY=V1,V2, or KEY=[JSON list] for values with commas. The same key adds values."""
    axes: dict[str, tuple[Any, ...]] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals or not key.strip():
            raise UsageError(f'--matrix "{shorten(entry)}" is not of the form KEY=VALUE,VALUE.')
        values = _parse_list(text) if text.startswith("[") else tuple(text.split(","))
        axes[key] = axes.get(key, ()) + values
    return axes


def parse_point(entry: str, flag: str) -> dict[str, object]:
    """A point in a text of the form KEY=VALUE,KEY=VALUE, or a JSON object for values with commas."""
    if entry.startswith("{"):
        try:
            found = json.loads(entry)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
        raise UsageError(f'{flag} "{shorten(entry)}" is not a JSON object.')
    point: dict[str, Any] = {}
    for part in entry.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key or key in point:
            raise UsageError(f'{flag} "{shorten(entry)}" is not of the form KEY=VALUE,KEY=VALUE.')
        point[key] = value
    return point


def format_axis(key: str, values: Sequence[Any]) -> str:
    """An axis as --matrix takes it."""
    texts = [value_text(value) for value in values]
    is_plain = all(isinstance(value, str | int | float) for value in values)
    if is_plain and not any("," in text for text in texts) and not texts[0].startswith("["):
        return f"{key}={','.join(texts)}"
    return f"{key}={json.dumps([list(value) if isinstance(value, tuple) else value for value in values])}"


def format_point(point: Point) -> str:
    """A point as --include and --exclude take it."""
    texts = [value_text(value) for value in point.values()]
    is_plain = all(isinstance(value, str | int | float) for value in point.values())
    if is_plain and not any("," in text for text in texts) and not any({",", "="} & set(key) for key in point):
        text = ",".join(f"{key}={value}" for key, value in zip(point, texts, strict=True))
        if not text.startswith("{"):
            return text
    return json.dumps({key: list(value) if isinstance(value, tuple) else value for key, value in point.items()})


def _parse_list(text: str) -> tuple[Any, ...]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not found:
        raise UsageError(f"--matrix: {short(text)} is not a JSON list of values.")
    return tuple(found)
